"""Each family, cut into layers of ours: what transformers itself computes, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hf.loops import differing_gradients, loop_step
from hf.tiny import FAMILIES, padding_mask, tiny, token_ids
from torch import Tensor, nn

from pipetrain import Pipeline
from pipetrain.models.hf.hf_spec import layers_of
from pipetrain.models.hf.parts import model_parts
from pipetrain.models.loss import IGNORED, next_token_loss

# In `make test`, all others being slow: one each of rotary tables per kind of layer, experts, learned positions, tuples.
PRESENT = ("llama-overlap", "gemma3_text-overlap", "mixtral-overlap", "mixtral-never", "gpt2-overlap", "falcon-overlap")


def batches(*, padded: bool, rows: int = 6, length: int = 12) -> tuple[Any, Tensor]:
    ids, targets = token_ids(rows, length), token_ids(rows, length, seed=9)
    if not padded:
        return ids, targets
    mask = padding_mask(rows, length)
    return {"input_ids": ids, "attention_mask": mask}, targets.masked_fill(mask == 0, IGNORED)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_in_a_row_are_the_model(family: str) -> None:
    """Logits and all gradients, plain and padded, in both of transformers' ways to make masks."""
    theirs, ours = tiny(family), tiny(family)
    parts = model_parts(ours)
    layers = layers_of(ours, 0, parts.num_layers, parts)
    for padded in (False, True):
        inputs, targets = batches(padded=padded, rows=4)
        value: Any = inputs
        for layer in layers:
            value = layer(value)
        wanted = theirs(**(inputs if padded else {"input_ids": inputs}), use_cache=False).logits
        assert torch.equal(value, wanted)
        next_token_loss(value, targets).backward()
        next_token_loss(wanted, targets).backward()
        assert not differing_gradients(ours, theirs)
    covered = {id(parameter) for layer in layers for parameter in layer.parameters()}
    assert covered == {id(parameter) for parameter in ours.parameters()}
    assert sum(len(list(layer.parameters())) for layer in layers) == len(covered), "a parameter stands in two layers"


def check_pipeline(family: str, mode: str) -> None:
    """Two steps of three stages on one rank, plain and padded."""
    theirs, ours = tiny(family), tiny(family)
    with warnings.catch_warnings(), Pipeline(ours, num_microbatches=2, stages_per_rank=3, recompute=mode) as pipeline:
        warnings.simplefilter("error")
        for padded in (False, True):
            inputs, targets = batches(padded=padded, rows=4)
            loss = pipeline.step(inputs, targets)
            assert torch.equal(loss, loop_step(theirs, inputs, targets, num_microbatches=2))
            assert not differing_gradients(ours, theirs)


@pytest.mark.quick(*PRESENT)
@pytest.mark.parametrize(("family", "mode"), [*((family, "overlap") for family in FAMILIES), ("mixtral", "never")])
def test_stages_are_the_model(family: str, mode: str) -> None:
    check_pipeline(family, mode)


def test_evaluation_and_logits_are_the_models() -> None:
    theirs, ours = tiny("llama"), tiny("llama")
    inputs, targets = batches(padded=True)
    with Pipeline(ours, num_microbatches=3, stages_per_rank=3) as pipeline, torch.no_grad():
        logits = theirs(**inputs, use_cache=False).logits
        torch.testing.assert_close(pipeline(inputs), logits)
        torch.testing.assert_close(pipeline.evaluate(inputs, targets), next_token_loss(logits, targets))


def test_a_stage_draws_the_same_dropout_wherever_it_begins() -> None:
    """The base's own dropout belongs to the embedding: a later stage that runs its forward for masks draws nothing."""
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    losses, models = [], []
    for balance in ([6], [2, 2, 2], [1, 3, 2]):
        models.append(tiny("gpt2", **dropout))
        with Pipeline(models[-1], num_microbatches=3, stages_per_rank=len(balance), balance=balance) as pipeline:
            losses.append(pipeline.step(*batches(padded=False)))
    assert losses[0] == losses[1] == losses[2]
    assert not differing_gradients(models[1], models[0])
    assert not differing_gradients(models[2], models[0])


def test_a_loss_of_ones_own_gets_logits() -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    inputs, targets = batches(padded=False)
    theirs, ours = tiny("llama"), tiny("llama")
    with Pipeline(ours, loss, num_microbatches=3, stages_per_rank=2) as pipeline:
        found = pipeline.step(inputs, targets)
    wanted = loss(theirs(input_ids=inputs, use_cache=False).logits, targets)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_masks_are_in_the_dtype_of_the_queries(precision: str) -> None:
    """Padded, with two layers per stage, in bfloat16 and under autocast."""
    theirs, ours = tiny("llama"), tiny("llama")
    if precision == "bf16":
        theirs, ours = theirs.bfloat16(), ours.bfloat16()
    inputs, targets = batches(padded=True)
    pipeline = Pipeline(ours, num_microbatches=3, stages_per_rank=3)
    with pipeline, torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        loss = pipeline.step(inputs, targets)
        wanted = loop_step(theirs, inputs, targets, num_microbatches=3)
    assert torch.equal(loss, wanted)
    assert not differing_gradients(ours, theirs)
