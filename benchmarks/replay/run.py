"""One stage of a pipeline at real size on one GPU, its neighbours replayed.

Stage 1 of 4: it runs F, R and B of its layers for real, through the runtime's own stage, lanes and executor. What its
neighbours would send comes over the copy engines, at the times at which the simulation of all four stages, on the
costs of this one, says that it comes. So a single GPU shows how much of the recomputation is hidden, and what it costs.

Without a GPU it runs with a toy size, to see that it runs: `--quick`.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipetrain.comm.failure import FailureBoard, Monitor
from pipetrain.comm.forms import Form, TensorForm
from pipetrain.comm.lanes import make_lanes
from pipetrain.comm.transport import Transport
from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import transformer_layers
from pipetrain.monitor.breakdown import break_down
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.program import Program
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.stage import Stage

from ..result import Options, Result, Table, Target
from ..unavailable import Unavailable
from .kernels import Beside, beside, kernels_of
from .neighbours import Clock, ReplayEdges

STAGES, STAGE, MICROBATCHES = 4, 1, 8
HOPS = (0.0, 0.5, 1.0, 2.0)  # in units of b
WARM_UP = 2

# What runs: its name, the recompute mode, and how far ahead receives are posted.
SYSTEMS = (
    ("never", "never", 2),
    ("inline, receives just in time", "inline", 0),
    ("inline", "inline", 2),
    ("early", "early", 2),
    ("overlap", "overlap", 2),
)


@dataclass(frozen=True)
class Size:
    """One stage: `layers` blocks of a Llama, on one sequence per microbatch."""

    layers: int
    hidden: int
    heads: int
    mlp: int
    sequence: int
    dtype: torch.dtype


LLAMA_7B = Size(layers=8, hidden=4096, heads=32, mlp=11008, sequence=4096, dtype=torch.bfloat16)
TOY = Size(layers=2, hidden=64, heads=4, mlp=128, sequence=64, dtype=torch.float32)


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of one system at one hop; seconds and bytes."""

    step_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    predicted_seconds: float
    allocated_bytes: int
    reserved_bytes: int
    all_steps: tuple[float, ...]


class Replay:
    """The stage under test, built once; every system runs the same weights."""

    def __init__(self, size: Size, device: torch.device) -> None:
        config = ModelConfig(
            num_hidden_layers=size.layers,
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            intermediate_size=size.mlp,
            max_position_embeddings=size.sequence,
        )
        torch.manual_seed(0)
        blocks = [build() for build in transformer_layers(config, 256)[1:-1]]
        self.layers = [block.to(device=device, dtype=size.dtype) for block in blocks]
        self.device = device
        shape = (1, size.sequence, size.hidden)
        strides = (size.sequence * size.hidden, size.hidden, 1)
        self.beside: Beside | None = None
        self._leaf = TensorForm(shape, strides, size.dtype, needs_gradient=True)

    def run(
        self, schedule: Schedule, costs: Costs, steps: int, *, profiled: bool = False
    ) -> list[tuple[Timeline, float, int, int]]:
        """Timelines of this rank, seconds of each step from the simulation's zero, allocated and reserved bytes.

        `profiled`: torch's profiler watches the last step, and `beside` says afterwards what ran beside R.
        """
        expected = simulate(schedule, costs)
        arrivals = {
            event.op: event.end for event in expected.of_rank(STAGE) if event.op.kind in (Kind.RECV_F, Kind.RECV_B)
        }
        board, meter, clock = FailureBoard(None), ActivationMeter(), Clock()
        monitor, lanes = Monitor(STAGE, board, timeout_seconds=300.0), make_lanes(STAGE, self.device)
        edges = ReplayEdges(arrivals, costs.hop_forward[STAGE], clock, lanes, monitor, self.device)
        transport = Transport(schedule.stage_ranks, STAGE, edges, meter, self.device, lanes)
        stage = Stage(STAGE, self.layers, first_layer=STAGE * len(self.layers), device=self.device, meter=meter)
        executor = Executor(STAGE, {STAGE: stage}, transport, lanes, monitor, board)
        program = Program.of(schedule, STAGE)
        found = []
        self.beside = None
        for number in range(steps):
            profile = _profile() if profiled and number == steps - 1 else nullcontext()
            _synchronize(self.device, reset=True)
            transport.start_step(self._forms(schedule), described=(False, False))
            with profile:
                clock.start()
                executor.run(program, Step(number, 0, with_graph=True, with_loss=False))
                recording = lanes.recording()
                _synchronize(self.device)
            if isinstance(profile, torch.profiler.profile):
                self.beside = beside(kernels_of(profile))
            events = tuple(event for event in recording.events() if event.rank == STAGE)
            found.append((Timeline(STAGES, events), _end(events) - clock.zero, *_memory(self.device)))
            for layer in self.layers:
                layer.zero_grad()
        transport.close()
        return found

    def _forms(self, schedule: Schedule) -> dict[Op, Form]:
        """Of every message of the rank: one tensor, with a gradient on its way forward."""
        _, leaf = pytree.tree_flatten(torch.empty(0))
        forward = Form(leaf, (self._leaf,))
        backward = Form(None, (replace(self._leaf, needs_gradient=False),))
        forms = {}
        for rank, _, op in schedule.ops():
            if rank == STAGE and not op.kind.computes:
                forms[op] = forward if op.kind in (Kind.SEND_F, Kind.RECV_F) else backward
        return forms

    def measure_costs(self) -> Costs:
        """f, b and r of the stage, from a run without waiting: medians over the microbatches of its last step."""
        nothing = Costs.spread(STAGES, forward=0.0, backward=0.0, recompute=0.0)
        timeline = self.run(_schedule("inline", 2), nothing, WARM_UP + 1)[-1][0]

        def median(kind: Kind) -> float:
            return statistics.median(event.end - event.start for event in timeline.events if event.op.kind is kind)

        return Costs.spread(STAGES, forward=median(Kind.F), backward=median(Kind.B), recompute=median(Kind.R))


