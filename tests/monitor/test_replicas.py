"""Runs of several replicas: reports, breakdowns, costs and pages know which rank is where, and what the adding up of gradients costs."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from pages import drawn_in, panels_in
from test_report import REPORT
from test_run_page import recorded_in

from pipetrain.config.records import ObserveConfig
from pipetrain.monitor.breakdown import break_down, break_down_replicas
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import EventFile
from pipetrain.monitor.measured_costs import measure_costs, op_seconds
from pipetrain.monitor.recorded import page_of_run
from pipetrain.monitor.recorder import Recorder
from pipetrain.monitor.report import as_markdown, measured_and_predicted, read_report, remarks, write_report
from pipetrain.monitor.step_report import RankReport, Report, StepFigures, StepResult, metrics_of
from pipetrain.monitor.stragglers import Straggler
from pipetrain.monitor.trackers import Tracker, Trackers, figures
from pipetrain.plan.mesh import RankPlace
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate

STAGES = 2
COSTS = Costs.spread(STAGES, forward=1.0, backward=2.0, reduce=[3.0, 3.0])
BY_ORDER = {"replica-stage": (0, 1, 2, 3), "stage-replica": (0, 2, 1, 3)}  # ranks: by replica, then place
RANKS = tuple(RankPlace(rank, rank // 2, rank % 2, (rank % 2,)) for rank in range(4))
FOUR = dataclasses.replace(
    REPORT,
    ranks=RANKS,
    recompute_hidden_seconds=(0.25,) * 4,
    recompute_exposed_seconds=(0.0,) * 4,
    peak_activation_bytes=(1, 2, 3, 4),
    peak_activation_bytes_never=(5,) * 4,
)


def schedule(**wanted: object) -> Schedule:
    return make_schedule("gpipe", num_stages=STAGES, num_microbatches=2, recompute="never", num_replicas=2, **wanted)


def later(timeline: Timeline, seconds: float) -> Timeline:
    """Of a replica that is so much behind: its gradients come later, and nobody has the sum before them."""
    moved = tuple(
        dataclasses.replace(event, start=event.start + seconds, end=event.end + seconds) for event in timeline.events
    )
    return Timeline(timeline.num_ranks, moved)


def one_behind(seconds: float, costs: Costs = COSTS) -> tuple[Timeline, Timeline]:
    """Replica 1 is behind, and both have the sums when it has."""
    first, second = simulate(schedule(), costs), later(simulate(schedule(), costs), seconds)
    sums = {event.op: event.end for event in second.events if event.lane is Lane.REDUCE}
    waited = (dataclasses.replace(event, end=sums.get(event.op, event.end)) for event in first.events)
    return Timeline(first.num_ranks, tuple(waited)), second


def report_of(replicas: tuple[Timeline, ...], order: str = "replica-stage") -> Report:
    """As it comes together from what each rank tells, in any order."""
    told = []
    for number, rank in enumerate(BY_ORDER[order]):
        replica, place = divmod(number, STAGES)
        events = replicas[replica].of_rank(place)
        told.append(RankReport(rank, 7, events, 10 * rank, 20, None, replica=replica, place=place, stages=(place,)))
    return Report.of((RankReport.from_json(one.to_json()) for one in reversed(told)), schedule())


# The adding up of gradients in a breakdown --------------------------------------------------------------------------


def test_what_is_added_up_after_the_last_op_is_exposed() -> None:
    """F 2, B 4, reduce 3: stage 1 is done at 8 of 10 and its sum at 11, that of stage 0 at 13."""
    timeline = simulate(schedule(), COSTS)
    reduced = {str(event.op): (event.start, event.end) for event in timeline.events if event.lane is Lane.REDUCE}
    computed = timeline.last_op_end
    assert timeline.step_seconds == computed + 3
    first, last = break_down(schedule(), timeline)
    assert first.reduce_exposed_seconds == 3
    assert last.reduce_exposed_seconds == reduced["1REDUCE_GRAD.0"][1] - computed
    for rank in (first, last):
        assert rank.busy_seconds + rank.bubble_seconds == pytest.approx(timeline.step_seconds)
    without = dataclasses.replace(COSTS, reduce=())
    assert max(first.reduce_exposed_seconds, last.reduce_exposed_seconds) == pytest.approx(
        timeline.step_seconds - simulate(schedule(), without).step_seconds
    )


def test_waiting_for_a_replica_that_is_behind_is_not_exposed() -> None:
    """Its reduces have begun, but the other replica still computes: only what comes after that is the reduce's."""
    early, late = break_down_replicas(schedule(), one_behind(5.0))
    assert [rank.reduce_exposed_seconds for rank in early] == [rank.reduce_exposed_seconds for rank in late]
    assert early[0].drain_seconds == late[0].drain_seconds + 5
    assert late[0].fill_seconds == early[0].fill_seconds + 5
    for rank in (*early, *late):
        assert rank.busy_seconds + rank.bubble_seconds == pytest.approx(simulate(schedule(), COSTS).step_seconds + 5)


