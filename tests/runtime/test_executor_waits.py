"""The executor obeys exactly the waits of a schedule and the order of its queues, however late messages come."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from examples import examples
from hypothesis import strategies as st
from in_process import InProcessRun
from random_schedules import random_schedules

from pipetrain.runtime.executor import _TABLE
from pipetrain.schedule.check import check
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.schedule import Schedule

SEEDS = range(4)


def with_waits(schedule: Schedule, waits: dict[str, str]) -> Schedule:
    """The schedule with other waits for some ops; `add 0F2` leaves those that it has."""
    changed = dict(schedule.waits)
    for text, awaited in waits.items():
        op = Op.parse(text.removeprefix("add "))
        kept = changed.get(op, ()) if text.startswith("add ") else ()
        changed[op] = (*kept, *map(Op.parse, awaited.split()))
    return dataclasses.replace(schedule, waits=changed)


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param({"add 0F2": "0SEND_F0"}, id="F waits until an output has left: bounds what is not sent"),
        pytest.param({"add 1RECV_B2": "1R1"}, id="a receive waits for an R"),
        pytest.param({"add 1RECV_F1": "1F0", "1RECV_F2": ""}, id="the second of a queue waits, the third does not"),
        pytest.param({"add 0SEND_F0": "0F2"}, id="the first of a queue waits longer than the second"),
        pytest.param({"0SEND_F0": "0F1", "0SEND_F1": ""}, id="a send waits through the one before it in its queue"),
        pytest.param({"add 0F3": "0SEND_F1", "add 0R0": "0SEND_F2"}, id="R waits for a send"),
        pytest.param({"add 1SEND_B0": "1RECV_B1", "add 1RECV_F3": "1SEND_F0"}, id="transfers wait for transfers"),
    ],
)
@pytest.mark.parametrize("mode", ["overlap", "inline"])
def test_waits_of_every_kind(waits: dict[str, str], mode: str) -> None:
    schedule = with_waits(make_schedule(num_stages=3, num_microbatches=4, recompute=mode), waits)
    check(schedule)
    for seed in SEEDS:
        run_two_steps(schedule, random.Random(seed), buffered=seed % 2 == 1)


def test_each_kind_runs() -> None:
    assert set(_TABLE) == set(Kind)


def run_two_steps(schedule: Schedule, source: random.Random, **how: Any) -> None:
    """The first step says the forms of its messages, the second knows them."""
    run = InProcessRun(schedule, source.randrange, **how)
    for _ in range(2):
        run.assert_right(run.step())


def accepts(schedule: Schedule) -> bool:
    """What is refused is of no interest here: tests/schedule asks what the refusal says."""
    try:
        check(schedule)
    except ValueError:
        return False
    return True


SCHEDULES = random_schedules(max_ranks=4, max_microbatches=4, with_replicas=False).map(lambda drawn: drawn[0])


@examples(40, 600, SCHEDULES, st.integers(0, 1 << 16))
def test_what_check_accepts_runs(schedule: Schedule, seed: int) -> None:
    """Random schedules: no hang, every wait obeyed, every value right, whatever comes when."""
    if accepts(schedule):
        run_two_steps(schedule, random.Random(seed), buffered=seed % 2 == 1)


REPLICATED = (
    random_schedules(max_ranks=3, max_microbatches=3)
    .map(lambda drawn: drawn[0])
    .filter(lambda schedule: schedule.num_replicas > 1)
)


SKIPPED = st.lists(st.frozensets(st.integers(0, 2)), min_size=4, max_size=4)


@examples(8, 40, REPLICATED, SKIPPED, st.integers(0, 1 << 16))
def test_what_check_accepts_runs_in_all_replicas(schedule: Schedule, wanted: list[frozenset[int]], seed: int) -> None:
    """Each rank of each replica at its own pace, whole or each with other microbatches that count nothing."""
    if not accepts(schedule):
        return
    skipped: list[frozenset[int]] = []
    if seed % 2:
        all_of_them = frozenset(range(schedule.num_microbatches))
        # One microbatch counts at least.
        skipped = [*(own & all_of_them for own in wanted[: schedule.num_replicas - 1]), frozenset()]
    run_two_steps(schedule, random.Random(seed), buffered=seed % 4 > 1, skipped=skipped)


@examples(20, 80, SCHEDULES, st.sets(st.integers(0, 3), min_size=1), st.integers(0, 1 << 16))
def test_microbatches_that_count_nothing_do_nothing(schedule: Schedule, wanted: set[int], seed: int) -> None:
    skipped = frozenset(wanted) & set(range(schedule.num_microbatches))
    if accepts(schedule) and len(skipped) < schedule.num_microbatches:
        run_two_steps(schedule, random.Random(seed), skipped=[skipped] * schedule.num_replicas)


@examples(20, 80, SCHEDULES, st.integers(0, 1 << 16))
def test_a_schedule_for_a_device_is_launched_in_its_order(schedule: Schedule, seed: int) -> None:
    """Whatever comes when: nothing hangs, and each rank starts its ops in the launch order."""
    if accepts(schedule):
        run_as_launched(for_device(schedule), seed)


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved"])
def test_families_are_launched_in_their_order(family: str) -> None:
    stages = 4 if family == "interleaved" else 2
    made = make_schedule(family, num_stages=stages, num_ranks=2, num_microbatches=4)
    for seed in SEEDS:
        run_as_launched(for_device(made), seed)


def run_as_launched(schedule: Schedule, seed: int) -> None:
    run = InProcessRun(schedule, random.Random(seed).randrange, buffered=seed % 2 == 1)
    for _ in range(2):
        logs = run.step()
        run.assert_right(logs)
        for log, (rank, order) in itertools.product(logs, enumerate(schedule.launch_order)):
            assert order == tuple(op for what, op in log if what == "start" and schedule.stage_ranks[op.stage] == rank)
