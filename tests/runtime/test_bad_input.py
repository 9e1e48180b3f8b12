"""What a user may get wrong: a clear error on every rank, nothing hung, and where nothing was started it goes on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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
    "stages that are no whole number": (linears(), {"num_stages": 3.0}, r"num_stages=3.0: a whole number"),
    "half a layer per stage": (linears(), {"balance": [1.5, 0.5, 1]}, r"balance=\[1.5, 0.5, 1\]: allowed are 'auto' or a list of layers per stage, which are whole"),
    "replicas that are text": (linears(), {"num_replicas": "1"}, r"num_replicas='1': a whole number"),
    "no plan": (linears(), {"plan": "auto"}, r"plan='auto': give what make_plan\(3, ...\) returns"),
    "a seed of 65 bits": (linears(), {"seed": 1 << 64}, r"seed=18446744073709551616: a whole number of 64 bits"),
    "no time": (linears(), {"timeout_seconds": 0}, r"timeout_seconds=0: .* more than 0"),
    "a time that is none": (linears(), {"timeout_seconds": math.nan}, r"timeout_seconds=nan: .* more than 0"),
    "endless time": (linears(), {"timeout_seconds": math.inf}, r"timeout_seconds=inf: .* at most 1e9"),
    "no device": (linears(), {"device": "gpu"}, r"device='gpu': allowed are 'cpu', 'cuda'"),
    "a count that is no function": (linears(), {"count_fn": 3}, r"count_fn=3: give a function of a microbatch's target"),
    "unknown schedule": (linears(), {"schedule": "gpip"}, r"did you mean 'gpipe'"),
    "unknown mode": (linears(), {"recompute": "overlapp"}, r"did you mean 'overlap'"),
    "shared parameter": (shared_by_three_stages(), {}, r"0.weight of stage 0, 1.weight of stage 1, 2.weight of stage 2 are one parameter: two stages may share one, not 3"),
    "memory of another stage": (in_one_memory(), {}, r"0.weight of stage 0 and 2.weight of stage 2 lie in one memory"),
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
    own, said = dist.get_rank(), []
    model = make_spec(ModelConfig(hidden_size=32, rope_theta=100.0 + own), 7)
    given: list[tuple[str, Any, dict[str, Any]]] = [
        ("model", model, {}),
        ("seed", linears(), {"seed": own}),
        ("plan", linears(), {"num_microbatches": 2 + own}),
        ("schedule", linears(), {"recompute": ["inline", "overlap"][own]}),
        ("schedule", linears(), {"schedule": own_order}),
    ]
    for what, layers, options in given:
        with pytest.raises(ValueError, match=f"rank 1 was given another {what} than rank 0") as caught:
            Pipeline(layers, mean_square, timeout_seconds=NEVER_SECONDS, **options)
        said.append(str(caught.value))
    return said


def test_ranks_given_different_arguments() -> None:
    first, second = run_ranks(2, make_with_own_arguments)
    assert first == second


# When it is called ----------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def learning(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def made_there() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(8, 8)


(SMALL, GOOD), UNEVEN = rows(3, 8), (torch.zeros(8, 8), torch.zeros(7, 8))
X, Y = GOOD
BATCHES: dict[str, tuple[Callable[[Pipeline], Any], str]] = {
    "few rows": (lambda pipeline: pipeline.step(*SMALL), r"inputs has 3 rows, fewer than num_microbatches=4: give at least 4 rows"),
    "no rows": (lambda pipeline: pipeline.evaluate(torch.zeros(0, 8), torch.zeros(0, 8)), r"rows"),
    "no inputs": (lambda pipeline: pipeline.step(None, SMALL[1]), r"step was given no (inputs|rows) on rank 0"),
    "numpy": (lambda pipeline: pipeline.step((X.numpy(), X), Y), r"inputs\[0\] is a numpy.ndarray, which is not cut: give a tensor, such as torch.from_numpy"),
    "a list": (lambda pipeline: pipeline.step({"a": X, "b": list(range(8))}, Y), r"inputs\['b'\] is a list of 8 plain values, as many as the batch has rows, and is not cut"),
    "an object": (lambda pipeline: pipeline.step((X, Holder(X)), Y), r"inputs\[1\] is a .*Holder with tensors in it, which are not cut"),
    "sparse": (lambda pipeline: pipeline.step((X, X.to_sparse()), Y), r"inputs\[1\] is a tensor of layout torch.sparse_coo, which cannot be cut"),
    "gradient": (lambda pipeline: pipeline.step((X, learning(X)), Y), r"inputs\[1\] requires a gradient: .* Give it as .detach\(\), or move its computation into the first layer"),
    "whole gradient": (lambda pipeline: pipeline.step((X, Whole(learning(X))), Y), r"inputs\[1\] \(Whole\) requires a gradient"),
    "inference": (lambda pipeline: pipeline.step(made_there(), Y), r"inputs was made under torch.inference_mode\(\), .* give its .clone\(\)"),
    "scale": (lambda pipeline: pipeline.step(*GOOD, scale=math.nan), r"step was given scale=nan: a finite number other than 0"),
    "no scale": (lambda pipeline: pipeline.step(*GOOD, scale=0), r"step was given scale=0: a finite number other than 0"),
    "scale that is a bool": (lambda pipeline: pipeline.step(*GOOD, scale=True), r"step was given scale=True: a finite number other than 0"),
    "scale in a tensor": (lambda pipeline: pipeline.step(*GOOD, scale=torch.tensor(2.0)), r"step was given scale=tensor\(2.\): a finite number"),
    "no_grad": (lambda pipeline: torch.no_grad()(pipeline.step)(*GOOD), r"step was called under torch.no_grad\(\), where no gradients are made"),
    "inference_mode": (lambda pipeline: torch.inference_mode()(pipeline.step)(*GOOD), r"step was called under torch.inference_mode\(\), where no gradients are made"),
    "other rows": (lambda pipeline: pipeline.step((UNEVEN, UNEVEN), SMALL[1]), r"inputs\[0\]\[1\] has 7 rows, the tensors before it 8"),
    "no dimension": (lambda pipeline: pipeline.step((torch.zeros(8, 8), torch.tensor(1.0)), SMALL[1]), r"inputs\[1\] is a tensor without dimensions.*pipetrain.Whole"),
}  # fmt: skip


def are_refused_and_go_on() -> list[str]:
    """A batch that cannot be cut is refused on every rank before anything runs."""
    said = []
    for call, _ in BATCHES.values():
        model, reference = nn.Sequential(*linears()), nn.Sequential(*linears())
        with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
            with pytest.raises(ValueError, match=r".") as caught:
                call(pipeline)
            said.append(str(caught.value))
            assert torch.equal(pipeline.step(*GOOD), reference_step(reference, mean_square, *GOOD, num_microbatches=4))
            assert_same_gradients(pipeline, reference)
    return said


def test_batches_that_cannot_be_cut() -> None:
    first, *others = run_ranks(3, are_refused_and_go_on)
    for (name, (_, message)), error in zip(BATCHES.items(), first, strict=True):
        assert re.search(message, error), f"{name}: {error}"
    assert others == [first] * 2


def fails_in_step(name: str) -> None:
    layers = linears()
    for layer in layers:
        layer.requires_grad_(name != "no gradient")
    losses: dict[str, Any] = {"no scalar": lambda output, target: (output - target).sum(1), "no loss": None}
    loss = losses.get(name, mean_square)
    pipeline = Pipeline(layers, loss, num_microbatches=4, timeout_seconds=NEVER_SECONDS)
    pipeline.step(X, {"numpy targets": Y.numpy(), "targets": Y[:7]}.get(name, Y))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no scalar", r"loss_fn returned a tensor of shape \[2\]: it must return a 0-dim tensor"),
        ("targets", r"targets have 7 rows on the last rank, inputs 8 on the first"),
        ("numpy targets", r"targets is a numpy.ndarray, which is not cut"),
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
    pipeline = Pipeline(linears(), mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS)
    pipeline.step(*GOOD)
    if dist.get_rank() != 1:
        pipeline.step(*GOOD)
    elif name == "clip":
        pipeline.clip_grad_norm_(1.0)
    else:
        pipeline.evaluate(X)
    pipeline.step(*GOOD)


@pytest.mark.parametrize("name", ["evaluate", "clip"])
def test_ranks_that_call_different_methods(name: str) -> None:
    outcomes = run_outcomes(3, calls_something_else, name)
    for outcome in outcomes:
        assert outcome.exit_code != 0
    if name != "clip":  # whose messages have another size, at which gloo ends the process
        expected = r"rank 1 called evaluate 1 where rank 0 called step 1: every rank must call the same methods"
        assert all(re.search(expected, outcome.error or "") for outcome in outcomes), [o.error for o in outcomes]


def is_wrong_on_rank_1(name: str) -> None:
    pipeline = Pipeline(linears(), mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS)
    here = dist.get_rank() == 1
    with torch.set_grad_enabled(not (here and name == "no_grad")):
        pipeline.step(*GOOD, scale=math.inf if here and name == "scale" else 1.0)


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
    for mode in (torch.no_grad, torch.inference_mode):
        model, reference = nn.Sequential(*linears()), nn.Sequential(*linears())
        with Pipeline(model, mean_square, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
            expected = pipeline.evaluate(*GOOD)
            with mode():
                assert torch.equal(pipeline.evaluate(*GOOD), expected)
                pipeline(X)
            wanted = reference_step(reference, mean_square, *GOOD, num_microbatches=4)
            assert torch.equal(pipeline.step(*GOOD), wanted)
            assert_same_gradients(pipeline, reference)


def test_evaluation_where_no_gradients_are_made() -> None:
    run_ranks(2, evaluates_there)
