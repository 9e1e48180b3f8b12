"""Real ranks: what each rank trains is what transformers trains, tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from hf.loops import loop_step
from hf.tiny import padding_mask, tiny, token_ids
from ranks import NEVER_SECONDS, run_ranks

from pipetrain import Pipeline
from pipetrain.models.loss import IGNORED


def train(families: list[str], modes: list[str]) -> int:
    """On every rank: equal loss, and equal gradients of its own layers. Returns how many tensors were compared."""
    torch.set_num_threads(1)
    compared = 0
    for family in families:
        for mode in modes:
            theirs, ours, mask = tiny(family), tiny(family), padding_mask(6, 12)
            inputs = {"input_ids": token_ids(6, 12), "attention_mask": mask}
            targets = token_ids(6, 12, seed=9).masked_fill(mask == 0, IGNORED)
            with Pipeline(ours, num_microbatches=3, recompute=mode, timeout_seconds=NEVER_SECONDS) as pipeline:
                loss = pipeline.step(inputs, targets)
                wanted = loop_step(theirs, inputs, targets, num_microbatches=3)
                assert torch.equal(loss, wanted), (family, mode, loss, wanted)
                own = {id(parameter) for parameter in pipeline.parameters()}
            for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                if id(parameter) in own:
                    assert torch.equal(parameter.grad, other.grad), (family, mode, name)
                    compared += 1
    return compared


def test_two_ranks() -> None:
    of_llama, of_mixtral = (len(list(tiny(family).parameters())) for family in ("llama", "mixtral"))
    assert sum(run_ranks(2, train, ["llama", "mixtral"], ["overlap"])) == of_llama + of_mixtral


@pytest.mark.slow
def test_three_ranks() -> None:
    run_ranks(3, train, ["llama", "gemma3_text", "mixtral"], ["overlap", "never"])
