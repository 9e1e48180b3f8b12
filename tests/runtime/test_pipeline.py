"""The pipeline as an object: evaluation, outputs, state, switches, reports, several in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity_cases import assert_same_gradients, assert_same_tensors, mean_square, plain, rows
from ranks import run_ranks
from rounding import rounding
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.families import ComputeLanes, Shape, gpipe
from pipetrain.schedule.op import Kind, Op

# In one piece and in microbatches: the mean over at most 40 rows of 8; and outputs, of order 1, of sums of these lengths.
LOSS_ROUNDING = rounding(torch.float32, terms=40 * 8)
OUTPUT_ROUNDING = rounding(torch.float32, terms=8 + 12 + 12 + 12)


def twins(dropout: float = 0.3) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(*plain(dropout))
    return model, copy.deepcopy(model)


def evaluates() -> None:
    model, reference = twins()
    reference.eval()
    with Pipeline(model, mean_square, num_microbatches=4) as pipeline:
        for inputs, targets in rows(8, 11, 3, 1, 40):
            loss = pipeline.evaluate(inputs, targets)
            assert not loss.requires_grad
            assert torch.allclose(loss, mean_square(reference(inputs), targets), rtol=LOSS_ROUNDING)
            assert torch.equal(loss, pipeline.evaluate(inputs, targets)), "dropout in evaluate"
            output = pipeline.eval()(inputs)
            assert (output is not None) == pipeline.is_last
            if output is not None:
                assert output.shape == targets.shape
                assert torch.allclose(output, reference(inputs), rtol=OUTPUT_ROUNDING, atol=OUTPUT_ROUNDING)
                assert not output.requires_grad
            pipeline.train()
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        assert pipeline.step_index == 0
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.step(*rows(8)[0])


class Structured(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"rows": x, "twice": (x * 2, None), "number": 3}


def joins() -> None:
    inputs, _ = rows(7)[0]
    last = nn.Sequential(nn.Linear(8, 8), Structured())
    with Pipeline([nn.Linear(8, 8), nn.Linear(8, 8), last], num_microbatches=3) as pipeline:
        output = pipeline(inputs)
        if pipeline.is_last:
            assert torch.equal(output["twice"][0], output["rows"] * 2)
            assert output["rows"].shape == (7, 8)
            assert (output["twice"][1], output["number"]) == (None, 3)


def steps_between_evaluations() -> None:
    """Evaluation and switches leave training as it was; so do the user's random numbers."""
    model, reference = twins()
    batches = rows(8, 11, 8)
    with Pipeline(model, mean_square, num_microbatches=4) as pipeline:
        for step, (inputs, targets) in enumerate(batches):
            pipeline.evaluate(inputs, targets)
            if step == 1:
                pipeline.eval()
                reference.eval()
            before = torch.get_rng_state()
            loss = pipeline.step(inputs, targets)
            assert torch.equal(torch.get_rng_state(), before)
            expected = reference_step(reference, mean_square, inputs, targets, num_microbatches=4, step=step)
            assert torch.equal(loss, expected)
            assert_same_gradients(pipeline, reference)  # of all steps so far: they add up
            pipeline.train()
            reference.train()


def state() -> None:
    model, reference = twins()
    for value in reference.state_dict().values():
        value.mul_(0.5)
    wanted = reference.state_dict()
    with Pipeline(model, mean_square, num_microbatches=4) as pipeline:
        pipeline.load_state_dict(wanted)
        own = pipeline.state_dict()
        assert own
        assert set(own) <= set(wanted)
        assert_same_tensors(own, wanted)
        full = pipeline.full_state_dict()
        assert (full is not None) == pipeline.is_first
        if full is not None:
            assert list(full) == list(wanted)
            assert_same_tensors(full, wanted)
        name = next(iter(own))
        with pytest.raises(ValueError, match=name):
            pipeline.load_state_dict({key: value for key, value in wanted.items() if key != name})
        with pytest.raises(ValueError, match=r"is \[3\] in the state"):
            pipeline.load_state_dict({**wanted, name: torch.zeros(3)})


