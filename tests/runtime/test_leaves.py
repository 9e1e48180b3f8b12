"""Whose gradients a stage makes: its own parameters' as in the plain loop; any other leaf is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_rank import make_stages, run_step
from parity_cases import Case, check_case, mean_square, rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.meter import ActivationMeter

MODES: dict[str, Any] = {"overlap": RecomputePolicy(last_stage="always"), "never": "never"}
TWO_STAGES: dict[str, Any] = {"num_stages": 2, "stages_per_rank": 2, "schedule": "interleaved"}
both_modes = pytest.mark.parametrize("mode", list(MODES))


class Scaled(nn.Linear):
    """Times what `scale` gives."""

    def __init__(self, scale: Callable[[], Tensor]) -> None:
        super().__init__(8, 8)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale()


class HasAttribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.constants = {"scale": torch.ones(8, requires_grad=True)}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.constants["scale"]


class InCheckpoint(HasAttribute):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.variable = "no leaf"  # an attribute that accumulating nodes have too
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradients[0] * y, (gradients[0] * x).sum(0)


class InFunction(HasAttribute):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Times.apply(nn.Linear.forward(self, x), self.constants["scale"])  # type: ignore[no-untyped-call]
        return output


class HasBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(8, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class MakesParameter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(8))
        return super().forward(x) * self.scale


class LeavesLoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.aux = [hidden.square().mean()]
        return hidden


class LeavesOutput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = super().forward(x)
        return self.hidden.tanh()


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(2, 8, requires_grad=True)]

    def forward(self, _: Tensor) -> Tensor:
        return self.held[0]


def in_global(x: Tensor) -> Tensor:
    return x * GLOBAL


GLOBAL = torch.ones(8, requires_grad=True)


class UsesGlobal(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return in_global(super().forward(x))


def weighted(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (weight * (output - target) ** 2).mean()


def of_another_stage() -> Sequence[nn.Module]:
    first = nn.Linear(8, 8)
    return [first, Scaled(lambda: first.weight[0])]


def with_last(layer: Callable[[], nn.Module]) -> Sequence[nn.Module]:
    return [nn.Linear(8, 8), layer()]


NO_PARAMETER = r"uses a tensor \[8\] that requires a gradient and is no parameter of its stage"
REFUSED: dict[str, tuple[Callable[[], Sequence[nn.Module]], str]] = {
    "a weight of another stage": (of_another_stage, r"^layer 1 \(Scaled\) uses 0.weight, which is of another stage: .*Choose a balance"),
    "a constant in a closure": (lambda: with_last(lambda: Scaled(functools.partial(torch.mul, GLOBAL, 2))), rf"^layer 1 \(Scaled\) {NO_PARAMETER} \(scale\[0\] of Scaled\).*make it an nn.Parameter"),
    "an attribute": (lambda: with_last(HasAttribute), rf"^layer 1 \(HasAttribute\) {NO_PARAMETER} \(constants\['scale'\] of HasAttribute\)"),
    "inside a checkpoint": (lambda: with_last(InCheckpoint), rf"^layer 1 \(InCheckpoint\) {NO_PARAMETER} \(constants"),
    "inside a Function": (lambda: with_last(InFunction), rf"^layer 1 \(InFunction\) {NO_PARAMETER} \(constants"),
    "a global": (lambda: with_last(lambda: UsesGlobal(8, 8)), rf"^layer 1 \(UsesGlobal\) {NO_PARAMETER} \(in_global.GLOBAL of UsesGlobal\)"),
    "a buffer": (lambda: with_last(HasBuffer), rf"^layer 1 \(HasBuffer\) {NO_PARAMETER} \(buffer 1.scale\)"),
    "made in the first forward": (lambda: with_last(lambda: MakesParameter(8, 8)), r"^layer 1 \(MakesParameter\) makes the parameter 1.scale in its forward.*in __init__"),
    "a loss in an attribute": (lambda: with_last(lambda: LeavesLoss(8, 8)), r"^layer 1 \(LeavesLoss\) leaves in its attribute aux a tensor whose graph .*add_loss"),
    "returned as it is": (lambda: with_last(Returns), r"^layer 1 \(Returns\) uses a tensor \[2, 8\].*\(held\[0\] of Returns\)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*changes its attribute")
@both_modes
@pytest.mark.parametrize("name", list(REFUSED))
def test_a_leaf_that_is_no_parameter_of_the_stage(name: str, mode: str) -> None:
    make, message = REFUSED[name]
    pipeline = Pipeline(make(), mean_square, num_microbatches=4, balance=[1, 1], recompute=MODES[mode], **TWO_STAGES)
    with pytest.raises(ValueError, match=message):
        pipeline.step(*rows(8)[0])


def regulariser(output: Tensor, target: Tensor, layers: Sequence[nn.Module] = ()) -> Tensor:
    return mean_square(output, target) + sum(p.square().sum() for layer in layers for p in layer.parameters())


@pytest.mark.parametrize("name", ["regulariser", "closure", "partial"])
def test_a_loss_that_uses_what_the_last_stage_does_not_have(name: str) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    weight = torch.ones(8, requires_grad=True)
    loss, message = {
        "regulariser": (lambda *given: regulariser(*given, layers), r"^loss_fn uses 0.(weight|bias), which is of another stage.*compute that term in a layer of its stage"),
        "closure": (lambda *given: weighted(*given, weight), rf"^loss_fn {NO_PARAMETER} \(weight of"),
        "partial": (functools.partial(weighted, weight=weight), rf"^loss_fn {NO_PARAMETER} \(\['weight'\] of partial\)"),
    }[name]  # fmt: skip
    pipeline = Pipeline(layers, loss, num_microbatches=4, **TWO_STAGES)
    with pytest.raises(ValueError, match=message):
        pipeline.step(*rows(8)[0])


# What is nobody's, or the stage's own ---------------------------------------------------------------------------------


class Force(nn.Linear):
    """Its leaf is made in the forward, and gone after it."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_(True)
        energy = super().forward(place).square().sum()
        return x + torch.autograd.grad(energy, place, create_graph=True)[0]


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach().requires_grad_()


