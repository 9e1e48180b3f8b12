"""The museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_cases import Case, check_case, rows, run_cases
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.runtime.cut import Whole
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.slots import LayerRefused, RecomputeMismatch

ALWAYS = RecomputePolicy(last_stage="always")


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


class AddPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0]) + value[1]


def test_reference_takes_whole_inputs() -> None:
    """Symptom: `reference_step` refused inputs in which a tensor was wrapped in Whole: "1 rows, the tensors before 2".

    Cause: it counted the rows of each microbatch, where Whole has been unwrapped, and not those of the batch.
    """
    inputs, targets = batch()
    model = nn.Sequential(AddPositions())
    loss = reference_step(model, mean_square, (inputs, Whole(torch.ones(1, 4))), targets, num_microbatches=3)
    expected = mean_square(model((inputs, torch.ones(1, 4))), targets)
    assert torch.allclose(loss, expected)


def step_with_a_frozen_first_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    inputs, targets = batch()
    options = {"schedule": "interleaved", "stages_per_rank": 2, "timeout_seconds": 10.0}
    with Pipeline(model, mean_square, num_microbatches=3, **options) as pipeline:
        for step, frozen in enumerate((False, True, False)):
            for layers in (model, reference):
                layers[1].requires_grad_(not frozen)
            loss = pipeline.step(inputs, targets)
            assert torch.equal(
                loss, reference_step(reference, mean_square, inputs, targets, num_microbatches=3, step=step)
            )


def test_frozen_first_stage_with_several_stages_per_rank() -> None:
    """Symptom: with two stages per rank and stage 0 frozen, rank 1 waited in 1RECV_B0 until the time-out.

    Cause: which stage is the first that needs a gradient was handed down the chain of ranks, so rank 0, which holds
    stage 2, never heard that stage 1 on rank 1 does, and sent it no gradients.
    """
    run_ranks(2, step_with_a_frozen_first_stage)


def bad_batch_after_unfreezing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    inputs, targets = batch()
    with Pipeline(model, mean_square, num_microbatches=3, timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(inputs, targets)
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match="num_microbatches=3"):
            pipeline.step(inputs[:2], targets[:2])
        pipeline.step(inputs, targets)
        assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_bad_batch_after_unfreezing() -> None:
    """Symptom: a layer was unfrozen, a batch was refused, and the next good step failed: it sent a gradient with no form.

    Cause: the refused call was taken for the one in which the ranks tell each other what needs a gradient now.
    """
    run_ranks(2, bad_batch_after_unfreezing)


def test_checkpoint_inside_a_layer_is_not_taken_for_a_leak() -> None:
    """Symptom: a layer with `torch.utils.checkpoint` inside warned that it "holds 5056 bytes outside of its saved tensors".

    Cause: those are the generator states that checkpoint keeps; the limit for what is worth a warning was 4096 bytes.
    """

    class Checkpointed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return output

    with Pipeline([Checkpointed(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(*batch())


def test_recompute_that_saves_less_names_its_own_layer() -> None:
    """Symptom: a layer saved a tensor less in R than in F, and the error named the layer after it.

    Cause: what the next layer saved was compared with what had not come; the count at the end of a layer was not.
    """

    calls: list[int] = []  # not in the layer: there R would put it back as it was

    class SavesOnce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x.exp() if len(calls) > 3 else x.exp().sin()

    layers = [nn.Linear(4, 4), SavesOnce(), nn.Linear(4, 4)]
    message = r"layer 1 \(SavesOnce\): the recompute ended without saving"
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=ALWAYS)
    with pytest.raises(RecomputeMismatch, match=message):
        pipeline.step(*batch())


def step_with_a_schedule_for_a_frozen_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3, first_backward=1)
    with Pipeline(model, mean_square, num_microbatches=3, schedule=schedule, timeout_seconds=NEVER_SECONDS) as pipeline:
        assert pipeline.schedule == schedule
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


def test_a_schedule_made_for_a_frozen_first_stage() -> None:
    """Symptom: a schedule made with first_backward=1 was refused, with the advice to make one with first_backward=0.

    Cause: the schedules were first checked as if every stage needed gradients.
    """
    run_ranks(2, step_with_a_schedule_for_a_frozen_stage)


# Layers that are no clean stack: each trains as the plain loop does, or is named. -------------------------------------

# Gradients inside a forward, and control flow of a layer's own. --- (12: 1, 2, 4, 13)


class Energy(nn.Module):
    """Gives the place and its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = x.detach().requires_grad_()
        return place, torch.tanh(self.linear(place)).square().sum()