def two_pipelines() -> None:
    """Two pipelines whose steps alternate do not mix their messages."""
    (first, first_reference), (second, second_reference) = twins(0.3), twins(0.0)
    with (
        Pipeline(first, mean_square, num_microbatches=4) as one,
        Pipeline(second, mean_square, num_microbatches=2, recompute="inline", schedule="1f1b") as two,
    ):
        for step, (inputs, targets) in enumerate(rows(8, 11)):
            assert torch.equal(
                one.step(inputs, targets),
                reference_step(first_reference, mean_square, inputs, targets, num_microbatches=4, step=step),
            )
            assert torch.equal(
                two.step(inputs, targets),
                reference_step(second_reference, mean_square, inputs, targets, num_microbatches=2, step=step),
            )
        assert_same_gradients(one, first_reference)
        assert_same_gradients(two, second_reference)


def reports() -> None:
    model, _ = twins()
    inputs, targets = rows(8)[0]
    seen: list[Op] = []
    with Pipeline(model, mean_square, num_microbatches=4, on_event=lambda event: seen.append(event.op)) as pipeline:
        with pytest.raises(RuntimeError, match="no report before the first step"):
            _ = pipeline.report
        pipeline.step(inputs, targets)
        report = pipeline.report
        assert [event.op for event in report.events] == seen
        ran = {op for rank, _, op in pipeline.schedule.ops() if rank == report.rank}
        assert set(seen) == ran
        assert len(seen) == len(ran)
        everyone = pipeline.gather_report()
        assert (everyone is not None) == pipeline.is_first
        if everyone is not None:
            assert set(everyone.per_rank("step")) == {0}
            assert len(everyone.of_ranks) == len(everyone.breakdown) == pipeline.plan.num_ranks
            assert sum(event.op.kind is Kind.B for event in everyone.timeline.events) == 4 * pipeline.plan.num_stages
            assert everyone.step_seconds > 0


def call_behind_each_forward(shape: Shape) -> ComputeLanes:
    return [
        [one for op in lane for one in ((op, Op(op.stage, Kind.CALL, op.microbatch)) if op.kind is Kind.F else (op,))]
        for lane in gpipe(shape)
    ]


def calls() -> None:
    """A function between ops gets the layers of its stage, no graph, and costs no bit; without it the schedule is refused."""
    model, reference = twins()
    seen: list[tuple[str, int, bool]] = []

    def on_call(op: Op, layers: Sequence[nn.Module]) -> None:
        seen.append((str(op), len(layers), torch.is_grad_enabled()))

    with pytest.raises(ValueError, match=r"CALL0: pipeline.schedule=call_behind_each_forward calls a function"):
        Pipeline(model, mean_square, num_microbatches=4, schedule=call_behind_each_forward)
    with Pipeline(
        model, mean_square, num_microbatches=4, schedule=call_behind_each_forward, on_call=on_call
    ) as pipeline:
        inputs, targets = rows(8)[0]
        loss = pipeline.step(inputs, targets)
        assert torch.equal(loss, reference_step(reference, mean_square, inputs, targets, num_microbatches=4))
        assert_same_gradients(pipeline, reference)
        stages = {stage: pipeline.plan.balance[stage] for stage in pipeline.plan.stages_of(pipeline.rank)}
        assert sorted(seen) == [(f"{stage}CALL{i}", count, False) for stage, count in stages.items() for i in range(4)]
        assert sum(event.op.kind is Kind.CALL for event in pipeline.report.events) == len(seen)


PARTS = [evaluates, joins, steps_between_evaluations, state, two_pipelines, calls, reports]


def all_parts() -> None:
    for part in PARTS:
        try:
            part()
        except BaseException as error:
            error.add_note(f"in {part.__name__}")
            raise


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_call_and_report(num_ranks: int) -> None:
    run_ranks(num_ranks, all_parts)


def test_ops_are_ranges_of_a_profiler_that_is_on() -> None:
    torch.manual_seed(0)
    inputs, targets = rows(8)[0]
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    with Pipeline(layers, mean_square, num_microbatches=2, stages_per_rank=2, schedule="interleaved") as pipeline:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            pipeline.step(inputs, targets)
        computing = {str(event.op) for event in pipeline.report.events if event.op.kind.computes}
    assert computing
    assert computing <= {event.name for event in profiler.events()}