class Tied(nn.Linear):
    """Uses the weight of a layer before it, which no registration shows."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.first: list[nn.Linear] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.first[0].weight


def tied_in_one_stage() -> Sequence[nn.Module]:
    middle, last = nn.Linear(8, 8), Tied()
    last.first.append(middle)
    return [nn.Linear(8, 8), middle, last]


RIGHT: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "a leaf for a force": lambda: [nn.Linear(8, 8), Force(8, 8), nn.Linear(8, 8)],
    "a leaf made and used": lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Sequential(Detached(8, 8), nn.Tanh())],
    "a leaf made and returned": lambda: [nn.Linear(8, 8), Detached(8, 8), nn.Linear(8, 8)],
    "tied in one stage": tied_in_one_stage,
    "left in an attribute, and used": lambda: [nn.Linear(8, 8), nn.Linear(8, 8), LeavesOutput(8, 8)],
    "parametrised": lambda: [*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3))],
}


@pytest.mark.filterwarnings("ignore:.*takes a gradient inside its forward", "ignore:.*changes its attribute")
@both_modes
@pytest.mark.parametrize("name", list(RIGHT))
def test_leaves_that_are_as_in_the_plain_loop(name: str, mode: str) -> None:
    options = {**TWO_STAGES, "balance": [1, 2], "recompute": MODES[mode]}
    check_case(Case(name, RIGHT[name], lambda: rows(8, 9), options=options))


def test_a_loss_reads_what_its_stage_leaves_and_its_weights() -> None:
    last = LeavesLoss(8, 8)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + last.aux[0] + last.weight.square().sum()

    layers = [nn.Linear(8, 8), nn.Linear(8, 8), last]
    with Pipeline(layers, loss, num_microbatches=4, recompute="never", **TWO_STAGES) as pipeline:
        pipeline.step(*rows(8)[0])


@pytest.mark.filterwarnings("ignore:.*changes its attribute", "ignore:.*weight_norm.*deprecated")
@both_modes
def test_weights_that_torch_leaves_in_attributes(mode: str) -> None:
    layers = [
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        nn.utils.weight_norm(nn.Linear(8, 8)),
        prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
    ]
    with Pipeline(layers, mean_square, num_microbatches=4, recompute=MODES[mode], **TWO_STAGES) as pipeline:
        pipeline.step(*rows(8)[0])


def test_sharded_parameters_are_gathered_into_leaves_of_their_own() -> None:
    from torch.distributed.fsdp import fully_shard  # half a second

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        with Pipeline(layers, mean_square, num_microbatches=4, device="cpu", recompute="never") as pipeline:
            pipeline.step(*rows(8)[0])
            assert all(parameter.grad is not None for parameter in pipeline.parameters())
    finally:
        dist.destroy_process_group()


def test_only_the_first_forward_of_its_kind_is_walked() -> None:
    class Breaks(nn.Dropout):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise KeyError
            return super().forward(x)

    layers = [nn.Linear(8, 8), Breaks()]
    (stage,) = make_stages(layers, [2], mean_square, ActivationMeter())
    walks: list[int] = []
    over = stage._leaves.over
    stage._leaves.over = lambda on_layer: (walks.append(1), over(on_layer))[1]  # type: ignore[assignment, func-returns-value]

    def is_walked(num_rows: int) -> bool:
        walks.clear()
        run_step([stage], torch.zeros(num_rows, 8), torch.zeros(num_rows, 8), 1)
        return bool(walks)

    assert is_walked(4)
    assert not is_walked(4)
    assert is_walked(5)
    layers[1].eval()
    assert is_walked(5)
    layers[1].broken = True
    with pytest.raises(KeyError):
        is_walked(6)
    stage.drop()
    layers[1].broken = False
    assert is_walked(6), "a forward that failed has not been walked"
