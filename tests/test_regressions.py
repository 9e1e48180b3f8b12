"""The museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from parity_cases import Case, check_case, rows, run_cases
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.config.load import load
from pipetrain.observe import folder
from pipetrain.observe.folder import choose_folder
from pipetrain.prepare import prepare
from pipetrain.runtime.cut import Whole, on_device
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.slots import RecomputeMismatch, SavedTensorChanged

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
    options = {"schedule": "interleaved", "stages_per_rank": 2, "timeout_seconds": NEVER_SECONDS}
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

    class SavesOnce(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            SavesOnce.calls += 1
            return x.exp() if SavesOnce.calls > 3 else x.exp().sin()

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

# Gradients inside a forward, and control flow of a layer's own.

# State that a forward changes.

# What needs a gradient, and whose.


def refused_in_step(message: str, layers: Sequence[nn.Module], loss: Any = mean_square, **options: Any) -> None:
    """A step of it is refused with such a message, whether sets are recomputed or kept."""
    for mode in (ALWAYS, "never"):
        with (
            pytest.raises(ValueError, match=message),
            Pipeline(layers, loss, num_microbatches=3, recompute=mode, **{**TWO_STAGES, **options}) as pipeline,
        ):
            pipeline.step(*batch())


TWO_STAGES: dict[str, Any] = {"num_stages": 2, "stages_per_rank": 2, "schedule": "interleaved"}


def test_a_step_where_no_gradients_are_made() -> None:
    """Symptom: `step` under `no_grad` or `inference_mode` ended in an internal KeyError or in autograd's words, in the midst of its ops.

    Cause: nobody asked whether gradients are made here. Now it is refused before any op, and the pipeline goes on.
    """
    for no_gradients in (torch.no_grad, torch.inference_mode):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        reference = copy.deepcopy(model)
        with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
            with (
                no_gradients(),
                pytest.raises(ValueError, match=rf"step was called under torch.{no_gradients.__name__}\(\)"),
            ):
                pipeline.step(*batch())
            assert torch.equal(
                pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
            )


def test_inputs_that_require_a_gradient() -> None:
    """Symptom: inputs with `requires_grad` got no `.grad`, and whatever had computed them none either; no word.

    Cause: what enters stage 0 is detached, as it must be where it comes from another rank.
    """
    inputs, targets = batch()
    for mode in (ALWAYS, "never"):
        with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=mode) as pipeline:
            for wrong in (inputs.clone().requires_grad_(), nn.Linear(4, 4)(inputs)):
                with pytest.raises(
                    ValueError,
                    match="inputs requires a gradient: a step gives gradients to the layers' parameters only",
                ):
                    pipeline.step(wrong, targets)
        pipeline = Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=mode)
        with pytest.raises(ValueError, match="targets requires a gradient"):
            pipeline.step(inputs, targets.clone().requires_grad_())


def test_a_loss_with_parameters_of_its_own() -> None:
    """Symptom: the parameters of a `loss_fn` had gradients and were in no `parameters()`, clip or `state_dict`; no word.

    Cause: a pipeline knows its layers, and nobody looked at what the loss is made of.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.weight * (output - target) ** 2).mean()

        def method(self, output: Tensor, target: Tensor) -> Tensor:
            return self(output, target)

    def of(loss: Weighted, output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target)

    own = Weighted()
    for loss in (own, own.method, functools.partial(of, own)):
        with pytest.raises(
            ValueError,
            match=r"loss_fn has parameters of its own to train \(weight\).*make what has them the last layer",
        ):
            Pipeline([nn.Linear(4, 4)], loss, num_microbatches=3)
    refused_in_step("^loss_fn uses a tensor .*weight", [nn.Linear(4, 4), nn.Linear(4, 4)], lambda *both: own(*both))
    own.requires_grad_(False)
    with Pipeline([nn.Linear(4, 4)], own, num_microbatches=3) as pipeline:
        pipeline.step(*batch())


