"""What layers of one stage leave for those of another in a dict, a list, a module or an object that both hold: it is refused by name.

Only outputs go from stage to stage. On one rank the other stage finds what another microbatch left, and on two it finds nothing.

    F1 of stage 0   puts a tensor there, as in F0: so it is no table that is made once                 [1]
    F0 of stage 1   computes with it, or with what was computed from it, up to its output              [2]

Where the other stage is on another rank, that one looks in the next step: [1] goes along with what ranks agree on anyway. What is only noted
down (statistics, a log) is let through, and so are numbers, of which nobody sees where they go.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipetrain.plan.plan import Plan
from pipetrain.runtime.executor import Step
from pipetrain.schedule.op import Kind, Op
from pipetrain.stage.attributes import is_of_the_user
from pipetrain.stage.leaves import named_paths, paths

_LOSS = "loss_fn"  # what it is called among the layers
_NOT_STATE = frozenset({"_parameters", "_buffers", "_modules"})
Told = tuple[int, str, int]
_MOST_TOLD = 16
_MOST_ENTRIES = 1000  # of a container that is looked into


@dataclass
class _Shared:
    """Something that layers of several stages hold: what it is called in each of them, and in which microbatches each put tensors there."""

    thing: Any
    names: dict[int, str] = field(default_factory=dict)
    written: dict[int, set[int]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Those in it, also in a list or tuple there, by where they are; none of a very long one."""
        if isinstance(self.thing, (dict, list, deque)) and len(self.thing) > _MOST_ENTRIES:
            return {}
        if isinstance(self.thing, (list, deque)):
            found = {f"[{number}]": value for number, value in enumerate(self.thing)}
        elif isinstance(self.thing, dict):
            found = {f"[{key!r}]": value for key, value in self.thing.items()}
        else:
            found = {f".{key}": value for key, value in vars(self.thing).items() if key not in _NOT_STATE}
        for key, value in list(found.items()):
            if isinstance(value, (list, tuple)):
                found |= {f"{key}[{number}]": one for number, one in enumerate(value[:_MOST_ENTRIES])}
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    @property
    def number(self) -> int:
        """Of what it is called first: the same on every rank."""
        return zlib.crc32(self.names[min(self.names)].encode())

    def changes(self, stage: int) -> bool:
        """Whether a stage puts a tensor there for each microbatch."""
        return len(self.written.get(stage, ())) > 1

    def called(self, stage: int, key: str) -> str:
        """A place in it, as it is called in a stage."""
        path, _, owner = self.names[stage].rpartition(" of ")
        return f"{path}{key} of {owner}" if path else f"{key.removeprefix('.')} of {owner}"


class _Left(NamedTuple):
    """A tensor that a stage has put somewhere, or one that was computed from it."""

    tensor: weakref.ref[Tensor]
    stage: int
    shared: _Shared
    key: str

    def is_for_others(self, own_stages: Set[int]) -> bool:
        """Whether a stage of this rank leaves it for each microbatch where one of another rank might look."""
        return (
            self.stage in own_stages and self.shared.changes(self.stage) and not self.shared.names.keys() <= own_stages
        )


