"""What a call of `Pipeline.generate` was given, as all ranks agree on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from pipetrain.group.chain import Chain
from pipetrain.plan.plan import whole_number
from pipetrain.runtime.sampling import Sampling
from pipetrain.stage.past import goes_on


@dataclass(frozen=True)
class Prompts:
    """Token ids to go on from, and how far and how to do so.

    `context` is how many tokens of a sample are looked at: where there are more, it goes on from the latter half of them. None: all.
    """

    tokens: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: Sampling
    ends: tuple[int, ...] = ()  # tokens after which a sample has ended
    context: int | None = None
    num_groups: int = 1  # samples are cut into so many, which follow each other through the stages

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Prompts:
        record = json.loads(text)
        return Prompts(
            tokens=tuple(map(tuple, record["tokens"])),
            max_new_tokens=record["max_new_tokens"],
            sampling=Sampling(**record["sampling"]),
            ends=tuple(record["ends"]),
            context=record["context"],
            num_groups=record["num_groups"],
        )


def check_prompts(
    tokens: Any,
    *,
    max_new_tokens: Any,
    sampling: Sampling,
    eos: Any = None,
    context: Any = None,
    num_groups: Any = 1,
) -> Prompts:
    """Raises:
    ValueError: with what of it no text can be made from.
    """
    rows = _rows(tokens)
    groups = whole_number("num_groups", num_groups)
    if groups > len(rows):
        raise ValueError(f"num_groups={groups}: there are {len(rows)} prompts, and each group needs one")
    return Prompts(
        rows,
        whole_number("max_new_tokens", max_new_tokens),
        sampling,
        tuple(_ids(() if eos is None else eos if isinstance(eos, (Sequence, Tensor)) else [eos], "eos")),
        None if context is None else whole_number("context", context, least=2),
        groups,
    )


def mistake_in_layers(layers: Mapping[int, nn.Module]) -> str | None:
    """Why these layers cannot make text token by token."""
    for number, layer in layers.items():
        if not goes_on(layer):
            return (
                f"layer {number} ({type(layer).__name__}) cannot go on from the tokens before: give it forward_cached(value, past) beside "
                "forward, as pipetrain.stage.past says"
            )
    return None


def agree_on(own: Callable[[], Prompts] | None, problem: str | None, chain: Chain) -> Prompts:
    """What the rank that holds the first stage was given (`own`, None elsewhere), on every rank. Collective.

    Raises:
        ValueError: what is wrong with it, or the first `problem` of a rank; the same on every rank.
        PipelineError: another rank failed, or called something else.
    """
    part = {"problem": problem or "", "prompts": ""}
    if own is not None and not problem:
        try:
            part["prompts"] = own().to_json()
        except (ValueError, TypeError) as error:
            part["problem"] = str(error)
    what = "what is generated"
    parts = [json.loads(text) for text in chain.concatenate(json.dumps(part).encode(), what)]
    found = next((part["problem"] for part in parts if part["problem"]), None)
    if found is not None:
        chain.wait_sent(what)  # this rank may end with the error, and the others are to know it
        raise ValueError(found)
    return Prompts.from_json(next(part["prompts"] for part in parts if part["prompts"]))


def _rows(tokens: Any) -> tuple[tuple[int, ...], ...]:
    if tokens is None:
        raise ValueError("generate was given no prompts on the rank that holds the first stage: give token ids there")
    if isinstance(tokens, Mapping):
        tokens = _unpadded(tokens)
    if isinstance(tokens, Tensor):
        tokens = [tokens] if tokens.dim() == 1 else list(tokens)
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
        raise ValueError(
            f"prompts is a {type(tokens).__name__}: give a list of prompts, each a list or a tensor of token ids, a tensor [prompts, tokens], "
            "or a dict with input_ids and attention_mask"
        )
    if tokens and isinstance(tokens[0], Integral):
        tokens = [tokens]
    rows = tuple(tuple(_ids(row, f"prompts[{number}]")) for number, row in enumerate(tokens))
    empty = next((number for number, row in enumerate(rows) if not row), None)
    if not rows or empty is not None:
        what = "prompts is empty" if empty is None else f"prompts[{empty}] is empty"
        raise ValueError(f"{what}: a text goes on from at least one token")
    return rows


def _unpadded(batch: Mapping[str, Any]) -> list[Tensor]:
    """The rows of what a tokenizer gives, without padding."""
    unknown = sorted(set(batch) - {"input_ids", "attention_mask", "token_type_ids"})
    if "input_ids" not in batch or unknown or not isinstance(batch["input_ids"], Tensor):
        raise ValueError(
            f"prompts has the keys {sorted(batch)}: a dict needs input_ids, a tensor, and may have attention_mask"
        )
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is None:
        return list(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or ids.dim() != 2:
        raise ValueError("prompts: input_ids and attention_mask need the same shape [prompts, tokens]")
    return [row[seen.bool()] for row, seen in zip(ids, mask)]


def _ids(row: Any, what: str) -> list[int]:
    if isinstance(row, Tensor):
        if row.dim() != 1 or row.is_floating_point() or row.is_complex():
            raise ValueError(
                f"{what} is a tensor {list(row.shape)} of {row.dtype}: token ids are whole numbers in one dimension"
            )
        row = row.tolist()
    if not isinstance(row, (Sequence, range)) or isinstance(row, (str, bytes)):
        raise ValueError(f"{what} is a {type(row).__name__}: a list or a tensor of token ids is needed")
    for token in row:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise ValueError(f"{what} has {token!r}: a token id is a whole number from 0 on")
    return [int(token) for token in row]
