"""A GPT-2 whose head has the weights of the embedding, over ranks: beside transformers' own loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hf.loops import loop_step
from hf.tiny import tiny, token_ids
from ranks import NEVER_SECONDS, run_ranks

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Lane


def train() -> None:
    """Ten steps with a clip: gradients of each within 1e-6, copies equal at the end."""
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
            assert abs(loss - wanted) <= 1e-6 * abs(wanted)
            norm = pipeline.clip_grad_norm_(0.5)
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            assert abs(norm - expected) <= 1e-6 * expected
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = pipeline.full_state_dict()
        if state is not None:
            first, second = (value for value in state.values() if value.shape == theirs.lm_head.weight.shape)
            assert torch.equal(first, second)
            assert (first - theirs.lm_head.weight).norm() <= 1e-6 * first.norm()


def test_two_ranks() -> None:
    run_ranks(2, train)


@pytest.mark.slow
def test_three_ranks() -> None:
    run_ranks(3, train)
