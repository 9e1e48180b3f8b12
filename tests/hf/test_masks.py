"""Masks: one float tensor per (stage, microbatch), no wait of the host, and packed documents that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf.tiny import FAMILIES, padding_mask, tiny, token_ids
from rounding import rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain import Pipeline
from pipetrain.model.hf import frame
from pipetrain.model.hf.adapter import layers_of
from pipetrain.model.hf.hf_spec import spec_of_hf

LENGTHS = (5, 4, 3)  # of the documents in a sample of 12 tokens
# Layers with a state that runs along the sequence; positions that their own forward leaves out of the mask.
APART = {family: family not in ("qwen3_next", "opt", "falcon", "bloom") for family in FAMILIES}


def packed(rows: int = 2) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {"input_ids": token_ids(rows, sum(LENGTHS)), "position_ids": positions.expand(rows, -1).contiguous()}


def assert_close(logits: Tensor, wanted: Tensor) -> None:
    """But for the order of sums, the longest of which is over the 48 numbers between the halves of an MLP."""
    within = rounding(wanted.dtype, terms=48) * float(wanted.std())
    torch.testing.assert_close(logits, wanted, rtol=0, atol=within)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_a_packed_document_is_as_if_alone(family: str) -> None:
    # In float64, where rounding hides nothing; experts are multiplied in float32 alone.
    dtype = torch.float32 if family == "mixtral" else torch.float64
    model, ours, inputs = tiny(family).to(dtype).eval(), tiny(family).to(dtype).eval(), packed()
    with Pipeline(ours, num_microbatches=2, stages_per_rank=3) as pipeline, torch.no_grad():
        logits = pipeline(inputs)
        start = 0
        for length in LENGTHS:
            document = slice(start, start + length)
            alone = model(input_ids=inputs["input_ids"][:, document], use_cache=False).logits
            assert_close(logits[:, document], alone)
            start += length


@pytest.mark.parametrize("family", FAMILIES)
def test_who_keeps_packed_documents_apart(family: str) -> None:
    """As said of the family from its masks, and as its logits show: those of the second document with another first one."""
    spec = spec_of_hf(tiny(family).eval())
    assert spec.take_batch is not None
    inputs = packed(1)
    if not APART[family]:
        with pytest.raises(ValueError, match=r"let packed documents see each other: .* \(data.layout=padded\)"):
            spec.take_batch(inputs, None)
        return
    spec.take_batch(inputs, None)
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, :5] = token_ids(1, 5, seed=77)
    layers = spec.build(0, spec.num_layers)
    logits = [_through(layers, batch) for batch in (inputs, other)]
    assert_close(logits[0][:, 5:], logits[1][:, 5:])


@torch.no_grad()
def _through(layers: list[Any], value: Any) -> Tensor:
    for layer in layers:
        value = layer(value)
    return value


def test_positions_that_start_again_beside_a_mask_are_refused() -> None:
    take = spec_of_hf(tiny("llama")).take_batch
    assert take is not None
    inputs = {**packed(), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    with pytest.raises(ValueError, match="position_ids start again within a sample, beside an attention_mask"):
        take(inputs, None)
    left = {
        "input_ids": token_ids(1, 4),
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
        "position_ids": torch.tensor([[1, 1, 0, 1]]),
    }
    take(left, None)  # padding in front, as generation has it


def test_a_step_refuses_them_too() -> None:
    inputs = {**packed(), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    with Pipeline(tiny("llama"), num_microbatches=2) as pipeline:
        with pytest.raises(ValueError, match="beside an attention_mask"):
            pipeline.step(inputs, token_ids(2, 12))
        pipeline.step(packed(), token_ids(2, 12))  # the pipeline goes on


def set_bytes(inputs: Any, length: int) -> list[int]:
    """Of the set of microbatch 0 on each of two stages, both with two decoder layers.

    Without grouped queries, whose keys and values transformers repeats where there is a mask.
    """
    with Pipeline(
        tiny("llama", num_key_value_heads=4), num_microbatches=1, stages_per_rank=2, recompute="never"
    ) as pipeline:
        pipeline.step(inputs, token_ids(1, length))
        return [stage.set_bytes[0] for stage in pipeline._stages.values()]


def test_a_set_has_one_mask_whatever_its_layers() -> None:
    length = 1024
    ids, mask = token_ids(1, length), torch.ones(1, length, dtype=torch.int64)
    mask[0, -3:] = 0
    plain, padded = set_bytes(ids, length), set_bytes({"input_ids": ids, "attention_mask": mask}, length)
    grown = [after - before for before, after in zip(plain, padded)]
    assert all(length * length * 4 <= more <= length * length * 4 * 1.01 for more in grown), grown


class Waits(TorchDispatchMode):
    """Counts the values that the host asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


INPUTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: token_ids(4, 12),
    "padded": lambda: {"input_ids": token_ids(4, 12), "attention_mask": padding_mask(4, 12)},
    "packed": packed,
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_the_host_waits_for_no_mask(family: str, inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, value = layers_of(tiny(family).eval(), 0, 6), INPUTS[inputs]()
    with Waits() as looking:
        wanted = _through(layers, value)
    monkeypatch.setattr(frame, "may_look", lambda device: False)
    with Waits() as ahead:
        found = _through(layers, value)
    assert_close(found, wanted)
    assert ahead.count == 0
    assert looking.count > 0 or inputs == "plain"
