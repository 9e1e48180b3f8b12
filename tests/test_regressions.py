"""The museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_cases import Case, rows, run_cases
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.runtime.cut import Whole
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.slots import RecomputeMismatch

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

# State that a forward changes. --- (12: 3, 5, 8, 14, 15, 16)

# What needs a gradient, and whose. --- (12: 9, 10)

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