def test_a_weight_tied_by_a_hidden_reference() -> None:
    """Symptom: a layer that used a layer of another stage (in a list, so that nothing registered it) trained with wrong gradients.

    Cause: its rank has its own copy of that layer, whose gradient nobody added; only registered parameters were compared.
    """

    class Tied(nn.Module):
        def __init__(self, first: nn.Linear) -> None:
            super().__init__()
            self.linear, self.first = nn.Linear(4, 4), [first]

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.first[0].weight

    first = nn.Linear(4, 4)
    refused_in_step(r"^layer 1 \(Tied\) uses 0.weight, which is of another stage", [first, Tied(first)])


def test_a_regulariser_over_all_layers() -> None:
    """Symptom: a `loss_fn` with a term over all layers: the stages before the last trained without it, and no word.

    Cause: on the last rank these layers are copies, whose gradients went nowhere.
    """
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + sum(p.square().sum() for layer in layers for p in layer.parameters())

    refused_in_step(r"^loss_fn uses 0\.(weight|bias), which is of another stage", layers, loss)


def test_a_constant_that_requires_a_gradient() -> None:
    """Symptom: a tensor with `requires_grad` in a closure or an attribute of a layer: in no `parameters()`, clip or `state_dict`.

    Cause: F's graph was never compared with the parameters of the stage.
    """
    scale = torch.ones(4, requires_grad=True)

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    refused_in_step(
        r"^layer 1 \(Scaled\) uses a tensor \[4\] that requires a gradient.*\(scale of Scaled\)",
        [nn.Linear(4, 4), Scaled(4, 4)],
    )


def test_statistics_shared_over_stages() -> None:
    """Symptom: one BatchNorm without parameters in two stages: each rank kept statistics of its own, which diverged; no word.

    Cause: only parameters were looked for in two stages.
    """
    norm = nn.BatchNorm1d(4, affine=False)
    layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)]
    refused_in_step(r"^buffer 1.(\w+) of stage 0 is 3.\1 of stage 1 as well, and a forward changed it", layers)


def test_a_buffer_that_stays_may_be_shared_over_stages() -> None:
    """A table that all layers look into, or a shared ReLU, is right on every stage: not everything shared is refused."""

    class Positions(nn.Linear):
        def __init__(self, table: Tensor) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table

    table, relu = torch.linspace(0, 1, 4), nn.ReLU()
    model = nn.Sequential(Positions(table), relu, Positions(table), relu, Positions(table))
    reference = copy.deepcopy(model)
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS, **TWO_STAGES) as pipeline:
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


def test_a_counter_shared_over_stages() -> None:
    """Symptom: a module without parameters that counts its calls, in two stages: each rank counted its own.

    Cause: only parameters were looked for in two stages.
    """

    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    counter = Counter()
    with (
        pytest.raises(ValueError, match="Counter 1 of stage 0 is 3 of stage 1 as well, and a forward changed it"),
        Pipeline(
            [nn.Linear(4, 4), counter, nn.Linear(4, 4), counter],
            mean_square,
            num_microbatches=3,
            recompute="never",
            **TWO_STAGES,
        ) as pipeline,
    ):
        pipeline.step(*batch())


def test_parameters_that_look_into_one_memory() -> None:
    """Symptom: `b.weight.data = a.weight.data` over two stages trained as two weights; no word.

    Cause: parameters were compared as objects. Flat parameters, which lie side by side in one storage, are no mistake.
    """
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"0.weight of stage 0 and 1.weight of stage 1 lie in one memory"):
        Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES)
    second.weight.data = first.weight.data.clone()
    flat = nn.utils.parameters_to_vector([*first.parameters(), *second.parameters()]).detach()
    nn.utils.vector_to_parameters(flat, [*first.parameters(), *second.parameters()])
    Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES).close()


