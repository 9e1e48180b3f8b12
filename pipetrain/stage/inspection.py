"""Whether a layer may run a second time, seen on the first microbatch of each kind: R must do what F did, and leave nothing behind.

A copy of the layer, which shares its parameters, runs on what the layer gets, with its seed:

    ahead of F   [1] does it take a gradient inside? Then hooks would be in its way, and it is kept
    after F      [2] does it save, a second time, what F has saved?  [3] does it change its attributes? If so, it is kept

The judge is R itself, which is compared with F (`proof.py`): a copy explains in time what R would only refuse.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from pipetrain.stage.added_losses import collecting
from pipetrain.stage.casts import has_compiled
from pipetrain.stage.entered import Gate
from pipetrain.stage.leaves import is_sharded
from pipetrain.stage.local import StageLocal
from pipetrain.stage.proof import describe_difference, differ
from pipetrain.stage.tensor_copies import TensorCopies, copy_of, is_small
from pipetrain.stage.traces import first_change, holds_outside, outer_traces, own_traces, rebound_outside

_INSIDE = "takes a gradient inside its forward"
# What torch.func says where saved-tensor hooks are in force.
_FUNCTORCH_REFUSES = "don't yet support saved tensor hooks"


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
        seed: Callable[[], None],
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
        before = own_traces(self._twin)
        again: list[Tensor] = []
        try:
            with collecting():
                self._run(lambda tensor: again.append(tensor.detach()), _refuse)
        except Exception:
            return None  # R will say it
        if (name := first_change(before, own_traces(self._twin))) is not None:
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
        """R will see those that F saw."""
        for module, name, buffer, values in self._buffers:
            if module._buffers.get(name) is buffer:  # R finds another one as the last F has left it
                buffer.data = values.clone()

    def _run(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._seed()
        with saved_tensors_hooks(pack, unpack):
            self._call(self._twin, _own_copy(self._value))


def refuses_hooks(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _FUNCTORCH_REFUSES in str(error)


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
    alive: Tensor = Gate.apply(torch.empty(0, device=tensor.device, requires_grad=True), alike, {}, 0)  # type: ignore[no-untyped-call]
    return alive


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, (Tensor, StageLocal, int, float, complex, str, bytes, bool, type(None)))
