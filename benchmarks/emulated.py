"""Emulated stages: they sleep instead of computing; processes, transfers and autograd are real.

A rank is one device: whatever sleeps in a process, of ours or of a peer, holds one lock meanwhile, so that nothing can
gain by computing twice at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipetrain.comm.device import CpuDevice
from pipetrain.comm.gloo import GlooReducer
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.op import Op
from pipetrain.stage.split_backward import SplitFunction

NUM_SAVED = 16
_DEVICE = threading.Lock()
_watchers: list[Callable[[], None]] = []
_pace = 1.0
# Not in the layer: what changes in each forward would be its state.
_forwards = WeakKeyDictionary["EmulatedStage", int]()


@contextmanager
def hurried(share: float) -> Iterator[None]:
    """Within, sleeps of this process take that share of their time."""
    global _pace
    _pace, before = share, _pace
    try:
        yield
    finally:
        _pace = before


def watch(watcher: Callable[[], None]) -> None:
    """Call `watcher` whenever a stage of this process computes."""
    _watchers.append(watcher)


def occupy_device(seconds: float) -> None:
    """Sleep while nothing else of this process may."""
    for watcher in _watchers:
        watcher()
    if seconds > 0:
        with _DEVICE:
            time.sleep(seconds * _pace)


def occupy_link(seconds: float) -> None:
    """Sleep while the rank may compute: its device is free, and the link alone is taken."""
    if seconds > 0:
        time.sleep(seconds * _pace)


def sleep_in_copies(seconds: float) -> None:
    """From now on a copy of a set to host memory, or back, takes this process so long, on the thread of its lane, and copies nothing: of the
    values only the first is handed on. An emulated set is `NUM_SAVED` tensors."""

    def copy(_: CpuDevice, target: Tensor, source: Tensor) -> None:  # noqa: ARG001
        occupy_link(seconds / NUM_SAVED)

    CpuDevice.copy = copy  # type: ignore[method-assign]


def slow_sums(seconds_of: Callable[[Op], float]) -> None:
    """From now on each REDUCE_GRAD of this process lasts so much longer than it takes gloo, on the thread on which it runs."""
    at_once = GlooReducer.reduce

    def reduce(
        self: GlooReducer,
        op: Op,
        tensors: list[Tensor],
        settle: Callable[[], None],
        ended: Callable[..., None],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        def settle_late() -> None:
            occupy_link(seconds_of(op))
            settle()

        at_once(self, op, tensors, settle_late, ended, ready)

    GlooReducer.reduce = reduce  # type: ignore[method-assign]


def _is_wanted(node: Any, place: int) -> bool:
    """Whether the backward that runs wants the gradient of this input of a node: torch's pipelines ask for that of a stage's input first and
    later for those of its weights, and torch's own kernels compute what is asked for."""
    following = node.next_functions[place][0]
    if following is None:
        return False
    try:
        wanted: bool = torch._C._will_engine_execute_node(following)
    except RuntimeError:  # torch's word for a leaf whose gradient `torch.autograd.grad` gives back
        return True
    return wanted


class _Sleep(SplitFunction):
    """Forward and backward, in one or in two halves, that take their time, and a set of tensors between them.

    The tensors are saved after the sleep and the output is one of them, so that a recompute that stops as soon as it has all
    that was saved cannot stop before the sleep. `torch.empty` touches no memory: to save takes no time, and to compute takes
    that of the sleep, whatever this machine's processor is doing for the network meanwhile. Of the values only the
    first is handed on.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, stage: EmulatedStage) -> Tensor:
        _forwards[stage] = stage.forwards + 1
        occupy_device(stage.forward_seconds)
        output = torch.zeros_like(given) if stage.is_written else torch.empty_like(given)
        output.view(-1)[0] = given.view(-1)[0]
        ctx.stage = stage
        make = torch.zeros_like if stage.is_written else torch.empty_like
        ctx.save_for_backward(weight, output, *(make(given) for _ in range(stage.num_saved - 1)))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, *_ = ctx.saved_tensors
        seconds = ctx.stage.backward_seconds
        if not _is_wanted(ctx, 1):
            seconds -= ctx.stage.weight_gradient_seconds
        elif ctx.needs_input_grad[0] and not _is_wanted(ctx, 0):
            seconds = ctx.stage.weight_gradient_seconds
        occupy_device(seconds)
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
    (default: half). Its set is `num_saved` tensors of the size of its output. `is_written`: their values are the same in F and R, so
    that the first step may compare them."""

    def __init__(
        self,
        forward_seconds: float,
        backward_seconds: float,
        weight_gradient_seconds: float | None = None,
        *,
        num_saved: int = NUM_SAVED,
        is_written: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.weight_gradient_seconds = (
            backward_seconds / 2 if weight_gradient_seconds is None else weight_gradient_seconds
        )
        self.num_saved = num_saved
        self.is_written = is_written

    @property
    def forwards(self) -> int:
        return _forwards.get(self, 0)

    def extra_repr(self) -> str:
        """What the profile tells layers apart by."""
        return f"{self.forward_seconds}, {self.backward_seconds}, {self.weight_gradient_seconds}, {self.num_saved}"

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(given, self.weight, self)
        return output


@dataclass(frozen=True)
class EmulatedWorkload:
    """Emulated layers, `layers_per_stage` for each of `num_stages` ranks; a microbatch is one row of `tensor_bytes` bytes.

    Seconds and sets are those of all layers of a rank, so a rank with two stages of one layer each has two half sets.
    """

    num_stages: int
    num_microbatches: int = 8
    forward_seconds: float = 0.04
    backward_seconds: float = 0.08
    tensor_bytes: int = 1_000_000
    weight_gradient_seconds: float | None = None  # of a backward, where it is split; None: half
    layers_per_stage: int = 1
    copy_seconds: float | None = None  # of a set to host memory, or back

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [self._layer] * (self.num_stages * self.layers_per_stage)

    def _layer(self) -> nn.Module:
        parts, weights = self.layers_per_stage, self.weight_gradient_seconds
        return EmulatedStage(
            self.forward_seconds / parts,
            self.backward_seconds / parts,
            None if weights is None else weights / parts,
            num_saved=NUM_SAVED // parts,
        )

    def balance(self) -> list[int]:
        return [self.layers_per_stage] * self.num_stages

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

    def costs(self, hop_seconds: float = 0.0, *, stages_per_rank: int = 1) -> Costs:
        """What its sleeps take, and nothing else; bytes of a set, with the input of its stage."""
        stages, weights = self.num_stages * stages_per_rank, self.weight_gradient_seconds
        costs = Costs.spread(
            stages,
            forward=self.forward_seconds / stages_per_rank,
            backward=self.backward_seconds / stages_per_rank,
            recompute=self.forward_seconds / stages_per_rank,
            weight_gradient=None if weights is None else weights / stages_per_rank,
            input_gradient=None if weights is None else (self.backward_seconds - weights) / stages_per_rank,
            hop=hop_seconds,
            offload=self.copy_seconds,
        )
        whole = (NUM_SAVED // stages_per_rank + 1) * self.tensor_bytes
        return replace(costs, input_bytes=(float(self.tensor_bytes),) * stages, set_bytes=(float(whole),) * stages)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG004
        return output.flatten()[0] * 1.0
