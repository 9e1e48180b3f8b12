"""From the second step on the host waits for its device once per step, on the rank that has the loss, and once per clip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from virtual_gpu.cases import Case, batch_norm, bfloat16, bridges, dropout, frozen, gaps, plain, play
from virtual_gpu.reserved import host_waits

LOSS, NORMS = "the loss of the step", "the norms of the gradients"


def clips_and_evaluates(pipeline: Pipeline, batch: Any) -> None:
    pipeline.clip_grad_norm_(1.0)
    inputs, targets = batch
    pipeline.evaluate(inputs if pipeline.is_first else None, targets if pipeline.is_last else None)


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", layers=batch_norm, also=clips_and_evaluates),
        Case("gpipe", layers=frozen, autocast=bfloat16, also=clips_and_evaluates),
        Case("interleaved", stages_per_rank=2, sets=2, layers=bridges(gaps), also=clips_and_evaluates),
        Case("1f1b", "never", ranks=3, layers=dropout, also=clips_and_evaluates),
    ],
    ids=str,
)
def test_one_wait_for_the_loss_and_one_for_the_norms(case: Case) -> None:
    for rank, recording in enumerate(play(case).recording):
        calls = [
            (call, waits) for call, waits in host_waits(recording) if call in ("step", "clip_grad_norm_", "evaluate")
        ]
        assert [call for call, _ in calls[:3]] == ["step", "clip_grad_norm_", "evaluate"]
        for call, waits in calls[3:]:
            has_loss = rank == case.ranks - 1 and call != "clip_grad_norm_"
            allowed = [[LOSS]] if has_loss else [[], [NORMS]] if call == "clip_grad_norm_" else [[]]
            assert waits in allowed, f"rank {rank} in {call} waits for {waits}"


class Asks(nn.Module):
    """Wants to know on the host what is on the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.sum() > 0 else 1.0)


def asking(num_stages: int) -> list[nn.Module]:
    return [nn.Sequential(*plain(1), Asks()) for _ in range(num_stages)]


def test_a_layer_that_waits_is_counted() -> None:
    case = Case("gpipe", layers=asking)
    for recording in play(case).recording:
        assert all(len(waits) >= case.microbatches for call, waits in host_waits(recording) if call == "step")
