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
from pipetrain.models.spec import make_spec
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.cut import Whole
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.families import Shape, gpipe, one_forward_one_backward
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.policy import RecomputePolicy


def linears(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(count)]


# When a Pipeline is made ----------------------------------------------------------------------------------------------


def shared_by_three_stages() -> list[nn.Module]:
    layers = linears()
    layers[2].weight = layers[1].weight = layers[0].weight
    return layers


def in_one_memory() -> list[nn.Module]:
    layers = linears()
    layers[2].weight.data = layers[0].weight.data
    return layers


def made_for_inference() -> list[nn.Module]:
    with torch.inference_mode():
        return linears()


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
    "microbatches that are no number": (linears(), {"num_microbatches": 2.5}, r"num_microbatches=2.5: a whole number is needed, 1 or more"),
    "microbatches that are a flag": (linears(), {"num_microbatches": True}, r"num_microbatches=True: a whole number"),
    "microbatches that are text": (linears(), {"num_microbatches": "8"}, r"num_microbatches='8': a whole number"),
    "negative microbatches": (linears(), {"num_microbatches": -1}, r"num_microbatches=-1: at least 1"),
    "stages that are no whole number": (linears(), {"num_stages": 3.0}, r"num_stages=3.0: a whole number"),
    "no stage": (linears(), {"num_stages": 0}, r"num_stages=0: at least 1"),
    "half a stage per rank": (linears(), {"stages_per_rank": 0.5}, r"stages_per_rank=0.5: a whole number"),
    "half a layer per stage": (linears(), {"balance": [1.5, 0.5, 1]}, r"balance=\[1.5, 0.5, 1\]: allowed are 'auto' or a list of layers per stage, which are whole"),
    "a balance that is a number": (linears(), {"balance": 3}, r"balance=3: allowed are 'auto' or a list"),
    "replicas that are text": (linears(), {"num_replicas": "1"}, r"num_replicas='1': a whole number"),
    "no plan": (linears(), {"plan": "auto"}, r"plan='auto': give what make_plan\(3, ...\) returns"),
    "a seed that is text": (linears(), {"seed": "0"}, r"seed='0': a whole number of 64 bits"),
    "a seed of 65 bits": (linears(), {"seed": 1 << 64}, r"seed=18446744073709551616: a whole number of 64 bits"),
    "no time": (linears(), {"timeout_seconds": 0}, r"timeout_seconds=0: .* more than 0"),
    "negative time": (linears(), {"timeout_seconds": -1}, r"timeout_seconds=-1: .* more than 0"),
    "a time that is none": (linears(), {"timeout_seconds": math.nan}, r"timeout_seconds=nan: .* more than 0"),
    "a time that is text": (linears(), {"timeout_seconds": "600"}, r"timeout_seconds='600': .* a number of seconds"),
    "endless time": (linears(), {"timeout_seconds": math.inf}, r"timeout_seconds=inf: .* at most 1e9"),
    "no device": (linears(), {"device": "gpu"}, r"device='gpu': allowed are 'cpu', 'cuda'"),
    "a device without memory": (linears(), {"device": "meta"}, r"device='meta': allowed are 'cpu', 'cuda'"),
    "a count that is no function": (linears(), {"count_fn": 3}, r"count_fn=3: give a function of a microbatch's target"),
    "unknown schedule": (linears(), {"schedule": "gpip"}, r"did you mean 'gpipe'"),
    "unknown mode": (linears(), {"recompute": "overlapp"}, r"did you mean 'overlap'"),
    "shared parameter": (shared_by_three_stages(), {}, r"0.weight of stage 0, 1.weight of stage 1, 2.weight of stage 2 are one parameter: two stages may share one, not 3"),
    "memory of another stage": (in_one_memory(), {}, r"0.weight of stage 0 and 2.weight of stage 2 lie in one memory"),
    "a layer three times": (linears(1) * 3, {}, r"0.weight of stage 0, 1.weight of stage 1, 2.weight of stage 2 are one parameter: two stages"),
    "of inference mode": (made_for_inference(), {}, r"layer [012] \(\w+\).weight was made under torch.inference_mode\(\), so it cannot be trained"),
    "a plan for other ranks": (linears(4), {"plan": make_plan(4, placement=[0, 1, 1, 0])}, r"plan: it is for 2 ranks, and there are 3"),
    "a plan and another balance": (linears(), {"plan": make_plan(3, num_ranks=3), "balance": [1, 2]}, r"balance=\[1, 2\]: the plan says \[1, 1, 1\]"),
    "a plan of replicas": (linears(), {"plan": make_plan(3, num_ranks=3, num_replicas=2)}, r"num_replicas=2: 3 ranks make no 2 replicas of equal size"),
    "a schedule of other ranks": (linears(), {"schedule": make_schedule(num_stages=3, placement=[2, 0, 1], num_microbatches=8)}, r"give a plan with its placement too, as in plan=make_plan\(..., placement=\[2, 0, 1\]\)"),
    "a generator of unknown stages": (linears(), {"schedule": of_five_stages}, r"^ValueError: generator of_five_stages, rank 0: 4F0 is of stage 4; allowed are 0 to 2 \(pipeline.num_stages=3\)$"),
    "more host memory than there is": (linears(), {"recompute": RecomputePolicy(offload="always", host_bytes=10**15)}, r"recompute.host_bytes=1000000000000000: this machine has \d+ bytes of memory"),
    "not a schedule": (linears(), {"schedule": 5}, r"pipeline.schedule=5: give the name of a family, a path"),
    "stage without parameters": ([*linears(2), nn.Tanh()], {}, r"stage 2 the layers 2 to 2 \(Tanh\).*no parameters"),
    "callable that returns no layer": ([lambda: nn.Linear(8, 8)] * 2 + [lambda: 3], {}, r"callable for layer 2 returned a int"),
}  # fmt: skip


