"""A chat as its template writes it, and which of its tokens count in the loss.

    <|user|> Hi <|assistant|> Hello! <|end|> <|user|> Why? <|assistant|> Because. <|end|>
                              answers                                    last

A template with `{% generation %}` marks says itself which characters the model writes. Of any other, turn by turn: an answer is what comes between the chat
up to there with the template's prompt for an answer, and the chat with it. That holds only where both are beginnings of the whole chat,
token for token; some templates write earlier turns in another way (they drop reasoning), and then it does not. This is looked at for every
sample, and a template that fails is refused: the loss would be taken on other tokens than were meant.
"""

from __future__ import annotations

import datetime
import functools
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
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

    from pipetrain.data.template_budget import BudgetedEnvironment

    with mock.patch.object(chat_template_utils, "ImmutableSandboxedEnvironment", BudgetedEnvironment):
        return chat_template_utils._cached_compile_jinja_template(template)