def test_callables_that_return_one_layer() -> None:
    """Symptom: two callables that returned one and the same layer, for two stages, trained one weight as two.

    Cause: sharing was looked for in what was given, not in what was built.
    """
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"parameter 0.weight of stage 0 is 1.weight of stage 1 as well"):
        Pipeline([lambda: layer, lambda: layer], mean_square, num_microbatches=3, **TWO_STAGES)


# Microbatches that do not count.


class NormedRoot(nn.Module):
    """Running means that see every microbatch that runs, and a derivative that is endless at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).abs().sqrt())


def does_not_count(loss_of_nothing: float, recompute: str | RecomputePolicy) -> None:
    """A batch whose second microbatch is padding: zeros as inputs, and nothing in its targets counts."""
    torch.manual_seed(0)
    model = nn.Sequential(NormedRoot(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    reference = copy.deepcopy(model)
    inputs, targets = batch()
    inputs[2:4], targets[2:4] = 0.0, -99.0

    def count(target: Tensor) -> int:
        return int((target != -99.0).sum())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) if count(target) else output.sum() * loss_of_nothing

    options = {"num_microbatches": 3, "count_fn": count}
    with Pipeline(model, loss_fn, stages_per_rank=2, balance=[1, 2], recompute=recompute, **options) as pipeline:
        loss = pipeline.step(inputs, targets)
    assert torch.equal(loss, reference_step(reference, loss_fn, inputs, targets, **options))
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), reference.buffers()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recompute", ["never", ALWAYS], ids=str)
@pytest.mark.parametrize("loss_of_nothing", [0.0, float("inf")])
def test_a_microbatch_that_counts_nothing(loss_of_nothing: float, recompute: str | RecomputePolicy) -> None:
    """Symptom: the loss was finite and gradients were NaN; running means had moved four times in three counted microbatches.

    Cause: a microbatch with n_i = 0 ran F on every stage, and zeros went back through its graph, where they met 0 * inf.
    The plain loop leaves it out.
    """
    does_not_count(loss_of_nothing, recompute)


@pytest.mark.parametrize("given", [float("nan"), None, -1])
def test_a_count_that_is_no_number(given: float | None) -> None:
    """Symptom: with count_fn giving nan the loss was nan without a reason; None gave "unsupported operand type(s) for +".

    Cause: what it gave was added up as it came.
    """
    pipeline = Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, count_fn=lambda target: given)
    with pytest.raises(ValueError, match=f"count_fn gave {given} for the target of microbatch 0: it must return"):
        pipeline.step(*batch())


# What crosses a cut.


class Then(nn.Module):
    """Tanh and a linear layer of 8 columns on `pick(input)`; gives `function(what it got, its own output)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], pick: Callable[[Any], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.pick = pick

    def forward(self, x: Any) -> Any:
        return self.function(
            x, self.linear(torch.tanh(self.pick(x)))
        )  # saves no output, which may then be changed in place


def only(x: Any, y: Tensor) -> Tensor:
    return y


MODES: tuple[Any, ...] = ("never", ALWAYS)
THREE_OVER_A_CUT: dict[str, Any] = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 3}


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
    if num_ranks == 1:
        run_cases(cases_by_name, name, num_ranks)
    else:
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
            "gradient",
            lambda: [Then(lambda x, y: torch.complex(y, y)), Then(only, lambda x: (x.conj() * (1 + 2j)).real)],
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


def halves(x: Any, y: Tensor) -> Any:
    both = torch.cat((y, y), 1)
    return both[:, :8], both[:, 8:]


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
        return [Then(halves), Then(only, add_in_place)]

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


def overlapping_and_changed() -> list[Case]:
    cases = cases_of("", lambda: [Then(lambda x, y: (y, y[:, 4:])), Then(only, lambda x: x[0].add_(1.0))])
    return [replace(case, options={**case.options, **THREE_OVER_A_CUT}) for case in cases]


def test_views_with_common_entries_at_a_cut() -> None:
    """Symptom: with `(h, h[:, :4])` at a cut and a next layer that changes one of them in place, the loss was 1.99 for 3.77.

    Cause: on another rank they have no memory in common. (Two leaves are one tensor, or look at memory that nobody changes.)
    """
    for case in overlapping_and_changed():
        with pytest.raises(
            SavedTensorChanged, match=r"output\[0\] of layer 0 \(Then\).* memory of output\[1\]: clone one"
        ):
            check_case(case)


class Tells(nn.Module):
    """A linear layer whose output, beside itself, is told by `tell(step, output)`; a model has one such count of steps."""

    def __init__(self, tell: Callable[[int, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tell = tell
        self.step = 0

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, self.tell(self.step, y)


def count_steps(step: int, model: nn.Sequential) -> None:
    for layer in model:
        if isinstance(layer, (Tells, UsesInTurns)):
            layer.step = step


def used(x: Any) -> Tensor:
    return x[0] if x[1] is None else x[0] * x[1]


def changing_gradients() -> list[Case]:
    steps = {"before_step": count_steps, "batches": lambda: rows(8, 8, 8, 8)}

    def detached_at_first(step: int, y: Tensor) -> Any:
        return (y * 2).detach() if step < 2 else y * 2

    def without_graph_in_turns(step: int, y: Tensor) -> Any:
        with torch.set_grad_enabled(step % 2 == 0):
            return y * 2

    return [
        *cases_of("detached at first", lambda: [Tells(detached_at_first), Then(only, used)], **steps),
        *cases_of("no_grad in turns", lambda: [Tells(without_graph_in_turns), Then(only, used)], **steps),
        *cases_of("used in turns", lambda: [Then(lambda x, y: (y, y * 2)), UsesInTurns()], **steps),
    ]


class UsesInTurns(nn.Module):
    """Needs the first part of its input in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Any) -> Tensor:
        return x[0] * x[1] if self.step % 2 else x[1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_needs_a_gradient_changes_inside_a_layer(num_ranks: int) -> None:
    """Symptom: a branch that was detached in the first steps never got a gradient later; between ranks, without a word.

    Cause: the receiver took the form of an earlier step, by which the tensor needed none.
    """
    on_ranks(num_ranks, "changing_gradients")


Pair = collections.namedtuple("Pair", "mean spread")


def values_and_structures() -> list[Case]:
    steps = {"before_step": count_steps}

    def differing(step: int, y: Tensor) -> Any:
        return [1, True, 0.5][step]

    def growing(step: int, y: Tensor) -> Any:
        return torch.ones(8)[: 8 if step == 1 else 1]

    def named(x: Any, y: Tensor) -> Any:
        return Pair(y, {(0, "a"): y * 2, 1: collections.OrderedDict(b=y.max(dim=1, keepdim=True))})

    def pick(x: Any) -> Tensor:
        return x.mean + x.spread[0, "a"] * x.spread[1]["b"].values

    def flag(x: Any, y: Tensor) -> Any:
        return y, x["flag"]

    def flags() -> list[Any]:
        return [({"x": x, "flag": flag}, y) for (x, y), flag in zip(rows(8, 8, 8), (2.0, -0.5, 3))]

    return [
        *cases_of("a value per step", lambda: [Tells(differing), Then(only, used)], **steps),
        *cases_of("a shape per step", lambda: [Tells(growing), Then(only, used)], **steps),
        *cases_of("a value of the batch", lambda: [Then(flag, lambda x: x["x"]), Then(only, used)], batches=flags),
        *cases_of("named tuples", lambda: [Then(named), Then(only, pick)]),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_and_structures_at_a_cut(num_ranks: int) -> None:
    """Symptom: a plain value that differed from step to step failed with "changed its form"; named tuples, `torch.return_types` and
    keys that are tuples with "NotImplementedError: No registered serialization name".

    Cause: values were taken for a part of the form, and structures written by torch's own function, which knows few types.
    """
    on_ranks(num_ranks, "values_and_structures")


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Parts:
    one: Tensor


class Marked(Tensor):
    """A tensor of a type of its own."""


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda y: (y, y.to_sparse()), r"output\[1\] as a tensor with the layout sparse_coo: return its indices"),
    "nested": (lambda y: {"n": torch.nested.nested_tensor([y[0], y[1]])}, r"output\['n'\] as a nested tensor"),
    "jagged": (lambda y: torch.nested.as_nested_tensor([y[0], y[1]], layout=torch.jagged), "output as a NestedTensor"),
    "quantized": (lambda y: (y, torch.quantize_per_tensor(y, 0.1, 0, torch.qint8)), "as a quantized tensor"),
    "meta": (lambda y: (y, y.to("meta")), r"output\[1\] as a tensor on meta, and the stages are on cpu"),
    "subclass": (lambda y: [y.as_subclass(Marked)], r"output\[0\] as a Marked, .*as_subclass\(torch.Tensor\)"),
    "enum": (lambda y: (y, Colour.RED), r"output\[1\] as an enum, .*: return its .value"),
    "dataclass": (lambda y: (y, Parts(y)), r"output\[1\] as a Parts, a dataclass that torch does not look into"),
    "set": (lambda y: (y, {1}), r"output\[1\] as a set: stages exchange"),
    "key": (lambda y: {Colour.RED: y}, "a dict with the key .* of type .*Colour: take strings"),
    "local type": (lambda y: collections.namedtuple("Local", "a")(y), "which other ranks cannot import by its name"),
}


@pytest.mark.filterwarnings("ignore:.*(sparse|nested|quantize).*:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_cross_a_cut_is_named(name: str) -> None:
    """Symptom: "unsupported operation: sparse tensor as_strided", "Cannot access storage", or nothing on one rank.

    Cause: nobody looked at what a stage returned before its bytes were taken.
    """
    make, message = REFUSED[name]
    pipeline = Pipeline(
        [Then(lambda x, y: make(y)), nn.Linear(8, 8)], mean_square, recompute="never", **THREE_OVER_A_CUT
    )
    with pytest.raises(TypeError, match=r"layer 0 \(Then\), the last of stage 0, returned .*" + message):
        pipeline.step(*rows(8)[0])


def test_whole_goes_to_the_device() -> None:
    """Symptom: on a GPU, "Expected all tensors to be on the same device" for what was wrapped in Whole.

    Cause: tensors of the batch were moved leaf by leaf, and Whole is a leaf that is no tensor.
    """
    batch = {"x": torch.ones(2, 1), "whole": Whole({"mask": (torch.ones(3), 5)})}
    moved = on_device(batch, torch.device("meta"))
    mask, number = moved["whole"].value["mask"]
    assert moved["x"].is_meta
    assert mask.is_meta
    assert number == 5


def change(x: Tensor) -> Tensor:
    return x.add_(1.0)


def change_data(x: Tensor) -> Tensor:
    x.data.add_(1.0)
    return x


@pytest.mark.parametrize("change", [change, change_data])
@pytest.mark.parametrize("place", ["first stage", "second stage", "targets"])
@pytest.mark.parametrize("mode", MODES, ids=["never", "always"])
def test_whole_changed_in_place(mode: Any, place: str, change: Callable[[Tensor], Tensor]) -> None:
    """Symptom: gradients off by up to 100 % where a layer changed in place what was wrapped in Whole.

    Cause: the plain loop adds up such changes from microbatch to microbatch; a copy per microbatch, or B after all F, does not.
    """
    x, y = rows(8)[0]
    first, second, loss_fn, name = (
        Then(only, lambda x: x[0] + x[1][1]),
        nn.Linear(8, 8),
        mean_square,
        r"inputs\[1\]\[1\]",
    )
    if place == "first stage":
        first = Then(only, lambda x: x[0] + change(x[1][1]))
    elif place == "second stage":
        first = Then(lambda x, y: (y, x[1][1]), lambda x: x[0])
        second = Then(only, lambda x: x[0] + change(x[1]))
    else:
        name, loss_fn = (
            r"targets\['w'\]",
            lambda output, target: ((output - target["y"] + change(target["w"])) ** 2).mean(),
        )
    pipeline = Pipeline([first, second], loss_fn, **THREE_OVER_A_CUT, recompute=mode)
    targets = {"y": y, "w": Whole(torch.ones(8))} if place == "targets" else y
    with pytest.raises(SavedTensorChanged, match=f"stage .* changes in place: {name}, which is Whole"):
        pipeline.step((x, Whole((1, torch.ones(8)))), targets)


def test_targets_changed_in_place_where_the_loss_is_recomputed() -> None:
    """Symptom: `loss_fn` changed its target in place, and under `last_stage=always` R computed another loss than F.

    Cause: R gives it the same tensor a second time.
    """

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ((output * target.mul_(2.0)) ** 2).mean()

    pipeline = Pipeline([nn.Linear(8, 8)], loss_fn, num_microbatches=3, recompute=ALWAYS)
    with pytest.raises(SavedTensorChanged, match=r"stage 0, .* changes in place: leaf 0 of its target"):
        pipeline.step(*rows(8)[0])


# Arguments.


def test_two_runs_that_start_in_one_new_folder(tmp_path: pathlib.Path) -> None:
    """Symptom: two runs started in the same new `run_dir` at the same moment both ran, and wrote over each other.

    Cause: a folder was taken once `config.yaml` lay in it, which is written long after it was looked for.
    """
    (tmp_path / "text.txt").write_text("a stage waits for a stage that runs " * 500)
    options = ["experiment=smoke", "data=text", "data.path=text.txt", "pipeline.num_stages=1", "steps=2", "run_dir=new"]
    root = str(pathlib.Path(__file__).resolve().parents[1])
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pipetrain.train", *options],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = sorted((run.communicate(timeout=PATIENCE_SECONDS)[1], run.returncode) for run in runs)
    assert sorted(code for _, code in ends) == [0, 2], ends
    (told,) = (error for error, code in ends if code == 2)
    # Where one has ended before the other begins, that finds its configuration.
    assert "another run is in this folder" in told or "there is a run in this folder" in told


def test_two_runs_without_a_folder_that_start_in_one_second(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two runs without `run_dir` that started in the same second could share a folder.

    Cause: a free name was chosen first, and its folder made later.
    """
    monkeypatch.chdir(tmp_path)
    taken = choose_folder(None, "run").path
    names = iter([taken, taken, taken.with_name("next")])
    monkeypatch.setattr(folder, "choose_folder", lambda *_: folder.RunFolder(next(names)))
    assert folder.reserve_folder(None, "run").path == taken
    assert folder.reserve_folder(None, "run").path == taken.with_name("next")


@pytest.mark.parametrize("field", ["forward", "backward", "recompute", "hop", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, [1.0, math.nan]])
def test_costs_are_finite(field: str, seconds: float | list[float]) -> None:
    """Symptom: `pipetrain show cost.forward_seconds=nan` never ended.

    Cause: no time is later than nan, so the simulated step had no next moment.
    """
    with pytest.raises(ValueError, match=f"cost.{field}_seconds=.*(nan|inf|-1)"):
        Costs.spread(2 + (field == "hop"), **{field: seconds})
    with pytest.raises(ValueError, match=r"recompute=\[nan\]: costs are finite numbers, 0 or more"):
        Costs((1.0,), (1.0,), (math.nan,), (), ())


def test_a_schedule_that_is_too_large_is_refused() -> None:
    """Symptom: `pipetrain show pipeline.num_stages=99999999` never ended, nor did a schedule of so many microbatches.

    Cause: there was no limit, and every op of it was to be made.
    """
    with pytest.raises(ValueError, match=r"99999999 stages .* are too many: allowed are 4096"):
        make_schedule(num_stages=99999999, num_microbatches=1)
    with pytest.raises(ValueError, match=r"num_microbatches=99999999 with 4 stages.*=32768"):
        make_schedule(num_stages=4, num_microbatches=99999999)


def test_what_does_not_run_yet_is_refused_before_a_process_starts() -> None:
    """Symptom: a run whose schedule has I and W was refused by its ranks, after its run folder was made.

    Cause: only the executor knew which kinds of ops it runs.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0F0,0I0,0W0\n")
        file.flush()
        options = ["experiment=smoke", f"pipeline.schedule={file.name}", "pipeline.num_microbatches=1"]
        with pytest.raises(ValueError, match="0I0: the runtime does not run I yet, only F, R, B, SEND_F"):
            prepare(load([*options, "pipeline.num_stages=1", "recompute=never"]))


def test_arguments_that_are_no_numbers() -> None:
    """Symptom: `num_microbatches=2.5` or `timeout_seconds=-1` ended in raw errors later, `balance=[1.5, 1.5]` was cut to `[1, 1]`.

    Cause: only their range was looked at, or nothing.
    """
    wrong: dict[str, Any] = {
        "num_microbatches": 2.5,
        "num_stages": 1.0,
        "stages_per_rank": True,
        "balance": [1.5, 0.5],
        "timeout_seconds": -1,
        "seed": 1 << 64,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ")):
            Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mean_square, **{name: value})
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        for scale in (0, float("nan"), float("inf"), "2", torch.tensor(2.0)):
            with pytest.raises(ValueError, match=r"step was given scale="):
                pipeline.step(*batch(), scale=scale)


def test_batches_that_are_no_tensors() -> None:
    """Symptom: a numpy array went whole to every microbatch, or failed in the midst of a layer; a list of numbers likewise.

    Cause: what is no tensor counts as a plain value, which each microbatch gets.
    """
    inputs, targets = batch()
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        with pytest.raises(ValueError, match=r"^inputs is a numpy.ndarray, which is not cut: .*torch.from_numpy"):
            pipeline.step(inputs.numpy(), targets)
        with pytest.raises(ValueError, match=r"^targets is a list of 6 plain values, as many as the batch has rows"):
            pipeline.step(inputs, list(range(6)))


def test_clipping_to_a_norm_that_is_none() -> None:
    """Symptom: `clip_grad_norm_(-1)` turned every gradient round; nan made them nan; no word.

    Cause: whatever was given was divided by the norm.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        pipeline.step(*batch())
        before = [parameter.grad.clone() for parameter in pipeline.parameters()]
        for norm in (-1, float("nan"), "1"):
            with pytest.raises(ValueError, match=r"clip_grad_norm_ was given max_norm=.*: a number, 0 or more"):
                pipeline.clip_grad_norm_(norm)
        for parameter, gradient in zip(pipeline.parameters(), before):
            assert torch.equal(parameter.grad, gradient)


def test_clipping_sparse_gradients() -> None:
    """Symptom: `clip_grad_norm_` raised NotImplementedError after a step with `nn.Embedding(sparse=True)`.

    Cause: torch has no norm of a sparse tensor. That of its entries would be wrong: rows that meet are added first.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4))
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    tokens, targets = torch.tensor([0, 1, 0, 0, 1, 2]), batch()[1]
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(tokens, targets)
        reference_step(dense, mean_square, tokens, targets, num_microbatches=3)
        norm, expected = pipeline.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        assert torch.allclose(norm, expected)
        for own, wanted in zip(model.parameters(), dense.parameters()):
            assert torch.allclose(own.grad.to_dense(), wanted.grad)


def test_a_state_of_another_model() -> None:
    """Symptom: a misspelt name in the state was ignored, and the layer kept its old buffer or extra tensors vanished; no word.

    Cause: each layer picked what it knows.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        state = pipeline.state_dict()
        for name in ("0.wieght", "1.weight", "weight"):
            with pytest.raises(ValueError, match=f"the state has '?{name}.*which the model does not"):
                pipeline.load_state_dict({**state, name: state["0.weight"]})
        with pytest.raises(ValueError, match=r"0.weight is a list in the state"):
            pipeline.load_state_dict({**state, "0.weight": [1.0]})