class Force(nn.Module):
    """Takes the gradient of what the layer before has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        place, energy = given
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return force * self.scale


class Penalty(nn.Module):
    """The slope of its own output beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(place).tanh().sum(), place, create_graph=True)
        return self.linear(x) + slope


class FunctionalPenalty(nn.Module):
    """The same by torch.func, which refuses saved-tensor hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: self.linear(y).tanh().sum())(x.detach())
        return self.linear(x) + slope


NEVER = RecomputePolicy("never")
UNPROVED = RecomputePolicy(last_stage="always", verify="off")


def check(
    layers: Callable[[], list[nn.Module]],
    *,
    recompute: RecomputePolicy,
    stages: int = 2,
    steps: int = 2,
    **options: Any,
) -> None:
    """Equal to the plain loop, `stages` stages on one rank."""
    batches = [batch() for _ in range(steps)]
    options = {"num_microbatches": 3, "num_stages": stages, "stages_per_rank": stages, **options}
    loss = options.pop("loss", mean_square)
    case = Case("layers", layers, lambda: batches, loss, options={"recompute": recompute, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*inside its forward")
        check_case(case)


EVERY_MODE = pytest.mark.parametrize("recompute", [NEVER, ALWAYS, UNPROVED], ids=["never", "always", "unproved"])


@pytest.mark.parametrize("recompute", [NEVER, ALWAYS], ids=["never", "always"])
@pytest.mark.parametrize("between", [0, 1])
def test_gradient_through_an_earlier_layer(recompute: RecomputePolicy, between: int) -> None:
    """Symptom: F of a stage with a layer for the energy and one for the force began again for ever, in every mode.

    Cause: the layer that took the gradient was run without hooks the next time; the layer that it read was not.
    """

    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), Energy(), *(nn.Identity() for _ in range(between)), Force(), nn.Linear(4, 4)]

    check(layers, recompute=recompute, stages=1)


def test_gradient_through_an_earlier_layer_that_is_met_too_late() -> None:
    """The same with nothing kept: the layer before cannot be run again, and both are named."""
    pipeline = Pipeline([Energy(), Force()], mean_square, num_microbatches=3, num_stages=1, recompute=UNPROVED)
    message = r"layer 1 \(Force\) takes a gradient through layer 0 \(Energy\) .*recompute.verify=first"
    with pytest.raises(LayerRefused, match=message):
        pipeline.step(*batch())


@EVERY_MODE
@pytest.mark.parametrize("penalty", [Penalty, FunctionalPenalty])
def test_gradient_inside_a_layer_runs_no_other_layer_again(
    recompute: RecomputePolicy, penalty: type[nn.Module]
) -> None:
    """Symptom: BatchNorm before such a layer was updated 5 times for 4, and an in-place first op applied twice.

    Cause: the whole stage began again, on buffers that a kept set had not copied and on an input that had been changed.
    """
    check(
        lambda: [nn.ReLU(inplace=True), nn.BatchNorm1d(4), penalty(), nn.BatchNorm1d(4)], recompute=recompute, stages=1
    )


@EVERY_MODE
def test_gradient_inside_a_layer_with_state(recompute: RecomputePolicy) -> None:
    """The layer that runs again finds its buffers, its counters and its random numbers as they were."""

    class Counts(FunctionalPenalty):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(self.norm(nn.functional.dropout(x, 0.5))) * self.calls

    check(lambda: [nn.Linear(4, 4), Counts(), nn.Linear(4, 4)], recompute=recompute, stages=1)


@EVERY_MODE
def test_gradient_inside_the_loss(recompute: RecomputePolicy) -> None:
    """Symptom: a loss with a gradient penalty updated the BatchNorm of its stage once too often.

    Cause: as above; the loss is the last layer of its stage.
    """

    def loss(output: Tensor, target: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
        return mean_square(output, target) + slope.square().mean()

    check(lambda: [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)], recompute=recompute, loss=loss)


class FromTheThirdOn(Penalty):
    """Takes a gradient from its third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 2 else self.linear(x)


