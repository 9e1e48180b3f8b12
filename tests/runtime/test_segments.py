"""Stages recomputed in parts: the numbers of `reference_step`, bit for bit, and the memory of one part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import pairwise
from parity_cases import Case, mean_square, plain, rows, run_cases, transposed
from ranks import run_ranks
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.policy import Mode, RecomputePolicy


def twelve(dropout: float) -> list[nn.Module]:
    return [*plain(dropout), *transposed(dropout)]


def in_parts() -> list[Case]:
    """Any two of mode, segments with sets, and schedule, with dropout, over stages of different sizes, so that parts are, too."""
    parts = ((2, None), (2, 1.5), (2, 2), ("sqrt", 1), ("layers", None))
    cases = []
    for row in pairwise([Mode.INLINE, Mode.EARLY, Mode.OVERLAP], parts, ["gpipe", "1f1b"]):
        mode, (segments, sets), schedule = row.values  # type: ignore[misc]
        policy = RecomputePolicy(mode, segments=segments, sets=sets)  # type: ignore[arg-type]
        options = {"recompute": policy, "balance": (3, 2, 7), "schedule": schedule}
        if not row.marks:
            name = f"{schedule}, {mode}, {segments} segments, {sets} sets"
            cases.append(Case(name, lambda: twelve(0.3), lambda: rows(8, 11), options=options))
    return cases


def in_other_schedules() -> list[Case]:
    """Parts in two stages per rank, in `auto`, and with every set of a microbatch in flight bounded."""
    two_stages = {"schedule": "interleaved", "stages_per_rank": 2}
    less = RecomputePolicy("early", segments=2, sets=0.5)
    found: dict[str, dict[str, Any]] = {
        "interleaved": {**two_stages, "recompute": RecomputePolicy(segments=2, sets=1)},
        "interleaved, one part": {**two_stages, "recompute": RecomputePolicy(segments=2)},
        "auto": {"schedule": "auto", "recompute": RecomputePolicy(segments=2, sets=1.5)},
        "auto, less than a set": {"schedule": "auto", "recompute": less},
        "every R proved": {"recompute": RecomputePolicy(segments=3, verify="every", last_stage="always")},
        "never": {"recompute": RecomputePolicy("never", segments=3)},
        "one stage keeps more": {"recompute": RecomputePolicy(segments=2, sets=[1.5, 0.5, 0.5])},
    }
    return [Case(name, lambda: twelve(0.3), lambda: rows(9, 12), options=options) for name, options in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [in_parts, in_other_schedules])
def test_gradients_are_those_of_one_process(cases: Callable[[], list[Case]]) -> None:
    run_ranks(3, run_cases, cases)


# What crosses from part to part ---------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A tree: what it was given beside what it makes of it, and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"x": x, "y": (y, y), "what": "a word"}


class Unpair(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        first, second = given["y"]
        return torch.tanh(first) * second + given["x"]


def shared() -> list[nn.Module]:
    """One weight in three parts."""
    same = nn.Linear(8, 8)
    return [same, nn.Tanh(), nn.Linear(8, 8), same, nn.Tanh(), same]


def in_place() -> list[nn.Module]:
    """A part whose first layer changes its input in place."""
    return [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)]


def with_buffers() -> list[nn.Module]:
    """State that F changes, of a layer that stands in two parts."""
    norm = nn.BatchNorm1d(8)
    return [norm, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), norm, nn.Linear(8, 8)]


def frozen() -> list[nn.Module]:
    """Nothing in the first part needs a gradient."""
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    layers[0].requires_grad_(requires_grad=False)
    return layers


def trees() -> list[nn.Module]:
    return [nn.Linear(8, 8), Pair(), nn.Identity(), Unpair(), nn.Linear(8, 8)]


def crossings() -> list[Case]:
    return [
        Case(
            f"{make.__name__}, {mode}, {segments}",
            make,
            lambda: rows(8, 11, 8),
            options={"recompute": RecomputePolicy(mode, segments=segments, sets=sets, last_stage="always")},
        )
        for make in (trees, shared, in_place, with_buffers, frozen)
        for mode, segments, sets in (("inline", 2, None), ("overlap", "layers", None), ("overlap", 3, 2))
    ]


def test_what_crosses_from_part_to_part() -> None:
    run_cases(crossings)


def test_a_value_that_cannot_cross_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "odd": object()}

    class Back(nn.Module):
        def forward(self, given: Any) -> Tensor:
            return given["x"]  # type: ignore[no-any-return]

    layers = [nn.Linear(8, 8), Odd(), Back(), nn.Linear(8, 8)]
    with (
        pytest.raises(TypeError, match=r"layer 1 \(Odd\), the last of part 0 of stage 0, returned output\['odd'\]"),
        Pipeline(layers, mean_square, num_microbatches=2, recompute=always(2)) as pipeline,
    ):
        pipeline.step(*rows(4)[0])


# Memory ---------------------------------------------------------------------------------------------------------------


CALLS: list[None] = []  # of layers; no state of theirs, which R would put back


class Layer(nn.Module):
    """Holds the same for B as any other: its input and four times that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(None)
        y = x * self.scale
        for _ in range(4):
            y = y.sin()
        return y


