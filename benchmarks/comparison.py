"""Ours and the peers on one workload: what is predicted, what was measured, what it held, and whether to believe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import LastStage, Mode
from pipetrain.schedule.simulate import simulate

from .charts import OURS, PEER_WITH, PEER_WITHOUT, Bar, Panel, draw_bars
from .emulated import EmulatedWorkload
from .ranks import preload
from .result import Options, Table, Target
from .systems import DeepSpeedPipe, Ours, System, TorchPipelining
from .trial import Network, OpSeconds, Row, all_systems, measure_ops, run_rounds

PEERS: tuple[System, ...] = (
    TorchPipelining("gpipe", recomputes=False),
    TorchPipelining("gpipe", recomputes=True),
    TorchPipelining("1f1b", recomputes=False),
    TorchPipelining("1f1b", recomputes=True),
    DeepSpeedPipe(recomputes=False),
    DeepSpeedPipe(recomputes=True),
)
# A sleep never ends early, so a step below the bound is a fault of the benchmark; rounding gets this much.
LEAST_OF_BOUND = 0.995
# Rounds that differ by more than this say more about the machine than about the system.
MOST_SPREAD = 0.10
# A peer without recomputation pays its hops on every microbatch; more than this above the formula and it was run wrongly.
MOST_OF_NEVER = 1.10


def peers_for(quick: bool) -> tuple[list[System], list[str]]:
    """The peers that are installed, and a line for each that is not."""
    preload("torch.distributed.pipelining", "deepspeed")
    return all_systems(PEERS[2:4] if quick else PEERS)


_COLUMNS = ", time, best, spread, bound, x bound, simulated, R hidden, R exposed, unexplained, live MB, meter MB"


@dataclass(frozen=True)
class Comparison:
    """Rows of one workload. `ops` and `hop_seconds` were measured before; the bound is for the sleeps and a hop of its own."""

    title: str
    workload: EmulatedWorkload
    rows: tuple[Row, ...]
    ops: OpSeconds
    hop_seconds: float
    bound_hop_seconds: float

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.system.name == name)

    def median(self, name: str) -> float:
        return self.row(name).median_seconds

    def best_peer(self, family: str | None, *, recomputes: bool) -> Row | None:
        """The fastest peer that ran."""
        rows = [
            row
            for row in self.rows
            if row.system.is_peer
            and row.trials
            and row.system.recomputes == recomputes
            and family in (None, row.system.family)
        ]
        return min(rows, key=lambda row: row.median_seconds, default=None)

    def _least_costs(self) -> Costs:
        return self.workload.costs(self.bound_hop_seconds)

    def _measured_costs(self) -> Costs:
        return self.ops.costs(self.workload.num_stages, self.hop_seconds)

    def _ours(self, name: str) -> Ours | None:
        system = self.row(name).system
        return system if isinstance(system, Ours) else None

    def bound_of(self, name: str) -> float:
        """Seconds: the least that any order of the same ops could take."""
        system = self._ours(name)
        if system is None:  # a peer that recomputes does so on every stage
            mode = Mode.OVERLAP if self.row(name).system.recomputes else Mode.NEVER
            system = Ours(mode=mode, last_stage=LastStage.ALWAYS)
        return bound_of(system.schedule(self.workload), self._least_costs())

    def simulated_of(self, name: str) -> float:
        """Seconds that were predicted from what one stage and one hop took alone."""
        system = self._ours(name)
        assert system is not None, f"{name} is a peer: its order is not simulated"
        return simulate(system.schedule(self.workload), self._measured_costs()).step_seconds

    def table(self) -> Table:
        unit = self.workload.forward_seconds
        headers = tuple(_COLUMNS.split(", "))
        lines = tuple(self._line(row, unit) if row.trials else (row.system.name, "crashed") for row in self.rows)
        title = (
            f"{self.title}; times in units of f = {unit * 1e3:g} ms, b = {self.workload.backward_seconds / unit:g} f, hop "
            f"measured {self.hop_seconds / unit:.2f} f; median of {max(len(row.trials) for row in self.rows)} rounds; R summed "
            "over ranks, unexplained of the worst rank"
        )
        return Table(title, headers, tuple((*line, *[""] * (len(headers) - len(line))) for line in lines))

    def _line(self, row: Row, unit: float) -> tuple[str, ...]:
        name, account, meter = row.system.name, row.account, row.peak_meter_bytes
        least = self.bound_of(name)
        told = ["", "", ""]
        if account is not None:
            told = [
                f"{sum(account.recompute_hidden_seconds) / unit:.1f}",
                f"{sum(account.recompute_exposed_seconds) / unit:.1f}",
                f"{max(account.unexplained_seconds) / account.step_seconds:.1%}",
            ]
        return (
            name,
            f"{row.median_seconds / unit:.2f}",
            f"{row.best_seconds / unit:.2f}",
            f"{row.spread:.1%}",
            f"{least / unit:.2f}",
            f"{row.median_seconds / least:.3f}",
            f"{self.simulated_of(name) / unit:.2f}" if self._ours(name) else "",
            *told,
            f"{row.peak_live_bytes / 1e6:.1f}",
            "" if meter is None else f"{meter / 1e6:.1f}",
        )

    def faults(self) -> list[str]:
        """Why a row should not be believed."""
        found = []
        for row in self.rows:
            where = f"{self.title}: {row.system.name}"
            if row.error is not None:
                found.append(f"{where} crashed: {row.error.splitlines()[-1].strip()}")
            if not row.trials:
                continue
            share = row.best_seconds / self.bound_of(row.system.name)
            if share < LEAST_OF_BOUND:
                found.append(f"{where} took {share:.3f} of the bound: a fault of this benchmark, the row is void")
            expected = not row.system.recomputes and row.system.is_peer and self.bound_hop_seconds == 0
            if expected and row.median_seconds > MOST_OF_NEVER * self.bound_of(row.system.name):
                found.append(
                    f"{where} took {row.median_seconds / self.bound_of(row.system.name):.3f} of (m + p - 1)(f + b): run wrongly or disturbed, the row is void"
                )
        noisy = [row.system.name for row in self.rows if row.trials and row.spread > MOST_SPREAD]
        if noisy:
            found.append(
                f"{self.title}: rounds differ by more than {MOST_SPREAD:.0%} for {', '.join(noisy)}: the machine was busy with "
                "something else, repeat before quoting these"
            )
        return found

    def unexplained_targets(self, where: str) -> list[Target]:
        """Of every step of ours in the table, the part of the worst rank that no cause accounts for."""
        accounts = [row.account for row in self.rows if row.account is not None]
        worst = max(max(account.unexplained_seconds) / account.step_seconds for account in accounts)
        return [Target(f"{where} unexplained part of a step, worst rank of all modes", worst, 0.02)]

    def memory_targets(self, where: str) -> list[Target]:
        """Our largest rank against the peer's largest rank, same family, both with recomputation."""
        targets = []
        for family in ("gpipe", "1f1b"):
            peer = self.best_peer(family, recomputes=True)
            if peer:
                ours = self.row(f"pipetrain {family} overlap").peak_live_bytes
                what = f"{where} {family} overlap: live bytes / {peer.system.name}"
                targets.append(Target(what, ours / peer.peak_live_bytes, 1.0))
        return targets

    def to_json(self) -> dict[str, Any]:
        ran = [row for row in self.rows if row.trials]
        return {
            "workload": vars(self.workload),
            "op_seconds": vars(self.ops),
            "hop_seconds": self.hop_seconds,
            "bound_seconds": {row.system.name: self.bound_of(row.system.name) for row in ran},
            "simulated_seconds": {
                row.system.name: self.simulated_of(row.system.name) for row in ran if self._ours(row.system.name)
            },
            "rows": [row.to_json() for row in self.rows],
        }


