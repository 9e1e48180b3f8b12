"""A loss that a layer adds (`pipetrain.add_loss`) counts as if `loss_fn` had it, wherever the layer is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_rank import assert_equal_gradients
from parity_cases import Case, check_case, mean_square, rows, run_cases, set_dropout
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain import Pipeline, RecomputePolicy, add_loss, make_plan, reference_step
from pipetrain.schedule.policy import Mode


class Experts(nn.Module):
    """Two experts and a gate; the load balance of Switch Transformers (Fedus et al. 2022, section 2.2) is added; and left in `aux`, if
    it `leaves` it there."""

    def __init__(self, scale: float = 0.3, *, leaves: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = scale
        self.leaves = leaves
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        chosen = share.argmax(-1)
        taken = nn.functional.one_hot(chosen, 2).float().mean(0)
        aux = self.scale * 2 * (taken * share.mean(0)).sum()
        add_loss(aux)
        if self.leaves:
            self.aux = aux
        outputs = torch.stack([torch.tanh(expert(x)) for expert in self.experts], 1)
        rows = torch.arange(len(x))
        return x + outputs[rows, chosen] * share[rows, chosen, None]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)


class Twice(Inner):
    """Two losses, one of which it gives on as well."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        add_loss(hidden.square().mean())
        add_loss(hidden.abs().max())
        return torch.tanh(hidden)


class Cuts(Inner):
    """Its output needs no gradient, and what it adds does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        add_loss(hidden.square().mean())
        return hidden.detach().sign()


class InPlace(Inner):
    """Changes what it has added, after it was added."""

    def forward(self, x: Tensor) -> Any:
        aux = self.inner(x).mean()
        add_loss(aux)
        return x, aux.mul_(2)


class Joins(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        value, aux = given
        return value * (1 + aux)


class Double(Inner):
    """A loss of another dtype than `loss_fn`'s."""

    def forward(self, x: Tensor) -> Tensor:
        add_loss(self.inner.weight.double().square().mean())
        return self.inner(x)


class Sometimes(Inner):
    """Adds a loss for every second row count: in some microbatches and steps, and not in others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.inner(x)
        if int(self.calls) % 3 == 1:
            add_loss(hidden.square().mean())
        return hidden


class GradientInside(Inner):
    """Takes a gradient in its forward, so that it starts again in its first F; before that it has added a loss.

    `has_fallback`: it catches what gets it out, and so has ended when it starts again.
    """

    def __init__(self, *, has_fallback: bool) -> None:
        super().__init__()
        self.caught = BaseException if has_fallback else ()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        hidden = torch.tanh(inner)
        add_loss(hidden.square().mean())
        try:
            (slope,) = torch.autograd.grad(hidden.sum(), inner, create_graph=True)
        except self.caught:
            slope = torch.ones_like(x)
        return hidden * slope


class Checkpointed(Inner):
    """A method in which it adds a loss runs again in the backward, by torch."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        add_loss(hidden.square().mean())
        return hidden


def experts() -> list[nn.Module]:
    def dense() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))

    return [nn.Linear(8, 8), Experts(), dense(), Experts(0.7), dense(), Experts()]


def all_kinds() -> list[nn.Module]:
    return [Cuts(), Twice(), InPlace(), Joins(), Double(), Checkpointed(), Sometimes(), nn.Linear(8, 8)]


def case(layers: Callable[[], Sequence[nn.Module]] = experts, **options: Any) -> Case:
    return Case(f"{layers.__name__} {options}", layers, lambda: rows(9, 12, 9), options=options)


@pytest.mark.parametrize("layers", [experts, all_kinds])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("mode", list(Mode))
def test_on_one_rank(mode: Mode, num_stages: int, layers: Callable[[], Sequence[nn.Module]]) -> None:
    check_case(case(layers, recompute=mode, stages_per_rank=num_stages))