def test_the_cost_of_a_reduce_is_counted_from_the_last_replica_on() -> None:
    """... and one bucket after the other: two of 3 s that are ready at once take 3 s each."""
    replicas = one_behind(5.0)
    found = measure_costs(STAGES, [replicas])
    assert found.reduce == (3.0, 3.0)
    assert found.reduce_shared == ()
    assert op_seconds(replicas[0])[Op.parse("0REDUCE_GRAD.0")] == 8  # as seen from one replica alone
    both = tuple(
        OpEvent(0, Lane.REDUCE, Op.parse(f"0REDUCE_GRAD.{part}"), 0.0, end) for part, end in ((1, 3.0), (0, 6.0))
    )
    assert list(op_seconds(Timeline(1, both)).values()) == [3.0, 3.0]


def test_the_sums_of_two_stages_have_a_cost_of_their_own() -> None:
    tied = make_schedule("gpipe", num_stages=2, num_microbatches=2, recompute="never", tied=[(0, 1)])
    found = measure_costs(2, [[simulate(tied, Costs.spread(2, reduce=4.0))]])
    assert (found.reduce, found.reduce_shared) == ((), (4.0, 4.0))


# Reports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", BY_ORDER)
def test_a_report_has_its_ranks_in_the_order_of_the_run(order: str) -> None:
    report = report_of(one_behind(5.0), order)
    assert [one.rank for one in report.of_ranks] == [0, 1, 2, 3]
    assert [report.of_ranks[rank].replica for rank in BY_ORDER[order]] == [0, 0, 1, 1]
    assert [rank.rank for rank in report.breakdown] == [0, 1, 2, 3]
    assert report.per_rank("peak_activation_bytes") == (0, 10, 20, 30)
    assert report.breakdown[BY_ORDER[order][2]].fill_seconds == 5  # the first rank of the replica that is behind
    assert [rank.rank for rank in report.breakdown_of(1)] == list(BY_ORDER[order][2:])
    assert len(report.timelines) == 2
    assert {event.rank for event in report.timelines[1].events} == {0, 1}
    assert report.timeline == report.timelines[0]
    assert report.step_seconds == simulate(schedule(), COSTS).step_seconds + 5


def test_one_replica_reports_as_before() -> None:
    timeline = simulate(make_schedule("gpipe", num_stages=2, num_microbatches=2), COSTS)
    told = [RankReport(rank, 7, timeline.of_rank(rank), 0, 0, None, stages=(rank,)) for rank in range(2)]
    report = Report.of((RankReport.from_json(one.to_json()) for one in told), schedule())
    assert report.timelines == (Timeline(2, tuple(event for rank in range(2) for event in timeline.of_rank(rank))),)
    assert report.per_rank("where") == (RankPlace(0, 0, 0, (0,)), RankPlace(1, 0, 1, (1,)))


