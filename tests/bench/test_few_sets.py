"""What the benchmarks of few sets run, and that each idea of the ablation is one: on the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.ablation.run import orders
from benchmarks.emulated import EmulatedWorkload
from benchmarks.sets.run import INSIDE, OFFLOADED, QUICK, FewSets, Measured, targets_of
from benchmarks.systems import Account, Ours
from benchmarks.trial import Row, Trial
from pipetrain.schedule.alive import peak_sets
from pipetrain.schedule.check import check
from pipetrain.schedule.policy import Offload
from pipetrain.schedule.simulate import simulate

FOUR = EmulatedWorkload(4, num_microbatches=16, forward_seconds=1.0, backward_seconds=2.0)


def seconds(system: Ours, workload: EmulatedWorkload) -> float:
    return simulate(system.schedule(workload), workload.costs()).step_seconds


def test_orders_are_sought_once_and_fit_their_places() -> None:
    case = FewSets(EmulatedWorkload(3, num_microbatches=6, layers_per_stage=2), 2, 1.0, split=True, search_seconds=0.0)
    for system in case.ours():
        sought = system.sought(case.workload, case.workload.costs(stages_per_rank=system.stages_per_rank))
        assert (sought.order is not None) == (system.family == "auto")
        schedule = sought.schedule(case.workload)
        check(schedule)
        assert max(peak.sets for peak in peak_sets(schedule)) <= system.sets
        assert schedule.num_ranks == case.workload.num_stages
        assert replace(sought, order=None) == system
    names = [system.name for case in (QUICK, *INSIDE) for system in case.ours()]
    assert {"1f1b", "1f1b, split", "auto, 20 s of search", "auto, split, 20 s of search", "zbv"} <= set(names)


def test_sets_go_to_the_host_where_copies_are_measured() -> None:
    case = replace(OFFLOADED, search_seconds=0.0)
    for system in case.ours():
        sought = system.sought(case.workload, case.workload.costs())
        assert sought.schedule(case.workload).offloaded
        assert seconds(sought, case.workload) < seconds(replace(system, offload=Offload.NONE), case.workload)


@pytest.mark.slow
def test_each_idea_of_the_ablation_brings_something() -> None:
    """Two sets of four: places for R alone, one pool, list order; then the same with I and W."""
    without_a_search = [system for system in orders(-1.0) if system.search_seconds == 0]
    none, pool, listed, pool_split, listed_split = (
        seconds(system.sought(FOUR, FOUR.costs()), FOUR) for system in without_a_search
    )
    assert none > pool > listed > listed_split
    assert pool > pool_split >= listed_split


def test_costs_of_a_workload_are_its_sleeps() -> None:
    costs = replace(FOUR, weight_gradient_seconds=0.5).costs(0.25)
    assert (costs.input_gradient[0], costs.weight_gradient[0], costs.hop_forward[0]) == (1.5, 0.5, 0.25)
    assert FOUR.costs().weight_gradient == ()


@pytest.mark.slow
def test_targets_say_what_was_measured() -> None:
    """Rows that take what was simulated and hold what was foreseen keep all promises; one too late, too full, or beside fast peers does not."""
    case = FewSets(EmulatedWorkload(3, num_microbatches=6, layers_per_stage=2), 2, 1.0, split=True, search_seconds=0.0)
    ours = [system.sought(case.workload, case.workload.costs()) for system in case.ours()]

    def missed(*, late: float = 1.0, full: float = 1.0, peers: float = 10.0) -> list[str]:
        rows = [Row(peer, [Trial((peers,), (), None)]) for peer in case.peers]
        for system in ours:
            costs = case.workload.costs(stages_per_rank=system.stages_per_rank)
            step = simulate(system.schedule(case.workload), costs).step_seconds
            held = max(Measured(case, [], 0.0).foreseen_bytes(system))
            account = Account((), (), (), step, costs, (round(full * held),))
            rows.append(Row(system, [Trial((late * step,), (), None, account)]))
        return [target.what for target in targets_of(Measured(case, rows, 0.0)) if not target.met]

    assert missed() == []
    assert [what for what in missed(late=1.05) if "simulated" in what] == missed(late=1.05)
    assert [what for what in missed(full=1.06) if "bytes" in what] == missed(full=1.06)
    assert len(missed(late=1.05)) == len(missed(full=1.06)) == 1
    assert len(missed(peers=1e-3)) == 3
