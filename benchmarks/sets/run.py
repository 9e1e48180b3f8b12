"""Time against sets: what a step takes with a few sets per stage, beside torch's 1F1B and ZBV."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pipetrain.monitor.breakdown import bytes_over_time
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.kinds import RECOMPUTE
from pipetrain.schedule.policy import Offload
from pipetrain.schedule.simulate import simulate

from ..charts import OURS, PEER_WITH, PEER_WITHOUT, Bar, Panel, draw_bars
from ..emulated import EmulatedWorkload
from ..links.hosts import check_available
from ..links.namespaces import shaped_network
from ..ranks import preload
from ..result import Options, Result, Table, Target
from ..systems import Ours, System, TorchPipelining
from ..trial import Network, Row, measure_hop, run_rounds
from ..unavailable import Unavailable

CLAIM = "two sets of four, or with its backward split of eight, take about as long as all of them without recomputation"
ALL_SETS, R_INLINE = TorchPipelining("1f1b", recomputes=False), TorchPipelining("1f1b", recomputes=True)
ZBV, ZBV_WITH_R = TorchPipelining("zbv", recomputes=False), TorchPipelining("zbv", recomputes=True)
SEARCH_SECONDS = 20.0
MOST_OF_SIMULATED, MOST_OF_BYTES = 0.04, 0.05


@dataclass(frozen=True)
class FewSets:
    """One table: `sets` places per stage, over links of `megabits` (0: inside the machine). The best is at most `limit` x `ALL_SETS`."""

    workload: EmulatedWorkload
    sets: int
    limit: float
    split: bool = False
    megabits: int = 0
    offload: Offload = Offload.NONE
    search_seconds: float = SEARCH_SECONDS

    @property
    def title(self) -> str:
        load = self.workload
        links = f", links of {self.megabits} Mbit/s" if self.megabits else ""
        copies = "" if load.copy_seconds is None else f", copies of {load.copy_seconds / load.forward_seconds:g} f"
        return f"{load.num_stages} stages, {load.num_microbatches} microbatches, {self.sets} sets{links}{copies}"

    @property
    def peers(self) -> list[System]:
        if self.split:
            return [ALL_SETS, ZBV, ZBV_WITH_R]
        return [ALL_SETS] if self.megabits else [ALL_SETS, R_INLINE]

    def ours(self) -> list[Ours]:
        """A named family, and the best order for all places (the rule's order if there is no search)."""
        family = Ours(
            "1f1b",
            sets=self.sets,
            split_backward=self.split,
            offload=self.offload,
            label=f"1f1b{', split' * self.split}",
        )
        rows = [family, self._auto()]
        return [*rows, Ours("zbv", sets=self.sets, label="zbv")] if self.split else rows

    def _auto(self) -> Ours:
        seconds = self.search_seconds
        label = f"auto{', split' * self.split}, {f'{seconds:g} s of search' if seconds else 'the rule'}"
        order = Ours("auto", sets=self.sets, search_seconds=seconds, split_backward=self.split, label=label)
        return replace(order, offload=self.offload)


_FOUR = EmulatedWorkload(4, num_microbatches=16)
# Two layers per stage, so that ZBV's two stages per rank have one each.
_EIGHT = EmulatedWorkload(8, num_microbatches=16, forward_seconds=0.08, backward_seconds=0.16, layers_per_stage=2)
_LINKED = EmulatedWorkload(4, num_microbatches=16, tensor_bytes=2_500_000)  # a hop of half a forward
INSIDE = (FewSets(_FOUR, 2, 1.10), FewSets(_EIGHT, 2, 1.00, split=True))
_COPIED = replace(_FOUR, copy_seconds=2 * _FOUR.forward_seconds)
OFFLOADED = FewSets(_COPIED, 2, 1.05, offload=Offload.AUTO, search_seconds=60.0)
LINKED = FewSets(_LINKED, 3, 0.80, megabits=1000)
QUICK = FewSets(EmulatedWorkload(2, num_microbatches=4, layers_per_stage=2), 2, 1.10, split=True, search_seconds=0.0)


@dataclass(frozen=True)
class Measured:
    """The rows of one table, and what one hop took alone."""

    case: FewSets
    rows: Sequence[Row]
    hop: float

    def ours(self) -> list[tuple[Row, Ours]]:
        return [(row, row.system) for row in self.rows if isinstance(row.system, Ours)]

    def seconds_of(self, system: System) -> float | None:
        """Of a row that ran."""
        return next((row.median_seconds for row in self.rows if row.system == system and row.trials), None)

    def simulated(self, row: Row, system: Ours) -> float:
        """Seconds, from what the ops of the first round took, as `plan.profile` has them."""
        account = row.trials[0].account
        assert account is not None
        assert account.costs is not None
        return simulate(system.schedule(self.case.workload), account.costs).step_seconds

    def bound(self, system: Ours) -> float:
        """Seconds: the least of any order that keeps as many sets."""
        costs = self.case.workload.costs(self.hop, stages_per_rank=system.stages_per_rank)
        return bound_of(system.schedule(self.case.workload), costs)

    def foreseen_bytes(self, system: Ours) -> tuple[float, ...]:
        """Per rank: sets and inputs, as `show` says; the inputs of stage 0 are parts of one batch, which is there from the start."""
        load = self.case.workload
        schedule, costs = system.schedule(load), load.costs(self.hop, stages_per_rank=system.stages_per_rank)
        costs = replace(
            costs,
            input_bytes=(0.0, *costs.input_bytes[1:]),
            set_bytes=(costs.set_bytes[0] - load.tensor_bytes, *costs.set_bytes[1:]),
        )
        timeline = simulate(schedule, costs)
        curves = [bytes_over_time(schedule, timeline.of_rank(rank), costs) for rank in range(schedule.num_ranks)]
        peaks = [max(held for _, held in curve) for curve in curves]
        # A set that is kept or copied has no use for its input.
        recomputes = any(op.stage == 0 and op.kind is RECOMPUTE for _, _, op in schedule.ops())
        return (peaks[0] + recomputes * load.num_microbatches * load.tensor_bytes, *peaks[1:])

    def off_simulated(self) -> float:
        """The worst of our rows: |simulated / measured - 1|, measured in the rounds after the one that the costs are from."""
        return max(
            abs(self.simulated(row, system) / statistics.median(row.rounds[1:] or row.rounds) - 1)
            for row, system in self.ours()
        )

    def off_bytes(self) -> float:
        """The worst of our rows: |foreseen / measured - 1|, of the rank that holds most."""
        return max(abs(max(self.foreseen_bytes(system)) / (_stage_bytes(row) or 1) - 1) for row, system in self.ours())


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    result = Result("sets", CLAIM, settings={"rounds": options.rounds})
    panels = []
    for case in _cases(options, result):
        measured = _measure(case, options.rounds)
        result.tables.append(_table(measured))
        result.data[case.title] = [row.to_json() for row in measured.rows]
        result.targets += targets_of(measured)
        result.notes += [
            f"{case.title}: {row.system.name} crashed: {row.error}" for row in measured.rows if row.error is not None
        ]
        panels.append(_panel(measured))

    def draw(path: Path) -> None:
        draw_bars(path, panels)

    result.draw = draw
    return result


def _cases(options: Options, result: Result) -> Sequence[FewSets]:
    if options.quick:
        return [QUICK]
    try:
        check_available()
    except Unavailable as reason:
        result.notes.append(f"slow links skipped: {reason}")
        return [*INSIDE, OFFLOADED]
    return [*INSIDE, OFFLOADED, LINKED]


def _measure(case: FewSets, rounds: int) -> Measured:
    load = case.workload
    with ExitStack() as stack:
        network = Network()
        if case.megabits:
            network = stack.enter_context(shaped_network(load.num_stages, megabits=case.megabits))
        hop = measure_hop(load, network=network)
        ours = [system.sought(load, load.costs(hop)) for system in case.ours()]
        rows = run_rounds([*case.peers, *ours], load, rounds=rounds, steps=1, network=network)
    return Measured(case, rows, hop)


def targets_of(measured: Measured) -> list[Target]:
    """Beside torch's 1F1B that keeps all sets and ZBV that recomputes; and what was foreseen beside what came."""
    case, title = measured.case, measured.case.title
    best = min(row.median_seconds for row, system in measured.ours() if system.family == "auto")
    targets = []
    for peer, limit in ((ALL_SETS, case.limit), (ZBV_WITH_R, 1.0)):
        seconds = measured.seconds_of(peer)
        if seconds is not None:
            targets.append(Target(f"{title}: auto / {peer.name}", best / seconds, limit))
    zbv = measured.seconds_of(ZBV_WITH_R)
    own = next((row.median_seconds for row, system in measured.ours() if system.family == ZBV.family), None)
    if zbv is not None and own is not None:
        targets.append(Target(f"{title}: zbv / {ZBV_WITH_R.name}", own / zbv, 1.0))
    return [
        *targets,
        Target(f"{title}: |simulated / measured - 1|, worst of ours", measured.off_simulated(), MOST_OF_SIMULATED),
        Target(f"{title}: |foreseen / metered bytes - 1|, worst of ours", measured.off_bytes(), MOST_OF_BYTES),
    ]


def _table(measured: Measured) -> Table:
    load, rows = measured.case.workload, measured.rows
    unit = load.forward_seconds
    lines = tuple(
        (
            row.system.name,
            f"{row.median_seconds / unit:.2f}",
            f"{row.spread:.1%}",
            f"{row.median_seconds / rows[0].median_seconds:.3f}",
            *_foreseen(measured, row),
            f"{row.peak_live_bytes / 1e6:.1f}",
        )
        if row.trials
        else (row.system.name, "crashed", *[""] * 7)
        for row in rows
    )
    headers = ("", "time / f", "spread", "x all sets", "simulated", "bound", "foreseen MB", "meter MB", "live MB")
    return Table(f"{measured.case.title} (hop {measured.hop / unit:.2f} f, f = {unit * 1e3:g} ms)", headers, lines)


def _stage_bytes(row: Row) -> int:
    """Sets, inputs and what waits for W of the fullest rank, as metered; messages on their way have bounds of their own."""
    return max(row.account.stage_bytes, default=0) if row.account is not None else 0


def _foreseen(measured: Measured, row: Row) -> tuple[str, str, str, str]:
    """Of an order of ours: its simulated step and the least of any order that keeps its sets, in units of f; bytes of its fullest rank,
    foreseen and metered."""
    system, unit = row.system, measured.case.workload.forward_seconds
    if not isinstance(system, Ours):
        return "", "", "", ""
    return (
        f"{measured.simulated(row, system) / unit:.2f}",
        f"{measured.bound(system) / unit:.2f}",
        f"{max(measured.foreseen_bytes(system)) / 1e6:.1f}",
        f"{_stage_bytes(row) / 1e6:.1f}",
    )


def _panel(measured: Measured) -> Panel:
    unit = measured.case.workload.forward_seconds
    bars = []
    for row in measured.rows:
        if row.trials:
            system = row.system
            colour = OURS if not system.is_peer else PEER_WITH if system.recomputes else PEER_WITHOUT
            least, most = min(row.rounds) / unit, max(row.rounds) / unit
            bars.append(Bar(system.name, row.median_seconds / unit, least, most, colour))
    return Panel(measured.case.title, "step time / f (less is better)", tuple(bars), {})
