"""Real ranks: what each rank trains is what transformers trains, tensor by tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from hf.loops import loop_step
from hf.tiny import padding_mask, tiny, token_ids
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding

from pipetrain import Pipeline
from pipetrain.models.loss import IGNORED
from pipetrain.schedule.op import Lane

# Ten steps, each of which adds up the gradients of two copies and of three microbatches in another order.
WITHIN = rounding(torch.float32, terms=10 * 2 * 3)


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
    run_ranks(3, train, ["gemma3_text"], ["overlap", "never"])


def train_tied() -> None:
    """A GPT-2 whose head has the weights of the embedding: loss and norm of ten steps with a clip, and copies that are equal at the end."""
    model = tiny("gpt2", tie_word_embeddings=True)
    theirs, ids = copy.deepcopy(model), token_ids(6, 12)
    targets = torch.cat([ids[:, 1:], torch.full((6, 1), IGNORED)], 1)
    with Pipeline(model, num_microbatches=3, schedule="1f1b", timeout_seconds=NEVER_SECONDS) as pipeline:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (pipeline, theirs)]
        assert {op.part for _, lane, op in pipeline.schedule.ops() if lane is Lane.REDUCE} == {0}
        for _ in range(10):
            loss = pipeline.step(ids, targets)
            wanted = loop_step(theirs, ids, targets, num_microbatches=3)
            assert abs(loss - wanted) <= WITHIN * abs(wanted)
            norm = pipeline.clip_grad_norm_(0.5)
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            assert abs(norm - expected) <= WITHIN * expected
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = pipeline.full_state_dict()
        if state is not None:
            first, second = (value for value in state.values() if value.shape == theirs.lm_head.weight.shape)
            assert torch.equal(first, second)
            assert (first - theirs.lm_head.weight).norm() <= WITHIN * first.norm()


def test_two_ranks_with_a_tied_head() -> None:
    run_ranks(2, train_tied)
