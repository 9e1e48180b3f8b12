"""Losses of causal language models: of experts, over stages, and of logits that are never all there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf.loops import differing_gradients, loop_step
from hf.tiny import VOCABULARY, padding_mask, tiny, token_ids
from rounding import rounding
from torch import Tensor

from pipetrain import Pipeline
from pipetrain.models import loss as losses
from pipetrain.models.hf.hf_spec import spec_of_hf
from pipetrain.models.loss import IGNORED, next_token_loss

WITHIN = rounding(torch.float32, terms=VOCABULARY)  # the longest of the sums whose order differs


def with_router_loss(model: torch.nn.Module) -> Any:
    """transformers' own: cross entropy and, of the whole microbatch, the loss of its experts."""

    def loss(output: Any, targets: Tensor) -> Tensor:
        return next_token_loss(output.logits, targets) + model.router_aux_loss_coef * output.aux_loss

    return loss


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_loss_of_experts_goes_over_stages(family: str, padded: bool) -> None:
    keys = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    theirs, ours = tiny(family, **keys), tiny(family, **keys)
    ids, targets, mask = token_ids(6, 12), token_ids(6, 12, seed=9), padding_mask(6, 12)
    inputs = {"input_ids": ids, "attention_mask": mask} if padded else ids
    targets = targets.masked_fill(mask == 0, IGNORED) if padded else targets
    with Pipeline(ours, num_microbatches=3, stages_per_rank=3) as pipeline:
        loss = pipeline.step(inputs, targets)
        output = pipeline(inputs)
    assert torch.equal(loss, loop_step(theirs, inputs, targets, num_microbatches=3, loss_of=with_router_loss(theirs)))
    assert not differing_gradients(ours, theirs, within=WITHIN)
    assert output["logits"].shape == (6, 12, 61)
    assert output["router_loss"].shape == (3,)
    assert float(output["router_loss"].min()) > 0.1, "a loss too small for a mistake in it to be seen"


# Logits in pieces -------------------------------------------------------------------------------------------------


def capped(family: str) -> dict[str, Any]:
    return {"final_logit_softcapping": 5.0} if family.startswith("gemma") else {}


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_logits_in_pieces_train_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two positions: loss and gradients are those of whole logits, also recomputed; a head may be scaled or have a cap."""
    theirs, ours = tiny(family, **capped(family)), tiny(family, **capped(family))
    ids, targets = token_ids(4, 12), token_ids(4, 12, seed=9)
    targets[0] = IGNORED
    wanted = loop_step(theirs, ids, targets, num_microbatches=2)
    monkeypatch.setattr(losses, "PIECE_BYTES", 4 * 2 * 2 * 61)
    seen = watched_logits(monkeypatch)
    with Pipeline(ours, num_microbatches=2, stages_per_rank=2, recompute="inline") as pipeline:
        loss = pipeline.step(ids, targets)
        torch.testing.assert_close(loss, wanted, rtol=WITHIN, atol=0)
        assert not differing_gradients(ours, theirs, within=WITHIN)
        assert pipeline(ids).shape == (4, 12, 61)
        torch.testing.assert_close(pipeline.evaluate(ids, targets), wanted, rtol=WITHIN, atol=0)
    assert seen
    assert seen == [2] * len(seen)


def watched_logits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each piece of logits has."""
    seen, piece = list[int](), losses._piece

    def watching(logits_of: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        seen.append(hidden.shape[1])
        return piece(logits_of, hidden, targets)

    monkeypatch.setattr(losses, "_piece", watching)
    return seen


def test_small_logits_are_made_whole() -> None:
    assert not losses.are_large(torch.empty(8, 1024, 1), 4096)
    assert losses.are_large(torch.empty(1, 1024, 1), 152_000)


def test_a_microbatch_in_which_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation that weighs rows, say; it gives no loss and no gradient."""
    monkeypatch.setattr(losses, "PIECE_BYTES", 1)
    model = tiny("llama")
    value: Any = token_ids(2, 4)
    for layer in spec_of_hf(model).build(0, 6):
        value = layer(value)
    loss = losses.causal_loss(value, torch.full((2, 4), IGNORED))
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
