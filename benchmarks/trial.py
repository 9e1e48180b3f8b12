"""One trial: one system, one workload, fresh processes; and rounds of trials, the systems in turns."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.op import Kind
from pipetrain.schedule.policy import LastStage, Mode

from .emulated import EmulatedWorkload, hurried, watch
from .live import LiveStorages
from .ranks import Place, RanksFailed, run_ranks, touch_memory
from .systems import Account, Ours, Runner, System, Workload

# A step that only makes what the next ones use (buffers, connections, forms) need not sleep as long; real layers take their time.
WARM_UP = 0.1


@dataclass(frozen=True)
class Trial:
    """What one trial gave. Seconds per step (from the first rank's start to the last rank's end), bytes per rank."""

    step_seconds: tuple[float, ...]
    peak_live_bytes: tuple[int, ...]  # empty in all rounds but the first: bytes do not depend on the weather
    peak_meter_bytes: tuple[int, ...] | None  # our own meter's number; None for a peer
    account: Account | None = None  # of the last timed step; None for a peer


@dataclass
class Row:
    """A system's trials, one per round; `error` where it crashed."""

    system: System
    trials: list[Trial] = field(default_factory=list)
    error: str | None = None

    @property
    def rounds(self) -> list[float]:
        """Seconds: the median step of each round."""
        return [statistics.median(trial.step_seconds) for trial in self.trials]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def best_seconds(self) -> float:
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest round) / median."""
        return (max(self.rounds) - min(self.rounds)) / self.median_seconds

    @property
    def account(self) -> Account | None:
        """Of the round whose step is the median one."""
        known = sorted(
            (trial.account for trial in self.trials if trial.account), key=lambda account: account.step_seconds
        )
        return known[len(known) // 2] if known else None

    @property
    def peak_live_bytes(self) -> int:
        """The largest of any rank."""
        return max(max(trial.peak_live_bytes, default=0) for trial in self.trials)

    @property
    def peak_meter_bytes(self) -> int | None:
        metered = [max(trial.peak_meter_bytes) for trial in self.trials if trial.peak_meter_bytes]
        return max(metered, default=None)

    def to_json(self) -> dict[str, Any]:
        """All rounds as they were."""
        return {
            "name": self.system.name,
            "system": asdict(self.system),  # type: ignore[call-overload]
            "error": self.error,
            "trials": [asdict(trial) for trial in self.trials],
        }


@dataclass(frozen=True)
class Network:
    """Where the ranks live and where they meet."""

    places: tuple[Place, ...] = ()
    store_host: str = "127.0.0.1"


def run_rounds(
    systems: Sequence[System],
    workload: Workload,
    *,
    rounds: int,
    steps: int,
    network: Network | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Row]:
    """Every system once in each round, so that whatever disturbs the machine disturbs all of them."""
    network = network or Network()
    tell = tell or _to_stderr
    rows = [Row(system) for system in systems]
    for number in range(rounds):
        for row in rows:
            if row.error is not None:
                continue
            try:
                values = run_ranks(
                    workload.num_stages,
                    run_trial,
                    row.system,
                    workload,
                    steps,
                    number == 0,
                    places=network.places,
                    store_host=network.store_host,
                )
            except RanksFailed as error:
                if not row.system.is_peer:
                    raise
                row.error = str(error)
                tell(f"round {number + 1}  {row.system.name}: {row.error.splitlines()[-1]}")
                continue
            row.trials.append(_together(values))
            tell(f"round {number + 1}/{rounds}  {row.system.name:32} {row.rounds[-1]:8.3f} s")
    return rows


def _together(values: Sequence[dict[str, Any]]) -> Trial:
    spans = zip(*(value["spans"] for value in values))
    seconds = tuple(max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in spans)
    metered = [value["meter_bytes"] for value in values]
    live = tuple(value["live_bytes"] for value in values if value["live_bytes"] is not None)
    return Trial(seconds, live, None if None in metered else tuple(metered), values[0]["account"])


def run_trial(system: System, workload: Workload, steps: int, count_bytes: bool) -> dict[str, Any]:
    """On one rank: a step to warm up (sleeps hurried), timed steps, and after them a step under the byte meter where it is asked for."""
    touch_memory(workload.memory_bytes())
    runner = system.start(workload)
    with hurried(WARM_UP):
        runner.step()
    # A rank has imported all systems: looking through their objects for cycles takes 0.1 to 0.2 s of whichever step it falls into.
    gc.collect()
    gc.freeze()
    spans = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        runner.step()
        spans.append((start, time.perf_counter()))
    account = runner.account()
    live_bytes = _live_bytes(runner, workload) if count_bytes else None
    result = {"spans": spans, "live_bytes": live_bytes, "meter_bytes": runner.own_peak_bytes(), "account": account}
    dist.barrier()
    runner.close()
    return result


def _live_bytes(runner: Runner, workload: Workload) -> int:
    emulated = isinstance(workload, EmulatedWorkload)
    live = LiveStorages(runner.tensors(), every_operation=not emulated)
    if emulated:
        watch(live.sample)
    with live:
        with hurried(WARM_UP):
            runner.step()  # shows the buffers that a system keeps from step to step
        live.restart(runner.tensors())
        runner.step()
    return live.peak_bytes


@dataclass(frozen=True)
class OpSeconds:
    """What one F, B and R of a stage take where nothing is waited for."""

    forward: float
    backward: float
    recompute: float

    def costs(self, num_stages: int, hop_seconds: float) -> Costs:
        """Of a schedule whose stages are all as that one."""
        return Costs.spread(
            num_stages, forward=self.forward, backward=self.backward, recompute=self.recompute, hop=hop_seconds
        )


def measure_ops(workload: EmulatedWorkload) -> OpSeconds:
    """Medians over one stage alone, sleeps that end late and the runtime's own work included: what predictions start from."""
    alone = replace(workload, num_stages=1, num_microbatches=min(8, workload.num_microbatches))
    seconds: OpSeconds = run_ranks(1, _time_ops, alone)[0]
    return seconds


def _time_ops(workload: EmulatedWorkload) -> OpSeconds:
    touch_memory(workload.memory_bytes())
    runner = Ours(mode=Mode.INLINE, last_stage=LastStage.ALWAYS).start(workload)
    with hurried(WARM_UP):
        runner.step()
    runner.step()
    events = runner.pipeline.report.events
    runner.close()

    def median(kind: Kind) -> float:
        return statistics.median(event.end - event.start for event in events if event.op.kind is kind)

    return OpSeconds(median(Kind.F), median(Kind.B), median(Kind.R))


def measure_hop(workload: Workload, *, network: Network | None = None, repeats: int = 10) -> float:
    """Seconds in which one boundary tensor gets from a stage to the next: half of a round trip between ranks 0 and 1."""
    network = network or Network()
    places = network.places[:2]
    values = run_ranks(2, _ping_pong, workload, repeats, places=places, store_host=network.store_host)
    return float(values[0])


def _ping_pong(workload: Workload, repeats: int) -> float:
    tensor = workload.stage_output(0)
    rank, trips = dist.get_rank(), []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        trips.append(time.perf_counter() - start)
    return statistics.median(trips[1:]) / 2


def all_systems(systems: Sequence[System]) -> tuple[list[System], list[str]]:
    """Those that are installed, and a line for each that is not."""
    found, missing = [], []
    for system in systems:
        if type(system).__name__ == "DeepSpeedPipe" and importlib.util.find_spec("deepspeed") is None:
            missing.append(f"{system.name}: skipped, DeepSpeed is missing: DS_BUILD_OPS=0 pip install deepspeed")
        else:
            found.append(system)
    return found, missing


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
