"""Finds out, in the first microbatch of a kind of step, whether a layer can be recomputed: R must do what F did, and leave nothing behind.

A copy of the layer (it shares the trained parameters) runs before F, and again after F if a proof follows. Some layers cannot be copied.

    before F   [1] does it take a gradient inside its forward? Hooks would prevent that, so the layer is kept and runs without hooks
    after F    [2] does it save other tensors or values than F did?  [3] does it change its attributes? Then the layer is kept
               [4] does its graph hold more memory than its output and saved tensors? F's graph then keeps that memory until B (a warning
                   says so), but R's graph does not: R detaches the tensors that it puts into slots

The proof (`proof.py`) compares R itself with F, and raises an error. The copy finds differences before R, so the layer can be kept.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.stage.casts import has_compiled
from pipetrain.stage.errors import LayerRefused, refuses_hooks
from pipetrain.stage.leaves import is_sharded
from pipetrain.stage.microbatch import AddedLosses, StageInput, StageLocal, through_gate
from pipetrain.stage.proof import describe_difference, differ
from pipetrain.stage.recompute import checksum
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral
from pipetrain.stage.split_linear import split_layer
from pipetrain.stage.tensor_copies import copy_of, is_dense, storage_key
from pipetrain.stage.traces import Look, first_change, holds_outside, outer_traces, own_traces, rebound_outside

if TYPE_CHECKING:
    from pipetrain.stage.stage import Stage

_INSIDE = "takes a gradient inside its forward"
_LITTLE_BYTES = 1 << 16  # per microbatch: no warning of less. A torch.utils.checkpoint inside a layer keeps 5 kB


@dataclass(eq=False)
class FirstLook:
    """Inspects the layers of a stage around one F. `compares`: a proof follows, so the copy of each layer also runs after F."""

    stage: Stage
    given: StageInput
    seeds: Sequence[int]
    late: LateBoundSet
    deferral: Deferral | None
    compares: bool
    _inspection: LayerInspection | None = None
    _gradients: Sequence[tuple[Tensor | None, int]] = ()

    def before(self, number: int, value: Any) -> None:
        """Called ahead of F of a layer. A layer that must run without hooks is kept. Raises LayerRefused: it calls `backward()`."""
        self._gradients = self._gradients_now()
        self._inspection = None
        if number in self.stage.free:
            return
        self._inspection = LayerInspection(self, number, value)  # it does not refer to this object: no cycle
        why = self._inspection.why_kept_ahead()
        self._refuse_backward(number)
        if why is not None:
            self._keep((number,), f"{self.stage.name_of(number)} {why}", free=True)

    def after(self, number: int) -> None:
        """F of the layer has run. Raises LayerRefused: it calls `backward()`."""
        self._refuse_backward(number)
        stage, late = self.stage, self.late
        name = stage.name_of(number)
        if self._inspection is not None and self.compares and number not in late.whole:
            why = self._inspection.why_kept(late.saved_by(number))
            held = self._inspection.held_outside
            if why is not None:
                num_bytes = stage.meter.uncounted_bytes(late.saved_by(number))
                self._keep((number,), f"{name} {why}", num_bytes=num_bytes)
            elif held is not None and held < _LITTLE_BYTES:
                stage.may_hold_outside.discard(number)
            elif held is not None:
                text = f"{name} holds {held} bytes per microbatch outside of its saved tensors (such as ctx.x = x): recompute cannot free them"
                self._warn_once("outside", number, f"{text}. In an autograd.Function, use ctx.save_for_backward")
        if number in late.reads_from:
            first = late.reads_from[number]
            through = "" if first == number else f"through {stage.name_of(first)} "
            why = f"{name} takes a gradient {through}inside its forward"
            self._keep(range(first, number + 1), why, free=True)

    def _keep(self, layers: Sequence[int], why: str, *, free: bool = False, num_bytes: int = 0) -> None:
        """Keep these layers: from now on R does not run them. `free`: F runs them without hooks."""
        stage, late, last = self.stage, self.late, max(layers)
        stage.kept.update(layers)
        stage.free.update(layers if free else ())
        late.keep_whole(set(layers), set(layers if free else ()))
        if not late.keep:
            size = f" ({num_bytes} bytes per microbatch)" if num_bytes else ""
            whose = (
                f"its saved tensors{size}"
                if len(layers) == 1
                else "the saved tensors of these layers and of those between them"
            )
            self._warn_once("kept", last, f"{why}: {whose} are kept from F to B and not recomputed")

    def _warn_once(self, what: str, layer: int, text: str) -> None:
        if (what, layer) not in self.stage.warned:
            self.stage.warned.add((what, layer))
            warnings.warn(text, stacklevel=4)

    def _gradients_now(self) -> list[tuple[Tensor | None, int]]:
        found = [parameter.grad for parameter in self.stage.state.parameters]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in found]

    def _refuse_backward(self, number: int) -> None:
        """Refuse `backward()` in a forward: it adds to `.grad`, and a pipeline runs forwards in another order than the plain loop."""
        pairs = zip(self._gradients_now(), self._gradients)
        if any(new is not old or version != was for (new, version), (old, was) in pairs):
            raise LayerRefused(
                f"{self.stage.name_of(number)} calls backward() in its forward, which adds to .grad: gradients come from the loss "
                "alone. Give the local loss to pipetrain.add_loss, or take its gradient with torch.autograd.grad"
            )


class _RefusesHooks(BaseException):
    """torch.func runs inside the layer. A BaseException, which the layer's `except Exception` does not catch."""


