"""Refuses a tensor that a stage leaves for another stage in a dict, list, module or object that both hold. The error names the tensor.

    F1 of stage 0   leaves a new tensor there, as F0 did: so it is not a constant that is made once    [1]
    F0 of stage 1   computes its output with that tensor, or with one computed from it                 [2]

Only outputs pass from stage to stage. If one rank has both stages, the second finds the tensor of another microbatch; on two ranks, none.
On two ranks, the rank that saw [1] reports it at the start of the second step, and the other rank checks for [2] in that step.
Stages may share an object to which they only write (statistics, a log).
"""

from __future__ import annotations

import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipetrain.plan.plan import Plan
from pipetrain.runtime.executor import Step
from pipetrain.schedule.op import Kind, Op
from pipetrain.stage.leaves import named_paths, paths
from pipetrain.stage.traces import is_of_the_user

Reported = tuple[int, str, int]  # the number of a shared thing, a key in it, the stage that leaves tensors there
_NUM_STEPS = 2  # the first steps, which are checked
_MOST_REPORTED = 16
_MOST_ENTRIES = 1000  # of a container: tensors in a longer one are not checked
_INSTEAD = (
    "Return it as part of the output (a tuple), from layer to layer, or choose a balance that puts both on one stage"
)


class _Shared(NamedTuple):
    """An object that layers of several stages hold, and its name in each stage."""

    thing: Any
    names: dict[int, tuple[str, str]]  # by stage: the path to it, and the layer or loss that holds it

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in a container and in containers inside it, by key; none of a very long container."""
        is_container = isinstance(self.thing, (dict, list, deque))
        trees = {"": self.thing} if is_container else {f".{name}": value for name, value in vars(self.thing).items()}
        return {
            name + pytree.keystr(path): leaf
            for name, tree in trees.items()
            if not isinstance(tree, (dict, list, deque)) or len(tree) <= _MOST_ENTRIES
            for path, leaf in pytree.tree_flatten_with_path(tree)[0]
            if isinstance(leaf, Tensor)
        }

    def called(self, stage: int, key: str = "") -> str:
        path, owner = self.names[stage]
        return f"{f'{path}{key}'.removeprefix('.')} of {owner}" if path or key else owner


class _Left(NamedTuple):
    """A tensor that a stage has left, or one that was computed from it. It is held, so that no other tensor gets the same `id`."""

    tensor: Tensor
    stage: int
    shared: _Shared
    key: str


class Skips(TorchFunctionMode):
    """Checks the first steps. `layers` are the layers that this rank knows, by their index in the model. As a torch function mode it marks
    tensors that F computes from those of another stage. It is switched on once a stage has left tensors in two microbatches."""

    def __init__(self, layers: Mapping[int, nn.Module], loss_fn: Any, plan: Plan, rank: int) -> None:
        super().__init__()
        self._stages = frozenset(plan.stages_of(rank))
        self._stage_ranks = plan.stage_ranks
        self._names = {index: f"layer {index} ({type(layer).__name__})" for index, layer in layers.items()}
        self._names[plan.num_layers] = "loss_fn"
        found: dict[int, _Shared] = {}
        seen: defaultdict[int, set[int]] = defaultdict(set)
        for index, root in {**layers, plan.num_layers: loss_fn}.items() if plan.num_stages > 1 else ():
            stage = plan.num_stages - 1 if root is loss_fn else plan.stage_of(index)
            for path, thing in (named_paths if root is loss_fn else paths)(root, _can_be_changed, seen[stage]):
                found.setdefault(id(thing), _Shared(thing, {})).names.setdefault(stage, (path, self._names[index]))
        self._shared = [one for one in found.values() if len(one.names) > 1 and one.names.keys() & self._stages]
        self.is_done = not self._shared  # nothing is left to check
        self.reported: list[Reported] = []
        self._num_steps = 0
        self._is_on = False
        self._now: Op | None = None  # the F that runs
        self._before: list[set[int]] = []  # the tensors in each shared thing when that F began
        self._leaves_in: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # (thing, stage) -> microbatches
        self._left: dict[int, _Left] = {}  # by the identity of the tensor
        self._computed: dict[int, _Left] = {}  # in the F that runs

    @contextmanager
    def over(self, step: Step, reported: Sequence[Reported]) -> Iterator[None]:
        """Check a training step, which runs in the block; `reported` is what ranks have found in earlier steps. The step raises
        ValueError: a layer computes with a tensor that another stage left, or looks for one that exists only on another rank."""
        before = step.on_layer

        def on_layer(microbatch: int, layer: int, output: Any) -> None:
            self._check(layer, output)
            if before is not None:
                before(microbatch, layer, output)

        self._hear(reported)
        step.on_layer, step.on_op, step.explain = on_layer, self._on_op, self._explain
        try:
            yield
        finally:
            step.on_layer, step.on_op, step.explain = before, None, None
            if self._is_on:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._end_step()

    def _hear(self, reported: Sequence[Reported]) -> None:
        """Note the tensors of this rank in places where a stage of another rank leaves tensors: this rank's stages must not use them."""
        for shared in self._shared:
            tensors = shared.tensors() if reported else {}
            for number, key, stage in reported:
                if number == _number(shared) and stage not in self._stages and key in tensors:
                    self._leaves_in[id(shared.thing), stage] |= {0, 1}
                    self._left[id(tensors[key])] = _Left(tensors[key], stage, shared, key)
        self._turn_on()

    def _turn_on(self) -> None:
        if not self._is_on and any(map(self._is_left_each_time, self._left.values())):
            self._is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def _is_left_each_time(self, left: _Left) -> bool:
        return len(self._leaves_in[id(left.shared.thing), left.stage]) > 1

    def _on_op(self, op: Op) -> None:
        """[1] Note what the F before this op has left."""
        if self._now is not None and self._now.microbatch is not None:
            stage = self._now.stage
            for shared, old in zip(self._shared, self._before):
                for key, tensor in shared.tensors().items() if stage in shared.names else ():
                    if id(tensor) not in old:
                        self._leaves_in[id(shared.thing), stage].add(self._now.microbatch)
                        self._left[id(tensor)] = _Left(tensor, stage, shared, key)
            self._turn_on()
        self._computed.clear()
        self._now = op if op.kind is Kind.F else None
        self._before = [set(map(id, shared.tensors().values())) for shared in self._shared] if self._now else []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and (source := self._source((args, kwargs))):
            tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self._computed |= {id(tensor): source._replace(tensor=tensor) for tensor in tensors}
        return result

    def _source(self, tree: Any) -> _Left | None:
        """Return a tensor that another stage left, if it is in `tree`, or if a tensor in `tree` was computed from it in the F that runs."""
        found = (self._computed.get(id(leaf)) or self._left.get(id(leaf)) for leaf in pytree.tree_leaves(tree))
        others = (left for left in found if left is not None and self._now and left.stage != self._now.stage)
        return next(filter(self._is_left_each_time, others), None)

    def _check(self, layer: int, output: Any) -> None:
        """[2] Raise if the output was computed with a tensor that another stage left."""
        left = self._source(output)
        if left is not None and self._now is not None:
            stage = self._now.stage
            raise ValueError(
                f"{self._names[layer]} of stage {stage} computes with {left.shared.called(stage, left.key)}, where stage "
                f"{left.stage} leaves a tensor in each forward ({left.shared.called(left.stage, left.key)}): that tensor belongs to "
                f"another microbatch, and does not reach a stage on another rank. {_INSTEAD}"
            )

    def _end_step(self) -> None:
        self._num_steps += 1
        self.reported = [
            (_number(left.shared), left.key, left.stage)
            for left in self._left.values()
            if left.stage in self._stages
            and self._is_left_each_time(left)
            and not left.shared.names.keys() <= self._stages
        ][:_MOST_REPORTED]
        if self._num_steps == _NUM_STEPS:
            self._shared, self.reported, self.is_done = [], [], True
        self._is_on, self._now, self._before = False, None, []
        self._left.clear()
        self._computed.clear()

    def _explain(self, error: Exception, stage: int) -> ValueError | None:
        """Return a clearer error if a layer of the stage looked for something that a stage on another rank may have left; else None."""
        if not isinstance(error, (KeyError, IndexError, AttributeError)):
            return None
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        names = set(frame.f_code.co_names)
        scope = {**{name: frame.f_globals[name] for name in names & frame.f_globals.keys()}, **frame.f_locals}
        lacking = {id(thing) for _, thing in paths(scope, lambda thing: _lacks(thing, error), names=names)}
        lacking.discard(id(scope))
        found = [one for one in self._shared if id(one.thing) in lacking and stage in one.names]
        ranks = self._stage_ranks
        others = [next((s for s in one.names if ranks[s] != ranks[stage]), None) for one in found]
        if not lacking or len(found) < len(lacking) or None in others:
            return None
        other = others[0]
        assert other is not None
        return ValueError(
            f"stage {stage} finds nothing in {found[0].called(stage)} ({type(error).__name__}: {error}). In stage {other} that object is "
            f"{found[0].called(other)}, but a value that one rank stores there does not reach the other. {_INSTEAD}"
        )


def _number(shared: _Shared) -> int:
    """Return a number for a shared object, the same on every rank: the checksum of its name in its first stage."""
    return zlib.crc32(shared.called(min(shared.names)).encode())


def _can_be_changed(thing: Any) -> bool:
    is_object = is_of_the_user(type(thing)) and hasattr(thing, "__dict__")
    return is_object or isinstance(thing, (dict, list, deque, nn.Module))


def _lacks(thing: Any, error: Exception) -> bool:
    """Whether the cause of `error` may be that something is missing in `thing`."""
    if isinstance(error, KeyError):
        return isinstance(thing, dict) and error.args[0] not in thing
    if isinstance(error, IndexError):
        return isinstance(thing, (list, deque)) and not thing
    return isinstance(error, AttributeError) and error.obj is thing and _can_be_changed(thing)
