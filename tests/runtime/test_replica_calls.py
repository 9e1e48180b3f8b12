"""Every call of a pipeline gives on two replicas of two stages what one loop gives, and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import test_tied as tied
import torch
import torch.distributed as dist
from ranks import NEVER_SECONDS, run_ranks
from replica_models import MICROBATCHES, SHAPES, assert_replicas_equal, batch, difference, layers, mean_square
from rounding import rounding
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipetrain.comm import chain as chains
from pipetrain.comm.failure import PipelineError
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

TWO = SHAPES["2 x 2"]
ALL_MICROBATCHES = TWO.num_replicas * MICROBATCHES
# The loop adds up the loss and each gradient microbatch by microbatch, replicas each their own first.
CLOSE = rounding(torch.float32, terms=ALL_MICROBATCHES)


def counted(target: Tensor) -> int:
    return int((target[:, 0] > -50).sum())


def counted_loss(output: Tensor, target: Tensor) -> Tensor:
    which = target[:, 0] > -50
    return ((output[which] - target[which]) ** 2).sum() / which.sum()


def rows_that_count(*counts: int) -> tuple[Tensor, Tensor]:
    """Two rows per microbatch, of which so many count."""
    inputs, targets = batch(7, 2 * len(counts))
    for number, count in enumerate(counts):
        targets[2 * number + count : 2 * number + 2] = -99.0
    return inputs, targets


def what_counts() -> None:
    """Counts are shared out over all replicas; one whose microbatches count nothing adds nothing."""
    all_counts = ((2, 1, 0, 2, 1, 1, 2, 0), (0, 0, 0, 0, 1, 2, 0, 1), (1, 2, 2, 2, 0, 0, 0, 0), (2,) * 8)
    accumulated = rounding(torch.float32, terms=ALL_MICROBATCHES * len(all_counts))
    reference = nn.Sequential(*layers())
    with TWO.pipeline(loss=counted_loss, count_fn=counted) as pipeline:
        for step, counts in enumerate(all_counts):
            inputs, targets = rows_that_count(*counts)
            loss = pipeline.step(pipeline.own_rows(inputs), pipeline.own_rows(targets))
            expected = reference_step(
                reference, counted_loss, inputs, targets, num_microbatches=8, step=step, count_fn=counted
            )
            assert torch.equal(loss, expected), f"{counts}: {float(loss)}, not {float(expected)}"
            wanted = dict(reference.named_parameters())  # steps are not put back to zero: they accumulate
            for name, parameter in pipeline.named_parameters():
                assert difference(parameter.grad, wanted[name].grad) <= accumulated, (counts, name)  # type: ignore[arg-type]
            evaluated = pipeline.evaluate(pipeline.own_rows(inputs), pipeline.own_rows(targets))
            with torch.no_grad():
                reference.eval()
                shares = [counted(rows) for rows in targets.tensor_split(8)]
                parts = zip(inputs.tensor_split(8), targets.tensor_split(8), shares)
                whole = sum(counted_loss(reference(x), y) * (n / sum(shares)) for x, y, n in parts if n)
                reference.train()
            assert difference(evaluated, whole) <= CLOSE  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"count_fn gave .* not all 0"):
            pipeline.step(*rows_that_count(0, 0, 0, 0))


def mistakes() -> list[str]:
    """Made in one replica alone; every rank of both says the same, and afterwards a step works."""
    said = []
    with TWO.pipeline() as pipeline:
        replica = pipeline.coordinates.replica
        inputs, targets = batch(0)
        good = pipeline.own_rows(inputs), pipeline.own_rows(targets)
        bad: list[tuple[Any, Any]] = [(inputs[:3], targets[:3]), (None, good[1]), ((good[0], good[0][:2]), good[1])]
        for call in bad:
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                pipeline.step(*(call if replica == 1 else good))
            said.append(str(caught.value))
        with pytest.raises(ValueError, match="rows, fewer than num_replicas=2") as caught:
            pipeline.own_rows(inputs[:1])
        said.append(str(caught.value))
        with pytest.raises(ValueError, match="generate was called with num_replicas=2"):
            pipeline.generate([[1]], max_new_tokens=1)
        assert math.isfinite(pipeline.step(*good))
    return said


def rows_of_each() -> None:
    """A batch is cut as all microbatches of all replicas cut it; of few rows each replica has its share."""
    with TWO.pipeline() as pipeline:
        r, inputs = pipeline.coordinates.replica, torch.arange(33)
        m = MICROBATCHES
        assert torch.equal(pipeline.own_rows(inputs), torch.cat(inputs.tensor_split(2 * m)[r * m : (r + 1) * m]))
        assert torch.equal(pipeline.own_rows((inputs[:5], 3))[0], inputs[:5].tensor_split(2)[r])
        few, targets = batch(1, 5)
        found = pipeline.evaluate(pipeline.own_rows(few), pipeline.own_rows(targets))
        model = nn.Sequential(*layers()).eval()
        with torch.no_grad():
            # One mean over all entries, or the sum of a mean per microbatch.
            close = rounding(torch.float32, terms=targets.numel())
            assert difference(found, mean_square(model(few), targets)) <= close
            output = pipeline.eval()(pipeline.own_rows(few))
            if pipeline.is_last:
                torch.testing.assert_close(output, model(few.tensor_split(2)[r]))


def state_and_reports() -> None:
    with TWO.pipeline() as pipeline:
        pipeline.step(*map(pipeline.own_rows, batch(0)))
        state, report = pipeline.full_state_dict(), pipeline.gather_report()
        assert (state is None) == (report is None) == (pipeline.rank > 0)
        if state is not None and report is not None:
            assert all(torch.equal(value, state[name]) for name, value in nn.Sequential(*layers()).state_dict().items())
            assert [one.rank for one in report.of_ranks] == [0, 1, 2, 3]
        assert pipeline.mesh.mesh_dim_names == ("replica", "stage")


def not_finite() -> None:
    """The microbatch is counted over all replicas, and every rank raises it."""
    with TWO.pipeline() as pipeline:
        inputs, targets = batch(0, 16)
        inputs[11] = math.nan  # row 11 of 2 in each microbatch: number 5, in replica 1
        own = pipeline.own_rows(inputs), pipeline.own_rows(targets)
        with pytest.raises(LossNotFinite, match="the loss of microbatch 5 in step 1"):
            pipeline.step(*own)
        found = pipeline.find_not_finite(*own)
        assert found.finding is not None
        assert (found.finding.microbatch, found.finding.layer, found.finding.rank) == (5, 0, 2)
        assert found.losses.keys() == set(range(8))
        # A gradient that is not finite, on one rank: the norm says so on each, and the next step is as if there had been none.
        pipeline.zero_grad()
        parameters = dict(pipeline.named_parameters())
        if pipeline.rank == 3:
            handle = parameters["4.norm.bias"].register_hook(lambda gradient: gradient * math.inf)
        assert math.isfinite(pipeline.step(*map(pipeline.own_rows, batch(1))))
        norms: list[Any] = [None] * 4
        dist.all_gather_object(norms, float(pipeline.clip_grad_norm_(1.0)))
        assert not any(map(math.isfinite, norms)), norms
        if pipeline.rank == 3:
            handle.remove()
        pipeline.zero_grad()
        pipeline.check_replicas()
        reference = nn.Sequential(*layers())
        number = pipeline.step_index
        loss = pipeline.step(*map(pipeline.own_rows, batch(2)))
        expected = reference_step(reference, mean_square, *batch(2), num_microbatches=8, step=number)
        assert difference(loss, expected) <= CLOSE
        for name, wanted in reference.named_parameters():
            assert name not in parameters or difference(parameters[name].grad, wanted.grad) <= CLOSE  # type: ignore[arg-type]


def weights_apart() -> list[str]:
    """Replicas that were built with other weights begin with those of the first; and who changes some is named."""
    said = []
    with TWO.pipeline(layers(seed=dist.get_rank())) as pipeline:
        assert_replicas_equal(pipeline)
        state = pipeline.full_state_dict()
        if state is not None:
            assert torch.equal(state["0.weight"], layers(seed=0)[0].state_dict()["weight"])
            assert torch.equal(state["5.weight"], layers(seed=1)[5].state_dict()["weight"])
        if pipeline.rank == 3:
            with torch.no_grad():
                dict(pipeline.named_parameters())["4.norm.bias"][3] += 1e-7
        with pytest.raises(PipelineError) as caught:
            pipeline.check_replicas()
        said.append(str(caught.value))
        pipeline.load_state_dict({**nn.Sequential(*layers()).state_dict()})
        pipeline.check_replicas()
    return said


def trained_and_frozen() -> list[str]:
    """What all replicas freeze is in no bucket; what one freezes alone is refused, on every rank."""
    with TWO.pipeline() as pipeline:
        own = dict(pipeline.named_parameters())
        frozen = [name for name in own if name.startswith(("0.", "1.", "2."))] + ["4.norm.bias"]
        for name in set(frozen) & set(own):
            own[name].requires_grad_(False)
        inputs, targets = batch(0)
        pipeline.step(pipeline.own_rows(inputs), pipeline.own_rows(targets))
        reference = nn.Sequential(*layers())
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(name not in frozen)
        reference_step(reference, mean_square, inputs, targets, num_microbatches=8)
        wanted = dict(reference.named_parameters())
        for name, parameter in own.items():
            if name in frozen:
                assert parameter.grad is None, name
            else:
                assert difference(parameter.grad, wanted[name].grad) <= CLOSE, name  # type: ignore[arg-type]
        if pipeline.rank == 3:
            own["4.norm.weight"].requires_grad_(False)
        with pytest.raises(PipelineError) as caught:
            pipeline.step(pipeline.own_rows(inputs), pipeline.own_rows(targets))
        return [str(caught.value)]


def shared_by_stages() -> None:
    """A parameter of two stages is summed over both and all replicas."""
    tied.several_steps_of({}, {}, num_replicas=2)


def few_messages() -> None:
    """What ranks tell each other besides ops does not grow with the microbatches."""
    sent: list[str] = []
    counts, send = [], chains.Neighbour.send

    def note(self: Any, data: bytes, what: str) -> None:
        sent.append(what)
        send(self, data, what)

    chains.Neighbour.send = note  # type: ignore[method-assign]
    try:
        for num_microbatches in (2, 12):
            plan = make_plan(6, num_ranks=2, num_microbatches=num_microbatches)
            with TWO.pipeline(plan=plan) as pipeline:
                sent.clear()
                pipeline.step(*map(pipeline.own_rows, batch(0)))
                counts.append(len(sent))
    finally:
        chains.Neighbour.send = send  # type: ignore[method-assign]
    assert counts[0] == counts[1] <= 5


def a_mesh_of_the_user() -> None:
    """It says which ranks are a replica, and its groups are those that libraries get."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    with Pipeline(layers(), mean_square, num_microbatches=4, mesh=mesh, timeout_seconds=NEVER_SECONDS) as pipeline:
        assert pipeline.mesh is mesh
        assert (pipeline.num_replicas, pipeline.plan.num_replicas, pipeline.plan.num_stages) == (2, 2, 2)
        assert (pipeline.coordinates.stage, pipeline.coordinates.replica) == divmod(pipeline.rank, 2)
        loss = pipeline.step(*map(pipeline.own_rows, batch(0)))
        expected = reference_step(nn.Sequential(*layers()), mean_square, *batch(0), num_microbatches=8)
        assert difference(loss, expected) <= CLOSE
    for wrong, expected_text in (
        ({"num_replicas": 4}, "num_replicas=4: the mesh has 2"),
        (
            {"plan": make_plan(6, num_ranks=4)},
            r"plan: it is for 4 ranks of each replica, and there are 4 ranks for num_replicas=2",
        ),
        ({"plan": make_plan(6, num_ranks=1, num_replicas=4)}, "num_replicas=4: the mesh has 2"),
    ):
        with pytest.raises(ValueError, match=expected_text):
            Pipeline(layers(), mean_square, mesh=mesh, timeout_seconds=NEVER_SECONDS, **wrong)
    with pytest.raises(ValueError, match="num_replicas=2: the plan says 4"):
        TWO.pipeline(plan=make_plan(6, num_ranks=1, num_replicas=4))
    with pytest.raises(ValueError, match=r"it is for 2 ranks, and there are 4: .* or set num_replicas=2"):
        Pipeline(layers(), mean_square, plan=make_plan(6, num_ranks=2), timeout_seconds=NEVER_SECONDS)