@pytest.mark.parametrize(
    "options", [{"segments": 3}, {"segments": 2, "last_stage": "always"}, {"selective": ("addmm",)}], ids=str
)
def test_recomputed_in_parts_and_selectively(options: dict[str, Any]) -> None:
    """Scale multiplies the gradient and not the loss."""
    check_case(replace(case(recompute=RecomputePolicy("inline", **options), stages_per_rank=1), scale=4.0))


@pytest.mark.parametrize("has_fallback", [False, True])
def test_a_layer_that_starts_again_adds_once(has_fallback: bool) -> None:
    policy = RecomputePolicy("inline", last_stage="always", verify="off")  # nothing is known of it before
    with pytest.warns(UserWarning, match="takes a gradient inside"):
        check_case(
            case(
                lambda: [nn.Linear(8, 8), GradientInside(has_fallback=has_fallback), nn.Linear(8, 8)], recompute=policy
            )
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of itself
def test_a_compiled_layer_adds_too() -> None:
    def layers() -> list[nn.Module]:
        experts = Twice()
        experts.compile(backend="eager")
        return [nn.Linear(8, 8), experts, nn.Linear(8, 8)]

    check_case(case(layers, recompute=RecomputePolicy("inline", last_stage="always")))


def test_a_later_change_in_place_does_not_count() -> None:
    """The plain value: what the layer's own tensor was in the call."""
    ((inputs, targets),) = rows(4)
    layers = [InPlace(), Joins()]
    found = reference_step(layers, mean_square, inputs, targets, num_microbatches=1)
    value, doubled = layers[0](inputs)
    assert torch.equal(found, (mean_square(layers[1]((value, doubled)), targets) + doubled / 2).detach())


def some_on_ranks(num_ranks: int) -> list[Case]:
    v_shaped = make_plan(6, num_ranks=num_ranks, num_microbatches=4, stages_per_rank=2, placement="v")
    return [
        case(recompute="overlap"),
        case(schedule="1f1b", recompute="never"),
        case(schedule="interleaved", stages_per_rank=2, recompute="inline"),
        case(schedule="zbv", plan=v_shaped),
        case(all_kinds),
    ]


def test_over_ranks() -> None:
    assert run_ranks(2, run_cases, some_on_ranks, 2) == [5] * 2


def of_two_replicas() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*experts())
    reference = copy.deepcopy(model)
    ((inputs, targets),) = rows(12)
    with Pipeline(model, mean_square, num_microbatches=2, num_replicas=2) as pipeline:
        loss = pipeline.step(pipeline.own_rows(inputs), pipeline.own_rows(targets))
        expected = reference_step(reference, mean_square, inputs, targets, num_microbatches=4)
        theirs = dict(reference.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
        return loss, expected


def test_over_replicas() -> None:
    for loss, expected in run_ranks(2, of_two_replicas):
        assert torch.equal(loss, expected)


def by_hand(model: nn.Sequential, inputs: Tensor, targets: Tensor, weights: Sequence[float]) -> Tensor:
    """The loop that reads `aux` of each layer, as one process may."""
    for layer in model:
        if isinstance(layer, Experts):
            layer.leaves = True
    losses = []
    for x, y, weight in zip(inputs.tensor_split(len(weights)), targets.tensor_split(len(weights)), weights):
        loss = mean_square(model(x), y)
        losses.append((loss + (model[1].aux + model[3].aux + model[5].aux)) * weight)
        if losses[-1].requires_grad:
            losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


def without_dropout() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    layers = experts()
    model = nn.Sequential(*layers)
    set_dropout(model, 0.0)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize(("reduction", "weights"), [("mean", (0.4, 0.3, 0.3)), ("sum", (1.0, 1.0, 1.0))])
def test_the_loop_by_hand(reduction: str, weights: Sequence[float]) -> None:
    model, plain = without_dropout()
    ((inputs, targets),) = rows(10)
    wanted = by_hand(plain, inputs, targets, weights)
    again = copy.deepcopy(model)
    options = {"num_microbatches": 3, "loss_reduction": reduction}
    assert torch.equal(reference_step(again, mean_square, inputs, targets, **options), wanted)  # type: ignore[arg-type]
    with Pipeline(model, mean_square, stages_per_rank=3, **options) as pipeline:  # type: ignore[arg-type]
        pipeline._runner._loss_check = None  # a mean, taken as a sum on purpose
        assert torch.equal(pipeline.step(inputs, targets), wanted)
        assert_equal_gradients(model, plain)
        assert_equal_gradients(again, plain)


@pytest.mark.parametrize("segments", [1, 2])
def test_evaluate_adds_it_and_a_call_does_not(segments: int) -> None:
    model, plain = without_dropout()
    ((inputs, targets),) = rows(10)
    policy = RecomputePolicy("inline", segments=segments)
    with (
        torch.no_grad(),
        Pipeline(model, mean_square, num_microbatches=3, stages_per_rank=2, recompute=policy) as pipeline,
    ):
        assert torch.equal(pipeline.evaluate(inputs, targets), by_hand(plain, inputs, targets, (0.4, 0.3, 0.3)))
        assert torch.equal(pipeline(inputs[:1]), plain(inputs[:1]))


def test_the_first_step_still_sees_a_loss_that_is_a_sum() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    ((inputs, targets),) = rows(8)
    with (
        Pipeline(experts(), total, num_microbatches=4) as pipeline,
        pytest.raises(ValueError, match="is a sum over rows"),
    ):
        pipeline.step(inputs, targets)


def test_a_loss_that_is_not_finite_is_found_in_its_layer() -> None:
    layers = experts()
    assert isinstance(layers[3], Experts)
    layers[3].scale = float("inf")
    ((inputs, targets),) = rows(8)
    with Pipeline(layers, mean_square, num_microbatches=2, stages_per_rank=3) as pipeline:
        with pytest.raises(Exception, match="loss of microbatch 0 in step 1 is not finite"):
            pipeline.step(inputs, targets)
        finding = pipeline.find_not_finite(inputs, targets).finding
        assert finding is not None
        assert (finding.layer, finding.microbatch) == (3, 0)


# What is refused, and plain torch -------------------------------------------------------------------------------------


class Adds(Inner):
    """Adds what `make` gives."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        add_loss(self.make(hidden))
        return hidden


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda hidden: hidden.mean(1), r"torch\.float32 of shape \[4\]: give a 0-dim floating-point tensor"),
        (lambda hidden: hidden.mean().item(), "was given a float: give a 0-dim"),
        (lambda hidden: hidden.argmax(), r"torch\.int64 of shape \[\]"),
        (lambda hidden: hidden.mean().detach(), "needs no gradient: detach"),
    ],
)
def test_other_tensors_are_refused(make: Callable[[Tensor], Any], says: str) -> None:
    ((inputs, targets),) = rows(8)
    with Pipeline([nn.Linear(8, 8), Adds(make)], mean_square, num_microbatches=2) as pipeline:
        with pytest.raises(ValueError, match=says) as raised:
            pipeline.step(inputs, targets)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=says):
        reference_step([Adds(make)], mean_square, inputs, targets, num_microbatches=2)


def test_outside_of_a_forward_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"outside of a forward: call it in the forward of a layer"):
        add_loss(torch.ones((), requires_grad=True))


def test_in_plain_torch_it_does_nothing() -> None:
    model, plain = nn.Sequential(Checkpointed(), Experts()), nn.Sequential(Checkpointed(), Experts())
    plain.load_state_dict(model.state_dict())
    ((inputs, targets),) = rows(8)
    mean_square(model(inputs), targets).backward()
    for module in plain.modules():
        if isinstance(module, Experts):
            module.scale = 0.0
    mean_square(plain(inputs), targets).backward()
    assert_equal_gradients(model, plain)
