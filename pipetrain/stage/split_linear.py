"""Linear functions whose backward comes in two halves: they replace torch's while a layer runs.

`nn.Linear`, `nn.MultiheadAttention` and models of Hugging Face look up `torch.nn.functional.linear` or `torch.addmm` at each call.
While a layer runs, functions of ours replace these two. (A `TorchFunctionMode` would also see `x @ weight`. But it costs 1 us for
every operation and attribute of every layer, and does not see into `multi_head_attention_forward`.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.stage.split_backward import IN_FORCE, Deferral, LayerCall, SplitFunction, layer_in_force, why_whole
from pipetrain.stage.tensor_copies import is_dense, view_into

_Layer = Callable[[Any], Any]
_linear, _addmm = F.linear, torch.addmm


class SplitLinear(SplitFunction):
    """`x [..., K]` times a matrix, plus a bias `[N]` or None; the matrix is `weight [N, K]` transposed, or `weight [K, N]`.

    It runs torch's operations in torch's order, so values and gradients have the same bits. Under autocast, `cast` is the cast
    of `weight`, and `x` has its dtype; the product is of `x` and `cast`. W sums the gradients of `weight` in a microbatch in that
    dtype, as autograd would if autocast had made the cast.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool, cast: Tensor | None = None
    ) -> Tensor:
        factor = weight if cast is None else cast
        ctx.save_for_backward(x, factor)
        ctx.is_transposed = is_transposed
        ctx.bias_waits = bias is not None and bias.requires_grad and why_whole(bias) is None
        # As torch does, use one fused operation for some inputs and two operations for others: the results differ in the last bit.
        ctx.is_fused = bias is not None and (x.dim() == 2 or x.is_contiguous())
        matrix = factor.t() if is_transposed else factor
        if bias is not None and ctx.is_fused:
            product = _addmm(bias.to(x.dtype), _rows(x), matrix)
        else:
            product = torch.mm(_rows(x), matrix)
        # A layer may change the output in place, which autograd forbids for a view. So the output is a new tensor in the memory of the
        # product. (`out=` would make one too, but `recompute.selective` keeps no output of an operation that writes.)
        output = view_into(product.untyped_storage(), product.view(*x.shape[:-1], matrix.shape[1]))
        if bias is not None and not ctx.is_fused:
            output.add_(bias.to(x.dtype))
        return output

    @staticmethod
    def backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            matrix = factor.t() if ctx.is_transposed else factor
            rows = _rows(gradient)
            # As in torch's derivative of `mm`, the gradient of a column-major matrix is column-major.
            of_x = matrix.mm(rows.t()).t() if _is_column_major(_rows(x)) else rows.mm(matrix.t())
            of_x = of_x if x.dim() == 2 else of_x.reshape(x.shape)
        if ctx.needs_input_grad[2] and not ctx.bias_waits:
            of_bias = _gradient_of_bias(ctx, gradient)
        return of_x, None, of_bias, None, None

    @staticmethod
    def backward_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        of_bias = _gradient_of_bias(ctx, gradient) if ctx.bias_waits else None
        rows, matrix = _rows(gradient), factor.t() if ctx.is_transposed else factor
        of_matrix = rows.t().mm(_rows(x)).t() if _is_column_major(matrix) else _rows(x).t().mm(rows)
        return None, of_matrix.t() if ctx.is_transposed else of_matrix, of_bias, None, None


def _gradient_of_bias(ctx: Any, gradient: Tensor) -> Tensor:
    """The gradient of the bias, summed as autograd sums that of a broadcast tensor."""
    return (_rows(gradient) if ctx.is_fused else gradient).sum_to_size(gradient.shape[-1])


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


# In the place of torch's ----------------------------------------------------------------------------------------------


def _split_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    output = _split_product(input, weight, bias, is_transposed=True)
    return _linear(input, weight, bias) if output is None else output


def _split_addmm(*args: Any, **named: Any) -> Tensor:
    output = None
    if len(args) == 3 and not named:
        bias, x, weight = args
        output = _split_product(x, weight, bias, is_transposed=False)
    return _addmm(*args, **named) if output is None else output


def _split_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor | None:
    """The product by a split function. None: the caller runs torch's function; a warning says so if `weight` needs a gradient."""
    call = layer_in_force()
    if call is None or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    why = why_whole(weight) or _why_not(call, x, weight, bias, is_transposed=is_transposed)
    if why is not None:
        call.deferral.weights.tell(call.layer, why)
        return None
    cast = None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        # R uses the cast that F made. If there is none, as in an inspection before F, `cast` returns the weight, and `to` casts it here.
        cast = call.deferral.weights.cast(weight, make=call.is_forward).detach().to(dtype)
        x = x.to(dtype)
    output: Tensor = SplitLinear.apply(x, weight, bias, is_transposed, cast)
    return output


def _why_not(call: LayerCall, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> str | None:
    if torch._C._are_functorch_transforms_active():
        return "it runs under torch.func"
    is_cast, kind = torch.is_autocast_enabled(x.device.type), x.device.type
    if is_cast and not (weight.dtype is torch.float32 and torch.is_autocast_cache_enabled()):
        return "it runs under an autocast that does not keep a cast of its weight"
    if hooks_in_force() is not call.hooks:
        return "it runs under torch.utils.checkpoint, or other hooks for saved tensors"
    fits = type(x) is Tensor and is_dense(x) and x.dim() > 1
    fits = fits and (x.dtype is weight.dtype or (is_cast and x.dtype is torch.get_autocast_dtype(kind)))
    fits = fits and weight.dim() == 2 and weight.numel() > 0 and weight.is_contiguous() and weight.is_floating_point()
    if fits and bias is not None:
        fits = type(bias) in (Tensor, nn.Parameter) and bias.dtype is weight.dtype
        fits = fits and bias.shape == (weight.shape[0 if is_transposed else 1],)
    return None if fits else "it multiplies tensors that are not plain, or of different dtypes"


def hooks_in_force() -> Any:
    """The pack hook of the innermost saved-tensor hooks in force, or None. torch has no public function for it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


_lock = threading.Lock()
_num_inside = 0


@contextmanager
def linears_split(call: LayerCall | None) -> Iterator[None]:
    """In the block, our functions replace torch's for all threads, but split only calls of this thread."""
    global _num_inside
    token = IN_FORCE.set(call)
    with _lock:
        _num_inside += 1
        F.linear, torch.addmm = _split_linear, _split_addmm
    try:
        yield
    finally:
        IN_FORCE.reset(token)
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                F.linear, torch.addmm = _linear, _addmm


def split_layer(deferral: Deferral, number: int, layer: _Layer, *, is_forward: bool) -> _Layer:
    """A function that runs `layer`, or a copy of it, with split functions in F or R. `number` is its index in the stage."""
    if number in deferral.weights.whole:
        return layer

    def run(value: Any) -> Any:
        # A layer in `Stage.free` runs without hooks, and is not split.
        if (hooks := hooks_in_force()) is None:
            return layer(value)
        with linears_split(LayerCall(deferral, number, hooks, is_forward)):
            return layer(value)

    return run