def run(options: Options) -> Result:
    if not torch.cuda.is_available() and not options.quick:
        raise Unavailable(
            "replay needs a GPU: run it where torch.cuda.is_available(), or with --quick for a toy on the CPU"
        )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size = TOY if options.quick else LLAMA_7B
    replay = Replay(size, device)
    costs = replay.measure_costs()
    steps = WARM_UP + (1 if options.quick else 3 * options.rounds)
    measured = {
        (name, hop): _measure(replay, _schedule(mode, ahead), _with_hop(costs, hop * costs.backward[0]), steps)
        for hop in HOPS
        for name, mode, ahead in SYSTEMS
    }
    notes = [_profiled_note(replay, costs)] if device.type == "cuda" else []
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (toy size)"
    return Result(
        name="replay",
        claim=f"stage {STAGE} of {STAGES} on {where}: what recomputation costs while the stage waits for slow links",
        settings={
            "size": str(size),
            "microbatches": MICROBATCHES,
            "f": costs.forward[0],
            "b": costs.backward[0],
            "r": costs.recompute[0],
        },
        tables=[_table(measured, hop, costs) for hop in HOPS],
        targets=_targets(measured),
        notes=notes,
        data={f"{name} at hop {hop:g} b": vars(one) for (name, hop), one in measured.items()},
    )


def _measure(replay: Replay, schedule: Schedule, costs: Costs, steps: int) -> Measured:
    found = replay.run(schedule, costs, steps)[WARM_UP:]
    parts = [break_down(schedule, timeline)[STAGE] for timeline, *_ in found]
    seconds = tuple(step for _, step, *_ in found)
    expected = simulate(schedule, costs)
    return Measured(
        step_seconds=statistics.median(seconds),
        exposed_seconds=statistics.median(part.recompute_exposed_seconds for part in parts),
        hidden_seconds=statistics.median(part.recompute_hidden_seconds for part in parts),
        predicted_seconds=_end(expected.of_rank(STAGE)),
        allocated_bytes=max(one[2] for one in found),
        reserved_bytes=max(one[3] for one in found),
        all_steps=seconds,
    )


def _profile() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities)


def _profiled_note(replay: Replay, costs: Costs) -> str:
    """One more step with `overlap`, watched: not among the measured ones, because watching takes time."""
    replay.run(_schedule("overlap", 2), _with_hop(costs, costs.backward[0]), WARM_UP + 1, profiled=True)
    return f"by the profiler, one step of overlap at a hop of 1 b: {replay.beside}"


def _schedule(mode: str, ahead: int) -> Schedule:
    return make_schedule(
        "gpipe", num_stages=STAGES, num_microbatches=MICROBATCHES, recompute=mode, transport_ahead=ahead
    )


def _with_hop(costs: Costs, seconds: float) -> Costs:
    return replace(costs, hop_forward=(seconds,) * (STAGES - 1), hop_backward=(seconds,) * (STAGES - 1))


def _end(events: tuple[OpEvent, ...]) -> float:
    return max(event.end for event in events if event.op.kind.computes)


def _synchronize(device: torch.device, *, reset: bool = False) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _table(measured: dict[Any, Measured], hop: float, costs: Costs) -> Table:
    rows = []
    for name, _, _ in SYSTEMS:
        one = measured[name, hop]
        rows.append(
            (
                name,
                f"{one.step_seconds * 1e3:.1f}",
                f"{one.predicted_seconds * 1e3:.1f}",
                f"{one.exposed_seconds * 1e3:.1f}",
                f"{one.hidden_seconds * 1e3:.1f}",
                f"{one.allocated_bytes / 2**30:.2f}",
                f"{one.reserved_bytes / 2**30:.2f}",
            )
        )
    title = f"hop {hop:g} b = {hop * costs.backward[0] * 1e3:.1f} ms; milliseconds, GiB"
    return Table(title, ("", "step", "simulated", "R exposed", "R hidden", "allocated", "reserved"), tuple(rows))


def _targets(measured: dict[Any, Measured]) -> list[Target]:
    targets = []
    for hop in HOPS:
        overlap, inline = measured["overlap", hop], measured["inline", hop]
        ratio = overlap.step_seconds / inline.step_seconds
        targets.append(Target(f"overlap / inline, step time, hop {hop:g} b", ratio, 1.01))
        if hop >= 0.5 and inline.exposed_seconds > 0:
            share = overlap.exposed_seconds / inline.exposed_seconds
            targets.append(Target(f"overlap / inline, exposed recompute, hop {hop:g} b", share, 1 / 3))
    return targets
