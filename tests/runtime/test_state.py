"""What a forward changes outside of autograd: noted, seen again as it was, put back; and what cannot be is named."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.stage.attributes import Attributes, StateChanged
from pipetrain.stage.layer_state import LayerState
from pipetrain.stage.seeding import draws_in_python, generators_restored, seed_generators
from pipetrain.stage.tensor_copies import SMALL_BYTES, TensorCopies, fingerprint, same_values

CPU = torch.device("cpu")


def state_of(*layers: nn.Module, loss_fn: Any = None) -> LayerState:
    return LayerState(layers, loss_fn, lambda number: f"layer {number}", CPU)


# Attributes -----------------------------------------------------------------------------------------------------------


class Thing:
    """Of the user's: not of torch, of Python or of ours."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def add_to_list(thing: Any) -> None:
    thing.a.append(1)


def add_key(thing: Any) -> None:
    thing.a["new"] = 2


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what `a` is, what changes it, what of it is compared
    "a number": (lambda: 1, lambda thing: setattr(thing, "a", 2), lambda a: a),
    "a list": (lambda: [1], add_to_list, list),
    "a list in a dict": (lambda: {"x": [1]}, lambda thing: thing.a["x"].append(2), lambda a: list(a["x"])),
    "a dict": (lambda: {"x": 1}, add_key, dict),
    "an ordered dict": (lambda: OrderedDict(x=1, y=2), lambda thing: thing.a.move_to_end("x"), lambda a: list(a)),
    "a set": (lambda: {1}, lambda thing: thing.a.add(2), set),
    "a deque": (lambda: deque([1, 2], maxlen=2), lambda thing: thing.a.append(3), list),
    "bytes": (lambda: bytearray(b"ab"), lambda thing: thing.a.extend(b"c"), bytes),
    "an object": (lambda: Thing(b=1), lambda thing: setattr(thing.a, "b", 2), lambda a: a.b),
    "a namespace": (lambda: SimpleNamespace(b=[1]), lambda thing: thing.a.b.append(2), lambda a: list(a.b)),
    "a tuple of lists": (lambda: ([1], [2]), lambda thing: thing.a[1].append(3), lambda a: list(a[1])),
    "a tensor": (lambda: torch.zeros(2), lambda thing: thing.a.data.add_(1), lambda a: a.tolist()),
    "a tensor in a list": (lambda: [torch.zeros(2)], lambda thing: thing.a[0].add_(1), lambda a: a[0].tolist()),
    "a module in a list": (lambda: [nn.Linear(1, 1)], lambda thing: setattr(thing.a[0], "n", 1), lambda a: sorted(vars(a[0]))),
    "an attribute gone": (lambda: 1, lambda thing: delattr(thing, "a"), lambda a: a),
    "one more attribute": (lambda: 1, lambda thing: setattr(thing, "b", 1), lambda a: a),
    "a torch generator": (torch.Generator, lambda thing: torch.rand(1, generator=thing.a), lambda a: a.get_state().tolist()),
    "a Python generator": (lambda: random.Random(1), lambda thing: thing.a.random(), lambda a: a.getstate()),
    "an argument of a partial": (lambda: partial(print, [1]), lambda thing: thing.a.args[0].append(2), lambda a: list(a.args[0])),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noted_seen_as_it_was_and_put_back(name: str) -> None:
    make, change, value = CHANGES[name]
    thing = Thing(a=make(), other=[3])
    kept, before = thing.a, value(thing.a)
    noted = Attributes([("thing", thing)])
    assert noted.changed() == []
    change(thing)
    after = sorted(vars(thing)), value(vars(thing).get("a", kept))
    assert len(noted.changed()) >= 1
    withdraw = noted.stand_in()
    assert value(thing.a) == before
    assert thing.a is kept, "it is another object"
    assert noted.changed() == []
    change(thing)  # what R does leaves no trace
    withdraw()
    assert (sorted(vars(thing)), value(vars(thing).get("a", kept))) == after


