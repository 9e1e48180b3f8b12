"""`Pipeline.change`: another policy, schedule or number of microbatches between two steps, and the numbers of `reference_step`, bit for bit."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cases import assert_same_gradients, assert_same_tensors, mean_square, plain, rows, transposed
from ranks import NEVER_SECONDS, run_ranks
from torch import nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy

# What is changed ahead of a step, the microbatches that it then has, and the rows of its batch.
WAY: list[tuple[dict[str, Any], int, int]] = [
    ({}, 4, 8),
    ({"recompute": "inline"}, 4, 8),
    ({"recompute": RecomputePolicy(segments=2)}, 4, 8),
    ({"num_microbatches": 2}, 2, 11),
    ({"schedule": "1f1b", "recompute": RecomputePolicy("early", sets=2), "num_microbatches": 5}, 5, 11),
    ({"recompute": RecomputePolicy("inline", selective="matmul")}, 5, 14),
    ({"recompute": "never", "num_microbatches": 1}, 1, 3),
    ({"schedule": "gpipe", "recompute": RecomputePolicy(segments="layers", verify="every")}, 1, 8),
    ({"recompute": "overlap", "num_microbatches": 4}, 4, 8),
]


def layers(*, tied: bool = False) -> list[nn.Module]:
    """Dropout, buffers that F changes, and a head that may share the weight of the first layer."""
    first, head = nn.Linear(8, 8), nn.Linear(8, 8)
    if tied:
        head.weight = first.weight
    return [first, *plain(0.3), nn.BatchNorm1d(8), *transposed(0.3), head]


def change_on_the_way(bfloat16: bool) -> int:
    """Each step beside the plain loop; returns the storages' bytes that are held at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    reference = copy.deepcopy(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)
    with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
        parameters = list(pipeline.parameters())
        for step, (changed, m, count) in enumerate(WAY):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of places that are not used
                pipeline.change(**changed)
            assert pipeline.plan.num_microbatches == m
            assert all(now is then for now, then in zip(pipeline.parameters(), parameters, strict=True))
            ((inputs, targets),) = rows(count)
            with autocast:
                loss = pipeline.step(copy.deepcopy(inputs), targets)
                expected = reference_step(reference, mean_square, inputs, targets, num_microbatches=m, step=step)
            assert torch.equal(loss, expected), f"step {step}: loss {loss}, expected {expected}"
            assert_same_gradients(pipeline, reference)
            assert pipeline.report.step == step
            done = [event.op for event in pipeline.report.events if event.op.kind is Kind.F]
            assert {op.microbatch for op in done} == set(range(m))
            with autocast, torch.no_grad():
                heldout = pipeline.evaluate(inputs, targets)
                reference.eval()
                parts = [
                    mean_square(reference(x), y) * (len(x) / count)
                    for x, y in zip(inputs.tensor_split(min(m, count)), targets.tensor_split(min(m, count)))
                ]
                reference.train()
            assert torch.equal(heldout, sum(parts[1:], parts[0]))
        assert_same_tensors(pipeline.state_dict(), reference.state_dict())
        return pipeline._parts.meter.current_bytes


