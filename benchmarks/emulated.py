"""Emulated stages: they sleep instead of computing; processes, transfers and autograd are real.

A rank is one device: whatever sleeps in a process, of ours or of a peer, holds one lock meanwhile, so that nothing can
gain by computing twice at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.schedule.costs import Costs
from pipetrain.stage.split_function import SplitFunction

NUM_SAVED = 16
_DEVICE = threading.Lock()
_watchers: list[Callable[[], None]] = []


def watch(watcher: Callable[[], None]) -> None:
    """Call `watcher` whenever a stage of this process computes."""
    _watchers.append(watcher)


def occupy_device(seconds: float) -> None:
    """Sleep while nothing else of this process may."""
    for watcher in _watchers:
        watcher()
    if seconds > 0:
        with _DEVICE:
            time.sleep(seconds)


class _Sleep(SplitFunction):
    """Forward and backward, in one or in two halves, that take their time, and a set of tensors between them.

    The tensors are saved after the sleep and the output is one of them, so that a recompute that stops as soon as it has all
    that was saved cannot stop before the sleep. `torch.empty` touches no memory: to save takes no time, and to compute takes
    that of the sleep, whatever this machine's processor is doing for the network meanwhile. Of the values only the
    first is handed on.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, stage: EmulatedStage) -> Tensor:
        stage.forwards += 1
        occupy_device(stage.forward_seconds)
        output = torch.empty_like(given)
        output.view(-1)[0] = given.view(-1)[0]
        ctx.stage = stage
        ctx.save_for_backward(weight, output, *(torch.empty_like(given) for _ in range(NUM_SAVED - 1)))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, *_ = ctx.saved_tensors
        occupy_device(ctx.stage.backward_seconds)
        return gradients[0], torch.zeros_like(weight), None

    @staticmethod
    def backward_input(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        occupy_device(ctx.stage.backward_seconds - ctx.stage.weight_gradient_seconds)
        return gradients[0], None, None

    @staticmethod
    def backward_weight(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:  # noqa: ARG004
        weight, *_ = ctx.saved_tensors
        occupy_device(ctx.stage.weight_gradient_seconds)
        return None, torch.zeros_like(weight), None


class EmulatedStage(nn.Module):
    """A layer `[rows, numbers]` -> the same; `forwards` counts its F and R. Of `backward_seconds` W has `weight_gradient_seconds`
    (default: half)."""

    def __init__(
        self, forward_seconds: float, backward_seconds: float, weight_gradient_seconds: float | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.weight_gradient_seconds = (
            backward_seconds / 2 if weight_gradient_seconds is None else weight_gradient_seconds
        )
        self.forwards = 0

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(given, self.weight, self)
        return output


@dataclass(frozen=True)
class EmulatedWorkload:
    """One emulated layer per stage; a microbatch is one row of `tensor_bytes` bytes."""

    num_stages: int
    num_microbatches: int = 8
    forward_seconds: float = 0.04
    backward_seconds: float = 0.08
    tensor_bytes: int = 1_000_000
    weight_gradient_seconds: float | None = None  # of a backward, where it is split; None: half

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [self._stage] * self.num_stages

    def _stage(self) -> nn.Module:
        return EmulatedStage(self.forward_seconds, self.backward_seconds, self.weight_gradient_seconds)

    def balance(self) -> list[int]:
        return [1] * self.num_stages

    def batch(self) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(self.num_microbatches, self.tensor_bytes // 4)
        return rows, torch.zeros(self.num_microbatches, 1)

    def stage_input(self, stage: int) -> Tensor:  # noqa: ARG002
        return torch.zeros(1, self.tensor_bytes // 4)

    def stage_output(self, stage: int) -> Tensor:
        return self.stage_input(stage)

    def memory_bytes(self) -> int:
        """What a rank that keeps all sets may need: the tensors of each, its input and a message."""
        return self.num_microbatches * (NUM_SAVED + 2) * self.tensor_bytes

    def costs(self, hop_seconds: float = 0.0) -> Costs:
        """What its sleeps take, and nothing else."""
        return Costs.spread(
            self.num_stages,
            forward=self.forward_seconds,
            backward=self.backward_seconds,
            recompute=self.forward_seconds,
            weight_gradient=self.weight_gradient_seconds,
            input_gradient=None
            if self.weight_gradient_seconds is None
            else self.backward_seconds - self.weight_gradient_seconds,
            hop=hop_seconds,
        )

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG004
        return output.flatten()[0] * 1.0