def test_what_r_changes_is_undone() -> None:
    thing = Thing(count=0, cache={}, mean=torch.zeros(2))
    noted = Attributes([("thing", thing)])
    thing.count, thing.cache["f"], thing.mean = 1, 1, thing.mean + 1
    live = thing.mean
    withdraw = noted.stand_in()
    assert (thing.count, thing.cache, thing.mean.tolist()) == (0, {}, [0, 0])
    thing.count, thing.cache["r"] = 7, 7
    thing.mean.add_(7)
    withdraw()
    assert (thing.count, thing.cache) == (1, {"f": 1})
    assert thing.mean is live
    assert thing.mean.tolist() == [1, 1]


def test_of_a_class_of_the_users_what_is_data() -> None:
    class Counted(nn.Module):
        calls = 0
        names: tuple[str, ...] = ()

        @property
        def twice(self) -> int:
            return 2 * self.calls

    noted = Attributes([("class", Counted)])
    Counted.calls += 1
    assert noted.changed() == ["class.calls"]
    withdraw = noted.stand_in()
    assert Counted.calls == 0
    Counted.names = ("R",)
    withdraw()
    assert (Counted.calls, Counted.names, Counted().twice) == (1, (), 2)


def test_variables_of_an_enclosing_function() -> None:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    noted = Attributes([("loss_fn", count)])
    count()
    assert noted.changed() == ["loss_fn.calls"]
    withdraw = noted.stand_in()
    assert count() == 1
    withdraw()
    assert count() == 2


def test_what_goes_round_in_circles_or_is_very_long_ends() -> None:
    thing = Thing(long=[[] for _ in range(10_000)])
    thing.self = thing
    noted = Attributes([("thing", thing)])
    thing.long[0].append(1)
    assert noted.changed() == [], "entries of long lists are not looked into"
    thing.long.append(1)
    assert noted.changed() == ["thing.long[10000]"]


# Tensors --------------------------------------------------------------------------------------------------------------


def test_a_copy_stands_in_for_every_reference_and_leaves_memory_alone() -> None:
    tensor = torch.zeros(3)
    view = tensor[:2]
    copies = TensorCopies([tensor])
    tensor.add_(1)
    live = copies.stand_in()
    assert tensor.tolist() == [0, 0, 0]
    assert view.tolist() == [1, 1]
    tensor.add_(5)
    copies.withdraw(live)
    assert tensor.tolist() == [1, 1, 1]
    assert tensor.data_ptr() == view.data_ptr()


def test_shared_memory_is_shared_by_the_copies() -> None:
    tensor = torch.zeros(3)
    view = tensor[1:]
    copies = TensorCopies([tensor, view], {})
    copies.stand_in()
    tensor.add_(2)
    assert view.tolist() == [2, 2]


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
    state.after_forward(state.before_forward(recomputed=True))
    before = state.before_forward(recomputed=True)
    assert (before.buffers.tensors, before.attributes, before.watched) == ([], [], [])


def test_only_what_changes_and_what_is_small_is_copied() -> None:
    layer = nn.Module()
    large = SMALL_BYTES // 4 + 1
    for name, size in {"small": 4, "table": large, "sums": large}.items():
        layer.register_buffer(name, torch.zeros(size))
    state = state_of(layer)
    before = state.before_forward(recomputed=True)
    layer.sums += 1
    seen = state.after_forward(before)
    assert [len(copy) for copy in seen.buffers.copies] == [4, large]
    assert seen.buffers.copies[1].sum() == 0
    before = state.before_forward(recomputed=True)
    assert [tensor is layer.table for tensor, _ in before.watched] == [True]
    layer.table += 1
    with pytest.raises(
        StateChanged, match=r"layer 0.table, a tensor of \[16385\], is changed by a forward for the first time"
    ):
        state.after_forward(before)


def test_it_learns_again_after_a_switch_of_mode_and_when_asked() -> None:
    layer = nn.BatchNorm1d(2)
    state = state_of(layer)

    def learns() -> bool:
        before = state.before_forward(recomputed=True)
        state.after_forward(before)
        state.end_step()
        return before.learning

    assert [learns(), learns()] == [True, False]
    layer.eval()
    assert [learns(), learns()] == [True, False]
    state.relearn()
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
        pass

    hooked = nn.Linear(1, 1)
    hooked.register_forward_hook(lambda *_: None)
    asked = [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), Own()), hooked, nn.functional.mse_loss, lambda *_: None]
    assert [draws_in_python(layer) for layer in asked] == [False, True, True, False, True]
