"""One stage gives the numbers of the plain loop in F, R and B, and holds nothing after a step or a failure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from one_rank import make_stages, run_step, twins
from pairwise import pairwise
from parity_cases import assert_same_gradients, assert_same_tensors, mean_square
from stage_models import (
    CALLS,
    LAYERS,
    Breaks,
    FunctionalGradInside,
    GradInside,
    M,
    batch,
    count_call,
    linear,
    meter_of,
    one_stage,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipetrain.runtime.reference import reference_step
from pipetrain.stage.meter import ActivationMeter

BALANCES: Sequence[Sequence[int]] = ([6], [2, 4], [1, 3, 1, 1])


def check_parity(
    make_layers: Callable[[], Sequence[nn.Module]],
    balance: Sequence[int],
    *,
    keep: bool,
    prove: Callable[[int], bool] = lambda microbatch: False,
) -> None:
    """Two steps: loss, gradients (which add up) and buffers equal; nothing is held afterwards."""
    torch.manual_seed(0)
    reference, ours = twins(make_layers())
    inputs, targets = batch()
    meter = meter_of(ours)
    stages = make_stages(list(ours), balance, mean_square, meter)
    for step in range(2):
        expected = reference_step(reference, mean_square, inputs.clone(), targets, num_microbatches=M, step=step)
        loss = run_step(stages, inputs.clone(), targets, M, keep=lambda microbatch: keep, prove=prove, step=step)
        assert torch.equal(loss, expected)
        assert_same_gradients(ours, reference)  # type: ignore[arg-type]
        assert_same_tensors(ours.state_dict(), reference.state_dict())
        assert meter.current_bytes == 0


# Equal numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "balance", "how"),
    [row for row in pairwise([*LAYERS], BALANCES, ["recomputed", "kept"]) if not row.marks],
    ids=str,
)
def test_equals_the_reference(name: str, balance: Sequence[int], how: str) -> None:
    check_parity(LAYERS[name], balance, keep=how == "kept")


@pytest.mark.parametrize("proved", [[0], [2], range(M)], ids=["first", "third", "every"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_proof_finds_nothing_where_nothing_is(name: str, proved: Sequence[int]) -> None:
    check_parity(LAYERS[name], [2, 4], keep=False, prove=lambda microbatch: microbatch in proved)


# A gradient inside forward --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [GradInside, FunctionalGradInside])
@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_gradient_inside_forward_keeps_that_layer_and_warns_once(inside: Any, balance: Sequence[int]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_parity(lambda: [linear(), inside(), linear(), nn.Dropout(0.2), linear(), linear()], balance, keep=False)
    (warning,) = caught
    assert f"layer 1 ({inside.__name__}) takes a gradient inside its forward" in str(warning.message)


# Early end of R -------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Counts its calls; saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        count_call(self)
        return x + 1


def test_no_gradient_no_recompute() -> None:
    frozen = linear().requires_grad_(False)
    counts = Counts()
    first, second = make_stages([frozen, counts, linear()], [2, 1], mean_square, ActivationMeter())
    run_step([first, second], *batch(), M)
    assert CALLS[counts] == M
    assert frozen.weight.grad is None


# Buffers and casts ----------------------------------------------------------------------------------------------------


def test_what_a_recompute_reads_of_buffers_lives_until_its_backward() -> None:
    """On a GPU R has been launched, and not run, when `recompute` returns: memory that the host lets go of then is given to a later F."""
    seen: list[StorageWeakRef] = []

    class Notes(nn.Module):
        """What it reads of its buffer is not saved for B: only the state that F saw holds it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.count, Tensor)
            seen.append(StorageWeakRef(self.count.untyped_storage()))
            self.count += 1
            return x + self.count

    alive: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            alive.append(not seen[-1].expired())
            return gradient

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Looks.apply(x)

    run_step(one_stage(linear(), Notes(), Looking(), linear()), *batch(), M)
    assert len(seen) == 2 * M
    assert alive == [True] * M
    assert [ref.expired() for ref in seen] == [False] * M + [True] * M, "what stood in goes with B"


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_autocast(keep: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_parity(lambda: [linear() for _ in range(6)], [2, 4], keep=keep)
        assert torch.is_autocast_cache_enabled()


# Loss and failure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "found"),
    [(lambda out, target: (out - target) ** 2, r"a tensor of shape \[3, 8\]"), (lambda out, target: 1.5, "float")],
)
def test_loss_that_is_no_scalar(loss: Any, found: str) -> None:
    stages = make_stages([linear()], [1], loss, ActivationMeter())
    with pytest.raises(ValueError, match=f"loss_fn returned {found}: it must return a 0-dim tensor"):
        run_step(stages, *batch(12), M)


@pytest.mark.parametrize(
    ("at", "how"),
    [(at, how) for how in ("recomputed", "selective") for at in (1, 3, M + 1, 2 * M)] + [(1, "kept"), (3, "kept")],
)
def test_nothing_is_held_after_a_failure(at: int, how: str) -> None:
    """In the first F or the third, in the first R or the last."""
    meter = ActivationMeter()
    layers, selective = [linear(), linear(), Breaks(at), linear(), linear()], ["matmul"] * (how == "selective")
    stages = make_stages(layers, [2, 3], mean_square, meter, selective)
    with pytest.raises(KeyError, match="broken on purpose") as raised:
        run_step(stages, *batch(), M, keep=lambda microbatch: how == "kept")
    del raised
    for stage in stages:
        stage.drop()
    assert meter.current_bytes == 0
