"""What a forward changes outside of autograd is seen: buffers come back for R as F saw them, other traces are named."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipetrain.stage.errors import StateChanged
from pipetrain.stage.layer_state import LayerState
from pipetrain.stage.seeding import draws_in_python, generators_restored, seed_generators
from pipetrain.stage.tensor_copies import SMALL_BYTES, TensorCopies, fingerprint, same_values
from pipetrain.stage.traces import first_change, outer_traces, own_traces

CPU = torch.device("cpu")


def state_of(*layers: nn.Module, loss_fn: Any = None) -> LayerState:
    return LayerState(layers, loss_fn, lambda number: f"layer {number}", CPU)


# What is left behind ---------------------------------------------------------------------------------------------------


class Thing:
    """Of the user's: not of torch, of Python or of ours."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def add_to_list(thing: Any) -> None:
    thing.a.append(1)


def add_key(thing: Any) -> None:
    thing.a["new"] = 2


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # what `a` is, what changes it
    "a number": (lambda: 1, lambda thing: setattr(thing, "a", 2)),
    "a list": (lambda: [1], add_to_list),
    "a list in a dict": (lambda: {"x": [1]}, lambda thing: thing.a["x"].append(2)),
    "a dict": (lambda: {"x": 1}, add_key),
    "an ordered dict": (lambda: OrderedDict(x=1, y=2), lambda thing: thing.a.move_to_end("x")),
    "a set": (lambda: {1}, lambda thing: thing.a.add(2)),
    "a deque": (lambda: deque([1, 2], maxlen=2), lambda thing: thing.a.append(3)),
    "bytes": (lambda: bytearray(b"ab"), lambda thing: thing.a.extend(b"c")),
    "an object": (lambda: Thing(b=1), lambda thing: setattr(thing.a, "b", 2)),
    "a namespace": (lambda: SimpleNamespace(b=[1]), lambda thing: thing.a.b.append(2)),
    "a tuple of lists": (lambda: ([1], [2]), lambda thing: thing.a[1].append(3)),
    "a tensor": (lambda: torch.zeros(2), lambda thing: thing.a.add_(1)),
    "a tensor in a list": (lambda: [torch.zeros(2)], lambda thing: thing.a[0].add_(1)),
    "a module in a list": (lambda: [nn.Linear(1, 1)], lambda thing: setattr(thing.a[0], "n", 1)),
    "an attribute gone": (lambda: 1, lambda thing: delattr(thing, "a")),
    "one more attribute": (lambda: 1, lambda thing: setattr(thing, "b", 1)),
    "a torch generator": (torch.Generator, lambda thing: torch.rand(1, generator=thing.a)),
    "a Python generator": (lambda: random.Random(1), lambda thing: thing.a.random()),
    "a numpy generator": (lambda: np.random.default_rng(1), lambda thing: thing.a.random()),
    "an old numpy generator": (lambda: np.random.RandomState(1), lambda thing: thing.a.rand()),
    "an argument of a partial": (lambda: partial(print, [1]), lambda thing: thing.a.args[0].append(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_an_attribute_is_seen(name: str) -> None:
    make, change = CHANGES[name]
    thing = Thing(a=make(), other=[3])
    before = own_traces(thing)
    assert first_change(before, own_traces(thing)) is None
    change(thing)
    changed = first_change(before, own_traces(thing))
    assert changed is not None
    assert changed.startswith(("a", "b"))


def test_of_a_class_of_the_users_what_is_data() -> None:
    class Counted(nn.Module):
        calls = 0

        @property
        def twice(self) -> int:
            return 2 * self.calls

    layer = Counted()
    before = outer_traces(layer)
    Counted.calls += 1
    assert first_change(before, outer_traces(layer)) == "Counted.calls"


def test_what_goes_round_in_circles_or_is_very_long_ends() -> None:
    thing = Thing(long=[[] for _ in range(10_000)])
    thing.self = thing
    before = own_traces(thing)
    thing.long[0].append(1)
    assert first_change(before, own_traces(thing)) is None, "entries of long lists are not looked into"
    thing.long.append(1)
    assert first_change(before, own_traces(thing)) == "long"


# Tensors --------------------------------------------------------------------------------------------------------------


def test_a_copy_stands_in_for_every_reference_and_leaves_memory_alone() -> None:
    tensor = torch.zeros(3)
    view = tensor[:2]
    copies = TensorCopies([tensor])
    tensor.add_(1)
    with copies.stand_in():
        assert tensor.tolist() == [0, 0, 0]
        assert view.tolist() == [1, 1]
        tensor.add_(5)
    assert tensor.tolist() == [1, 1, 1]
    assert tensor.data_ptr() == view.data_ptr()


@pytest.mark.parametrize(
    "make",  # not the tensors: other tests look at all that are alive
    [
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.ones(3, 1).expand(3, 2),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(2, dtype=torch.bool),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda: torch.tensor(5),
        lambda: torch.empty(0),
    ],
    ids=range(8),
)
def test_a_copy_is_the_same(make: Callable[[], Tensor]) -> None:
    tensor = make()
    (copy,) = TensorCopies([tensor]).copies
    assert same_values(copy, tensor)
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride()
        fingerprints = fingerprint(copy), fingerprint(tensor)
        assert None not in fingerprints
        assert torch.equal(*fingerprints)  # type: ignore[arg-type]


def test_a_fingerprint_sees_a_change_through_data() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        tensor = torch.randn(5, 7).to(dtype)
        before = fingerprint(tensor)
        tensor.data.mul_(1.01)
        assert before is not None
        assert not torch.equal(fingerprint(tensor), before)  # type: ignore[arg-type]


# The state of a stage -------------------------------------------------------------------------------------------------


def test_a_stage_without_state_copies_nothing() -> None:
    state = state_of(nn.Linear(2, 2), nn.ReLU())
    state.after_forward(state.before_forward(recomputed=True), recomputed=True)
    before = state.before_forward(recomputed=True)
    assert (before.buffers.tensors, before.watched) == ([], [])


def test_only_what_changes_and_what_is_small_is_copied() -> None:
    layer = nn.Module()
    large = SMALL_BYTES // 4 + 1
    for name, size in {"small": 4, "table": large, "sums": large}.items():
        layer.register_buffer(name, torch.zeros(size))
    state = state_of(layer)
    before = state.before_forward(recomputed=True)
    layer.sums += 1
    seen = state.after_forward(before, recomputed=True)
    assert [len(copy) for copy in seen.copies] == [4, large]
    assert seen.copies[1].sum() == 0
    before = state.before_forward(recomputed=True)
    assert [tensor is layer.table for tensor, _ in before.watched] == [True]
    layer.table += 1
    with pytest.raises(
        StateChanged, match=r"layer 0.table, a tensor of \[16385\], is changed by a forward for the first time"
    ):
        state.after_forward(before, recomputed=True)


def test_it_learns_again_after_a_switch_of_mode_and_when_asked() -> None:
    layer = nn.BatchNorm1d(2)
    state = state_of(layer)

    def learns() -> bool:
        state.look()
        before = state.before_forward(recomputed=True)
        state.after_forward(before, recomputed=True)
        return before.learning

    assert [learns(), learns()] == [True, False]
    layer.eval()
    assert [learns(), learns()] == [True, False]
    state.is_learning = True
    assert [learns(), learns()] == [True, False]


# Random numbers -------------------------------------------------------------------------------------------------------


def test_generators_of_python_and_numpy_start_from_the_seed_and_come_back() -> None:
    numpy_random = pytest.importorskip("numpy.random")

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy_random.rand()), float(torch.rand(()))

    draw()
    states = random.getstate(), numpy_random.get_state()[1].tolist()
    drawn = []
    with generators_restored(CPU):
        for seed in (1, 2**63, 1):
            seed_generators(seed, CPU)
            drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]
    assert (random.getstate(), numpy_random.get_state()[1].tolist()) == states


def test_who_may_draw_from_python() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * 2

    class Draws(Own):
        def scale(self) -> float:
            return random.random()

    class HasInClass(Own):
        draw = random.random

    class HasByDefault(Own):
        def scale(self, draw: object = random.random) -> object:
            return draw

    class Has(Own):
        def __init__(self, act: object) -> None:
            super().__init__()
            self.act = act

    def imports(*_: object) -> float:
        from random import random as draw

        return draw()

    hooked = nn.Linear(1, 1)
    hooked.register_forward_hook(lambda *_: None)
    never = [
        nn.Linear(1, 1),
        nn.Sequential(nn.Linear(1, 1), Own()),
        nn.functional.mse_loss,
        lambda x, y: (x - y).mean(),
    ]
    may = [
        hooked,
        nn.Sequential(Draws()),
        Has(imports),
        Has(random.random),
        imports,
        lambda *_: random.random(),
        lambda *_: never,
    ]
    assert [draws_in_python(layer) for layer in never] == [False] * 4
    may += [HasInClass(), HasByDefault(), Has([Draws()])]
    assert [draws_in_python(layer) for layer in may] == [True] * 10