def test_a_rank_is_called_as_in_messages() -> None:
    assert str(RankPlace(3, 1, 1, (1,))) == "rank 3 (replica 1, stage 1)"
    assert str(RankPlace(5, 1, 1, (1, 3, 5))) == "rank 5 (replica 1, stages 1, 3 and 5)"


def test_the_report_of_a_run_says_who_is_where(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", FOUR)
    assert read_report(tmp_path / "report.json") == FOUR
    text = as_markdown(FOUR)
    assert "2 replicas." in text
    assert re.search(r"\| replica +\| +0 \| +0 \| +1 \| +1 \|", text)
    assert re.search(r"\| stages +\| +0 \| +1 \| +0 \| +1 \|", text)
    assert "replica" not in as_markdown(dataclasses.replace(REPORT, ranks=RANKS[:2]))


def test_a_slow_rank_and_a_slow_replica_are_named() -> None:
    def said(*slow: int) -> list[str]:
        stragglers = tuple(Straggler(rank, "F", 1.8, 2, "others") for rank in slow)
        return remarks(dataclasses.replace(FOUR, stragglers=stragglers))

    (one,) = said(3)
    assert one.startswith("Rank 3 (replica 1, stage 1) is slow: its F takes 1.8 times as long as on ranks with equal")
    assert said(2, 3)[0].startswith("Replica 1 is slow")
    assert not any(line.startswith("Replica") for line in said(0, 3))
    assert not any(line.startswith("Replica") for line in said(0, 1, 2, 3))  # then it is no replica among others


# What a run writes --------------------------------------------------------------------------------------------------


def page_of(folder: Path, run: Any, report: Report, measured: Any, predicted: Any) -> str:
    recorded_in(folder).finish(folder / "timeline.json", run, report, measured, predicted, range(2, 5))
    return page_of_run(folder / "timeline.json", folder / "metrics.jsonl")


def test_the_page_has_a_step_per_replica_and_says_which_was_last(tmp_path: Path) -> None:
    report = report_of(one_behind(5.0), "stage-replica")
    measured, predicted = measured_and_predicted(schedule(), report, [one_behind(0.0)])
    text = page_of(tmp_path, FOUR, report, measured, predicted)
    above, first, second = panels_in(text)
    assert first["name"] == "Measured, step 200, replica 0"
    assert second["name"] == "Measured, step 200, replica 1, the last to end"
    assert (first["ranks"], second["ranks"]) == (["rank 0", "rank 2"], ["rank 1", "rank 3"])
    assert "reduce exposed 3 s" in second["facts"]
    assert "REDUCE_GRAD" in {op[2].strip("0123456789>.") for op in second["ops"]}
    for panel, timeline in zip((above, first, second), (predicted.timeline, *report.timelines)):  # type: ignore[union-attr]
        assert len(panel["ops"]) == len(timeline.events)


def test_a_step_begins_and_ends_with_all_replicas_in_each_picture() -> None:
    """So that pictures of replicas can be laid over each other."""
    measured, _ = measured_and_predicted(schedule(), report_of(one_behind(5.0)), [])
    assert [one.step_seconds for one in measured] == [measured[0].step_seconds] * 2
    assert [one.start for one in measured] == [0.0, 0.0]
    assert measured[1].timeline.start == 5.0


def test_each_step_that_is_shown_has_its_own_bound() -> None:
    """A last step that took half of what the steps before did has half their bound; of two replicas, each has that of its own ops."""
    half = Costs.spread(STAGES, forward=0.5, backward=1.0, reduce=[1.5, 1.5])
    measured, predicted = measured_and_predicted(schedule(), report_of(one_behind(0.0, half)), [one_behind(0.0)])
    assert predicted is not None
    assert predicted.bound_seconds == bound_of(schedule(), COSTS)
    assert [one.bound_seconds for one in measured] == [bound_of(schedule(), half)] * 2
    uneven = one_behind(0.0, half)[0], one_behind(0.0)[1]
    measured, _ = measured_and_predicted(schedule(), report_of(uneven), [])
    assert measured[0].bound_seconds < measured[1].bound_seconds


@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_below_its_bound_however_its_ops_vary(seed: int) -> None:
    """On one rank that never waits. Medians add up to more than the ops do where most are long."""
    draw, now, events = random.Random(seed), 0.0, list[OpEvent]()
    alone = make_schedule("gpipe", num_stages=1, num_microbatches=7, recompute="never")
    for op in alone.lane(0, Lane.COMPUTE):
        events.append(OpEvent(0, Lane.COMPUTE, op, now, now + draw.choice((0.1, 1.0, 1.1))))
        now = events[-1].end
    report = Report.of([RankReport(0, 9, tuple(events), 0, 0, None)], alone)
    ((shown,), _) = measured_and_predicted(alone, report, [])
    assert shown.step_seconds == now
    assert shown.bound_seconds <= now


def test_one_replica_is_drawn_without_its_number(tmp_path: Path) -> None:
    one = report_of(one_behind(5.0))
    alone = dataclasses.replace(
        one, timelines=one.timelines[:1], of_ranks=one.of_ranks[:2], breakdown=one.breakdown[:2]
    )
    measured, predicted = measured_and_predicted(schedule(), alone, [one.timelines[:1]])
    text = page_of(tmp_path, REPORT, alone, measured, predicted)
    assert [len(step["panels"]) for step in drawn_in(text)["steps"]] == [1]
    assert "replica" not in panels_in(text)[-1]["name"]
    assert measured[0].ranks == ()


def test_events_of_a_file_are_of_the_rank_of_the_run(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "rank-0003.jsonl", 3, 10)
    file(OpEvent(1, Lane.COMPUTE, Op.parse("1F0"), 0.0, 1.0))
    file.end_step(1)
    file.close()
    (line,) = (tmp_path / "rank-0003.jsonl").read_text().splitlines()
    assert (json.loads(line)["rank"], json.loads(line)["op"]) == (3, "1F0")


@pytest.mark.parametrize("order", BY_ORDER)
def test_figures_of_trackers_are_named_by_the_ranks_of_the_run(order: str) -> None:
    """What wandb and TensorBoard keep, and a line of metrics.jsonl."""
    report = report_of(one_behind(5.0), order)
    result = StepResult(loss=1.0, learning_rate=0.1, grad_norm=2.0)
    memory = StepFigures(report.step_seconds, (1, 2, 3, 4), report)
    metrics = metrics_of(7, result, memory, (8, 8), 8, 2.0)
    kept = figures(dataclasses.asdict(metrics))
    late = BY_ORDER[order][2]  # the first rank of the replica that is behind
    assert kept[f"fill_seconds/rank-{late}"] == 5
    assert kept[f"reduce_exposed_seconds/rank-{late}"] == 3
    assert kept["peak_memory_bytes/rank-3"] == 4
    assert kept["step_seconds"] == report.step_seconds
    assert "fill_seconds/rank-4" not in kept


def test_trackers_get_the_step_of_the_slowest_replica(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "events").mkdir()
    recorder = Recorder(folder, 0, ObserveConfig(progress=False), num_steps=4, keep=range(2, 5))
    report = report_of(one_behind(5.0))
    measured, predicted = measured_and_predicted(schedule(), report, [one_behind(0.0)])
    told = []
    listener = Tracker()
    listener.finish = told.append  # type: ignore[assignment, method-assign]
    recorder._trackers.close()
    recorder._trackers = Trackers({"listener": listener})
    recorder.finish(FOUR, measured, predicted, report)
    recorder.close()
    assert [one.ranks for one in told[0].pictures] == [(), RANKS[2:]]
    assert "replica 1, the last to end" in folder.timeline.read_text()
