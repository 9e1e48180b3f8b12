"""What a pipeline must equal bit for bit: a case names a model, its batches and the pipeline's arguments.

A rank runs a whole table of cases one after the other, so that a test starts its processes once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks import NEVER_SECONDS
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

Batch = tuple[Any, Any]


def mean_square(output: Any, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


@dataclass(frozen=True)
class Case:
    """`layers()` and `batches()` give the same on every rank. A step is made with each batch, the last one with clipping."""

    name: str
    layers: Callable[[], Sequence[nn.Module]]
    batches: Callable[[], Sequence[Batch]]
    loss: Callable[[Any, Any], Tensor] = mean_square
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    before_step: Callable[[int, nn.Sequential], None] = lambda step, model: None


def rows(*counts: int, width: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(count, width, generator=generator), torch.randn(count, width, generator=generator))
        for count in counts
    ]


def run_cases(make_cases: Callable[..., Sequence[Case]], *args: Any) -> int:
    """On every rank: all cases; a failure names its case. Returns how many there were."""
    cases = make_cases(*args)
    for case in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                check_case(case)
        except BaseException as error:
            error.add_note(f"in the case {case.name!r}")
            raise
    return len(cases)


def check_case(case: Case) -> None:
    """Loss, gradients, buffers, norm of clipping: equal to `reference_step`, and nothing is held when a step ends."""
    torch.manual_seed(0)
    model = nn.Sequential(*case.layers())
    reference = copy.deepcopy(model)
    options = {"num_microbatches": 4, "timeout_seconds": NEVER_SECONDS, **case.options}
    m, count_fn = options["num_microbatches"], options.get("count_fn")
    with Pipeline(model, case.loss, **options) as pipeline:
        batches = case.batches()
        for step, (inputs, targets) in enumerate(batches):
            case.before_step(step, model)
            case.before_step(step, reference)
            pipeline.zero_grad()
            reference.zero_grad()
            with case.autocast():
                loss = pipeline.step(
                    copy.deepcopy(inputs) if pipeline.is_first else None,
                    targets if pipeline.is_last else None,
                    scale=case.scale,
                )
                expected = _reference(case, reference, copy.deepcopy(inputs), targets, m, step, count_fn)
            assert loss.dtype == expected.dtype, f"loss is {loss.dtype}, expected {expected.dtype}"
            assert torch.equal(loss, expected), f"step {step}: loss {loss}, expected {expected}"
            assert pipeline._parts.meter.current_bytes == 0, (
                f"{pipeline._parts.meter.current_bytes} bytes left after step {step}"
            )
            assert_same_gradients(pipeline, reference)
        norm = pipeline.clip_grad_norm_(0.05)
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        assert torch.equal(norm, wanted), f"norm {norm}, expected {wanted}"
        assert_same_gradients(pipeline, reference)
        assert_same_tensors(pipeline.state_dict(), reference.state_dict())


def _reference(case: Case, model: nn.Sequential, inputs: Any, targets: Any, m: int, step: int, count_fn: Any) -> Tensor:
    loss = reference_step(model, case.loss, inputs, targets, num_microbatches=m, step=step, count_fn=count_fn)
    if case.scale != 1.0:
        # A power of two: scaled gradients are the gradients scaled, without a rounding.
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(case.scale)
    return loss


def assert_same_gradients(pipeline: Pipeline, reference: nn.Sequential) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in pipeline.named_parameters():
        ours, theirs = parameter.grad, expected[name].grad
        assert (ours is None) == (theirs is None), f"{name}.grad is {ours}, expected {theirs}"
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs), f"{name}.grad differs by up to {(ours - theirs).abs().max()}"


def assert_same_tensors(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), f"{name} differs"


# Models: six layers each, so that four stages can be cut unevenly -----------------------------------------------------


class Transposed(nn.Module):
    """The same values with the strides of a transposed matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).t().contiguous().t()


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).to(memory_format=torch.channels_last)


def plain(dropout: float) -> list[nn.Module]:
    first = nn.Sequential(nn.Linear(8, 12), nn.Dropout(dropout))
    return [first, nn.GELU(), nn.Linear(12, 12), nn.Dropout(dropout), nn.LayerNorm(12), nn.Linear(12, 8)]


def transposed(dropout: float) -> list[nn.Module]:
    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), Transposed())

    return [mixed(), mixed(), mixed(), mixed(), mixed(), nn.Linear(8, 8)]


def channels_last(dropout: float) -> list[nn.Module]:
    def mixed(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), nn.Dropout(dropout), ChannelsLast())

    last = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
    return [mixed(2), mixed(3), mixed(3), nn.Conv2d(3, 3, 1), mixed(3), last]


def set_dropout(model: nn.Module, p: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p


def images(*counts: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(count, 2, 4, 4, generator=generator), torch.randn(count, 8, generator=generator))
        for count in counts
    ]
