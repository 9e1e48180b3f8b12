"""Whether a layer may run a second time, seen on the first microbatch of each kind: R must do what F did, and leave nothing behind.

A copy of the layer, which shares its parameters, runs on what the layer gets, with its seed:

    ahead of F   [1] does it take a gradient inside? Then hooks would be in its way, and it is kept
    after F      [2] does it save, a second time, what F has saved?  [3] does it change its attributes? If so, it is kept
                 [4] does memory stay allocated besides its output and its saved tensors?

The proof (`proof.py`) compares R itself with F, and raises an error. The copy finds differences earlier, when the layer can be kept.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.stage.added_losses import AddedLosses, collecting
from pipetrain.stage.casts import has_compiled
from pipetrain.stage.entry import through_gate
from pipetrain.stage.errors import LayerRefused, refuses_hooks
from pipetrain.stage.leaves import is_sharded
from pipetrain.stage.local import StageLocal
from pipetrain.stage.proof import describe_difference, differ
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral
from pipetrain.stage.split_linear import split_layer
from pipetrain.stage.tensor_copies import TensorCopies, copy_of, is_dense, is_small, storage_key
from pipetrain.stage.traces import Look, first_change, holds_outside, outer_traces, own_traces, rebound_outside
from pipetrain.stage.witness import checksum

if TYPE_CHECKING:
    from pipetrain.stage.microbatch import StageInput
    from pipetrain.stage.stage import Stage

_INSIDE = "takes a gradient inside its forward"
# Less than this per microbatch is not worth a word. A torch.utils.checkpoint inside a layer keeps 5 kB: generator states.
_LITTLE_BYTES = 1 << 16


class FirstLook:
    """An F that inspects the layers of its stage. With `compares`, an R will follow, so a copy of each layer also runs again after F."""

    def __init__(
        self,
        stage: Stage,
        given: StageInput,
        seeds: Sequence[int],
        late: LateBoundSet,
        deferral: Deferral | None,
        *,
        compares: bool,
    ) -> None:
        self._stage = stage
        self._given = given
        self._seeds = seeds
        self._late = late
        self._deferral = deferral
        self._compares = compares
        self._inspection: LayerInspection | None = None
        self._gradients: list[tuple[Tensor | None, int]] = []

    def before(self, number: int, value: Any) -> None:
        """Ahead of F of a layer: where it must run without hooks, it will.

        Raises:
            LayerRefused: it calls `backward()`.
        """
        self._gradients = self._gradients_now()
        self._inspection = None
        if number in self._stage.kept.free:
            return
        self._inspection = self._inspect(number, value)
        why = self._inspection.why_kept_ahead()
        self._refuse_backward(number)
        if why is not None:
            self._stage.kept.add(self._late, (number,), f"{self._stage.name_of(number)} {why}", free=True)

    def after(self, number: int) -> None:
        """F of the layer has run.

        Raises:
            LayerRefused: it calls `backward()`.
        """
        self._refuse_backward(number)
        stage, late = self._stage, self._late
        if self._inspection is not None and self._compares and number not in late.whole:
            why = self._inspection.why_kept(late.saved_by(number))
            if why is not None:
                num_bytes = stage.meter.uncounted_bytes(late.saved_by(number))
                stage.kept.add(late, (number,), f"{stage.name_of(number)} {why}", num_bytes=num_bytes)
            elif (held := self._inspection.held_outside) >= _LITTLE_BYTES and number not in stage.holds_outside:
                stage.holds_outside.add(number)
                warnings.warn(
                    f"{stage.name_of(number)} holds {held} bytes per microbatch outside of its saved tensors (such as ctx.x = x): "
                    "recompute cannot free them. In an autograd.Function use ctx.save_for_backward",
                    stacklevel=2,
                )
        if number in late.reads_from:
            first = late.reads_from[number]
            through = "" if first == number else f"through {stage.name_of(first)} "
            why = f"{stage.name_of(number)} takes a gradient {through}inside its forward"
            stage.kept.add(late, range(first, number + 1), why, free=True)

    def _inspect(self, number: int, value: Any) -> LayerInspection:
        stage, given, deferral = self._stage, self._given, self._deferral
        is_loss = number == len(stage.layers)

        def call(layer: Any, value: Any) -> Any:
            if deferral is not None:
                layer = split_layer(deferral, number, layer, is_forward=False)
            return stage.casts.once(number, layer, make=True)(value) if stage.casts.is_active() else layer(value)

        target = pytree.tree_map_only(Tensor, Tensor.clone, given.target)

        def call_loss(loss_fn: Any, output: Any) -> Any:  # on a target of its own: it may be changed in place
            own = replace(given, target=pytree.tree_map_only(Tensor, Tensor.clone, target))
            return stage.weighted_loss(loss_fn, output, own, AddedLosses())

        return LayerInspection(
            stage.loss_fn if is_loss else stage.layers[number],
            value,
            call=call_loss if is_loss else call,
            seed=functools.partial(stage.state.seeders[number], self._seeds[number]),
            buffers=stage.state.copies_of(number),
            # Of a set that is kept a forward may change weights that do not learn, and a copy must not.
            shared=[one for one in stage.state.parameters if one.requires_grad or not self._late.keep],
        )

    def _gradients_now(self) -> list[tuple[Tensor | None, int]]:
        found = [parameter.grad for parameter in self._stage.state.parameters]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in found]

    def _refuse_backward(self, number: int) -> None:
        """In a pipeline forwards stand in another order than in the plain loop; and sums of floats depend on their order."""
        pairs = zip(self._gradients_now(), self._gradients)
        if any(new is not old or version != was for (new, version), (old, was) in pairs):
            raise LayerRefused(
                f"{self._stage.name_of(number)} calls backward() in its forward, which adds to .grad: gradients come from the loss "
                "alone. Give the local loss to pipetrain.add_loss, or take its gradient with torch.autograd.grad"
            )


class RefusesHooks(BaseException):
    """torch.func runs inside the layer. No Exception: the layer must not catch it."""


class LayerInspection:
    """One layer (or loss), around one F of it.

    Args:
        call: runs a layer, or the loss, on a value: `call(layer, value)`.
        seed: sets the generators as F of this microbatch has them for this layer.
        buffers: of the layer, as they are ahead of F.
        shared: tensors that a copy does not copy: parameters.
    """

    def __init__(
        self,
        layer: Any,
        value: Any,
        *,
        call: Callable[[Any, Any], Any],
        seed: Callable[[], object],
        buffers: TensorCopies,
        shared: Iterable[Tensor],
    ) -> None:
        self._layer = layer
        self._call = call
        self._seed = seed
        self._value = _own_copy(value)
        self._given = [leaf for leaf in pytree.tree_leaves(value) if _is_object(leaf)]
        self._given_looks = [own_traces(leaf) for leaf in self._given]
        self._own, self._outer = own_traces(layer), outer_traces(layer)
        self._rebinds = rebound_outside(layer)  # a copy would rebind it, too
        # One that reaches outside is not tried: a copy would, too.
        self._twin = None if self._rebinds or holds_outside(layer) else _twin_of(layer, buffers, shared)
        self._buffer_names = {name for name, _ in layer.named_buffers()} if isinstance(layer, nn.Module) else set()
        large = {id(buffer) for buffer in layer.buffers()} if isinstance(layer, nn.Module) else set()  # shared with it
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in (self._twin.modules() if isinstance(self._twin, nn.Module) else ())
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in large
        ]

    def why_kept_ahead(self) -> str | None:
        """Why the layer's F must run without hooks, if it must."""
        if isinstance(self._layer, torch.jit.ScriptModule):
            return "is compiled by torch.jit, which makes other code of it after its first runs"
        if self._twin is None:
            return None
        reads: list[bool] = []

        def read(tensor: Tensor) -> Tensor:
            reads.append(True)
            return tensor

        try:
            with _listening_to_functorch(), collecting():
                self._run(Tensor.detach, read)
        except RefusesHooks:
            return _INSIDE
        except Exception as error:  # of a gradient through layers before it, say: F itself will tell
            return _INSIDE if refuses_hooks(error) else None
        return _INSIDE if reads else None

    held_outside = 0  # bytes that stay when it has run again, besides its output and what it has saved

    def why_kept(self, saved: Sequence[Tensor]) -> str | None:
        """Why the layer cannot be recomputed, if it cannot: F has run, and has `saved` these."""
        if self._rebinds:
            return f"rebinds {self._rebinds}, a variable outside of it, in its forward"
        if (name := first_change(self._outer, outer_traces(self._layer))) is not None:
            return f"changes {name}, outside of itself, in its forward"
        for look, leaf in zip(self._given_looks, self._given):
            if (name := first_change(look, own_traces(leaf))) is not None:
                return f"changes {name} of a {type(leaf).__name__} in its input"
        if self._twin is None:
            name = first_change(self._own, own_traces(self._layer))
            return None if name is None else f"changes its attribute {name} in its forward"
        self._put_buffers_back()
        before = own_traces(self._twin) | self._late_buffers()
        again: list[Tensor] = []
        try:
            with collecting(), _StoragesMade() as made:
                output = self._run(lambda tensor: again.append(tensor.detach()), _refuse)
            self.held_outside = made.bytes_left((output, again))
            del output
        except Exception:
            return None  # R will say it
        if (name := first_change(before, own_traces(self._twin) | self._late_buffers())) is not None:
            return f"changes its attribute {name} in each forward"
        if len(again) != len(saved):
            return f"saves {len(again)} tensors when it runs again, and {len(saved)} the first time"
        for found, expected in zip(again, saved):
            if found.shape != expected.shape or found.dtype != expected.dtype:
                return "saves other tensors when it runs again"
            if differ(found, expected):
                return f"computes other values when it runs again: {describe_difference(found, expected)}"
        return None

    def _late_buffers(self) -> Look:
        """What is in buffers that the layer has registered since: R would find it as another forward has left it."""
        named = self._twin.named_buffers() if isinstance(self._twin, nn.Module) else ()
        return {name: checksum([buffer.cpu()]) for name, buffer in named if name not in self._buffer_names}

    def _put_buffers_back(self) -> None:
        """Restore the buffers, so that R reads the values that F read."""
        for module, name, buffer, values in self._buffers:
            if module._buffers.get(name) is buffer:  # R finds another one as the last F has left it
                buffer.data = values.clone()

    def _run(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        self._seed()
        with saved_tensors_hooks(pack, unpack):
            return self._call(self._twin, _own_copy(self._value))


class _StoragesMade(TorchDispatchMode):
    """The storages that operations in its block allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        there = _storages_in((args, kwargs))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and is_dense(leaf) and storage_key(leaf) not in there:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return output

    def bytes_left(self, allowed: Any) -> int:
        """Of what is still there, besides that of tensors in `allowed`."""
        for key in _storages_in(allowed):
            self._made.pop(key, None)
        if self._num_alive() >= _LITTLE_BYTES:
            gc.collect()  # cycles are garbage, not held
        return self._num_alive()

    def _num_alive(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())  # type: ignore[misc, no-untyped-call]


def _storages_in(tree: Any) -> set[int]:
    return {storage_key(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


def _refuse(_: Any) -> NoReturn:
    raise RuntimeError("a copy takes a gradient inside its forward, which F did not")


@contextmanager
def _listening_to_functorch() -> Iterator[None]:
    """torch.func switches hooks off where it cannot have them, and fails where there are some; a layer may catch that."""

    def refuse(_: str = "") -> NoReturn:
        raise RefusesHooks

    switch_off = graph.disable_saved_tensors_hooks
    graph.disable_saved_tensors_hooks = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = switch_off


def _twin_of(layer: Any, buffers: TensorCopies, shared: Iterable[Tensor]) -> Any:
    """A copy with the buffers as they were, or None: of compiled and sharded layers, of what cannot be copied."""
    modules = [layer] if isinstance(layer, nn.Module) else []
    if any(map(has_compiled, modules)) or any(map(is_sharded, modules)) or isinstance(layer, torch.jit.ScriptModule):
        return None
    known = {id(tensor): tensor for tensor in shared}
    large = [buffer for module in modules for buffer in module.buffers() if not is_small(buffer)]
    known |= {id(buffer): buffer for buffer in large}
    for tensor, kept in zip(buffers.tensors, buffers.copies):
        known[id(tensor)] = kept.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(layer, known)
    except Exception:
        return None


def _own_copy(value: Any) -> Any:
    """`value` with copies of its tensors, which may be changed in place, and of the objects in it."""
    leaves, spec = pytree.tree_flatten(value)
    tensors: dict[int, Tensor] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = _alive(leaf)
            leaves[number] = tensors[id(leaf)]
        elif _is_object(leaf):
            try:
                leaves[number] = copy.deepcopy(leaf)
            except Exception:
                continue
    return pytree.tree_unflatten(leaves, spec)


def _alive(tensor: Tensor) -> Tensor:
    """A copy, of the same strides, that is no leaf where the tensor is none: a layer may change it in place."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    alike = copy_of(tensor)
    if not tensor.requires_grad:
        return alike
    return through_gate(torch.empty(0, device=tensor.device, requires_grad=True), alike)


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, (Tensor, StageLocal, int, float, complex, str, bytes, bool, type(None)))
