"""What a user may get wrong: a clear error on every rank, nothing hung, and where nothing was started it goes on."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import assert_same_gradients, mean_square, rows
from ranks import NEVER_SECONDS, run_outcomes, run_ranks
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.model.spec import make_spec
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.families import Shape, gpipe, one_forward_one_backward
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Op


def linears(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(count)]


# When a Pipeline is made ----------------------------------------------------------------------------------------------


def shared_by_two_stages() -> list[nn.Module]:
    layers = linears()
    layers[2].weight = layers[0].weight
    return layers


def of_five_stages(shape: Shape) -> list[list[Op]]:
    return [[Op(4, Kind.F, 0)] for _ in range(shape.num_ranks)]


def own_order(shape: Shape) -> list[list[Op]]:
    """The same function on both ranks, which orders the ops differently."""
    return one_forward_one_backward(shape) if dist.get_rank() == 1 else gpipe(shape)


ARGUMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "fewer layers than stages": (linears(2), {}, r"2 layers cannot fill 3 stages"),
    "balance adds up to less": (linears(), {"balance": [1, 1, 2]}, r"adds up to 4 layers, the model has 3"),
    "balance of other length": (linears(), {"balance": [1, 2]}, r"\[1, 2\] has 2 entries for 3 stages"),
    "empty stage": (linears(), {"balance": [0, 1, 2]}, r"each stage needs at least one layer"),
    "unknown balance": (linears(), {"balance": "evenly"}, r"balance='evenly': allowed are 'auto' or a list"),
    "world size": (linears(), {"num_stages": 4}, r"num_stages=4 does not fit 3 ranks"),
    "no microbatch": (linears(), {"num_microbatches": 0}, r"num_microbatches=0: at least 1"),
    "unknown schedule": (linears(), {"schedule": "gpip"}, r"did you mean 'gpipe'"),
    "unknown mode": (linears(), {"recompute": "overlapp"}, r"did you mean 'overlap'"),
    "shared parameter": (shared_by_two_stages(), {}, r"parameter 0.weight of stage 0 is 2.weight of stage 2 as well"),
    "a plan for other ranks": (linears(4), {"plan": make_plan(4, placement=[0, 1, 1, 0])}, r"plan: it is for 2 ranks, and there are 3"),
    "a plan and another balance": (linears(), {"plan": make_plan(3, num_ranks=3), "balance": [1, 2]}, r"balance=\[1, 2\]: the plan says \[1, 1, 1\]"),
    "a plan of replicas": (linears(), {"plan": make_plan(3, num_ranks=3, num_replicas=2)}, r"num_replicas=2: only one"),
    "a schedule of other ranks": (linears(), {"schedule": make_schedule(num_stages=3, placement=[2, 0, 1], num_microbatches=8)}, r"give a plan with its placement too, as in plan=make_plan\(..., placement=\[2, 0, 1\]\)"),
    "a generator of unknown stages": (linears(), {"schedule": of_five_stages}, r"^ValueError: generator of_five_stages, rank 0: 4F0 is of stage 4; allowed are 0 to 2 \(pipeline.num_stages=3\)$"),
    "not a schedule": (linears(), {"schedule": 5}, r"pipeline.schedule=5: give the name of a family, a path"),
    "stage without parameters": ([*linears(2), nn.Tanh()], {}, r"stage 2 the layers 2 to 2 \(Tanh\).*no parameters"),
    "callable that returns no layer": ([lambda: nn.Linear(8, 8)] * 2 + [lambda: 3], {}, r"callable for layer 2 returned a int"),
}  # fmt: skip


def make_each() -> list[str]:
    messages = []
    for layers, options, _ in ARGUMENTS.values():
        try:
            Pipeline(layers, mean_square, timeout_seconds=NEVER_SECONDS, **options)
            messages.append("nothing")
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    with Pipeline(linears(), mean_square, num_microbatches=2, timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(*rows(4)[0])
    return messages


def test_arguments_that_do_not_fit() -> None:
    """The same error on every rank, and afterwards a good pipeline still works."""
    found = run_ranks(3, make_each)
    for name, message, (_, _, expected) in zip(ARGUMENTS, found[0], ARGUMENTS.values()):
        assert re.search(expected, message), f"{name}: {message}"
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_model_that_cannot_be_cut() -> None:
    with pytest.raises(TypeError, match=r"a model of type Linear cannot be cut: give an nn.Sequential"):
        Pipeline(nn.Linear(8, 8), mean_square)


def makes_with_own_arguments(name: str) -> str:
    own = dist.get_rank()
    model = make_spec(ModelConfig(hidden_size=32, rope_base=100.0 + own), 7) if name == "model" else linears()
    options: dict[str, Any] = {
        "model": {},
        "seed": {"seed": own},
        "plan": {"num_microbatches": 2 + own},
        "schedule": {"recompute": ["inline", "overlap"][own]},
        "generator": {"schedule": own_order},
    }[name]
    what = {"generator": "schedule"}.get(name, name)
    with pytest.raises(ValueError, match=f"rank 1 was given another {what} than rank 0") as caught:
        Pipeline(model, mean_square, timeout_seconds=NEVER_SECONDS, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["model", "seed", "plan", "schedule", "generator"])
def test_ranks_given_different_arguments(name: str) -> None:
    first, second = run_ranks(2, makes_with_own_arguments, name)
    assert first == second


# When it is called ----------------------------------------------------------------------------------------------------


def is_refused_and_goes_on(call: str) -> str:
    """A batch that cannot be cut is refused on every rank before anything runs."""
    model = nn.Sequential(*linears())
    reference = nn.Sequential(*linears())
    small, good = rows(3, 8)
    uneven = (torch.zeros(8, 8), torch.zeros(7, 8))
    with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
        with pytest.raises(ValueError, match=r".") as caught:
            {
                "few rows": lambda: pipeline.step(*small),
                "no rows": lambda: pipeline.evaluate(torch.zeros(0, 8), torch.zeros(0, 8)),
                "no inputs": lambda: pipeline.step(None, small[1]),
                "other rows": lambda: pipeline.step((uneven, uneven), small[1]),
                "no dimension": lambda: pipeline.step((torch.zeros(8, 8), torch.tensor(1.0)), small[1]),
            }[call]()
        loss = pipeline.step(*good)
        assert torch.equal(loss, reference_step(reference, mean_square, *good, num_microbatches=4))
        assert_same_gradients(pipeline, reference)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("few rows", r"inputs has 3 rows, fewer than num_microbatches=4: give at least 4 rows"),
        ("no rows", r"rows"),
        ("no inputs", r"step was given no (inputs|rows) on rank 0"),
        ("other rows", r"inputs\[0\]\[1\] has 7 rows, the tensors before it 8"),
        ("no dimension", r"inputs\[1\] is a tensor without dimensions.*pipetrain.Whole"),
    ],
)
def test_batches_that_cannot_be_cut(call: str, message: str) -> None:
    first, *others = run_ranks(3, is_refused_and_goes_on, call)
    assert re.search(message, first), first
    assert others == [first] * 2


def fails_in_step(name: str) -> None:
    inputs, targets = rows(8)[0]
    loss, count_fn = mean_square, None
    if name == "no scalar":
        loss = lambda output, target: (output - target).sum(1)  # noqa: E731
    elif name == "targets":
        targets = targets[:7]
    elif name == "counts":
        count_fn = lambda target: 0  # noqa: E731
    layers = linears()
    if name == "no gradient":
        for layer in layers:
            layer.requires_grad_(False)
    pipeline = Pipeline(
        layers,
        None if name == "no loss" else loss,
        num_microbatches=4,
        timeout_seconds=NEVER_SECONDS,
        count_fn=count_fn,
    )
    pipeline.step(inputs, targets)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no scalar", r"loss_fn returned a tensor of shape \[2\]: it must return a 0-dim tensor"),
        ("targets", r"targets have 7 rows on the last rank, inputs 8 on the first"),
        ("counts", r"count_fn gave \[0, 0, 0, 0\]"),
        ("no loss", r"has no loss_fn"),
        ("no gradient", r"nothing in the model needs a gradient"),
    ],
)
def test_mistakes_that_the_last_rank_finds(name: str, message: str) -> None:
    """It raises ValueError; the others end and say the same, instead of waiting for it."""
    outcomes = run_outcomes(3, fails_in_step, name)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert re.search(message, outcome.error or ""), outcome.error
    assert "ValueError" in (outcomes[2].error or "")


class Poisoned(nn.Module):
    """Multiplies one row of the batch by infinity, where a row's first entry is the mark."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] == 43.0, x * math.inf, x)


