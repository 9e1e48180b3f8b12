"""Text from a trained model, over its stages: each rank reads the weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipetrain.config.records import RunConfig
from pipetrain.data.dataset import make_tokenizer
from pipetrain.data.tokenizer import Tokenizer
from pipetrain.model.spec import make_spec
from pipetrain.plan.plan import Plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.snapshot.weights import load_weights

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # the end of a text may be half a character
_HELD_BACK = 4  # tokens at most: no character takes more bytes


@dataclass(frozen=True)
class Asked:
    """What a user wants to read: see `Pipeline.generate`."""

    prompts: tuple[str, ...]
    num_tokens: int
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def generate(config: RunConfig, plan: Plan, weights: Path, asked: Asked, write: Callable[[str], None]) -> None:
    """Gives `write` on rank 0 each prompt of `asked` and what the model of the run puts after it: one prompt as it goes along,
    several one after the other at the end. Collective over the ranks of `plan`.

    Raises:
        ValueError: an empty prompt, numbers out of range, or weights that do not fit.
        PipelineError: a rank failed.
    """
    tokenizer = make_tokenizer(config.data)
    if tokenizer is None:
        raise ValueError("data.tokenizer=null: the run was trained on token ids, and no tokenizer makes text of them")
    spec = make_spec(config.model, tokenizer.vocabulary_size)
    with Pipeline(spec, plan=plan, recompute="never", timeout_seconds=config.timeout_seconds) as pipeline:
        load_weights(weights, pipeline, spec)
        writer = _Writer(tokenizer, asked.prompts, write if pipeline.rank == 0 else _nowhere)
        writer.begin()
        pipeline.generate(
            [tokenizer.encode(prompt.encode()).tolist() for prompt in asked.prompts],
            max_new_tokens=asked.num_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed,
            context=config.data.sequence_length,
            on_token=writer.on_token,
        )
        writer.end()


class _Writer:
    """Writes texts as their tokens come: of one prompt at once, of several each in one piece at the end."""

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[str], write: Callable[[str], None]) -> None:
        self._texts = [TextStream(tokenizer) for _ in prompts]
        self._prompts = list(prompts)
        self._write = write
        self._is_streaming = len(self._texts) == 1
        self._written: list[list[str]] = [[prompt] for prompt in prompts]

    def begin(self) -> None:
        if self._is_streaming:
            self._write(self._prompts[0])

    def on_token(self, number: int, token: int) -> None:
        self._put(number, self._texts[number].add(token))

    def _put(self, number: int, text: str) -> None:
        if self._is_streaming:
            self._write(text)
        else:
            self._written[number].append(text)

    def end(self) -> None:
        for number, text in enumerate(self._texts):
            self._put(number, text.rest())
        if self._is_streaming:
            self._write("\n")
        else:
            self._write("\n\n".join(map("".join, self._written)) + "\n")


class TextStream:
    """Tokens to text, as far as it is whole: a character may be of several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._line: list[int] = []  # since the last end of a line: a token's text may depend on those before it
        self._shown = 0  # characters of it

    def add(self, token: int) -> str:
        """What one more token makes readable."""
        self._line.append(token)
        text = self._tokenizer.decode(self._line)
        whole = text.rstrip(_BROKEN) if len(text) - len(text.rstrip(_BROKEN)) < _HELD_BACK else text
        return self._show(text, max(len(whole), self._shown))

    def rest(self) -> str:
        """What is left at the end, readable or not."""
        text = self._tokenizer.decode(self._line)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        new, self._shown = text[self._shown : end], end
        if end == len(text) and text.endswith("\n"):
            self._line.clear()
            self._shown = 0
        return new


def _nowhere(text: str) -> None:
    """The other ranks know the text, and nobody reads it there."""
