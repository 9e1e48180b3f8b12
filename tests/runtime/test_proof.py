"""The proof of R on the microbatch whose set F has kept: what it finds, what it allows, what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from one_rank import make_stages, run_step
from parity_cases import mean_square, plain
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.errors import RecomputeMismatch
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.proof import Stop, describe_difference, differ
from pipetrain.stage.stage import Stage

M = 4


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)


def first(microbatch: int) -> bool:
    return microbatch == 0


def stages_of(*layers: nn.Module, balance: Sequence[int] | None = None) -> list[Stage]:
    return make_stages(list(layers), balance or [len(layers)], mean_square, ActivationMeter())


# What counts as a difference ------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), "2 of 2 entries differ, by up to inf"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-22]), "1 of 2 entries differ, by up to 2.38e-07"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 entries differ, by up to 1"),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), "1 of 1 entries differ, by up to 1"),
        (torch.empty(0), torch.empty(0), None),
        (torch.tensor([2.0]).to_sparse(), torch.tensor([3.0]).to_sparse(), "1 of 2 entries differ, by up to 1"),
    ],
    ids=["NaN", "another NaN", "a bit", "bool", "complex", "empty", "sparse"],
)
def test_difference(found: Tensor, expected: Tensor, said: str | None) -> None:
    assert differ(found, expected) == (said is not None)
    if said is not None:
        assert describe_difference(found, expected) == said


# What it finds --------------------------------------------------------------------------------------------------------


DRIFT = [0.0]


class Drifts(nn.Module):
    """Other values in R: nothing that could be seen on its first forward."""

    def __init__(self, step: float = 1.0) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x + self.step * DRIFT[0])


def drift(stage: int, microbatch: int) -> None:
    DRIFT[0] += 1.0


@pytest.fixture(autouse=True)
def no_drift() -> None:
    DRIFT[0] = 0.0


def test_the_first_layer_that_differs_is_named() -> None:
    message = r"layer 1 \(Drifts\): the recompute saves a tensor \[3, 8\] float32 made by SigmoidBackward with other values: \d+ of 24"
    with pytest.raises(RecomputeMismatch, match=message):
        run_step(
            stages_of(nn.Linear(8, 8), Drifts(), nn.Linear(8, 8)), *batch(), M, prove=first, before_recompute=drift
        )


def test_another_path_because_of_other_values_names_the_values() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if bool(x.mean() < 0.9) else x.sin() * 2

    layers = [nn.Linear(8, 8), Drifts(9.0), nn.Linear(8, 8), nn.Sigmoid(), Branches(), nn.Linear(8, 8)]
    with pytest.raises(RecomputeMismatch, match=r"layer 1 \(Drifts\)"):
        run_step(stages_of(*layers), *batch(), M, prove=first, before_recompute=drift)


def test_only_what_is_proved_is_compared() -> None:
    layers = [nn.Linear(8, 8), Drifts(), nn.Linear(8, 8)]
    run_step(stages_of(*layers), *batch(), M, before_recompute=drift)
    with pytest.raises(RecomputeMismatch, match="with other values"):
        run_step(stages_of(*layers), *batch(), M, prove=lambda microbatch: microbatch == M - 1, before_recompute=drift)


# Where R may end ------------------------------------------------------------------------------------------------------


class ChangesThroughData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(x, 0.1, 0.9, training=True)


@pytest.mark.parametrize(
    ("make", "stop"),
    [
        (lambda: [nn.Linear(8, 8), nn.Sigmoid()], Stop.AT_SLOT),
        (lambda: [nn.Linear(8, 8), Noise()], Stop.AT_LAYER),
        (lambda: [Noise(), nn.Linear(8, 8)], Stop.AT_SLOT),
        (lambda: [nn.Linear(8, 8), nn.Sigmoid(), ChangesThroughData()], Stop.AT_END),
    ],
    ids=["the last slot", "the layer that fills it later", "noise in the middle", "a later layer changes it"],
)
def test_where_recompute_may_end(make: Callable[[], list[nn.Module]], stop: Stop) -> None:
    layers = make()
    stages = stages_of(*layers, nn.Linear(8, 8), balance=[len(layers), 1])
    run_step(stages, *batch(), M, prove=first)
    assert stages[0]._stop is stop


def test_without_a_proof_recompute_ends_with_its_layer() -> None:
    calls: list[int] = []

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x + 1

    class SavesFirst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(x)
            calls.append(0)
            return y

    stages = stages_of(nn.Linear(8, 8), SavesFirst(), Counts(), nn.Linear(8, 8), balance=[3, 1])
    run_step(stages, *batch(), M)
    assert (calls.count(0), calls.count(1)) == (2 * M, M)
    calls.clear()
    run_step(stages, *batch(), M, prove=first)
    assert (calls.count(0), calls.count(1)) == (M + 1, M + 1), "only the proof runs to the end"


# What is proved -------------------------------------------------------------------------------------------------------


def proved_in(steps: int, verify: str | int, **options: Any) -> list[list[int]]:
    """For each step, which microbatches of stage 0 of two were proved."""
    model = nn.Sequential(*plain(0.0))
    policy = RecomputePolicy(verify=verify, last_stage="always")  # type: ignore[arg-type]
    arguments = {"num_microbatches": M, "num_stages": 2, "stages_per_rank": 2, **options}
    found: list[list[int]] = []
    with Pipeline(model, mean_square, recompute=policy, **arguments) as pipeline:
        execute = pipeline._runner.executor.run

        def noted(program: Any, step: Any) -> None:
            found.append(sorted(microbatch for stage, microbatch in step.proved if stage == 0))
            execute(program, step)

        pipeline._runner.executor.run = noted  # type: ignore[method-assign]
        for step in range(steps):
            if step == 4:
                model[0].requires_grad_(False)
            if step == 5:
                model[1].eval()
            pipeline.step(*batch())
    return found


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        ("first", [[0], [], [], [], [0], [0], [], []]),
        ("off", [[]] * 8),
        ("every", [[0, 1, 2, 3]] * 8),
        (3, [[0], [], [], [1], [0], [0], [2], []]),
        (1, [[0], [1], [2], [3], [0], [0], [2], [3]]),
    ],
)
def test_which_microbatches(verify: str | int, expected: list[list[int]]) -> None:
    """A layer is frozen in step 4, another switched to eval in step 5: that is another kind of step."""
    assert proved_in(8, verify) == expected


def test_where_nothing_is_recomputed_the_first_microbatch_is_looked_at() -> None:
    model = nn.Sequential(*plain(0.0))
    with Pipeline(model, mean_square, num_microbatches=M, recompute="never") as pipeline:
        pipeline.step(*batch())
        assert pipeline._runner._proving.choose(0, 1, pipeline._programs.whole())[0] == frozenset()


@pytest.mark.parametrize("verify", ["sometimes", 0, -1, 1.5, True, None, ""])
def test_what_verify_may_be(verify: Any) -> None:
    with pytest.raises(ValueError, match=r"recompute.verify=.*: allowed are first, every, off, or a number N"):
        RecomputePolicy(verify=verify)


def test_policies_that_differ_in_verify_make_the_same_schedule() -> None:
    assert RecomputePolicy(verify="off") == RecomputePolicy()
    assert repr(RecomputePolicy(verify=3)) == repr(RecomputePolicy())
    assert RecomputePolicy(verify="12").verify == 12


# What it holds --------------------------------------------------------------------------------------------------------


def test_a_proof_holds_one_layer_more() -> None:
    peaks = {}
    for verify in ("off", "first"):
        policy = RecomputePolicy(last_stage="always", verify=verify)
        layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
        with Pipeline(nn.Sequential(*layers), mean_square, num_microbatches=M, recompute=policy) as pipeline:
            pipeline.step(*batch())
            peaks[verify] = pipeline._parts.meter.peak_bytes
    of_a_layer = 3 * 8 * 4  # a microbatch of 3 rows
    assert peaks["off"] <= peaks["first"] <= peaks["off"] + 2 * of_a_layer