def replaced_parameters() -> None:
    """Nobody would sum the gradient of a parameter that came later, and replicas would drift apart."""
    inputs, targets = batch(0)
    model = layers()
    with TWO.pipeline(model) as pipeline:
        pipeline.step(inputs, targets)
        for linear in (model[0], model[5]):
            linear.weight = nn.Parameter(linear.weight.detach().clone())
        with pytest.raises((ValueError, PipelineError), match=r"[05]\.weight: not a parameter that the stage had when"):
            pipeline.step(inputs, targets)


PARTS: list[Callable[[], Any]] = [
    what_counts,
    mistakes,
    rows_of_each,
    state_and_reports,
    not_finite,
    weights_apart,
    shared_by_stages,
    few_messages,
    a_mesh_of_the_user,
    trained_and_frozen,
    replaced_parameters,
]


def all_parts() -> dict[str, Any]:
    found = {}
    for part in PARTS:
        try:
            found[part.__name__] = part()
        except BaseException as error:
            error.add_note(f"in {part.__name__}")
            raise
    return found


def test_everything_else_of_two_by_two() -> None:
    found = run_ranks(4, all_parts)
    for name in ("mistakes", "weights_apart"):
        assert all(each[name] == found[0][name] for each in found), f"{name}: not the same on every rank"
    said = found[0]["mistakes"]
    assert (
        said[0]
        == "inputs has 3 rows, fewer than num_microbatches=4: give at least 4 rows or set num_microbatches=3 (in replica 1)"
    )
    assert said[1].startswith("step was given no inputs on rank 2 (replica 1, stage 0), which holds the first stage")
    assert "\n" not in "".join(said)
    (apart,) = found[0]["weights_apart"]
    assert "rank 1 (replica 0, stage 1), rank 3 (replica 1, stage 1) differ in 4.norm.bias" in apart
    for each in found:
        (text,) = each["trained_and_frozen"]
        assert text.startswith("replica 1 trains other parameters of stage 1 than replica 0"), text
