"""What ranks that share a device as threads compute over messages that meet on it, next to one process; and that nothing hangs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from one_gpu import LAYERS, MODELS, NUM_MICROBATCHES, WIDTH, Shared, check_close, mean_square
from spinning import TIMEOUT_SECONDS, SpinningRanks
from torch import nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy


def compare_spinning(ranks: SpinningRanks, num_ranks: int, device: str, case: Shared, *, waits: bool = False) -> None:
    """Three steps on every rank; with `waits` each host waits for its own device before every op of the last two."""
    torch.manual_seed(0)
    whole = nn.Sequential(*MODELS[case.model]()).to(device)
    models = [copy.deepcopy(whole) for _ in range(num_ranks)]
    batches = [[torch.randn(rows, WIDTH, device=device) for _ in range(2)] for rows in (12, 12, 12)]
    plan = make_plan(
        LAYERS,
        num_ranks=num_ranks,
        stages_per_rank=case.stages_per_rank,
        num_microbatches=NUM_MICROBATCHES,
        communicators="pair" if case.stages_per_rank > 1 else "edge",
    )
    # Before the ranks: so all kernels are loaded, which makes a host wait for its device, and here the device is everybody's.
    expected = []
    for step, (inputs, targets) in enumerate(batches):
        whole.zero_grad()
        loss = reference_step(whole, mean_square, inputs, targets, num_microbatches=NUM_MICROBATCHES, step=step)
        expected.append(
            (loss, {name: one.grad.clone() for name, one in whole.named_parameters() if one.grad is not None})
        )
    if device != "cpu":
        torch.cuda.synchronize()

    def trained(rank: int) -> list[Any]:
        policy = RecomputePolicy(case.mode, sets=case.sets, keep="none")
        found = []
        options: dict[str, Any] = {"schedule": case.schedule, "recompute": policy, "timeout_seconds": TIMEOUT_SECONDS}
        with Pipeline(models[rank], mean_square, plan=plan, **options) as pipeline:
            for step, (inputs, targets) in enumerate(batches):
                if waits and step == 1:
                    pipeline.before_ops(lambda op, step: ranks.wait_for_own_streams())
                pipeline.zero_grad()
                loss = pipeline.step(inputs, targets)
                found.append((loss, {name: one.grad.clone() for name, one in pipeline.named_parameters()}))
        return found

    for rank, found in enumerate(ranks.run(trained)):
        for step, (loss, gradients) in enumerate(found):
            check_close(loss, expected[step][0], f"the loss of step {step} on rank {rank}")
            for name, gradient in gradients.items():
                check_close(gradient, expected[step][1][name], f"{name}.grad of step {step} on rank {rank}")
