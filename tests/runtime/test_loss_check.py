"""The first step refuses a loss that is not a mean over rows, or warns of it once; a sum is trained as a sum if the user says so."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_cases import assert_same_gradients, mean_square
from ranks import run_outcomes, run_ranks
from torch import Tensor, nn

from pipetrain import Pipeline, RecomputePolicy, Whole, reference_step
from pipetrain.runtime import losses

CLASSES = 5
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0])
SUM_NAMED = r'loss_fn is a sum over rows: .*loss_reduction="sum"'


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def squares() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, CLASSES)


def classes() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.tensor([0, 1, 1, 2, 3, -100, 4, 1])


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


def weight_of_classes(target: Tensor) -> float:
    return float(CLASS_WEIGHTS[target[target >= 0]].sum())


def not_padding(target: Tensor) -> int:
    return int((target >= 0).sum())


weighted = nn.CrossEntropyLoss(CLASS_WEIGHTS)


def step(loss: Any, batch: tuple[Any, Any], **options: Any) -> tuple[Tensor, nn.Sequential, list[str]]:
    """The loss of the first of two steps, the model with its gradients, and what both warned of."""
    net = model()
    with (
        Pipeline(net, loss, **{"num_microbatches": 4, **options}) as pipeline,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        pipeline.step(*batch)
        pipeline.zero_grad()
        pipeline.step_index = 0
        return pipeline.step(*batch), net, [str(one.message) for one in told]


@pytest.mark.parametrize("m", [2, 4, 3])
def test_a_sum_is_refused(m: int) -> None:
    with pytest.raises(ValueError, match=SUM_NAMED):
        step(sum_of_squares, squares(), num_microbatches=m)


@pytest.mark.parametrize("recompute", ["overlap", "never"])
@pytest.mark.parametrize("m", [1, 2, 4, 3])
def test_a_sum_that_is_said_to_be_one_is_that_of_the_whole_batch(m: int, recompute: str) -> None:
    loss, net, told = step(sum_of_squares, squares(), num_microbatches=m, loss_reduction="sum", recompute=recompute)
    assert told == []
    reference, whole = model(), model()
    expected = reference_step(reference, sum_of_squares, *squares(), num_microbatches=m, loss_reduction="sum")
    assert torch.equal(loss, expected)
    of_all = sum_of_squares(whole(squares()[0]), squares()[1])
    of_all.backward()
    torch.testing.assert_close(loss, of_all.detach())
    for ours, theirs, plain in zip(net.parameters(), reference.parameters(), whole.parameters()):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(ours.grad, plain.grad)


def test_a_sum_is_evaluated_as_one() -> None:
    with Pipeline(model(), sum_of_squares, num_microbatches=4, loss_reduction="sum") as pipeline:
        torch.testing.assert_close(
            pipeline.evaluate(*squares()), sum_of_squares(model()(squares()[0]), squares()[1]).detach()
        )


def test_a_mean_that_is_said_to_be_a_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_fn is a mean over rows: .*leave loss_reduction out"):
        step(mean_square, squares(), loss_reduction="sum")


def test_what_counts_nothing_weighs_nothing_in_a_sum() -> None:
    inputs, targets = squares()
    targets[2:4] = -99.0

    def counted(target: Tensor) -> int:
        return int((target[:, 0] > -50).sum())

    options = {"count_fn": counted, "loss_reduction": "sum"}
    loss, _, told = step(sum_of_squares, (inputs, targets), **options)
    reference = model()
    expected = reference_step(reference, sum_of_squares, inputs, targets, num_microbatches=4, **options)  # type: ignore[arg-type]
    assert torch.equal(loss, expected)
    assert told == []


@pytest.mark.parametrize(
    ("loss", "batch"),
    [(weighted, classes), (F.cross_entropy, classes), (contrastive, squares)],
    ids=["weights", "padding", "pairs"],
)
def test_another_loss_is_told_of_once(loss: Any, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    (told,) = step(loss, batch())[2]
    for words in ("class weights", "padding", "contrastive", "count_fn="):
        assert words in told


@pytest.mark.parametrize(("loss", "count_fn"), [(weighted, weight_of_classes), (F.cross_entropy, not_padding)])
def test_with_its_count_fn_it_is_right(loss: Any, count_fn: Any) -> None:
    found, _, told = step(loss, classes(), count_fn=count_fn)
    assert told == []
    torch.testing.assert_close(found, loss(model()(classes()[0]), classes()[1]).detach())


@pytest.mark.parametrize("m", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mean_is_none_of_these(m: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 300)).to(dtype)
    batch = torch.randn(701, 6, dtype=dtype), torch.randint(300, (701,))
    with Pipeline(net, F.cross_entropy, num_microbatches=m) as pipeline, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(*batch)


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": x, "parts": (x[:, :2], 3)}


def loss_of_pairs(output: dict[str, Any], target: tuple[Tensor, Tensor]) -> Tensor:
    return sum_of_squares(output["out"], target[0]) + output["parts"][0].mean() * target[1].sum()


def test_structures_are_joined_and_what_is_whole_is_not() -> None:
    inputs, targets = squares()
    pipeline = Pipeline([*model(), Pairs()], loss_of_pairs, num_microbatches=4)
    with pipeline, pytest.warns(UserWarning, match="loss_fn gives"):
        pipeline.step(inputs, (targets, Whole(torch.ones(3))))


class Counting(nn.Module):
    """A mean, with a state that does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return mean_square(output, target)