@EVERY_MODE
def test_gradient_inside_a_layer_from_a_later_microbatch_on(recompute: RecomputePolicy) -> None:
    """Symptom: F began again in the middle of a step. Cause: as above; what it had to undo was not what had been copied."""
    check(
        lambda: [nn.BatchNorm1d(4), FromTheThirdOn(), nn.Linear(4, 4)], recompute=recompute, stages=1, schedule="1f1b"
    )


class FillsLater(nn.Module):
    """Its operation draws its noise after it has saved the tensor for it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(x, 0.1, 0.9, training=True)


@EVERY_MODE
@pytest.mark.parametrize("place", ["last", "middle", "before a layer that saves nothing"])
def test_operation_that_fills_what_it_has_saved(recompute: RecomputePolicy, place: str) -> None:
    """Symptom: RReLU last in a recomputed stage gave gradients of 1e7 to 1e13.

    Cause: R ended when the last tensor was saved, and the operation had not filled it yet.
    """
    after: dict[str, list[nn.Module]] = {
        "last": [],
        "middle": [nn.Linear(4, 4)],
        "before a layer that saves nothing": [nn.Identity()],
    }
    check(
        lambda: [nn.Linear(4, 4), FillsLater(), *after[place], nn.Linear(4, 4)],
        recompute=recompute,
        balance=[2 + len(after[place]), 1],
    )


class ChangesThroughData(nn.Module):
    """Changes in place what the layer before has saved, so that no version tells."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x


def test_saved_tensor_that_a_later_layer_changes_without_a_word() -> None:
    """Symptom: gradients of another tensor than the plain loop's.

    Cause: R ended before the layer that changes what had been saved; what counts is the value at the end of F.
    """
    check(
        lambda: [nn.Linear(4, 4), nn.Sigmoid(), ChangesThroughData(), nn.Linear(4, 4)], recompute=ALWAYS, balance=[3, 1]
    )


class Swallows(nn.Module):
    """Does without the gradient where it is not given one."""

    def __init__(self, what: type[BaseException], *, functional: bool) -> None:
        super().__init__()
        self.what = what
        self.inner = FunctionalPenalty() if functional else Penalty()

    def forward(self, x: Tensor) -> Tensor:
        try:
            output: Tensor = self.inner(x)
        except self.what:
            output = x * 0
        return output


@EVERY_MODE
@pytest.mark.parametrize("what", [Exception, BaseException])
def test_layer_that_catches_what_asks_for_a_gradient(recompute: RecomputePolicy, what: type[BaseException]) -> None:
    """Symptom: a layer with `except Exception:` around its gradient took its fallback, in every mode.

    Cause: what got the stage out of the layer was an Exception, and whether the layer had let it pass was not asked.
    """
    check(lambda: [nn.Linear(4, 4), Swallows(what, functional=False), nn.Linear(4, 4)], recompute=recompute)


@EVERY_MODE
def test_layer_that_catches_what_torch_func_says_of_hooks(recompute: RecomputePolicy) -> None:
    """Symptom: the fallback again. Cause: torch.func refuses saved-tensor hooks by a RuntimeError, which the layer caught."""
    check(lambda: [nn.Linear(4, 4), Swallows(Exception, functional=True), nn.Linear(4, 4)], recompute=recompute)


