"""A chat as its template writes it, and which of its tokens count in the loss.

    <|user|> Hi <|assistant|> Hello! <|end|> <|user|> Why? <|assistant|> Because. <|end|>
                              answers                                    last

A template with `{% generation %}` marks says itself which characters the model writes. Of any other, turn by turn: an answer is what comes between the chat
up to there with the template's prompt for an answer, and the chat with it. That holds only where both are beginnings of the whole chat,
token for token; some templates write earlier turns in another way (they drop reasoning), and then it does not. This is looked at for every
sample, and a template that fails is refused: the loss would be taken on other tokens than were meant.

Chat templates come with models, and are programs: each document has a budget of work and of size, the same on every machine.

    source ──► tree ──► loops, literals, joined texts, compared values and text pass a filter that charges them ──► code
    call, operator, filter, output ──► charged, and what it gives is measured

Jinja's sandbox keeps a template from reaching Python; it does not keep it from running for ever. A document with which a template goes over
its budget is refused, whatever time or memory there is: else the samples of a corpus would depend on the machine.
"""

from __future__ import annotations

import datetime
import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from numpy.typing import NDArray

from pipetrain.config.records import ALL, LAST
from pipetrain.data.documents import MESSAGES, Row

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

_MOST_SHOWN = 200  # characters of what a template says

Span = tuple[int, int]  # characters of a rendered chat


class TooSlow(Exception):
    """A chat ends the command and is not left out: on a faster machine it may be a sample. `number`: of the chat, among those encoded at once."""

    number = 0


class SampleRefused(ValueError):
    """A chat that cannot be a sample; the message says why, after its file and line."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of the tokenizer `called` so. `counted` is `answers`, `last` (answer) or `all`; `date` is today."""

    template: str
    special_tokens: Mapping[str, Any]
    called: str
    counted: str
    date: datetime.date

    @property
    def has_marks(self) -> bool:
        """Whether it says itself what the model writes."""
        return _MARKS.search(self.template) is not None

    def render(self, row: Row, *, answers: bool = False, first: int | None = None) -> str:
        """The text of a chat, or of its `first` messages; with `answers`, and the prompt for an answer. Raises SampleRefused."""
        return self._rendered(row, row[MESSAGES][:first], answers, marks=False)[0]

    def render_marked(self, row: Row) -> tuple[str, list[Span]]:
        """The text of a chat, and which characters count. Raises SampleRefused; ValueError: it cannot be told what counts."""
        if self.counted == ALL:
            text = self.render(row)
            return text, [(0, len(text))]
        if not self.has_marks:
            return self._by_turns(row)
        text, spans = self._rendered(row, row[MESSAGES], answers=False, marks=True)
        return text, spans[-1:] if self.counted == LAST else spans

    def counted_tokens(self, offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
        """Which tokens have a character in `spans`; `offsets [tokens, 2]` are theirs. Raises ValueError: one begins before an answer and ends in it."""
        counted = np.zeros(len(offsets), np.bool_)
        if not len(offsets):
            return counted
        begin, end = offsets[:, 0], offsets[:, 1]
        for first, last in spans:
            # some tokenizers leave white space out of a token's characters: a token without any belongs to what it ends
            counted |= np.where(begin == end, (first < end) & (end <= last), (begin < last) & (end > first))
            if not self.has_marks and ((begin < first) & (end > first)).any():
                raise self._refusal("a token reaches from a prompt into its answer")
        return counted

    def _by_turns(self, row: Row) -> tuple[str, list[Span]]:
        turns = [number for number, message in enumerate(row[MESSAGES]) if message["role"] == "assistant"]
        whole = self.render(row)
        spans = []
        for number in turns[-1:] if self.counted == LAST else turns:
            try:
                prompt = self.render(row, answers=True, first=number)
                with_answer = self.render(row, first=number + 1)
            except SampleRefused as error:
                if not number:
                    raise SampleRefused(
                        "it begins with an answer, and the chat template writes no prompt before it"
                    ) from None
                raise self._refusal(f"it cannot write the first {number} messages alone ({error})") from None
            if not (whole.startswith(prompt) and whole.startswith(with_answer) and len(prompt) <= len(with_answer)):
                raise self._refusal(
                    "it writes a turn in another way when others come after it, as where reasoning is dropped"
                )
            spans.append((len(prompt), len(with_answer)))
        return whole, spans

    def _refusal(self, why: str) -> ValueError:
        last = "data.assistant_only_loss=last (the last answer alone), " if self.counted != LAST else ""
        return ValueError(
            f"data.tokenizer={self.called}: the chat template of {self.called} does not tell what an answer is: it has no "
            f"{{% generation %}} marks, and {why}; use {last}data.assistant_only_loss=false, or a template with these marks"
        )

    def _rendered(self, row: Row, messages: Sequence[Row], answers: bool, *, marks: bool) -> tuple[str, list[Span]]:
        """The text, and with `marks` the characters between them."""
        from transformers.utils import chat_template_utils

        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            with _lock, mock.patch.object(chat_template_utils, "_compile_jinja_template", _compiled):
                _compiled(self.template).environment.start({"messages": given, "tools": row.get("tools")}, self.date)
                (text,), spans = chat_template_utils.render_jinja_template(
                    [given],
                    tools=row.get("tools"),
                    chat_template=self.template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=answers,
                    **self.special_tokens,
                )
        except (MemoryError, TooSlow):
            raise  # elsewhere it may be a sample
        except Exception as error:  # it is a program of others: it may fail in every way
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:_MOST_SHOWN]
            raise SampleRefused(f"the chat template of {self.called} does not take it ({reason})") from None
        for number, message in enumerate(given):
            if isinstance(parts := message.get("content"), (list, Mapping)) and str(parts) in text:
                raise SampleRefused(
                    f"message {number} has a {type(parts).__name__} as its content, which the chat template of {self.called} writes as Python "
                    "does: give a text"
                )
        return text, spans[0] if marks else []


