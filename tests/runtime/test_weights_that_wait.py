"""A stage holds what W needs from I to W and no longer, and says what is missing or was changed."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_rank import make_stages, run_step, twins
from rounding import rounding
from torch import Tensor, nn
from waiting_layers import WIDTH, M, Scale, autocast, linear, mean_square, rows

from pipetrain.runtime.reference import reference_step
from pipetrain.stage.errors import SavedTensorChanged
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.split_backward import accumulate
from pipetrain.stage.split_linear import linears_split
from pipetrain.stage.stage import Stage


class PathByData(nn.Module):
    """Reads its weight in another way when the input says so, which its first does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output + self.inner.weight.sum() if bool(x[0, 0] > 100) else output


def one_stage(*layers: nn.Module) -> Stage:
    (stage,) = make_stages(layers, [len(layers)], mean_square, ActivationMeter())
    return stage


def test_only_what_w_needs_is_held_and_only_until_then() -> None:
    """Of a set of 4 tensors (the batch, two inputs of linear layers, the loss's) I leaves the inputs and what W multiplies them by."""
    model = [linear(), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)]
    stage, meter = one_stage(*model), ActivationMeter()
    meter.exclude(parameter for layer in model for parameter in layer.parameters())
    stage.meter = stage.weights.meter = meter
    inputs, targets = rows()
    one = inputs.nbytes
    seen: list[int] = []
    run_w = stage.backward_weights

    def watched(microbatch: int) -> None:
        seen.append(meter.current_bytes)
        run_w(microbatch)
        seen.append(meter.current_bytes)

    stage.backward_weights = watched  # type: ignore[method-assign]
    run_step([stage], inputs, targets, 1, keep=lambda _: True, waiting=0)
    assert seen == [4 * one, 0]
    assert stage.set_bytes[0] >= 4 * one


def test_casts_are_no_part_of_a_set() -> None:
    """Under autocast x and the gradient wait in half the bytes, and the weight's cast is the step's."""
    sizes = {}
    for name, around in (("full", nullcontext), ("autocast", autocast)):
        stage = one_stage(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        stage.meter.exclude(parameter for layer in stage.layers for parameter in layer.parameters())
        with around(), warnings.catch_warnings():
            warnings.simplefilter("error")
            run_step([stage], *rows(M * 2, 64), M, keep=lambda _: False, waiting=1)
        sizes[name] = stage.set_bytes[0]
    assert sizes["autocast"] <= sizes["full"]


def test_a_step_that_fails_before_its_w() -> None:
    """W is missed at the end of the step, and dropped with the step."""
    stage = one_stage(linear())
    with pytest.raises(ZeroDivisionError):
        run_step([stage], *rows(), M, keep=lambda _: True, waiting=M, before_w=lambda: 1 // 0)
    assert stage.meter.current_bytes > 0
    with pytest.raises(AssertionError, match="stage 0 has had no W of microbatches 0, 1, 2, 3"):
        stage.end_step()
    stage.drop()
    assert stage.meter.current_bytes == 0
    stage.end_step()


def test_what_waits_may_not_change() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(torch.tanh(x))
            return kept[-1]

    def change() -> None:
        kept[0].data.view(-1)[:1]
        kept[0].detach().mul_(2)

    stage = one_stage(linear(), Keeps(), linear())
    with pytest.raises(
        SavedTensorChanged, match=r"layer 2 \(Linear\): a tensor \[2, 6\] that W needs was changed in place after I"
    ):
        run_step([stage], *rows(), M, keep=lambda _: True, waiting=M, before_w=change)


def test_another_path_later_gives_the_whole_gradient_all_the_same() -> None:
    """The weight is read in another way by a microbatch that was not the first: at most the order of a sum differs."""
    inputs, targets = rows()
    inputs[-2] = 1000.0
    torch.manual_seed(0)
    model, reference = twins([PathByData()])
    run_step(
        make_stages(list(model), [1], mean_square, ActivationMeter()),
        inputs,
        targets,
        M,
        keep=lambda _: True,
        waiting=M,
    )
    reference_step(reference, mean_square, inputs, targets, num_microbatches=M)
    close = rounding(torch.float32, terms=M + 1)  # one gradient per microbatch, and that of the other way
    torch.testing.assert_close(*(next(one.parameters()).grad for one in (model, reference)), rtol=close, atol=0)


def test_nothing_of_torch_is_replaced_outside_of_a_layer() -> None:
    linear_of_torch, addmm = F.linear, torch.addmm
    inside: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.append(F.linear is linear_of_torch)
            return x

    for waiting in (None, 0):
        run_step([one_stage(Looks(), linear())], *rows(), M, keep=lambda _: False, waiting=waiting)
    assert inside == [True] * 2 * M + [False] * 2 * M
    with linears_split(None), linears_split(None):
        assert F.linear is not linear_of_torch
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).grad_fn is None
    assert (F.linear, torch.addmm) == (linear_of_torch, addmm)


def test_a_gradient_is_added_as_autograd_adds_it() -> None:
    """The first becomes `.grad`, with the strides and the dtype of the parameter."""
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    gradient = torch.ones(3, 2).t()
    for count in (1, 2):
        with torch.no_grad():
            accumulate(parameter, gradient)
        assert parameter.grad is not None
        assert (parameter.grad.dtype, parameter.grad.stride()) == (torch.bfloat16, (3, 1))
        assert torch.equal(parameter.grad, torch.full((2, 3), float(count), dtype=torch.bfloat16))


def test_a_function_of_one_s_own_may_have_a_third_kernel_for_the_whole() -> None:
    calls: list[str] = []

    class Kernels(Scale):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            calls.append("whole")
            return gradient, (gradient * ctx.saved_tensors[0]).sum(0)

        @staticmethod
        def backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            calls.append("input")
            return Scale.backward_input(ctx, gradient)

        @staticmethod
        def backward_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            calls.append("weight")
            return Scale.backward_weight(ctx, gradient)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = Kernels.apply(x, self.weight)
            return output

    for waiting, expected in ((None, ["whole"] * 2), (2, ["input"] * 2 + ["weight"] * 2)):
        calls.clear()
        run_step([one_stage(linear(), Layer())], *rows(), 2, keep=lambda _: True, waiting=waiting)
        assert calls == expected
