"""Masks: one float tensor per (stage, microbatch), no wait of the host, and packed documents that do not see each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf.tiny import FAMILIES, MIXING, VOCABULARY, padding_mask, tiny, token_ids
from rounding import rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain import Pipeline
from pipetrain.config.records import ModelConfig
from pipetrain.models.hf import frame
from pipetrain.models.hf.batch_check import BatchCheck, what_mixes_documents
from pipetrain.models.hf.hf_spec import hf_spec, layers_of, spec_of_hf
from pipetrain.models.hf.parts import model_parts
from pipetrain.models.spec import ModelSpec

LENGTHS = (5, 4, 3)  # of the documents in a sample of 12 tokens
# Layers with a state that runs along the sequence; masks that the family makes without positions.
CARRIES = r"decoder layer 0 \(\w+\) carries one document into the next"
REFUSED = ("qwen3_next", "recurrent_gemma", "opt", "falcon", "bloom", "gpt_oss")


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


def logits_of_the_second_document(spec: ModelSpec) -> list[Tensor]:
    """After one first document, and after another."""
    inputs = packed(1)
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, :5] = token_ids(1, 5, seed=77)
    layers = spec.build(0, spec.num_layers)
    return [_through(layers, batch)[:, 5:] for batch in (inputs, other)]


@pytest.mark.parametrize("family", [*FAMILIES, *MIXING])
def test_who_keeps_packed_documents_apart(family: str) -> None:
    """As said of the family, and as its logits show."""
    spec = spec_of_hf(tiny(family).eval())
    assert spec.take_batch is not None
    first, second = logits_of_the_second_document(spec)
    if family in REFUSED:
        with pytest.raises(ValueError, match=rf"see each other: {CARRIES}; .* \(data.layout=padded\)"):
            spec.take_batch(packed(1), None)
        assert (first - second).abs().max() > 1e-3
    else:
        spec.take_batch(packed(1), None)
        assert_close(first, second)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", *REFUSED])
def test_the_command_and_the_library_give_one_answer(family: str, tmp_path: Path) -> None:
    """The command has the whole model on the meta device alone."""
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    config = ModelConfig(name="hf", path=str(tmp_path), weights="random")
    answers = []
    for spec in (spec_of_hf(model), hf_spec(config, VOCABULARY)):
        assert isinstance(spec.take_batch, BatchCheck)
        answers.append(spec.take_batch.what_mixes())
    assert answers[0] == answers[1]
    assert (answers[0] is None) == (family not in REFUSED)


def test_a_layer_that_is_deaf_to_its_mask_is_found_and_nothing_is_left_changed() -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Deaf(LlamaDecoderLayer):
        def forward(self, hidden: Tensor, attention_mask: Any = None, **given: Any) -> Any:  # noqa: ARG002
            return super().forward(hidden, attention_mask=None, **given)

    model = tiny("llama")
    model.model.layers[2].__class__ = Deaf
    state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    why = what_mixes_documents(model, model_parts(model))
    assert why == "decoder layer 2 (Deaf) carries one document into the next"
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


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
