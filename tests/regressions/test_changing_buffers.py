"""Recomputation sees each buffer as its forward saw it, however and whenever a layer changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_the_loop import ALWAYS, batch, check_state, mean_square, refused
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.stage.errors import RecomputeMismatch, StateChanged


class Scales(nn.Module):
    """Multiplies by a buffer; `change` is called with the layer ahead of each use."""

    def __init__(self, change: Callable[[Any], None], size: int = 4) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))
        self.calls = 0
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return x * x * self.scale[:4]


def grow(layer: Any) -> None:
    layer.scale += 0.25


def grow_unseen(layer: Any) -> None:
    layer.scale.data.mul_(1.25)


def grow_every_third(layer: Any) -> None:
    layer.calls += 1
    if layer.calls % 3 == 0:
        layer.scale += 0.25


def put_another(layer: Any) -> None:
    layer.scale = layer.scale * 1.25


def grow_once_warm(layer: Any) -> None:
    if layer.training and WARM[0]:
        layer.scale.data.mul_(1.25)


WARM = [False]


def warm_later(step: int, model: nn.Sequential) -> None:
    WARM[0] = step > 0


@pytest.mark.parametrize("change", [grow, grow_unseen, grow_every_third, put_another])
def test_a_buffer_that_changes_in_its_own_way(change: Any) -> None:
    """Symptom: gradients 5 % off where a buffer changed in every third forward; wrong in every mode where `.data` did it.

    Cause: only buffers that the first forward changed were copied for R, and a kept set looked into the live buffer.
    """
    check_state(lambda: [Scales(change), nn.Linear(4, 4)])


def test_a_buffer_that_begins_to_change_in_the_second_step() -> None:
    """Symptom and cause: as above, for what the whole first step leaves alone."""

    check_state(
        lambda: [Scales(grow_once_warm), nn.Linear(4, 4)], ["overlap", "inline", "two stages"], before_step=warm_later
    )


def test_a_buffer_that_begins_to_change_under_a_kept_set() -> None:
    """Symptom: gradients wrong in `never`, by 0.29 where a layer read BatchNorm's running variance; or refused.

    Cause: a kept set looked into the live buffer, unless a forward was known to change it and no BatchNorm owned it.
    """

    class ReadsItsVariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.tanh(self.norm(x))) * self.norm.running_var

    check_state(lambda: [Scales(grow_once_warm), nn.Linear(4, 4)], ["never"], before_step=warm_later)
    check_state(lambda: [ReadsItsVariance(), nn.Linear(4, 4)], ["never", "overlap"])


def test_momentum_and_statistics_switched_on_later() -> None:
    """Symptom: BatchNorm with momentum 0, then 0.1: R moved the running statistics again. Cause: as above."""

    def switch(step: int, model: nn.Sequential) -> None:
        model[1].momentum = 0.1 * step
        model[2].train(step != 1)

    check_state(lambda: [nn.BatchNorm1d(4, momentum=0.0), nn.BatchNorm1d(4), nn.Tanh()], before_step=switch)


def test_a_large_buffer_that_begins_to_change_is_named() -> None:
    """Symptom: silent wrong gradients. Cause: as above; a large buffer is not copied unless it is known to change."""
    LATE.clear()
    message = r"layer 1 \(Scales\).scale, a tensor of \[100000\], is changed by a forward f"
    refused(StateChanged, message, [nn.Linear(4, 4), Scales(grow_late, 100_000), nn.Linear(4, 4)])
    check_state(lambda: [Scales(grow, 100_000)])


def grow_late(layer: Any) -> None:
    LATE.append(1)
    if len(LATE) == 4:  # the first F, and a copy of the layer before and after it
        layer.scale += 0.25


LATE: list[int] = []


def test_a_layer_that_reads_the_buffer_of_another() -> None:
    """Symptom: gradients 26 % off. Cause: as above."""

    class Reads(nn.Module):
        def __init__(self, other: Scales, *, view: bool) -> None:
            super().__init__()
            self.of_other = other.scale[None] if view else other.scale

        def forward(self, x: Tensor) -> Tensor:
            return x * x * self.of_other

    def pair(*, view: bool) -> list[nn.Module]:
        scales = Scales(grow)
        return [scales, Reads(scales, view=view)]

    check_state(lambda: pair(view=False), ["overlap", "inline", "two places"])
    with pytest.raises(RecomputeMismatch, match=r"layer 2 \(Reads\): the recompute saves .* with other values"):
        check_state(lambda: pair(view=True), ["overlap"])


class Holds(nn.Module):
    """`make()` in a buffer, of which the output is what `use` makes."""

    def __init__(self, make: Callable[[], Tensor], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("held", make(), persistent=False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.held, x)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")  # torch's, of a prototype and of a beta state
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).roll(1, 0).to_sparse(),
        lambda: torch.eye(2).roll(1, 0).to_sparse_csr(),
        lambda: nested(torch.jagged),
        lambda: nested(torch.strided),
    ],
    ids=["sparse", "sparse_csr", "jagged", "nested"],
)
def test_a_buffer_without_a_storage(make: Callable[[], Tensor]) -> None:
    """Symptom: NotImplementedError or RuntimeError of a graph network's adjacency matrix. Cause: the meter asked it for a storage."""

    def use(held: Tensor, x: Tensor) -> Tensor:
        return x * x * held.unbind()[0].sum() if held.is_nested else torch.sparse.mm(held, x) * x

    check_state(lambda: [Holds(make, use), nn.Linear(4, 4)])


def test_a_large_batch_norm_that_is_first_used_later() -> None:
    """Symptom: running statistics updated twice per microbatch. Cause: a large buffer was watched by its version, which batch_norm leaves."""

    class UsesItLater(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(20_000)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.repeat(1, 5_000))[:, :4] * x if WARM[0] else x * 2

    check_state(lambda: [UsesItLater()], ["overlap", "never"], before_step=warm_later)


class DoublesItsInputLater(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if WARM[0]:
            x.data.mul_(2)
        return x * x


@pytest.mark.parametrize(
    "make", [lambda: Scales(grow_once_warm, 100_000), DoublesItsInputLater], ids=["buffer", "input"]
)
def test_what_begins_to_change_through_data_is_named(make: Callable[[], nn.Module]) -> None:
    """Symptom: silent wrong gradients. Cause: no version tells of a change through `.data`; the witness sees what R makes of it."""
    WARM[0] = False
    with Pipeline([make(), nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(*batch())
        WARM[0] = True
        with pytest.raises(RecomputeMismatch, match=r"layer \d .*: the recompute saves other values.* first step"):
            pipeline.step(*batch())
