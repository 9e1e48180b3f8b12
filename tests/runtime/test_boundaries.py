"""What a step may be given, and which of its layers need no gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cases import Case, mean_square, rows, run_cases
from ranks import run_ranks
from torch import Tensor, nn

from pipetrain.runtime.cut import Whole
from pipetrain.schedule.make import make_schedule


class Apply(nn.Module):
    """A linear layer, whose output goes through `function(x, linear(x))`; the input is picked by `pick`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], pick: Callable[[Any], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.pick = pick

    def forward(self, x: Any) -> Any:
        return self.function(x, torch.tanh(self.linear(self.pick(x))))


# What a step may be given ---------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Takes (x, positions), where the positions are the same for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: tuple[Tensor, Tensor, str]) -> Tensor:
        x, positions, _ = value
        return self.linear(x) + positions


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def linears() -> list[nn.Module]:
    return [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]


def with_batch_norm() -> list[nn.Module]:
    spectral = nn.utils.parametrizations.spectral_norm
    return [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        spectral(nn.Linear(8, 8)),
        nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8)),
        nn.Sequential(spectral(nn.Linear(8, 8)), nn.BatchNorm1d(8, momentum=None)),
    ]


def shared_in_a_stage() -> list[nn.Module]:
    shared = nn.Linear(8, 8)
    return [shared, nn.Sequential(nn.Tanh(), shared), nn.Linear(8, 8), nn.Linear(8, 8)]


def counted(target: Tensor) -> int:
    return int((target >= 0).sum())


def counted_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=-1)


def labels(*lists: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(len(given), 8, generator=torch.Generator().manual_seed(5)), torch.tensor(given)) for given in lists
    ]


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(nn.functional.dropout(output, 0.3), target)


def sequences(*shapes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(*shape, 8, generator=generator), torch.randn(*shape, 8, generator=generator)) for shape in shapes
    ]


def half() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def steps(num_ranks: int) -> list[Case]:
    zero_first = [-1, -1, -1, 2, 3, 1, -1, 0]
    zero_last = [1, -1, 0, 2, 3, 1, -1, -1]
    cases = [
        Case("new batch sizes", linears, lambda: rows(8, 5, 11, 8, 4)),
        Case("new sequence lengths", linears, lambda: sequences((4, 3), (5, 3), (4, 7), (4, 3))),
        Case("as many rows as microbatches", linears, lambda: rows(4)),
        Case("one microbatch", linears, lambda: rows(3, 4), options={"num_microbatches": 1}),
        Case("scale", linears, lambda: rows(8, 9), scale=0.25),
        Case("targets count", linears, lambda: labels(zero_first, zero_last), counted_loss, {"count_fn": counted}),
        Case("dropout in the loss", linears, lambda: rows(8, 9), loss=noisy_loss),
        Case("one parameter twice in a stage", shared_in_a_stage, lambda: rows(8, 9), options={"balance": _last_three_apart(num_ranks)}),
        Case("whole inputs", lambda: [Positions(), *linears()[1:]], lambda: _with_positions(8, 9)),
        Case("dict as inputs", lambda: [Apply(lambda x, y: y, lambda x: x["x"]), *linears()[1:]], _dicts),
    ]  # fmt: skip
    for mode in ("never", "inline", "overlap"):
        options = {"recompute": mode}
        cases += [
            Case(f"buffers, {mode}", with_batch_norm, lambda: rows(8, 11, 8), options=options),
            Case(f"autocast, {mode}", linears, lambda: rows(8, 8), options=options, autocast=half),
            Case(f"float64, {mode}", lambda: [Double(), *(layer.double() for layer in linears())], _doubles, options={**options, "balance": _first_two(num_ranks)}),
            Case(f"mixed autocast, {mode}", linears, lambda: rows(8, 8, 8), options=options, autocast=_now_and_then()),
        ]  # fmt: skip
    return cases


def _last_three_apart(num_ranks: int) -> list[int]:
    return [4] if num_ranks == 1 else [2, 1, 1]


def _first_two(num_ranks: int) -> list[int]:
    return [5] if num_ranks == 1 else [2, 2, 1]


def _with_positions(*counts: int) -> list[Any]:
    return [((x, Whole(torch.arange(8.0)[None]), "word"), y) for x, y in rows(*counts)]


def _dicts() -> list[Any]:
    return [({"x": x, "flag": True}, y) for x, y in rows(8, 9)]


def _doubles() -> list[Any]:
    return [(x, y.double()) for x, y in rows(8, 9)]


def _now_and_then() -> Callable[[], Any]:
    """Autocast in every second step."""
    calls = iter(range(1000))
    return lambda: half() if next(calls) % 2 else contextlib.nullcontext()


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_step_may_be_given(num_ranks: int) -> None:
    run_ranks(num_ranks, run_cases, steps, num_ranks)


# What is trained ------------------------------------------------------------------------------------------------------


def frozen(*numbers: int) -> Callable[[int, nn.Sequential], None]:
    def freeze(step: int, model: nn.Sequential) -> None:
        for number, layer in enumerate(model):
            layer.requires_grad_(number not in numbers)

    return freeze


def frozen_by_turns(*sets: tuple[int, ...]) -> Callable[[int, nn.Sequential], None]:
    return lambda step, model: frozen(*sets[step % len(sets)])(step, model)


def only_one_bias(step: int, model: nn.Sequential) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "3.0.bias")


FREEZES: dict[str, Callable[[int, nn.Sequential], None]] = {
    "first frozen": frozen(0),
    "first two frozen": frozen(0, 1),
    "all but the last frozen": frozen(0, 1, 2, 3, 4),
    "all but the first frozen": frozen(1, 2, 3, 4, 5),
    "middle frozen": frozen(2, 3),
    "by turns": frozen_by_turns((), (0, 1), (2, 3), (0, 1, 2, 3), ()),
    "only one bias": only_one_bias,
}


def freezing(num_ranks: int) -> list[Case]:
    cases = []
    for number, (name, before) in enumerate(FREEZES.items()):
        mode = ("never", "inline", "overlap")[number % 3]
        # A schedule that is given, as `pipetrain train` does, has B for stages that may not need one.
        given = make_schedule("1f1b", num_stages=num_ranks, num_microbatches=4, recompute=mode)
        different: dict[str, dict[str, Any]] = {"overlap": {"recompute": "overlap"}, "inline": {"recompute": "inline"}}
        if num_ranks > 1:
            different["inline"] = {"schedule": "interleaved", "stages_per_rank": 6 // num_ranks, "recompute": "inline"}
            different[f"given {mode}"] = {"schedule": given, "recompute": mode}
        for what, options in different.items():
            batches = lambda: rows(8, 8, 9, 8, 8)  # noqa: E731
            cases.append(Case(f"{name}, {what}", six_linears, batches, options=options, before_step=before))
    return cases


def six_linears() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_layers_that_need_no_gradient(num_ranks: int) -> None:
    run_ranks(num_ranks, run_cases, freezing, num_ranks)