def always(segments: int | str, **more: Any) -> RecomputePolicy:
    return RecomputePolicy(segments=segments, last_stage="always", **more)


def peaks(segments: int | str, sizes: list[int]) -> list[int]:
    """The peak of activation bytes for a stage of so many layers, from the second step on."""
    found = []
    for size in sizes:
        layers = [Layer(64) for _ in range(size)]
        with Pipeline(layers, mean_square, num_microbatches=4, recompute=always(segments)) as pipeline:
            for _ in range(2):
                inputs = targets = torch.zeros(8, 64)
                pipeline.step(inputs, targets)
            found.append(pipeline.report.peak_activation_bytes)
    return found


def exponent(sizes: list[int], held: list[int]) -> float:
    """The slope of log(held) over log(size), by least squares."""
    x, y = [math.log(one) for one in sizes], [math.log(one) for one in held]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


@pytest.mark.slow
def test_sqrt_parts_hold_the_square_root() -> None:
    sizes = [16, 64, 256]
    assert exponent(sizes, peaks("sqrt", sizes)) == pytest.approx(0.5, abs=0.1)
    assert exponent(sizes, peaks(1, sizes)) == pytest.approx(1.0, abs=0.1)


def test_parts_of_a_layer_hold_their_inputs_and_one_layer() -> None:
    (held,) = peaks("layers", [16])
    row = 2 * 64 * 4  # an input of a microbatch
    assert held <= 4 * 16 * row + 6 * row  # m inputs of each layer, and what one layer saves


def test_parts_of_r_run_each_layer_once() -> None:
    layers = [Layer(4) for _ in range(12)]
    with Pipeline(layers, mean_square, num_microbatches=2, recompute=always(4)) as pipeline:
        for _ in range(2):
            CALLS.clear()
            pipeline.step(torch.zeros(4, 4), torch.zeros(4, 4))
    assert len(CALLS) == 2 * 12 * 2  # F and R


def test_the_report_has_parts_as_ops() -> None:
    seen = []
    with Pipeline(
        twelve(0.0), mean_square, num_microbatches=2, recompute=always(3), on_event=lambda event: seen.append(event.op)
    ) as pipeline:
        pipeline.step(*rows(4)[0])
    assert [str(op) for op in seen if op.kind in (Kind.R, Kind.B) and op.microbatch == 0] == [
        "0R0.2", "0B0.2", "0R0.1", "0B0.1", "0R0.0", "0B0.0",
    ]  # fmt: skip


def test_a_layer_that_goes_another_way_is_named() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = iter(range(100))

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * next(self.generator)

    layers = [nn.Linear(8, 8), nn.Tanh(), Counts(), nn.Linear(8, 8)]
    with (
        pytest.raises(RuntimeError, match=r"layer 3 \(Linear\): the recompute saves .* other values"),
        Pipeline(layers, mean_square, num_microbatches=2, recompute=always(2)) as pipeline,
    ):
        pipeline.step(*rows(4)[0])


def test_more_segments_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute\.segments=4: stage 0 has 3 layers"):
        Pipeline([nn.Linear(8, 8) for _ in range(3)], mean_square, recompute=always(4))