class SwallowsTheEnd(nn.Module):
    """Its last operation saves the last tensor of the stage."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.sigmoid(x)
        except BaseException:
            return torch.sigmoid(torch.tanh(x))


def test_layer_that_catches_the_end_of_recompute() -> None:
    """Symptom: RecomputeMismatch with a reason that was not true: "saves one tensor more than in F".

    Cause: the layer caught what ends R when the last tensor is saved, and went on.
    """
    check(lambda: [nn.Linear(4, 4), SwallowsTheEnd(), nn.Linear(4, 4)], recompute=ALWAYS, balance=[2, 1])


def test_mismatch_that_a_layer_catches() -> None:
    """Symptom: the wrong layer was named. Cause: the right error went through a layer that caught it."""

    class OtherOperation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return x.exp() if next(calls) < 3 else x.sin()
            except Exception:
                return x.exp()

    calls = itertools.count()
    pipeline = Pipeline(
        [nn.Linear(4, 4), OtherOperation(), nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS
    )
    with pytest.raises(
        RecomputeMismatch, match=r"layer 1 \(OtherOperation\): the recompute saves .* in F it was .*ExpBackward"
    ):
        pipeline.step(*batch())


def test_other_values_in_recompute() -> None:
    """Symptom: gradients of values that F has not seen, without a word.

    Cause: only shapes, types and operations of what R saves were compared with those of F.
    """
    own = itertools.count()

    class Drifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x + next(own))

    layers = [nn.Linear(4, 4), Drifts(), nn.Linear(4, 4)]
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=ALWAYS)
    message = r"layer 1 \(Drifts\): the recompute saves a tensor \[2, 4\] float32 made by SigmoidBackward with other values: \d of 8 entries differ, by up to .*a counter, a cache"
    with pytest.raises(RecomputeMismatch, match=message):
        pipeline.step(*batch())


@EVERY_MODE
def test_functions_that_ask_twice(recompute: RecomputePolicy) -> None:
    """A layer that reads the same saved tensors in several gradients, and in a second order."""

    class Hessian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            place = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(place).tanh().sum(), place, create_graph=True)
            (bend,) = torch.autograd.grad(slope.square().sum(), place, create_graph=True)
            return self.linear(x) + slope + bend

    check(lambda: [nn.Linear(4, 4), Hessian(), nn.BatchNorm1d(4), nn.Linear(4, 4)], recompute=recompute, stages=1)


# State that a forward changes. --- (12: 3, 5, 8, 14, 15, 16)


class LocalLoss(nn.Module):
    """Trains its own weights by a loss of its own."""

    def __init__(self, *, catches: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.catches = catches

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.linear(x.detach()).square().mean().backward()
        except BaseException:
            if not self.catches:
                raise
        return self.linear(x)


@EVERY_MODE
@pytest.mark.parametrize("catches", [False, True])
def test_backward_inside_a_forward(recompute: RecomputePolicy, catches: bool) -> None:
    """Symptom: gradients off by up to 100 %, without a word.

    Cause: it adds to `.grad` in F, and in R again; in a pipeline F of one microbatch stands before B of another.
    """
    layers = [nn.Linear(4, 4), LocalLoss(catches=catches), nn.Linear(4, 4)]
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=recompute)
    with pytest.raises(LayerRefused, match=r"layer 1 \(LocalLoss\) calls backward\(\) in its forward"):
        pipeline.step(*batch())


# What needs a gradient, and whose. --- (12: 9, 10)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Chooses(nn.Linear):
    """Gives whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def chosen() -> list[nn.Module]:
    return [nn.Linear(4, 4), Chooses(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4)]


