"""Emulated stages over slow links: a hop of half a forward, and of a whole one."""

from __future__ import annotations

import itertools
from dataclasses import replace

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.simulate import simulate

from ..comparison import Comparison, chart, compare, peers_for
from ..emulated import EmulatedWorkload
from ..result import Options, Result, Target
from ..systems import Ours
from ..trial import measure_hop
from .hosts import BUCKET, check_available
from .namespaces import shaped_network

CLAIM = "over slow links we are faster with recomputation than the peers without"
MEGABITS = 1000
STAGES = 4
# Bytes of a boundary tensor -> the hop that this makes at MEGABITS, in units of f = 40 ms.
HOPS = {2_500_000: "0.5 f", 5_000_000: "1 f"}
GPIPE_TO_PEER = {"0.5 f": 0.74, "1 f": 0.67}
ONE_F_ONE_B_TO_PEER = {"0.5 f": 0.73, "1 f": 0.68}
BEST_TO_PEER_WITHOUT = {"0.5 f": 0.94, "1 f": 0.81}
GPIPE, ONE_F_ONE_B = "pipetrain gpipe overlap", "pipetrain 1f1b overlap"
# A set more, which is still less than torch's GPipe with recomputation holds.
KEPT = "pipetrain gpipe overlap 2 sets"


def run(options: Options) -> Result:
    check_available()
    settings = {"rounds": options.rounds, "megabits": MEGABITS, "shape": f"tc tbf {BUCKET}, both ends"}
    result = Result("links", CLAIM, settings=settings)
    peers, missing = peers_for(options.quick)
    result.notes += missing
    comparisons = []
    for tensor_bytes, hop_name in itertools.islice(HOPS.items(), 1 if options.quick else None):
        workload = EmulatedWorkload(STAGES, tensor_bytes=tensor_bytes)
        with shaped_network(STAGES, megabits=MEGABITS) as network:
            hop = measure_hop(workload, network=network)
            title = f"{STAGES} stages, links of {MEGABITS} Mbit/s, {tensor_bytes / 1e6:g} MB a tensor (hop {hop_name})"
            systems = [*_ours(workload, hop, options.quick), *peers]
            comparison = compare(
                title, systems, workload, options, hop_seconds=hop, bound_hop_seconds=hop, network=network
            )
        comparisons.append(comparison)
        result.tables.append(comparison.table())
        result.notes += comparison.faults()
        result.targets += _targets(comparison, hop_name)
        result.data[hop_name] = comparison.to_json()
    result.draw = lambda path: chart(path, comparisons)
    return result


def _ours(workload: EmulatedWorkload, hop_seconds: float, quick: bool) -> list[Ours]:
    """GPipe in three modes and with a set kept, and 1F1B with the warm-up that the simulator finds best at the measured hop."""
    modes = (Mode.OVERLAP,) if quick else (Mode.NEVER, Mode.INLINE, Mode.OVERLAP)
    warmup = best_warmup(workload, hop_seconds)
    classic = [Ours("1f1b", mode, warmup=warmup, label=f"pipetrain 1f1b {mode}") for mode in modes]
    kept = [] if quick else [Ours("gpipe", Mode.OVERLAP, sets=2, label=KEPT)]
    return [*(Ours("gpipe", mode) for mode in modes), *kept, *classic]


def best_warmup(workload: EmulatedWorkload, hop_seconds: float) -> tuple[int, ...]:
    """Forwards in flight per stage: the fastest 1F1B in simulation; of equally fast ones, the one that holds least."""
    load = workload
    costs = Costs.spread(
        load.num_stages,
        forward=load.forward_seconds,
        backward=load.backward_seconds,
        recompute=load.forward_seconds,
        hop=hop_seconds,
    )
    most = load.num_microbatches
    candidates = []
    for counts in itertools.product(
        *(range(min(most, load.num_stages - s), most + 1) for s in range(load.num_stages - 1))
    ):
        if all(after <= before for before, after in itertools.pairwise(counts)):
            candidates.append((*counts, 1))

    def step_seconds(counts: tuple[int, ...]) -> float:
        return simulate(replace(Ours("1f1b"), warmup=counts).schedule(load), costs).step_seconds

    return min(candidates, key=lambda counts: (round(step_seconds(counts), 4), sum(counts)))


def _targets(comparison: Comparison, hop_name: str) -> list[Target]:
    where = f"S={STAGES} hop {hop_name}"
    gpipe, classic = comparison.row(GPIPE), comparison.row(ONE_F_ONE_B)
    targets = []
    peer = comparison.best_peer("gpipe", recomputes=True)
    if peer:
        ratio = gpipe.median_seconds / peer.median_seconds
        targets.append(Target(f"{where}: gpipe overlap / {peer.system.name}", ratio, GPIPE_TO_PEER[hop_name]))
        for row in comparison.rows:
            if row.system.name == KEPT:
                what = f"{where}: gpipe overlap, 1 set kept"
                time_ratio = row.median_seconds / peer.median_seconds
                bytes_ratio = row.peak_live_bytes / peer.peak_live_bytes
                targets.append(Target(f"{what} / {peer.system.name}", time_ratio, GPIPE_TO_PEER[hop_name]))
                targets.append(Target(f"{what}: live bytes / {peer.system.name}", bytes_ratio, 1.0))
    peer = comparison.best_peer("1f1b", recomputes=True)
    if peer:
        ratio = classic.median_seconds / peer.median_seconds
        targets.append(Target(f"{where}: 1f1b overlap / {peer.system.name}", ratio, ONE_F_ONE_B_TO_PEER[hop_name]))
    peer = comparison.best_peer(None, recomputes=False)
    if peer:
        best = min(gpipe, classic, key=lambda row: row.median_seconds)
        ratio = best.median_seconds / peer.median_seconds
        what = f"{where}: {best.system.name} / {peer.system.name}"
        targets.append(Target(what, ratio, BEST_TO_PEER_WITHOUT[hop_name]))
    without = [row for row in comparison.rows if row.system.name == "torch 1f1b no recompute" and row.trials]
    if without:
        ratio = classic.best_seconds / without[0].best_seconds
        targets.append(Target(f"{where}: 1f1b overlap / torch 1f1b without recompute, best rounds", ratio, 1.0))
    return [*targets, *comparison.memory_targets(where), *comparison.unexplained_targets(where)]