_lock = threading.Lock()  # of the compiled templates: each has the budget of one document


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """The template as transformers compiles it, in a sandbox with a budget."""
    from transformers.utils import chat_template_utils

    with mock.patch.object(chat_template_utils, "ImmutableSandboxedEnvironment", BudgetedEnvironment):
        return chat_template_utils._cached_compile_jinja_template(template)


# The budget of a document ----------------------------------------------------------------------------------------------

MOST_WORK = 1_000_000  # calls, filters, turns of loops and values looked at, of a small document; some seconds
# More for each value of the document: templates that look at all messages for each one are common.
WORK_PER_VALUE = 1_000
MOST_SIZE = 2**20  # characters and values of what a template makes of a small document
SIZE_FACTOR = 8  # of what it makes of a large one, times the size of that
MOST_SECONDS = 60.0
_MOST_CALLS = 50  # of macros inside each other
_MOST_BITS = 4096  # of a number
_MOST_WIDTH = 1000  # of a column, an indentation, or digits
_CALL = 20  # units of work of a call: about as long as so many turns of a loop
_CHARACTERS = 256  # that are one unit of work
_WITH_WIDTH = {"ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "round", "indent", "tojson"}
# Of no use in a chat: they draw at random, or make much of little.
_NO_FILTERS = ("batch", "center", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
_NO_GLOBALS = ("cycler", "joiner", "lipsum")
_CHEAP_TESTS = {"boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none"}
_CHEAP_TESTS |= {"number", "sequence", "string", "true", "undefined"}
_WIDE = re.compile(r"\d{4,}|%[^a-z%]*\*|:[^}]*\{")  # a width of 1,000 or more, or one that comes with the values


class BudgetedEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """Takes the place of Jinja's sandbox. `start` before each document."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters: dict[str, Callable[..., Any]]
        for name in _NO_FILTERS:
            del self.filters[name]
        for name in _NO_GLOBALS:
            del self.globals[name]
        self.finalize = _while_it_runs(self._written)
        self.start(None, datetime.date.min)

    def start(self, document: Any, date: datetime.date) -> None:
        """Gives the budget of a document, however large that is. Templates are told `date` as today."""
        self.globals["strftime_now"] = date.strftime  # in place of a function of transformers that asks the clock
        self._calls = self._size_written = self._charges = 0
        self._deadline = time.monotonic() + MOST_SECONDS
        self._work = self._most_size = sys.maxsize
        self._most_size = max(MOST_SIZE, SIZE_FACTOR * self._measure(document))
        self._work = MOST_WORK + WORK_PER_VALUE * (sys.maxsize - self._work)

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        # not before: transformers sets a filter of its own after the environment was made
        self.filters = {name: self._charged(name, function) for name, function in self.filters.items()}
        own: dict[str, Callable[[Any], Any]] = {"_turns": self._turns, "_text": str}
        own |= {"_held": self._held, "_joined": self._joined}
        self.filters |= {name: _while_it_runs(function) for name, function in own.items()}
        return super().from_string(_Charging().visit(self.parse(source)), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ("encode", "translate", "maketrans") and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # of `format`, which the sandbox wraps
        self._check(getattr(method, "__name__", ""), getattr(method, "__self__", None), args, kwargs)
        self._charge(_CALL)
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise OverflowError(f"more than {_MOST_CALLS} calls are inside each other")
        try:
            return self._held(super().call(context, called, *args, **kwargs))
        finally:
            self._calls -= 1

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bits = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
        num_bits = sum(bits) if operator == "*" else 0
        if operator == "**" and isinstance(right, int):
            num_bits = bits[0] * right
        if num_bits > _MOST_BITS:
            raise OverflowError(f"a number has more than {_MOST_BITS} bits")
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(count, int):
                    self._check_size(len(value) * count)
        if operator == "%":
            self._check_format(left, right)
        return self._held(super().call_binop(context, operator, left, right))

    # What charges ----------------------------------------------------------------------------------------------------

    def _charge(self, work: int) -> None:
        self._work -= work
        self._charges += 1
        if self._charges % 4096 == 0 and time.monotonic() > self._deadline:
            raise TooSlow(f"its chat template takes more than {MOST_SECONDS:.0f} s")
        if self._work < 0:
            raise OverflowError("it takes too many steps: it may look at each message a thousand times")

    def _measure(self, value: Any) -> int:
        """Characters and values of all that is in `value`, each time that it is in there; charges that."""
        size, work, values = 0, 0, [value]
        while values and size <= self._most_size and work <= self._work:
            one = values.pop()
            length = len(one) if isinstance(one, (str, bytes, range)) else 1
            work += 1 + length // _CHARACTERS
            size += length
            if isinstance(one, Mapping):
                values += [*one.keys(), *one.values()]
            elif isinstance(one, (list, tuple, set, frozenset)):
                values += one
        self._check_size(size)
        self._charge(work)
        return size

    def _check_size(self, size: int) -> None:
        if size > self._most_size:
            raise OverflowError(f"it makes a value of more than {self._most_size:,} characters")

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose values are measured before and after; what comes one by one is taken at once."""
        position = int(hasattr(function, "jinja_pass_arg"))  # before the value stands the context, or the like

        @functools.wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[position:]
            self._check(name, value, others, kwargs)
            self._measure(value)
            return self._held(function(*args, **kwargs))

        return charged

    def _check(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """What a call of this name would make, before it does."""
        given = [*args, *kwargs.values()]
        for one in given:
            self._measure(one)
        if name in _WITH_WIDTH:
            if any(isinstance(one, int) and abs(one) > _MOST_WIDTH for one in given):
                raise OverflowError(f"{name} is given a width of more than {_MOST_WIDTH}")
            lines = str(value).count("\n") + 1 if name == "indent" else 1
            self._check_size(lines * sum(len(one) for one in given if isinstance(one, str)))
        elif name in ("format", "format_map"):
            self._check_format(value, given)
        elif name == "replace" and isinstance(value, str) and len(given) > 1:
            self._check_size(str(value).count(str(given[0])) * len(str(given[1])))
        elif name == "join":
            first = given[0] if given else ""
            text, parts = (value, first) if isinstance(value, str) else (first, value)
            self._check_size(len(str(text)) * len(parts) if hasattr(parts, "__len__") else 0)

    def _check_format(self, text: Any, values: Any) -> None:
        if isinstance(text, str):
            if _WIDE.search(text):
                raise OverflowError("a format has a width of 1,000 or more, or one that is a value")
            self._check_size((text.count("%") + text.count("{")) * self._measure(values))

    def _held(self, value: Any) -> Any:
        value = self._turns(value) if isinstance(value, Iterator) else value
        self._measure(value)
        return value

    def _turns(self, values: Iterable[Any]) -> list[Any]:
        taken = []
        for value in values:
            self._charge(1)
            taken.append(value)
        return taken

    def _joined(self, values: Sequence[Any]) -> str:
        self._measure(values)
        return "".join(map(str, values))

    def _written(self, value: Any) -> Any:
        self._size_written += self._measure(value)
        self._check_size(self._size_written)
        return value


def _while_it_runs(function: Callable[[Any], Any]) -> Callable[[Context, Any], Any]:
    """What takes the context is not called by Jinja while it compiles, once for all documents."""
    taking: Callable[[Context, Any], Any] = pass_context(lambda _, value: function(value))
    return taking


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Charging(NodeTransformer):  # type: ignore[misc]
    """Puts the filters into a tree."""

    def visit(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "_turns")
        elif isinstance(node, nodes.Compare):
            for operand in (node, *node.ops):
                operand.expr = _filtered(operand.expr, "_held")
        elif isinstance(node, nodes.Test) and node.name not in _CHEAP_TESTS:
            node.node = _filtered(node.node, "_held")
            node.args = [_filtered(argument, "_held") for argument in node.args]
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")
        elif isinstance(node, nodes.TemplateData):
            return _filtered(nodes.Const(node.data, lineno=node.lineno), "_text")
        elif isinstance(getattr(node, "arg", None), nodes.Slice) or (
            isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)) and getattr(node, "ctx", "load") == "load"
        ):
            return _filtered(node, "_held")
        return node