class LayerInspection:
    """Inspects one layer, or the loss, before and after one F; `value` is its input."""

    held_outside: int | None = None  # bytes that the copy's run leaves allocated besides its output and saved tensors

    def __init__(self, look: FirstLook, number: int, value: Any) -> None:
        self._stage, self._deferral, self._number = look.stage, look.deferral, number
        self._seed = functools.partial(look.stage.state.seeders[number], look.seeds[number])
        stage = look.stage
        self._layer: Any = stage.layers[number] if number < len(stage.layers) else stage.loss_fn
        self._value = _own_copy(value)
        self._batch = look.given._replace(target=pytree.tree_map_only(Tensor, Tensor.clone, look.given.target))
        objects = [leaf for leaf in pytree.tree_leaves(value) if _is_object(leaf)]
        self._given = [(leaf, own_traces(leaf)) for leaf in objects]
        self._own, self._outer = own_traces(self._layer), outer_traces(self._layer)
        self._rebinds = rebound_outside(self._layer)  # variables outside; a copy would rebind them, too
        # If no R follows, F may change frozen weights. So the copy of the layer has frozen weights of its own, and shares the trained ones.
        shared = [one for one in stage.state.parameters if one.requires_grad or not look.late.keep]
        # A layer that can change objects outside of itself gets no copy: the copy would change these objects, too.
        self._twin: Any = None if self._rebinds or holds_outside(self._layer) else _twin_of(self._layer, shared)
        named = self._layer.named_buffers() if isinstance(self._layer, nn.Module) else ()
        self._buffer_names = {name for name, _ in named}
        modules = self._twin.modules() if isinstance(self._twin, nn.Module) else ()
        buffers = ((module, name, buffer) for module in modules for name, buffer in module._buffers.items())
        self._buffers = [(one, name, buffer, buffer.clone()) for one, name, buffer in buffers if buffer is not None]

    def why_kept_ahead(self) -> str | None:
        """Why the layer's F must run without hooks, if it must."""
        if isinstance(self._layer, torch.jit.ScriptModule):
            return "is compiled by torch.jit, which recompiles it after its first runs"
        if self._twin is None:
            return None
        reads: list[Tensor] = []

        def read(tensor: Tensor) -> Tensor:
            reads.append(tensor)
            return tensor

        try:
            with _listening_to_functorch(), AddedLosses():
                self._run(Tensor.detach, read)
        except _RefusesHooks:
            return _INSIDE
        except Exception as error:
            # The copy may fail where F does not: its input has no graph of earlier layers, through which the layer may take a gradient.
            return _INSIDE if refuses_hooks(error) else None
        return _INSIDE if reads else None

    def why_kept(self, saved: Sequence[Tensor]) -> str | None:
        """Why the layer cannot be recomputed, if it cannot. F has run; `saved` are the tensors that it saved."""
        if self._rebinds:
            return f"rebinds {self._rebinds}, a variable outside of it, in its forward"
        if (name := first_change(self._outer, outer_traces(self._layer))) is not None:
            return f"changes {name}, outside of itself, in its forward"
        for leaf, look in self._given:
            if (name := first_change(look, own_traces(leaf))) is not None:
                return f"changes {name} of a {type(leaf).__name__} in its input"
        if self._twin is None:
            name = first_change(self._own, own_traces(self._layer))
            return None if name is None else f"changes its attribute {name} in its forward"
        self._put_buffers_back()
        before = own_traces(self._twin) | self._late_buffers()
        again: list[Tensor] = []
        try:
            with AddedLosses(), _StoragesMade() as made:
                output = self._run(lambda tensor: again.append(tensor.detach()), _refuse)
            self.held_outside = made.bytes_left((output, again))
            del output
        except Exception:
            return None  # R will raise it, too
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

    def _put_buffers_back(self) -> None:
        """Give the copy's buffers the values that they had before F."""
        for module, name, buffer, values in self._buffers:
            # A buffer that the first run has replaced stays replaced: F replaced the layer's buffer too, and R will read the new one.
            if module._buffers.get(name) is buffer:
                buffer.data = values.clone()

    def _late_buffers(self) -> Look:
        """Checksums of buffers that the copy's first run registers. Nobody copied such a buffer before F, so R would read a later F's values."""
        named = self._twin.named_buffers() if isinstance(self._twin, nn.Module) else ()
        return {name: checksum([buffer.cpu()]) for name, buffer in named if name not in self._buffer_names}

    def _run(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Run the copy of the layer with the seed of F, on a copy of the input, which it may change in place."""
        stage, number = self._stage, self._number
        call: Any = self._twin
        if number == len(stage.layers):
            given = self._batch._replace(target=pytree.tree_map_only(Tensor, Tensor.clone, self._batch.target))
            call = functools.partial(stage.weighted_loss, self._twin, given=given, added=AddedLosses())
        elif self._deferral is not None:
            call = split_layer(self._deferral, number, call, is_forward=False)
        if stage.casts.is_active() and number < len(stage.layers):
            call = stage.casts.once(number, call, make=True)
        self._seed()
        with saved_tensors_hooks(pack, unpack):
            return call(_own_copy(self._value))


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
        """Bytes of these storages that are still allocated, without storages of tensors in `allowed`."""
        for key in _storages_in(allowed):
            self._made.pop(key, None)
        if self._num_alive() >= _LITTLE_BYTES:
            gc.collect()  # unreachable cycles do not count
        return self._num_alive()

    def _num_alive(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())  # type: ignore[misc, no-untyped-call]


def _storages_in(tree: Any) -> set[int]:
    return {storage_key(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


def _refuse(_: Any) -> NoReturn:
    raise RuntimeError("a copy takes a gradient inside its forward, which F did not")


@contextmanager
def _listening_to_functorch() -> Iterator[None]:
    """In the block, _RefusesHooks is raised where torch.func disables saved-tensor hooks. A layer may catch torch.func's own error."""

    def refuse(_: str = "") -> NoReturn:
        raise _RefusesHooks

    switch_off = graph.disable_saved_tensors_hooks
    graph.disable_saved_tensors_hooks = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = switch_off


def _twin_of(layer: Any, shared: Iterable[Tensor]) -> Any:
    """A copy of `layer` that has the tensors `shared` themselves. None: the layer is compiled or sharded, or cannot be copied."""
    known = {id(tensor): tensor for tensor in shared}
    if isinstance(layer, nn.Module):
        if has_compiled(layer) or is_sharded(layer) or isinstance(layer, torch.jit.ScriptModule):
            return None
        for buffer in layer.buffers():
            known[id(buffer)] = copy_of(buffer).requires_grad_(buffer.requires_grad)
    try:
        return copy.deepcopy(layer, known)
    except Exception:
        return None


def _own_copy(value: Any) -> Any:
    """`value` with copies of its tensors and other objects: a layer may change them in place."""
    tensors: dict[int, Tensor] = {}

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = _alive(leaf)
            return tensors[id(leaf)]
        with suppress(Exception):
            return copy.deepcopy(leaf) if _is_object(leaf) else leaf
        return leaf  # it cannot be copied

    return pytree.tree_map(own, value)


def _alive(tensor: Tensor) -> Tensor:
    """A copy with the same strides. If the tensor needs a gradient, the copy does too and is not a leaf: a layer may change it in place."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    alike = copy_of(tensor)
    if not tensor.requires_grad:
        return alike
    return through_gate(torch.empty(0, device=tensor.device, requires_grad=True), alike, {})


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, (Tensor, StageLocal, int, float, complex, str, bytes, bool, type(None)))