@pytest.mark.parametrize(
    "given", [lambda one: one, lambda one: one.forward, lambda one: partial(one)], ids=["module", "method", "partial"]
)
def test_the_state_of_a_loss_is_left_alone(given: Callable[[Counting], Any]) -> None:
    one, plain = Counting(), Counting()
    step(given(one), squares(), recompute="never")
    for _ in range(2):
        reference_step(model(), plain, *squares(), num_microbatches=4)
    assert (one.calls, float(one.seen)) == (plain.calls, float(plain.seen))


def with_noise(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output + torch.randn_like(output), target)


def of_two_rows(output: Tensor, target: Tensor) -> Tensor:
    if len(output) != 2:
        raise ValueError("two rows, please")
    return mean_square(output, target)


def in_place(output: Tensor, target: Tensor) -> Tensor:
    return (output.sub_(target) ** 2).mean()


def of_target_in_place(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output, target.mul_(2))


@pytest.mark.parametrize("loss", [with_noise, of_two_rows, in_place, of_target_in_place])
def test_a_loss_that_cannot_be_compared_is_left_alone(loss: Any) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    net, reference = model(), model()
    inputs, targets = squares()
    once = targets.clone()
    torch.set_rng_state(before)
    with Pipeline(net, loss, num_microbatches=4) as pipeline, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipeline.step(inputs, targets)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(found, reference_step(reference, loss, inputs, once, num_microbatches=4))
        assert torch.equal(targets, once)
        assert_same_gradients(pipeline, reference)


CALLS: list[int] = []


def noting_calls(output: Tensor, target: Tensor) -> Tensor:
    CALLS.append(len(output))
    return mean_square(output, target)


def test_it_is_looked_at_in_the_first_step_alone() -> None:
    CALLS.clear()
    step(noting_calls, squares(), recompute="never")
    assert CALLS == [2, 2, 2, 2, 2, 8, 2, 2, 2, 2]  # one again, to see that it gives the same, and all together


@pytest.mark.parametrize(("loss", "told"), [(mean_square, None), (sum_of_squares, SUM_NAMED)])
def test_of_a_large_output_the_first_is_cut_in_two(
    loss: Any, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_MOST_BYTES", 1)
    if told is None:
        assert step(loss, squares())[2] == []
    else:
        with pytest.raises(ValueError, match=told):
            step(loss, squares())


def test_the_probe_takes_no_kept_output_for_a_layers() -> None:
    """Outputs over its 64 KiB, and a loss that does not save them."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1 << 14))
    inputs, targets = torch.randn(8, 6), torch.randint(1 << 14, (8,))
    policy = RecomputePolicy(last_stage="always")  # type: ignore[arg-type]
    with Pipeline(net, F.cross_entropy, num_microbatches=4, recompute=policy) as pipeline, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(inputs, targets)


def test_a_word_that_is_no_reduction() -> None:
    with pytest.raises(ValueError, match=r"loss_reduction='none': allowed are 'mean' .* and 'sum'"):
        Pipeline(model(), mean_square, loss_reduction="none")
    with pytest.raises(ValueError, match=r'a mean over the rows of the microbatch, or .*loss_reduction="sum"'):
        step(partial(F.cross_entropy, reduction="none"), classes())


def refused_everywhere(num_replicas: int, m: int) -> str:
    options: dict[str, Any] = {"num_replicas": num_replicas, "num_microbatches": m, "timeout_seconds": 60.0}
    with Pipeline(model(), sum_of_squares, **options) as pipeline:
        inputs, targets = map(pipeline.own_rows, squares())
        try:
            pipeline.step(inputs, targets)
        except Exception as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(("num_replicas", "m"), [(1, 4), (2, 1), (2, 2)])
def test_every_rank_is_told(num_replicas: int, m: int) -> None:
    """Before any optimizer steps; also where each replica has one microbatch."""
    found = [outcome.value for outcome in run_outcomes(2, refused_everywhere, num_replicas, m)]
    assert all(re.search(SUM_NAMED, text) for text in found), found


def sum_over_replicas() -> float:
    with Pipeline(model(), sum_of_squares, num_replicas=2, num_microbatches=2, loss_reduction="sum") as pipeline:
        inputs, targets = map(pipeline.own_rows, squares())
        loss = pipeline.step(inputs, targets)
        reference = copy.deepcopy(model())
        expected = reference_step(reference, sum_of_squares, *squares(), num_microbatches=4, loss_reduction="sum")
        assert torch.equal(loss, expected)
        for ours, theirs in zip(pipeline.parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad)
    return float(loss)


def test_a_sum_over_replicas_is_that_of_all_rows() -> None:
    one, other = run_ranks(2, sum_over_replicas)
    assert one == other