def make_each() -> list[str]:
    messages = []
    for layers, options, _ in ARGUMENTS.values():
        try:
            Pipeline(layers, mean_square, **{"timeout_seconds": NEVER_SECONDS, **options})
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


def make_with_own_arguments() -> list[str]:
    return [makes_with_own(name) for name in ("model", "seed", "plan", "schedule", "generator")]


def makes_with_own(name: str) -> str:
    own = dist.get_rank()
    model = make_spec(ModelConfig(hidden_size=32, rope_theta=100.0 + own), 7) if name == "model" else linears()
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


def test_ranks_given_different_arguments() -> None:
    first, second = run_ranks(2, make_with_own_arguments)
    assert first == second


# When it is called ----------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def are_refused_and_go_on() -> list[str]:
    return [is_refused_and_goes_on(call) for call in BATCHES]


def is_refused_and_goes_on(call: str) -> str:
    """A batch that cannot be cut is refused on every rank before anything runs."""
    model = nn.Sequential(*linears())
    reference = nn.Sequential(*linears())
    small, good = rows(3, 8)
    uneven = (torch.zeros(8, 8), torch.zeros(7, 8))
    with torch.inference_mode():
        made_there = torch.zeros(8, 8)
    with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
        with pytest.raises(ValueError, match=r".") as caught:
            {
                "few rows": lambda: pipeline.step(*small),
                "no rows": lambda: pipeline.evaluate(torch.zeros(0, 8), torch.zeros(0, 8)),
                "no inputs": lambda: pipeline.step(None, small[1]),
                "other rows": lambda: pipeline.step((uneven, uneven), small[1]),
                "no dimension": lambda: pipeline.step((torch.zeros(8, 8), torch.tensor(1.0)), small[1]),
                "numpy": lambda: pipeline.step((good[0].numpy(), good[0]), good[1]),
                "a list": lambda: pipeline.step({"a": good[0], "b": list(range(8))}, good[1]),
                "an object": lambda: pipeline.step((good[0], Holder(good[0])), good[1]),
                "sparse": lambda: pipeline.step((good[0], good[0].to_sparse()), good[1]),
                "gradient": lambda: pipeline.step((good[0], good[0].clone().requires_grad_()), good[1]),
                "whole gradient": lambda: pipeline.step((good[0], Whole(good[0].clone().requires_grad_())), good[1]),
                "inference": lambda: pipeline.step(made_there, good[1]),
                "scale": lambda: pipeline.step(*good, scale=math.nan),
                "no scale": lambda: pipeline.step(*good, scale=0),
                "scale of text": lambda: pipeline.step(*good, scale="2"),
                "scale in a tensor": lambda: pipeline.step(*good, scale=torch.tensor(2.0)),
                "no_grad": lambda: torch.no_grad()(pipeline.step)(*good),
                "inference_mode": lambda: torch.inference_mode()(pipeline.step)(*good),
            }[call]()
        loss = pipeline.step(*good)
        assert torch.equal(loss, reference_step(reference, mean_square, *good, num_microbatches=4))
        assert_same_gradients(pipeline, reference)
    return str(caught.value)


