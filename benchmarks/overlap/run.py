"""Emulated stages on one machine: where the recomputation goes, ours beside the peers'."""

from __future__ import annotations

from pipetrain.schedule.policy import Mode

from ..comparison import Comparison, chart, compare, peers_for
from ..emulated import EmulatedWorkload
from ..result import Options, Result, Target
from ..systems import Ours
from ..trial import measure_hop

CLAIM = (
    "with recomputation as an op of its own, a step with recomputation costs nearly what the least possible step does"
)
# Promised ratios for 2, 4 and 8 stages.
GPIPE_TO_PEER = {2: 0.89, 4: 0.86, 8: 0.83}
ONE_F_ONE_B_TO_PEER = {2: 0.92, 4: 0.89, 8: 0.85}
TO_BOUND = {2: 1.03, 4: 1.03, 8: 1.04}
SIMULATED = {2: 0.03, 4: 0.03, 8: 0.04}


def run(options: Options) -> Result:
    workloads = [EmulatedWorkload(stages) for stages in ((2,) if options.quick else (2, 4, 8))]
    modes = (Mode.INLINE, Mode.OVERLAP) if options.quick else tuple(Mode)
    ours = [Ours(family, mode) for family in ("gpipe", "1f1b") for mode in modes]
    peers, missing = peers_for(options.quick)
    result = Result("overlap", CLAIM, settings={"rounds": options.rounds, "workloads": [vars(w) for w in workloads]})
    result.notes += missing
    comparisons = []
    for workload in workloads:
        title = f"{workload.num_stages} stages, {workload.num_microbatches} microbatches"
        # A hop inside one machine is part of what the runtime has to answer for: the bound has none.
        hop = measure_hop(workload)
        comparison = compare(title, [*ours, *peers], workload, options, hop_seconds=hop, bound_hop_seconds=0.0)
        comparisons.append(comparison)
        result.tables.append(comparison.table())
        result.notes += comparison.faults()
        result.targets += _targets(comparison, workload.num_stages)
        result.data[str(workload.num_stages)] = comparison.to_json()
    result.draw = lambda path: chart(path, comparisons)
    return result


def _targets(comparison: Comparison, stages: int) -> list[Target]:
    targets = []
    gpipe, classic = comparison.median("pipetrain gpipe overlap"), comparison.median("pipetrain 1f1b overlap")
    where = f"S={stages}"
    peer = comparison.best_peer("gpipe", recomputes=True)
    if peer:
        targets.append(
            Target(f"{where} gpipe overlap / {peer.system.name}", gpipe / peer.median_seconds, GPIPE_TO_PEER[stages])
        )
    peer = comparison.best_peer("1f1b", recomputes=True)
    if peer:
        ratio = classic / peer.median_seconds
        targets.append(Target(f"{where} 1f1b overlap / {peer.system.name}", ratio, ONE_F_ONE_B_TO_PEER[stages]))
    bound = comparison.bound_of("pipetrain gpipe overlap")
    targets.append(Target(f"{where} gpipe overlap / bound", gpipe / bound, TO_BOUND[stages]))
    for name in ("pipetrain gpipe overlap", "pipetrain 1f1b overlap"):
        simulated = comparison.simulated_of(name)
        error = abs(simulated / comparison.median(name) - 1)
        targets.append(Target(f"{where} {name}: |simulated / measured - 1|", error, SIMULATED[stages]))
    return [*targets, *comparison.memory_targets(where), *comparison.unexplained_targets(where)]
