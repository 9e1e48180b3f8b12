"""Time against sets: what a step takes with a few sets per stage, beside torch's 1F1B that keeps them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pipetrain.schedule.alive import peak_sets
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

from ..emulated import EmulatedWorkload
from ..links.hosts import check_available
from ..links.namespaces import shaped_network
from ..ranks import preload
from ..result import Options, Result, Table, Target
from ..systems import Ours, System, TorchPipelining
from ..trial import Network, Row, measure_hop, run_rounds
from ..unavailable import Unavailable

CLAIM = "two sets of four, or with its backward split of eight, take about as long as all of them without recomputation"
ALL_SETS = TorchPipelining("1f1b", recomputes=False)
SEARCH_SECONDS = 60.0


@dataclass(frozen=True)
class FewSets:
    """One table: `sets` places per stage, over links of `megabits` (0: inside the machine). The best is at most `limit` x `ALL_SETS`."""

    workload: EmulatedWorkload
    sets: int
    limit: float
    split: bool = False
    megabits: int = 0

    @property
    def title(self) -> str:
        load = self.workload
        links = f", links of {self.megabits} Mbit/s" if self.megabits else ""
        return f"{load.num_stages} stages, {load.num_microbatches} microbatches, {self.sets} sets{links}"

    def ours(self, search_seconds: float) -> list[Ours]:
        """From one set and R when its gradient is there to the best order for all places."""
        searched = [0.0, search_seconds] if search_seconds else [0.0]
        rows = [
            Ours("1f1b", Mode.INLINE, label="1f1b inline, 1 set"),
            Ours("1f1b", Mode.OVERLAP, label="1f1b, 1 set"),
            Ours("1f1b", Mode.OVERLAP, sets=self.sets, label="1f1b"),
        ]
        rows += [self._auto(seconds, split=False) for seconds in searched]
        if self.split:
            rows.append(Ours("1f1b", Mode.OVERLAP, sets=self.sets, split_backward=True, label="1f1b, split"))
            rows += [self._auto(seconds, split=True) for seconds in searched]
        return rows

    def _auto(self, seconds: float, *, split: bool) -> Ours:
        label = f"auto{', split' if split else ''}, {f'{seconds:g} s of search' if seconds else 'the rule'}"
        return Ours("auto", sets=self.sets, search_seconds=seconds, split_backward=split, label=label)


_FOUR = EmulatedWorkload(4, num_microbatches=16)
_EIGHT = EmulatedWorkload(8, num_microbatches=16, forward_seconds=0.08, backward_seconds=0.16)
_LINKED = EmulatedWorkload(4, num_microbatches=16, tensor_bytes=2_500_000)  # a hop of half a forward
INSIDE = (FewSets(_FOUR, 2, 1.10), FewSets(_EIGHT, 2, 1.00, split=True))
LINKED = FewSets(_LINKED, 3, 0.80, megabits=1000)
QUICK = FewSets(EmulatedWorkload(2, num_microbatches=4), 2, 1.10, split=True)


def run(options: Options) -> Result:
    preload("torch.distributed.pipelining")
    seconds = 0.0 if options.quick else SEARCH_SECONDS
    result = Result("sets", CLAIM, settings={"rounds": options.rounds, "search_seconds": seconds})
    for case in _cases(options, result):
        with ExitStack() as stack:
            stages = case.workload.num_stages
            network = (
                stack.enter_context(shaped_network(stages, megabits=case.megabits)) if case.megabits else Network()
            )
            hop = measure_hop(case.workload, network=network)
            ours = [system.sought(case.workload, case.workload.costs(hop)) for system in case.ours(seconds)]
            systems: list[System] = [ALL_SETS, TorchPipelining("1f1b", recomputes=True), *ours]
            rows = run_rounds(
                systems, case.workload, rounds=options.rounds, steps=1 if options.quick else 2, network=network
            )
        result.tables.append(_table(case, rows, hop))
        result.data[case.title] = [row.to_json() for row in rows]
        result.targets.append(_target(case, rows))
    return result


def _cases(options: Options, result: Result) -> Sequence[FewSets]:
    if options.quick:
        return [QUICK]
    try:
        check_available()
    except Unavailable as reason:
        result.notes.append(f"slow links skipped: {reason}")
        return INSIDE
    return [*INSIDE, LINKED]


def _target(case: FewSets, rows: Sequence[Row]) -> Target:
    best = min(row.median_seconds for row in rows if isinstance(row.system, Ours) and row.system.family == "auto")
    return Target(f"{case.title}: auto / {ALL_SETS.name}", best / rows[0].median_seconds, case.limit)


def _table(case: FewSets, rows: Sequence[Row], hop: float) -> Table:
    unit = case.workload.forward_seconds
    lines = tuple(
        (
            row.system.name,
            f"{row.median_seconds / unit:.2f}",
            f"{row.spread:.1%}",
            f"{row.median_seconds / rows[0].median_seconds:.3f}",
            *_foreseen(row.system, case.workload, hop),
            f"{row.peak_live_bytes / 1e6:.1f}",
            "" if row.peak_meter_bytes is None else f"{row.peak_meter_bytes / 1e6:.1f}",
        )
        for row in rows
    )
    headers = ("", "time / f", "spread", "x all sets", "simulated", "bound", "sets", "live MB", "meter MB")
    return Table(f"{case.title} (hop {hop / unit:.2f} f, f = {unit * 1e3:g} ms)", headers, lines)


def _foreseen(system: System, workload: EmulatedWorkload, hop: float) -> tuple[str, str, str]:
    """Of an order of ours, in units of f: its simulated step, the least of any order that keeps its sets; and its most sets of a stage."""
    if not isinstance(system, Ours):
        return "", "", ""
    schedule, costs, unit = system.schedule(workload), workload.costs(hop), workload.forward_seconds
    step, least = simulate(schedule, costs).step_seconds, bound_of(schedule, costs)
    return f"{step / unit:.2f}", f"{least / unit:.2f}", str(max(peak.sets for peak in peak_sets(schedule)))
