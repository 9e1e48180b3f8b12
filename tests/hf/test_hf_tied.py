"""A GPT-2 whose head has the weights of the embedding, over ranks: beside transformers' own loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hf.loops import loop_step
from hf.tiny import tiny, token_ids
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Lane

# Ten steps, each of which adds up the gradients of two copies and of three microbatches in another order.
WITHIN = rounding(torch.float32, terms=10 * 2 * 3)


def train() -> None:
    """Ten steps with a clip: the loss and the norm of each, and copies that are equal at the end."""
    model = tiny("gpt2", tie_word_embeddings=True)
    theirs = copy.deepcopy(model)
    ids = token_ids(6, 12)
    inputs, targets = ids, torch.cat([ids[:, 1:], torch.full((6, 1), -100)], 1)
    with Pipeline(
        model, num_microbatches=3, schedule="1f1b", num_stages=dist.get_world_size(), timeout_seconds=NEVER_SECONDS
    ) as pipeline:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (pipeline, theirs)]
        (bucket,) = {op.part for _, lane, op in pipeline.schedule.ops() if lane is Lane.REDUCE}
        assert bucket == 0
        for _ in range(10):
            loss = pipeline.step(inputs, targets)
            wanted = loop_step(theirs, inputs, targets, num_microbatches=3)
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


def test_two_ranks() -> None:
    run_ranks(2, train)


@pytest.mark.slow
def test_three_ranks() -> None:
    run_ranks(3, train)