def compare(
    title: str,
    systems: Sequence[System],
    workload: EmulatedWorkload,
    options: Options,
    *,
    hop_seconds: float,
    bound_hop_seconds: float,
    network: Network | None = None,
) -> Comparison:
    ops = measure_ops(workload)
    rows = run_rounds(systems, workload, rounds=options.rounds, steps=1 if options.quick else 2, network=network)
    return Comparison(title, workload, tuple(rows), ops, hop_seconds, bound_hop_seconds)


def chart(path: Path, comparisons: Sequence[Comparison]) -> None:
    """A panel per workload, a bar per system."""
    panels = []
    for comparison in comparisons:
        unit = comparison.workload.forward_seconds
        bars = [
            Bar(
                row.system.name, row.median_seconds / unit, min(row.rounds) / unit, max(row.rounds) / unit, _colour(row)
            )
            for row in comparison.rows
            if row.trials
        ]
        ours = next((row.system.name for row in comparison.rows if row.system.name == "pipetrain gpipe overlap"), None)
        marks = {"bound with recomputation": comparison.bound_of(ours) / unit} if ours else {}
        panels.append(Panel(comparison.title, "step time / f (less is better)", tuple(bars), marks))
    draw_bars(path, panels)


def _colour(row: Row) -> str:
    if not row.system.is_peer:
        return OURS
    return PEER_WITH if row.system.recomputes else PEER_WITHOUT
