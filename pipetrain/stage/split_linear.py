"""Linear layers whose backward comes in two halves, in the place of torch's while a layer runs.

`nn.Linear`, `nn.MultiheadAttention` and models of Hugging Face call `torch.nn.functional.linear` or `torch.addmm` by that name when
they run, so for so long a function of ours stands there. (A `TorchFunctionMode` would see `x @ weight`, too; it would cost
1 us for every operation and attribute of every layer, and would not see into `multi_head_attention_forward`.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.stage.split_function import SplitFunction, User, user_in_force, why_whole

_linear, _addmm = F.linear, torch.addmm


class SplitLinear(SplitFunction):
    """`x [..., K]` times a matrix, plus a bias `[N]` or None; the matrix is `weight [N, K]` transposed, or `weight [K, N]`.

    Torch's operations in torch's order, so that values and gradients have the same bits. The gradient of the bias is a sum
    over rows, next to nothing, and stays in I: shared biases are autograd's own matter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_transposed = is_transposed
        # What torch does in one operation and what in two differs in the last bit.
        ctx.is_fused = bias is not None and (x.dim() == 2 or (x.dim() == 3 and x.is_contiguous()))
        matrix = weight.t() if is_transposed else weight
        # The output may be changed in place, which autograd allows of no view that a function returns.
        output = x.new_empty(*x.shape[:-1], matrix.shape[1])
        if bias is not None and ctx.is_fused:
            _addmm(bias, _rows(x), matrix, out=_rows(output))
        else:
            torch.mm(_rows(x), matrix, out=_rows(output))
        return output if bias is None or ctx.is_fused else output.add_(bias)

    @staticmethod
    def backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _gradient_of_rows(_rows(x), _rows(gradient), weight.t() if ctx.is_transposed else weight).view(
                x.shape
            )
        # Autograd sums it over the rows.
        of_bias = (_rows(gradient) if ctx.is_fused else gradient) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None

    @staticmethod
    def backward_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.is_transposed:
            return None, _gradient_of_matrix(_rows(x), _rows(gradient), weight.t()).t(), None, None
        return None, _gradient_of_matrix(_rows(x), _rows(gradient), weight), None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _gradient_of_rows(rows: Tensor, gradient: Tensor, matrix: Tensor) -> Tensor:
    """As torch's derivative of `mm` has it: with the strides of what it belongs to."""
    if _is_column_major(rows):
        return matrix.mm(gradient.t()).t()
    return gradient.mm(matrix.t())


def _gradient_of_matrix(rows: Tensor, gradient: Tensor, matrix: Tensor) -> Tensor:
    if _is_column_major(matrix):
        return gradient.t().mm(rows).t()
    return rows.t().mm(gradient)


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


# In the place of torch's ----------------------------------------------------------------------------------------------


def _split_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    if torch.compiler.is_compiling() or not _may_split(
        user_in_force(), input, weight, bias, num_outputs=weight.shape[0]
    ):
        return _linear(input, weight, bias)
    output: Tensor = SplitLinear.apply(input, weight, bias, True)
    return output


def _split_addmm(*args: Any, **named: Any) -> Tensor:
    if not torch.compiler.is_compiling() and len(args) == 3 and not named:
        bias, x, weight = args
        if _may_split(user_in_force(), x, weight, bias, num_outputs=weight.shape[-1]):
            output: Tensor = SplitLinear.apply(x, weight, bias, False)
            return output
    return _addmm(*args, **named)


def _may_split(user: User | None, x: Tensor, weight: Tensor, bias: Tensor | None, *, num_outputs: int) -> bool:
    """Whether this product is one of ours; where its weight learns, and it is not, the user is told why."""
    if user is None or not weight.requires_grad or not torch.is_grad_enabled():
        return False
    why = why_whole(weight) or _why_not_here(user, x) or _why_not_this(x, weight, bias, num_outputs)
    if why is not None:
        user.tell(why)
    return why is None


def _why_not_here(user: User, x: Tensor) -> str | None:
    if torch._C._are_functorch_transforms_active():
        return "it runs under torch.func"
    if torch.is_autocast_enabled(x.device.type):
        return "it runs under autocast"
    if hooks_in_force() is not user.hooks:
        return "it runs under torch.utils.checkpoint, or other hooks for saved tensors"
    return None


def _why_not_this(x: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int) -> str | None:
    is_plain = type(x) is Tensor and x.layout is torch.strided and not x.is_nested and x.is_floating_point()
    fits = (
        is_plain
        and x.dim() > 1
        and weight.dim() == 2
        and weight.numel() > 0
        and weight.is_contiguous()
        and x.dtype is weight.dtype
    )
    if fits and bias is not None:
        fits = type(bias) in (Tensor, nn.Parameter) and bias.shape == (num_outputs,) and bias.dtype is weight.dtype
    return None if fits else "it multiplies other than plain tensors of one dtype"


def hooks_in_force() -> Any:
    """What is called for each tensor that is saved now; None: nothing. It has no public name: the one in front alone is asked."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


_lock = threading.Lock()
_num_inside = 0


@contextmanager
def linears_split() -> Iterator[None]:
    """Within it, on any thread: only what runs as a `User` notices."""
    global _num_inside
    with _lock:
        _num_inside += 1
        F.linear, torch.addmm = _split_linear, _split_addmm
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                F.linear, torch.addmm = _linear, _addmm