BATCHES = {
    "few rows": r"inputs has 3 rows, fewer than num_microbatches=4: give at least 4 rows",
    "no rows": r"rows",
    "no inputs": r"step was given no (inputs|rows) on rank 0",
    "numpy": r"inputs\[0\] is a numpy.ndarray, which is not cut: give a tensor, such as torch.from_numpy",
    "a list": r"inputs\['b'\] is a list of 8 plain values, as many as the batch has rows, and is not cut",
    "an object": r"inputs\[1\] is a .*Holder with tensors in it, which are not cut",
    "sparse": r"inputs\[1\] is a tensor of layout torch.sparse_coo, which cannot be cut",
    "gradient": r"inputs\[1\] requires a gradient: .* Give it as .detach\(\), or move its computation into the first layer",
    "whole gradient": r"inputs\[1\] \(Whole\) requires a gradient",
    "inference": r"inputs was made under torch.inference_mode\(\), .* give its .clone\(\)",
    "scale": r"step was given scale=nan: a finite number other than 0",
    "no scale": r"step was given scale=0: a finite number other than 0",
    "scale in a tensor": r"step was given scale=tensor\(2.\): a finite number",
    "scale of text": r"step was given scale='2': a finite number other than 0",
    "no_grad": r"step was called under torch.no_grad\(\), where no gradients are made",
    "inference_mode": r"step was called under torch.inference_mode\(\), where no gradients are made",
    "other rows": r"inputs\[0\]\[1\] has 7 rows, the tensors before it 8",
    "no dimension": r"inputs\[1\] is a tensor without dimensions.*pipetrain.Whole",
}


def test_batches_that_cannot_be_cut() -> None:
    first, *others = run_ranks(3, are_refused_and_go_on)
    for (call, message), error in zip(BATCHES.items(), first, strict=True):
        assert re.search(message, error), f"{call}: {error}"
    assert others == [first] * 2


def fails_in_step(name: str) -> None:
    inputs, targets = rows(8)[0]
    loss, count_fn = mean_square, None
    if name == "no scalar":
        loss = lambda output, target: (output - target).sum(1)  # noqa: E731
    elif name == "targets":
        targets = targets[:7]
    elif name == "numpy targets":
        targets = targets.numpy()
    elif name == "listed targets":
        targets = list(range(8))
    elif name == "targets with a gradient":
        targets.requires_grad_()
    elif name == "no targets":
        targets = None
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
        ("numpy targets", r"targets is a numpy.ndarray, which is not cut"),
        ("listed targets", r"targets is a list of 8 plain values, as many as the batch has rows"),
        ("targets with a gradient", r"targets requires a gradient"),
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


def is_wrong_on_rank_1(name: str) -> None:
    inputs, targets = rows(8)[0]
    pipeline = Pipeline(linears(), mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS)
    here = dist.get_rank() == 1
    with torch.set_grad_enabled(not (here and name == "no_grad")):
        pipeline.step(inputs, targets, scale=math.inf if here and name == "scale" else 1.0)


@pytest.mark.parametrize(
    ("name", "message"), [("no_grad", r"step was called under torch.no_grad\(\)"), ("scale", "scale=inf")]
)
def test_a_mistake_on_a_rank_that_is_not_the_first(name: str, message: str) -> None:
    """That rank says so, and the others end with its words instead of waiting for it."""
    outcomes = run_outcomes(3, is_wrong_on_rank_1, name)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert re.search(message + r".*\(on rank 1\)", outcome.error or ""), outcome.error


def evaluates_there() -> None:
    """What evaluation makes there is not in the way of training."""
    batch = rows(8)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        model, reference = nn.Sequential(*linears()), nn.Sequential(*linears())
        with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
            expected = pipeline.evaluate(*batch)
            with mode():
                assert torch.equal(pipeline.evaluate(*batch), expected)
                pipeline(batch[0])
            wanted = reference_step(reference, mean_square, *batch, num_microbatches=4)
            assert torch.equal(pipeline.step(*batch), wanted)
            assert_same_gradients(pipeline, reference)


def test_evaluation_where_no_gradients_are_made() -> None:
    run_ranks(2, evaluates_there)
