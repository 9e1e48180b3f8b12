"""Recomputation sees the state that its forward saw, where a layer or loss keeps it in Python: counters, caches, generators, inputs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from beside_the_loop import ALWAYS, KEPT_WARNINGS, assert_same_gradients, batch, check, check_state, mean_square
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy

NUM_CALLS = 0


class CountsGlobally(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global NUM_CALLS
        NUM_CALLS += 1
        return x * x * (1 + 0.1 * (NUM_CALLS % 7))


def counts_in_a_function() -> nn.Module:
    calls = 0

    class CountsThere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x * x * (1 + 0.1 * calls)

    return CountsThere()


@KEPT_WARNINGS
def test_a_counter_outside_of_the_layer() -> None:
    """Symptom and cause: as below, for a variable of the module or of the function in which the class is."""
    check_state(lambda: [counts_in_a_function(), nn.Linear(4, 4)])

    def counted_anew() -> tuple[Tensor, Tensor]:
        global NUM_CALLS
        assert NUM_CALLS in (0, 3)  # whatever runs again
        NUM_CALLS = 0
        return batch()

    check_state(lambda: [CountsGlobally()], ["overlap"], make_batch=counted_anew)


GENERATOR: Any = None  # that every layer of this class draws from


class DropsPath(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        is_torch = isinstance(GENERATOR, torch.Generator)
        drawn = float(torch.rand((), generator=GENERATOR)) if is_torch else GENERATOR.random()
        return x if drawn < 0.1 else x + super().forward(x)


@KEPT_WARNINGS
@pytest.mark.parametrize("make", [np.random.default_rng, torch.Generator().manual_seed], ids=["numpy", "torch"])
def test_a_generator_that_layers_share(make: Callable[[int], Any]) -> None:
    """Symptom: the loss of the plain loop, and for 28 of 40 seeds other gradients. Cause: R drew later numbers than F, and mostly did the same."""
    calls = itertools.count()

    def seeded_anew() -> tuple[Tensor, Tensor]:
        """Each step with a seed of its own, which the plain loop has, too."""
        global GENERATOR
        GENERATOR = make(next(calls) // 2)
        return batch()

    check_state(lambda: [DropsPath(4, 4), DropsPath(4, 4)], ["overlap", "two places"], make_batch=seeded_anew)


def test_a_loss_with_state() -> None:
    """Symptom: wrong gradients under last_stage=always. Cause: as above, for loss_fn."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            with torch.no_grad():
                self.mean.lerp_(output.mean(), 0.5)
            return mean_square(output * output, target) * (self.mean + self.calls)

        def method(self, output: Tensor, target: Tensor) -> Tensor:
            return self(output, target)

    def closure() -> Callable[[Tensor, Tensor], Tensor]:
        calls, sums = 0, [1.0]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            sums.append(sums[-1] * 1.1)
            return mean_square(output * output, target) * (calls + sums[-1])

        return loss

    for make_loss in (Weighted, lambda: Weighted().method, closure, lambda: partial(closure())):
        check_state(lambda: [nn.Tanh()], make_loss=make_loss)


def test_an_input_changed_through_data() -> None:
    """Symptom: `x.data.mul_` first in a stage: R saw it changed twice. Cause: the change bumps no version."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.data.mul_(2)
            return x * x

    check_state(lambda: [Doubles(), nn.Linear(4, 4)], ["two stages"])

    check(lambda: [Doubles(), nn.Linear(4, 4)], recompute=ALWAYS, stages=1)


@KEPT_WARNINGS
def test_an_object_in_the_inputs_that_a_forward_fills() -> None:
    """Symptom: filled twice, gradients off. Cause: R filled it again, and read what later forwards had filled in."""

    class Cache:
        def __init__(self) -> None:
            self.sums: list[Tensor] = []

    class Fills(nn.Module):
        def forward(self, value: tuple[Tensor, Cache]) -> Tensor:
            x, cache = value
            cache.sums.append(x.detach().sum())
            return x * x * torch.stack(cache.sums).sum()

    caches: list[Cache] = []

    def with_cache() -> tuple[Any, Tensor]:
        caches.append(Cache())
        inputs, targets = batch()
        return (inputs, caches[-1]), targets

    for policy in (ALWAYS, RecomputePolicy("never")):
        ours = nn.Sequential(Fills(), nn.Linear(4, 4))
        reference = copy.deepcopy(ours)
        with Pipeline(ours, mean_square, num_microbatches=3, recompute=policy) as pipeline:
            found = pipeline.step(*with_cache())
            expected = reference_step(reference, mean_square, *with_cache(), num_microbatches=3)
            assert torch.equal(found, expected)
            assert_same_gradients(ours, reference)
        assert len(caches[-2].sums) == len(caches[-1].sums) == 3


@pytest.mark.filterwarnings("ignore:layer . .Remembers. holds")
def test_a_large_tensor_attribute_that_the_next_forward_reads() -> None:
    """Symptom: wrong gradients where a layer reads what its last forward left in an attribute. Cause: R saw the newest."""

    class Remembers(nn.Module):
        def __init__(self, *, reads: bool) -> None:
            super().__init__()
            self.last = torch.zeros(20_000, 4)
            self.reads = reads

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.last[: len(x)] if self.reads else x
            self.last = torch.zeros(20_000, 4) + x.detach().sum()
            return y * y

    for reads in (False, True):
        check_state(lambda reads=reads: [Remembers(reads=reads), nn.Linear(4, 4)])