@EVERY_MODE
@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 2], [1, 2, 1]], ids=str)
def test_stage_whose_output_needs_no_gradient(recompute: RecomputePolicy, balance: list[int]) -> None:
    """Symptom: `KeyError: 0` in B of a stage with parameters that ends in argmax or detach.

    Cause: F held nothing for a B that the schedule has, as the stage has parameters. The plain loop gives them no gradient.
    """
    check(chosen, recompute=recompute, stages=len(balance), balance=balance)
    layers = [nn.Linear(4, 4), Detached(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    check(lambda: copy.deepcopy(layers), recompute=recompute, stages=len(balance), balance=balance)


def step_with_a_choice() -> None:
    for mode in ("overlap", "inline", "never"):
        options = {"num_microbatches": 3, "balance": [2, 2], "recompute": mode}
        check_case(Case(mode, chosen, lambda: [batch()] * 2, mean_square, options=options))


def test_stage_whose_output_needs_no_gradient_on_a_rank_of_its_own() -> None:
    run_ranks(2, step_with_a_choice)


@EVERY_MODE
def test_loss_that_needs_no_gradient(recompute: RecomputePolicy) -> None:
    """Symptom: `KeyError: 0`. Cause: as above, for the loss; the plain loop refuses it, too."""
    layers = [nn.Linear(4, 4), Detached(4, 4)]
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, num_stages=2, stages_per_rank=2, recompute=recompute)
    with pytest.raises(ValueError, match=r"loss_fn returned a loss that needs no gradient, although .*detach\(\)"):
        pipeline.step(*batch())


# Microbatches that do not count. --- (12: 6)

# What crosses a cut. --- (12: 7, 11, 12, 17)


class Then(nn.Module):
    """A linear layer of 8 columns with tanh, on `pick(input)`; gives `function(what it got, its own output)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], pick: Callable[[Any], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.pick = pick

    def forward(self, x: Any) -> Any:
        return self.function(x, torch.tanh(self.linear(self.pick(x))))


def only(x: Any, y: Tensor) -> Tensor:
    return y


MODES: tuple[Any, ...] = ("never", ALWAYS)


def cases_of(name: str, layers: Callable[[], list[nn.Module]], **options: Any) -> list[Case]:
    """With sets kept and with all of them recomputed; three steps."""
    size = len(layers())
    batches = options.pop("batches", lambda: rows(8, 8, 8))
    before_step = options.pop("before_step", lambda step, model: None)
    return [
        Case(
            f"{name}, {mode}",
            layers,
            batches,
            options={"recompute": mode, "balance": [1] * size, "num_microbatches": 3, **options},
            before_step=before_step,
        )
        for mode in MODES
    ]


def on_ranks(num_ranks: int, name: str) -> None:
    """The cases that the function `name` makes, a stage per layer: all on one rank, or in turns on two."""
    run_ranks(num_ranks, run_cases, cases_by_name, name, num_ranks)


def cases_by_name(name: str, num_ranks: int) -> list[Case]:
    cases: list[Case] = globals()[name]()
    return [
        replace(case, options={**case.options, **_spread(len(case.options["balance"]) // num_ranks)}) for case in cases
    ]


def _spread(stages_per_rank: int) -> dict[str, Any]:
    return {"schedule": "interleaved" if stages_per_rank > 1 else "gpipe", "stages_per_rank": stages_per_rank}


def lazy_bits() -> list[Case]:
    """What `conj` and `imag` of a conjugate give: a view with a bit that says how its bytes are meant."""

    def conjugate(x: Any, y: Tensor) -> Any:
        return torch.complex(y, y * 2).conj()

    def negative(x: Any, y: Tensor) -> Any:
        return (y, torch.complex(y, y * 2).conj().imag)

    def real(x: Any) -> Tensor:
        return (x * (1 + 2j)).real

    return [
        *cases_of("conjugate", lambda: [Then(conjugate), Then(only, real)]),
        *cases_of("negative", lambda: [Then(negative), Then(only, lambda x: x[0] * x[1])]),
        *cases_of(
            "gradient", lambda: [Then(lambda x, y: torch.complex(y, y)), Then(only, lambda x: (x * x.conj()).real)]
        ),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_lazy_bits_at_a_cut(num_ranks: int) -> None:
    """Symptom: with `x.conj()` at the end of a stage the loss was 1.281 for 1.476, on one rank too.

    Cause: the bytes of a lazy conjugate are those of its base; its gate and its message took the bytes alone.
    """
    on_ranks(num_ranks, "lazy_bits")


def add_in_place(x: Any) -> Tensor:
    x[0].add_(1.0)
    return x[0] * x[1]


def same_tensor_twice() -> list[Case]:
    def twice(x: Any, y: Tensor) -> Any:
        return (y, {"again": y}, y * 2)

    def pick(x: Any) -> Tensor:
        x[0].mul_(3.0)
        return x[0] * x[1]["again"] + x[2]

    def passed_on() -> list[nn.Module]:
        return [
            Then(twice),
            Then(lambda x, y: (x[0], x[1]["again"], y), lambda x: x[0]),
            nn.Identity(),
            Then(only, add_in_place),
        ]

    def parts() -> list[nn.Module]:
        return [Then(lambda x, y: torch.cat((y, y), 1).chunk(2, dim=1)), Then(only, add_in_place)]

    def overlapping() -> list[nn.Module]:
        return [Then(lambda x, y: (y, y[:, :4])), Then(only, lambda x: x[0] + x[1].repeat(1, 2))]

    return [
        *cases_of("twice", lambda: [Then(twice), Then(only, pick)]),
        *cases_of("passed on", passed_on),
        *cases_of("parts of one tensor", parts),
        *cases_of("overlapping, not changed", overlapping),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_tensor_twice_at_a_cut(num_ranks: int) -> None:
    """Symptom: with `(h, h)` at a cut and a next layer that changes one of them in place, the loss was 1.99 for 3.77.

    Cause: each leaf was sent, and given a gate, by itself.
    """
    on_ranks(num_ranks, "same_tensor_twice")


# Arguments. --- (12: 18, 19, 20)
