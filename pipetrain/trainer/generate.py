"""Text from a trained model, over its stages: each rank reads the weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipetrain.config.phases import phases_of
from pipetrain.config.read_files import read_object
from pipetrain.config.records import ModelConfig, RunConfig
from pipetrain.data.dataset import make_tokenizer
from pipetrain.data.tokenizer import HfTokenizer, Tokenizer
from pipetrain.models.hf.source import BRING, GENERATION_CONFIG, find_source
from pipetrain.models.size import family_of
from pipetrain.models.spec import make_spec
from pipetrain.models.weights import load_weights
from pipetrain.plan.plan import Plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.snapshot.manifest import NAME as MANIFEST
from pipetrain.snapshot.reader import Snapshot

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # the end of a text may be half a character
_HELD_BACK = 4  # tokens at most: no character takes more bytes


@dataclass(frozen=True)
class Asked:
    """What a user wants to read: see `Pipeline.generate`.

    Where the model's tokenizer has a chat template, prompts are questions, each a chat of its own after the `system` message; `raw`: they
    are texts to continue in any case. A text ends before the first of the `stop` texts, none of which is empty.
    """

    prompts: tuple[str, ...]
    num_tokens: int
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    system: str | None = None
    raw: bool = False
    stop: tuple[str, ...] = ()


def generate(config: RunConfig, plan: Plan, weights: Path, asked: Asked, write: Callable[[str], None]) -> None:
    """Gives `write` on rank 0 what the model of the run puts after each prompt of `asked`: after one prompt as it goes along, after
    several one after the other at the end. A text follows its prompt, an answer stands alone. Collective over the ranks of `plan`.

    `config` is the run's, with a Hugging Face model's config and tokenizer in `model.path`; `weights` is the folder that the run left them in
    at its end, or a whole snapshot.

    Raises ValueError: numbers out of range, no tokenizer, or weights that do not fit; PipelineError: a rank failed.
    """
    tokenizer = make_tokenizer(config.data, config.model.path)
    if tokenizer is None:
        raise ValueError("data.tokenizer=null: the run was trained on token ids, and no tokenizer makes text of them")
    prompts = [_tokens_of(prompt, asked, tokenizer) for prompt in asked.prompts]
    shown = [""] * len(prompts) if _are_chats(asked, tokenizer) else list(asked.prompts)
    spec = make_spec(config.model, tokenizer.vocabulary_size)
    with Pipeline(spec, plan=plan, recompute="never", timeout_seconds=config.timeout_seconds) as pipeline:
        if (weights / MANIFEST).exists():
            Snapshot(weights, checked=True).restore_weights(pipeline)
        else:
            load_weights(weights, pipeline, spec)
        # The other ranks know the text, and nobody reads it there.
        writer = _Writer(tokenizer, shown, asked.stop, write if pipeline.rank == 0 else lambda _: None)
        pipeline.generate(
            prompts,
            max_new_tokens=asked.num_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed,
            eos=_ends(tokenizer, config.model),
            context=_context(config),
            on_token=writer.on_token,
        )
        writer.end()


def _are_chats(asked: Asked, tokenizer: Tokenizer) -> bool:
    """Whether the prompts are questions.

    Raises ValueError: a message that only a chat has.
    """
    has_template = isinstance(tokenizer, HfTokenizer) and tokenizer.has_chats
    if asked.system is not None and (asked.raw or not has_template):
        why = "--raw continues a text" if asked.raw else f"{tokenizer.called} has no chat template"
        raise ValueError(f"--system={asked.system}: {why}, and there is no chat for it to begin")
    return has_template and not asked.raw


def _tokens_of(prompt: str, asked: Asked, tokenizer: Tokenizer) -> list[int]:
    if not _are_chats(asked, tokenizer):
        return tokenizer.encode(prompt.encode())
    assert isinstance(tokenizer, HfTokenizer)
    system = [] if asked.system is None else [{"role": "system", "content": asked.system}]
    return tokenizer.encode_prompt(tokenizer.render([*system, {"role": "user", "content": prompt}]))


def _ends(tokenizer: Tokenizer, model: ModelConfig) -> tuple[int, ...]:
    """The tokens after which a text has ended: the tokenizer's, and those that the model's own generation_config names."""
    ends = tokenizer.end_tokens if isinstance(tokenizer, HfTokenizer) else ()
    if model.path is None:
        return ends
    file = find_source(model.path, model.revision).folder / GENERATION_CONFIG
    named = read_object(file, BRING).get("eos_token_id") if file.exists() else None
    named = named if isinstance(named, list) else [named]
    return tuple(sorted({*ends, *(token for token in named if isinstance(token, int))}))


def _context(config: RunConfig) -> int | None:
    """The longest text for the model: for ours the sequence length of its training, else what its config says."""
    if config.model.path is None:
        return max(2, *(phase.config.data.sequence_length for phase in phases_of(config)))
    return family_of(config.model).longest_of(config.model)


class _Writer:
    """Writes texts as their tokens come: a single one at once, several each in one piece at the end. `shown` stands before each, `stop` ends
    each. All ranks have one, so that they end a text together."""

    def __init__(
        self, tokenizer: Tokenizer, shown: Sequence[str], stop: Sequence[str], write: Callable[[str], None]
    ) -> None:
        self._texts = [TextStream(tokenizer) for _ in shown]
        self._held = [""] * len(shown)  # of each what a stop may begin with
        self._stop, self._tokenizer = stop, tokenizer
        self._write = write
        self._written: list[list[str]] = [[] for _ in shown]  # what waits for the end
        for number, text in enumerate(shown):
            self._put(number, text)

    def on_token(self, number: int, token: int) -> bool:
        """Whether the text has ended."""
        text = self._held[number] + self._texts[number].add(token)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        held = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        end = min(ends, default=len(text) - held)
        self._put(number, text[:end])
        self._held[number] = "" if ends else text[end:]
        if ends:
            self._texts[number] = TextStream(self._tokenizer)
        return bool(ends)

    def _put(self, number: int, text: str) -> None:
        if len(self._texts) == 1:
            self._write(text)
        else:
            self._written[number].append(text)

    def end(self) -> None:
        for number, text in enumerate(self._texts):
            self._put(number, self._held[number] + text.rest())
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
