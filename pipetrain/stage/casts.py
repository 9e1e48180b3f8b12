"""Under autocast: a weight is cast once per step (exceptions: see `_CASTING`), and this cast does not belong to a set.

A matrix product saves the cast of its weight for backward. If each R made its own cast, each set would hold the weights of its stage
a second time.

    trained   autocast casts a weight once and keeps the cast until the outermost autocast ends. R reads the cast of F. This is safe:
              R waits for F's stream, and the cast is freed only after the step.
    frozen    autocast casts the weight at each use. Here the first F of a step makes the cast, and later uses get it instead of the
              weight. The end of the step frees it, so a weight that changes between steps is cast again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.tensor_copies import is_dense, storage_key

# Functions, as layers call them, that autocast runs in low precision on every device. None changes a weight or returns a view of it.
# Other products with a frozen weight (an einsum, nn.MultiheadAttention) cast it at each use, as plain autocast does.
_CASTING = frozenset((
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
    Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
))  # fmt: skip


class WeightCasts:
    """The casts of one stage's weights in one step. A step that makes no cast calls no method but `is_active`, in an inspection."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, meter: ActivationMeter) -> None:
        self._layers = layers
        self._device = device.type
        self._meter = meter
        self._of_trained: dict[int, StorageWeakRef] = {}  # by the weight's identity
        self._frozen: dict[int, Mapping[int, Tensor]] = {}  # layer -> id of a weight that is cast once -> weight
        # (identity of a weight, dtype) -> its version, its address and its cast.
        self._of_frozen: dict[tuple[int, torch.dtype], tuple[int, int, Tensor]] = {}
        self.storages: set[int] = set()  # of all casts of this step
        self._is_stale = False

    def is_active(self) -> bool:
        """Whether autocast is on. `_CastOnce` asks at each product, because a layer may have switched it off; so does an inspection."""
        return torch.is_autocast_enabled(self._device)

    # Trained ------------------------------------------------------------------------------------------------------

    def see(self, saved: Tensor) -> None:
        """Called for each tensor that F saves. The meter does not count it if it is a weight's cast that autocast keeps."""
        weight = self._weight_cast_in(saved)
        if weight is not None:
            new = StorageWeakRef(saved.untyped_storage())  # type: ignore[no-untyped-call]
            if self._of_trained.setdefault(id(weight), new).cdata == new.cdata:
                self._leave_out(new.cdata)

    def see_again(self, saved: Tensor) -> None:
        """Called for each tensor that R saves. If R made a cast of a weight, autocast has lost F's cast and keeps R's: note it."""
        weight = self._weight_cast_in(saved)
        if weight is not None:
            known = self._of_trained.get(id(weight))
            self._is_stale |= known is None or known.cdata != storage_key(saved)

    def end_recompute(self) -> None:
        """R is over. If it made a cast, clear autocast's cache: that cast belongs to R's stream and graph, and no F may get it."""
        if self._is_stale:
            torch.clear_autocast_cache()
            self._is_stale = False

    def _weight_cast_in(self, saved: Tensor) -> Tensor | None:
        """The trained weight of which `saved` is the cast, or a view of the cast; None: there is none."""
        if saved.dtype is not torch.get_autocast_dtype(self._device):
            return None
        node = saved.grad_fn if saved._base is None else saved._base.grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return None
        return getattr(node.next_functions[0][0], "variable", None)  # only AccumulateGrad has `variable`

    # Frozen -------------------------------------------------------------------------------------------------------

    def once(self, number: int, call: Callable[[Any], Any], *, make: bool) -> Callable[[Any], Any]:
        """A function that runs `call`, a layer, with casts of its frozen weights. With `make=False`, only casts that exist are used."""
        if number not in self._frozen:
            own = self._layers[number : number + 1]  # empty for the loss
            weights = [weight for layer in own if not has_compiled(layer) for weight in layer.parameters()]
            self._frozen[number] = {
                id(weight): weight
                for weight in weights
                if type(weight) is nn.Parameter and not weight.requires_grad
                if weight.dtype is torch.float32 and is_dense(weight)
            }
        frozen = self._frozen[number]
        if not frozen:
            return call

        def run(value: Any) -> Any:
            with _CastOnce(self, frozen, make=make):
                return call(value)

        return run

    def cast(self, weight: Tensor, *, make: bool) -> Tensor:
        """The cast of a weight, as autocast makes it. If there is none yet and `make` is False, the weight itself."""
        dtype = torch.get_autocast_dtype(self._device)
        version, address, cast = self._of_frozen.get((id(weight), dtype), (-1, 0, weight))
        if version == weight._version and address == weight.data_ptr() and not cast._version:
            return cast
        if not make or weight.device.type != self._device:
            return weight
        cast = weight.detach().to(dtype)
        self._of_frozen[id(weight), dtype] = weight._version, weight.data_ptr(), cast
        self._leave_out(storage_key(cast))
        return cast

    def _leave_out(self, storage: int) -> None:
        if storage not in self.storages:
            self.storages.add(storage)
            self._meter.leave_out(storage)

    def end_step(self) -> None:
        """The step has ended, or failed: drop all casts, because weights may change now."""
        for storage in self.storages:
            self._meter.count_again(storage)
        for held in (self.storages, self._of_trained, self._of_frozen, self._frozen):
            held.clear()


class _CastOnce(TorchFunctionMode):
    """Under autocast, replaces frozen weights by their casts in the arguments of the operations in `_CASTING`."""

    def __init__(self, casts: WeightCasts, frozen: Mapping[int, Tensor], *, make: bool) -> None:
        super().__init__()
        self._casts, self._frozen, self._make = casts, frozen, make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTING and self._casts.is_active():
            args = tuple(map(self._cast, args))
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        return self._casts.cast(value, make=self._make) if id(value) in self._frozen else value


def has_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile runs a part of the layer. It gets none of our casts, because it would keep those that it is compiled with."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in layer.modules())