@pytest.mark.parametrize(
    ("num_ranks", "bfloat16"), [(1, False), (2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_steps_equal_the_plain_loop_whatever_is_changed(num_ranks: int, bfloat16: bool) -> None:
    assert run_ranks(num_ranks, change_on_the_way, bfloat16) == [0] * num_ranks


def tied_over_ranks() -> list[torch.Tensor]:
    """The gradient of the weight that the first and the last stage share, after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers(tied=True))
    reference, found = copy.deepcopy(model), []
    with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
        for step, (changed, m, count) in enumerate(WAY[:5]):
            pipeline.change(**changed)
            pipeline.zero_grad()
            reference.zero_grad()
            ((inputs, targets),) = rows(count)
            pipeline.step(inputs, targets)
            reference_step(reference, mean_square, inputs, targets, num_microbatches=m, step=step)
            own = dict(pipeline.named_parameters())["0.weight"].grad
            assert own is not None
            # Each copy adds up its own use over the microbatches first.
            torch.testing.assert_close(own, reference[0].weight.grad)
            found.append(own)
    return found


def test_a_weight_that_two_ranks_share_has_one_gradient_after_each_change() -> None:
    first, last = run_ranks(2, tied_over_ranks)
    assert len(first) == 5
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))


MISTAKES: dict[str, Callable[[Pipeline], dict[str, Any]]] = {
    "num_microbatches=0: at least 1 is needed": lambda pipeline: {"num_microbatches": 0},
    "later": lambda pipeline: {"recompute": "later"},
    "recompute.segments=99: stage 0 has": lambda pipeline: {"recompute": RecomputePolicy(segments=99)},
    "the schedule is for 3 microbatches, the pipeline has num_microbatches=4": lambda pipeline: {
        "schedule": make_schedule("gpipe", num_stages=pipeline.plan.num_stages, num_microbatches=3)
    },
    "rank 1 was given another plan than rank 0": lambda pipeline: {"num_microbatches": 2 + pipeline.rank},
}


def mistakes() -> list[str]:
    """What each mistake says; the pipeline goes on after each as it was before."""
    told = []
    ((inputs, targets),) = rows(8)
    model = nn.Sequential(*plain(0.0))
    with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
        before = pipeline.step(inputs, targets)
        for given in MISTAKES.values():
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                pipeline.change(**given(pipeline))
            told.append(str(refused.value))
            pipeline.step_index = 0
            assert torch.equal(pipeline.step(inputs, targets), before)
    return told


def test_what_cannot_be_changed_is_told_on_every_rank_and_changes_nothing() -> None:
    first, second = run_ranks(2, mistakes)
    assert first == second
    for message, part in zip(first, MISTAKES, strict=True):
        assert part in message
        assert "\n" not in message


def test_a_schedule_that_was_given_says_itself_what_is_recomputed() -> None:
    plan = make_plan(3, num_ranks=1, num_microbatches=2)
    given = make_schedule("gpipe", num_stages=1, num_microbatches=2, recompute="inline")
    with Pipeline(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), mean_square, plan=plan, schedule=given
    ) as pipeline:
        with pytest.raises(
            ValueError, match=r"^change\(recompute='never'\): the pipeline runs a Schedule that it was given"
        ):
            pipeline.change(recompute="never")
        pipeline.change(schedule=make_schedule("gpipe", num_stages=1, num_microbatches=2, recompute="never"))
        assert pipeline.schedule.policy.mode.value == "never"


def test_the_report_is_that_of_the_last_step_until_the_next_one() -> None:
    ((inputs, targets),) = rows(8)
    with Pipeline(nn.Sequential(*plain(0.0)), mean_square, num_microbatches=4, recompute="inline") as pipeline:
        pipeline.step(inputs, targets)
        before = pipeline.gather_report()
        pipeline.change(num_microbatches=2, recompute="never")
        assert pipeline.gather_report() == before
        pipeline.step(inputs, targets)
        after = pipeline.gather_report()
    assert before is not None
    assert after is not None
    assert [len(report.timeline.events) for report in (before, after)] == [8, 4]


def test_the_first_microbatch_after_a_change_is_proved() -> None:
    """A layer that does not do in R what it did in F is found, although its like was proved before."""

    counted = itertools.count(1)

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.is_fickle = nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls = next(counted)
            return torch.tanh(self.linear(x) * (calls if self.is_fickle else 1))

    layer = Fickle()
    ((inputs, targets),) = rows(8)
    policy = RecomputePolicy("inline", last_stage="always")
    with Pipeline(nn.Sequential(layer, nn.Linear(8, 8)), mean_square, num_microbatches=2, recompute=policy) as pipeline:
        pipeline.step(inputs, targets)
        layer.is_fickle = True
        pipeline.change(recompute=RecomputePolicy("early", last_stage="always"))
        with pytest.raises(Exception, match=r"layer 0 \(Fickle\) computes other values when it runs again"):
            pipeline.step(inputs, targets)


def test_a_closed_pipeline_is_not_changed() -> None:
    pipeline = Pipeline(nn.Sequential(*plain(0.0)), mean_square)
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.change(recompute="inline")
