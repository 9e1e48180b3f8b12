"""Ranks that share one device, over edges of host memory: what each computes next to one process. Needs torch alone.

The same cases run on the CPU, where numbers are equal bit for bit, and on a GPU, where they are close: kernels may sum in another
order there.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ranks import NEVER_SECONDS
from torch import Tensor, nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import Mode, RecomputePolicy

WIDTH = 16
LAYERS = 8
NUM_MICROBATCHES = 4
# How torch begins to say that a gradient is added up on another stream than its backward ran on.
STREAMS_DIFFER = "The AccumulateGrad node's stream does not match"


class Gaps(nn.Module):
    """Every second entry of twice as many: memory with gaps, which a message does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))[:, ::2]


class Pair(nn.Module):
    """Hands on what it got, expanded and whole, beside what it made; the next of its kind adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x = given[0] + given[1] if isinstance(given, tuple) else given
        y = torch.tanh(self.linear(x))
        return y, y[:, :1].expand(-1, WIDTH)


class Both(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0] * given[1]


def plain() -> list[nn.Module]:
    return [layer for _ in range(LAYERS // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))]


def gaps() -> list[nn.Module]:
    return [Gaps() for _ in range(LAYERS)]


def pairs() -> list[nn.Module]:
    return [*(Pair() for _ in range(LAYERS - 1)), Both()]


def normed() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS)]


MODELS = {"plain": plain, "gaps": gaps, "pairs": pairs, "normed": normed}


@dataclass(frozen=True)
class Shared:
    """One pipeline of ranks that share a device."""

    model: str
    schedule: str
    mode: str
    stages_per_rank: int = 1
    sets: int = 1


def every_case(models: Sequence[str] = tuple(MODELS)) -> list[Shared]:
    """All modes: each model in GPipe's order and in 1F1B's, and two stages a rank."""
    orders = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
    return [
        Shared(model, schedule, mode.value, stages) for model in models for schedule, stages in orders for mode in Mode
    ]


def of_one_rank() -> list[Shared]:
    """Two and four stages on one rank, whose lanes share its streams: all modes, and R with one place and with two."""
    return [
        Shared(model, schedule, mode.value, stages, sets)
        for model in MODELS
        for schedule, stages in (("gpipe", 2), ("interleaved", 4))
        for mode in Mode
        for sets in ((1, 2) if mode in (Mode.EARLY, Mode.OVERLAP) else (1,))
    ]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def compare_all(
    device: str, num_ranks: int, cases: Sequence[Shared], prepare: Callable[[], None] = lambda: None
) -> int:
    """On every rank: two steps of each case, an evaluation and a call. Returns how many cases there were."""
    prepare()
    for case in cases:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="" if device == "cpu" else STREAMS_DIFFER)
                compare(device, num_ranks, case)
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
    return len(cases)


def compare(device: str, num_ranks: int, case: Shared) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*MODELS[case.model]()).to(device)
    whole = copy.deepcopy(model)
    plan = make_plan(
        LAYERS,
        num_ranks=num_ranks,
        stages_per_rank=case.stages_per_rank,
        num_microbatches=NUM_MICROBATCHES,
        edges="pinned",
    )
    policy = RecomputePolicy(case.mode, sets=case.sets, keep="none")
    options: dict[str, Any] = {"schedule": case.schedule, "recompute": policy, "timeout_seconds": NEVER_SECONDS}
    with Pipeline(model, mean_square, plan=plan, device=device, **options) as pipeline:
        for step, rows in enumerate((12, 12, 9)):
            inputs, targets = (torch.randn(rows, WIDTH, device=device) for _ in range(2))
            pipeline.zero_grad()
            whole.zero_grad()
            loss = pipeline.step(inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
            expected = reference_step(whole, mean_square, inputs, targets, num_microbatches=NUM_MICROBATCHES, step=step)
            check_close(loss, expected, f"the loss of step {step}")
            of_whole = dict(whole.named_parameters())
            for name, parameter in pipeline.named_parameters():
                check_close(parameter.grad, of_whole[name].grad, f"{name}.grad of step {step}")
        pipeline.eval()
        whole.eval()
        output = pipeline(inputs)
        with torch.no_grad():
            parts = [whole(part) for part in inputs.tensor_split(NUM_MICROBATCHES)]
        if pipeline.is_last:
            check_close(output, torch.cat(parts), "the output")
        check_close(pipeline.clip_grad_norm_(1e6), nn.utils.get_total_norm(_gradients(whole)), "the norm")


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def check_close(found: Any, expected: Any, what: str) -> None:
    """Equal bit for bit on a CPU."""
    exact = {"rtol": 0.0, "atol": 0.0} if found.device.type == "cpu" else {}
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}", **exact)