class Skips:
    """Looks at the first two steps. `layers` are those that this rank knows, by their place in the model.

    `told` is what this rank says to the others: of something that is held there too its name as a number, the place in it, and the stage
    that leaves tensors there.
    """

    def __init__(self, layers: Mapping[int, nn.Module], loss_fn: Any, plan: Plan, rank: int) -> None:
        self._roots: dict[int, tuple[int, str, Any]] = {
            number: (plan.stage_of(number), f"layer {number} ({type(layer).__name__})", layer)
            for number, layer in layers.items()
        }
        self._roots[plan.num_layers] = (plan.num_stages - 1, _LOSS, loss_fn)
        self._knows_all = len(layers) == plan.num_layers
        self._own_stages = frozenset(plan.stages_of(rank))
        found = _shared_by(self._roots.values()) if plan.num_stages > 1 else []
        self._shared = [shared for shared in found if shared.names.keys() & self._own_stages]
        self._steps_left = 2
        self.told: list[Told] = []
        self._now: Op | None = None  # the F that runs
        self._before: list[dict[str, Tensor]] = []  # what was in each at its start
        self._left: dict[int, _Left] = {}  # by the identity of the tensor
        self._computed: dict[int, _Left] = {}  # in the F that runs

    @contextmanager
    def over(self, step: Step) -> Iterator[None]:
        """In the block `step` runs, with a graph.

        Raises:
            ValueError: (what runs in it) a layer computes with what another stage left.
        """
        if not self._shared:
            yield
            return
        before = step.on_layer

        def on_layer(microbatch: int, layer: int, output: Any) -> None:
            self._check(layer, output)
            if before is not None:
                before(microbatch, layer, output)

        with ExitStack() as watch:
            if self._left:
                watch.enter_context(_Watch(self))
            step.on_layer, step.on_op = on_layer, lambda op: self._on_op(op, watch)
            try:
                yield
            finally:
                step.on_layer, step.on_op = before, None
                self._now, self._before = None, []
                self._end_step()

    def _end_step(self) -> None:
        self._steps_left -= 1
        known = dict.fromkeys(
            (left.shared.number, left.key, left.stage)
            for left in self._left.values()
            if left.is_for_others(self._own_stages)
        )
        self.told = list(known)[:_MOST_TOLD] if self._steps_left else []
        if not self._steps_left:
            self._shared = []
        self._left.clear()
        self._computed.clear()

    def hear(self, told: Iterable[Told]) -> None:
        """What the ranks before have told, before a step: what this rank has in those places, its own stages are not to compute with."""
        if not self._shared:
            return
        by_number = {shared.number: shared for shared in self._shared}
        for number, key, stage in told:
            shared = by_number.get(number)
            if (
                shared is not None
                and stage not in self._own_stages
                and (tensor := shared.tensors().get(key)) is not None
            ):
                shared.written[stage] = {0, 1}
                self._left[id(tensor)] = _Left(weakref.ref(tensor), stage, shared, key)

    def _on_op(self, op: Op, watch: ExitStack) -> None:
        if self._now is not None and self._look_for_new(self._now):
            watch.enter_context(_Watch(self))
        self._computed.clear()
        self._now = op if op.kind is Kind.F else None
        self._before = [shared.tensors() for shared in self._shared] if self._now else []

    def _look_for_new(self, op: Op) -> bool:
        """[1] Note down what an F has left; whether it is the first to do so again, so that from now on it is watched who reads it."""
        assert op.microbatch is not None
        has_watched = any(shared.changes(stage) for shared in self._shared for stage in shared.names)
        for shared, before in zip(self._shared, self._before):
            old = set(map(id, before.values()))
            new = {key: one for key, one in shared.tensors().items() if id(one) not in old}
            if new and op.stage in shared.names:
                shared.written.setdefault(op.stage, set()).add(op.microbatch)
                self._left |= {id(one): _Left(weakref.ref(one), op.stage, shared, key) for key, one in new.items()}
        return not has_watched and any(shared.changes(op.stage) for shared in self._shared)

    def left_by_another(self, tensor: Tensor) -> _Left | None:
        """What another stage left that this tensor is, or was computed from in the F that runs."""
        if self._now is None:
            return None
        for known in (self._computed, self._left):
            left = known.get(id(tensor))
            if left is not None and left.tensor() is tensor:
                return left if left.stage != self._now.stage and left.shared.changes(left.stage) else None
        return None

    def note(self, tensor: Tensor, source: _Left | None) -> None:
        """It was computed from `source`."""
        if source is not None:
            self._computed[id(tensor)] = source._replace(tensor=weakref.ref(tensor))

    def _check(self, number: int, output: Any) -> None:
        """[2] Raises:
        ValueError: the output of layer `number` was computed from what another stage left.
        """
        found = (self.left_by_another(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        left = next(filter(None, found), None)
        if left is not None:
            stage, name, _ = self._roots[number]
            raise ValueError(
                f"{name} of stage {stage} computes with {left.shared.called(stage, left.key)}, where stage {left.stage} leaves a tensor in "
                f"each forward ({left.shared.called(left.stage, left.key)}): it is that of another microbatch, and on two ranks nothing comes. "
                f"{_INSTEAD}"
            )

    # Several ranks ------------------------------------------------------------------------------------------------

    def explain(self, error: Exception, stage: int) -> ValueError | None:
        """What an error in F of a stage means, where a layer looks for something in what a layer of another stage holds too."""
        if not isinstance(error, (KeyError, IndexError, AttributeError)):
            return None
        own = [(name, root) for where, name, root in self._roots.values() if where == stage]
        for name, root in own:
            for path, thing in paths(root, lambda one: _lacks(one, error)):
                other = self._who_else_holds(thing, stage)
                if other:
                    return ValueError(
                        f"{name} of stage {stage} finds nothing in {_called(path, name)} ({type(error).__name__}: {error}), which {other} holds "
                        f"too: what one stage leaves there does not come to the other. {_INSTEAD}"
                    )
                if not self._knows_all:
                    error.add_note(
                        f"where a layer of another stage is to put it into {_called(path, name)}: on this rank it never comes. {_INSTEAD}"
                    )
        return None

    def _who_else_holds(self, thing: Any, stage: int) -> str:
        for where, name, root in self._roots.values():
            if where != stage and any(paths(root, lambda one: one is thing)):
                return f"{name} of stage {where}"
        return ""


_INSTEAD = (
    "Return it as part of the output (a tuple), from layer to layer, or choose a balance that puts both on one stage"
)


class _Watch(TorchFunctionMode):
    """Follows what an F computes from what another stage left."""

    def __init__(self, skips: Skips) -> None:
        super().__init__()
        self._skips = skips

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        found = map(self._skips.left_by_another, _tensors_in((args, kwargs)))
        source = next(filter(None, found), None)
        result = function(*args, **kwargs)
        for tensor in _tensors_in(result):
            self._skips.note(tensor, source)
        return result


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _shared_by(roots: Iterable[tuple[int, str, Any]]) -> list[_Shared]:
    """What can be changed and is held in several stages."""
    found: dict[int, _Shared] = {}
    seen: defaultdict[int, set[int]] = defaultdict(set)
    for stage, name, root in roots:
        walk = named_paths if name == _LOSS else paths
        for path, thing in walk(root, _can_be_changed, seen[stage]):
            found.setdefault(id(thing), _Shared(thing)).names.setdefault(stage, _called(path, name))
    return [shared for shared in found.values() if len(shared.names) > 1]


def _can_be_changed(thing: Any) -> bool:
    return isinstance(thing, (dict, list, deque, nn.Module)) or (
        is_of_the_user(type(thing)) and hasattr(thing, "__dict__")
    )


def _lacks(thing: Any, error: Exception) -> bool:
    """Whether `error` may have come of looking for something that is not in `thing`."""
    if isinstance(error, KeyError):
        return isinstance(thing, dict) and all(error.args[:1] != (key,) for key in thing)
    if isinstance(error, IndexError):
        return isinstance(thing, (list, deque)) and not thing
    return isinstance(error, AttributeError) and error.obj is thing and _can_be_changed(thing)


def _called(path: str, owner: str) -> str:
    return f"{path} of {owner}" if path else owner
