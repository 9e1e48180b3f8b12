"""What a layer leaves for one of another stage, past the output, is refused by name; what they share and do not pass on is not."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import pairwise
from parity_cases import Case, check_case, mean_square, rows
from ranks import run_outcomes, run_ranks
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline

GLOBAL: dict[str, Tensor] = {}
TWO_STAGES: dict[str, Any] = {"stages_per_rank": 2, "num_microbatches": 4}


class Puts(nn.Linear):
    """Calls `put` with its output."""

    def __init__(self, put: Callable[[Tensor], object]) -> None:
        super().__init__(8, 8)
        self.put = put

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.put(hidden.detach())
        return hidden


class Takes(nn.Linear):
    """Adds what `take` gives."""

    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__(8, 8)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.take()


def in_dict() -> tuple[nn.Module, nn.Module]:
    held: dict[str, Tensor] = {}
    return Puts(lambda x: held.update(skip=x)), Takes(lambda: held["skip"].tanh())


def popped() -> tuple[nn.Module, nn.Module]:
    held: list[Tensor] = []
    return Puts(lambda x: held.append(x)), Takes(lambda: held.pop())


def in_object() -> tuple[nn.Module, nn.Module]:
    held = types.SimpleNamespace()
    return Puts(lambda x: setattr(held, "skip", (x, 1))), Takes(lambda: held.skip[0])


def in_layer() -> tuple[nn.Module, nn.Module]:
    first = Puts(lambda x: setattr(first, "skip", x))
    hidden = [first]
    return first, Takes(lambda: torch.cat([hidden[0].skip[:1], hidden[0].skip[1:]]))


def put_into_global(x: Tensor) -> None:
    GLOBAL["skip"] = x


def in_global() -> tuple[nn.Module, nn.Module]:
    return Puts(put_into_global), Takes(lambda: GLOBAL["skip"])


REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], str, str]] = {
    "a dict": (in_dict, r"take\.held\['skip'\] of layer 1 \(Takes\)", r"put\.held\['skip'\] of layer 0 \(Puts\)"),
    "a list": (popped, r"take\.held\[\d\] of layer 1 \(Takes\)", r"of layer 0 \(Puts\)"),
    "an object": (in_object, r"take\.held\.skip\[0\] of layer 1 \(Takes\)", r"put\.held\.skip\[0\] of layer 0 \(Puts\)"),
    "a layer": (in_layer, r"take\.hidden\[0\]\.skip of layer 1 \(Takes\)", r"skip of layer 0 \(Puts\)"),
    "a global": (in_global, r"take\.GLOBAL\['skip'\] of layer 1 \(Takes\)", r"put\.GLOBAL\['skip'\] of layer 0 \(Puts\)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode", "schedule"),
    [row for row in pairwise([*REFUSED], ["never", "overlap"], ["gpipe", "interleaved"]) if not row.marks],
)
def test_a_skip_between_stages_of_one_rank(name: str, mode: str, schedule: str) -> None:
    make, here, there = REFUSED[name]
    message = rf"^layer 1 \(Takes\) of stage 1 computes with {here}.*where stage 0 leaves.*{there}.*as part of the output \(a tuple\)"
    with Pipeline(make(), mean_square, recompute=mode, schedule=schedule, **TWO_STAGES) as pipeline:
        with pytest.raises(ValueError, match=message) as raised:
            pipeline.step(*rows(8)[0])
        assert "\n" not in str(raised.value)


def test_what_a_loss_reads_of_a_layer() -> None:
    first = in_layer()[0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + first.skip.square().mean()  # type: ignore[operator,union-attr]

    with (
        Pipeline([first, nn.Linear(8, 8)], loss, **TWO_STAGES) as pipeline,
        pytest.raises(ValueError, match=r"^loss_fn of stage 1 computes with first\.skip of loss_fn, where stage 0"),
    ):
        pipeline.step(*rows(8)[0])


# What is right --------------------------------------------------------------------------------------------------------


class Config:
    def __init__(self) -> None:
        self.scale = torch.tensor(0.5)
        self.numbers = {"calls": 0}


def with_config() -> list[nn.Module]:
    """A constant of both, and a count in it."""
    config = Config()

    def scale() -> Tensor:
        config.numbers["calls"] += 1
        return config.scale

    return [Takes(scale), Takes(scale)]


def with_table() -> list[nn.Module]:
    """Made by whoever is first, for all: the same in each microbatch."""
    tables: dict[int, Tensor] = {}

    def table() -> Tensor:
        if 8 not in tables:
            tables[8] = torch.arange(8.0)
        return tables[8]

    return [Takes(table), Takes(table)]


def with_statistics() -> list[nn.Module]:
    """Each stage notes its own, and adds to what both have."""
    seen: dict[str, Tensor] = {"sum": torch.zeros(())}

    def note(x: Tensor) -> None:
        seen[f"mean {len(seen)}"] = x.mean()
        seen["sum"] = seen["sum"] + x.sum()

    return [Puts(note), Puts(note)]


def of_one_stage() -> list[nn.Module]:
    return [*in_dict(), nn.Linear(8, 8)]


def logged() -> list[nn.Module]:
    log = logging.getLogger("test_skips")
    return [Puts(lambda x: log.debug("%s", x)), Puts(lambda x: log.debug("%s", x))]


@pytest.mark.parametrize("mode", ["never", "overlap"])
@pytest.mark.parametrize("layers", [with_config, with_table, with_statistics, of_one_stage, logged])
def test_what_may_be_shared(layers: Callable[[], list[nn.Module]], mode: str) -> None:
    options = {"stages_per_rank": 2, "recompute": mode}
    if layers is of_one_stage:
        options["balance"] = [2, 1]
    check_case(Case(layers.__name__, layers, lambda: rows(8, 9), options=options))


def test_nothing_is_looked_at_after_two_steps() -> None:
    layers = with_statistics()
    with Pipeline(layers, mean_square, **TWO_STAGES) as pipeline:
        assert pipeline._runner._skips._shared
        for _ in range(2):
            pipeline.step(*rows(8)[0])
        assert not pipeline._runner._skips._shared
        assert not pipeline._runner._skips._left


# Over ranks -----------------------------------------------------------------------------------------------------------


def on_two_ranks(name: str) -> None:
    with Pipeline(REFUSED[name][0](), mean_square, num_microbatches=2) as pipeline:
        pipeline.step(*rows(8)[0])


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_skip_between_ranks(name: str) -> None:
    for outcome in run_outcomes(2, on_two_ranks, name):
        assert outcome.error is not None
        assert "ValueError: stage 1 finds nothing in take." in outcome.error or outcome.rank == 0
        assert "of layer 1 (Takes) (" in outcome.error
        assert re.search(r"In stage 0 that object is (.* of )?layer 0 \(Puts\), but", outcome.error)
        assert "as part of the output (a tuple)" in outcome.error


def with_first_value() -> tuple[nn.Module, nn.Module]:
    """Something is there before."""
    held = types.SimpleNamespace(skip=torch.zeros(4, 8))
    return Puts(lambda x: setattr(held, "skip", x)), Takes(lambda: held.skip)


def two_steps(*makes: Callable[[], list[nn.Module]]) -> None:
    for make in makes:
        with Pipeline(make(), mean_square, num_microbatches=2) as pipeline:
            for _ in range(2):
                pipeline.step(*rows(8)[0])


def test_a_first_value_that_never_changes_on_the_other_rank() -> None:
    for outcome in run_outcomes(2, two_steps, with_first_value):
        assert outcome.error is not None
        assert (
            "layer 1 (Takes) of stage 1 computes with take.held.skip of layer 1 (Takes), where stage 0 leaves"
            in outcome.error
        )


def test_what_may_be_shared_between_ranks() -> None:
    run_ranks(2, two_steps, with_statistics, with_config, with_table)


def with_mistake() -> list[nn.Module]:
    """A key that is nowhere, and a dict of both stages that has nothing to do with it."""
    options = {"scale": 1.0}
    own: dict[str, float] = {}
    return [Takes(lambda: options["scale"]), Takes(lambda: options["scale"] * own["bias"])]


def test_any_other_error_stays_as_it_is() -> None:
    with Pipeline(with_mistake(), mean_square, **TWO_STAGES) as pipeline, pytest.raises(KeyError, match="bias"):
        pipeline.step(*rows(8)[0])
    error = run_outcomes(2, two_steps, with_mistake)[1].error
    assert error is not None
    assert "KeyError: 'bias'" in error
    assert "as part of the output" not in error