def has_a_bad_row() -> str:
    model = nn.Sequential(Poisoned(), *linears())
    reference = nn.Sequential(Poisoned(), *linears())
    (bad, targets), (good, other) = rows(8, 8)
    bad[5, 0] = 43.0
    with Pipeline(model, mean_square, num_microbatches=4, balance=[2, 1, 1], timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(good, other)
        with pytest.raises(RuntimeError, match="not finite") as caught:
            pipeline.step(bad, targets)
        pipeline.zero_grad()
        loss = pipeline.step(good, other)
        assert torch.equal(loss, reference_step(reference, mean_square, good, other, num_microbatches=4, step=2))
        assert_same_gradients(pipeline, reference)
    return str(caught.value)


def test_a_loss_that_is_not_finite() -> None:
    """Microbatch and step are named on every rank, and the next step works."""
    first, *others = run_ranks(3, has_a_bad_row)
    assert "the loss of microbatch 2 in step 1 is not finite" in first
    assert others == [first] * 2


def calls_something_else(name: str) -> None:
    inputs, targets = rows(8)[0]
    pipeline = Pipeline(linears(), mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS)
    pipeline.step(inputs, targets)
    if dist.get_rank() == 1:
        {"evaluate": pipeline.evaluate, "call": pipeline, "clip": lambda *_: pipeline.clip_grad_norm_(1.0)}[name](
            inputs
        )
    else:
        pipeline.step(inputs, targets)
    pipeline.step(inputs, targets)


@pytest.mark.parametrize("name", ["evaluate", "call", "clip"])
def test_ranks_that_call_different_methods(name: str) -> None:
    outcomes = run_outcomes(3, calls_something_else, name)
    for outcome in outcomes:
        assert outcome.exit_code != 0
    if name != "clip":  # whose messages have another size, at which gloo ends the process
        expected = rf"rank 1 called {name} 1 where rank 0 called step 1: every rank must call the same methods"
        assert all(re.search(expected, outcome.error or "") for outcome in outcomes), [o.error for o in outcomes]
