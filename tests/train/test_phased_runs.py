"""Runs of several phases: another policy, other batches and microbatches, longer samples; resumed in each of them, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import signal
from collections.abc import Sequence

import pytest
from ranks import run_outcomes, run_ranks
from resumed import assert_same_training, metrics_of
from small_text import make_text

from pipetrain.config.load import load_config
from pipetrain.monitor.report import read_report
from pipetrain.runtime.faults import VARIABLE
from pipetrain.train import train
from pipetrain.trainer.guard import Guard

STEPS = 9
PHASES = (
    "phases=[{from:0,recompute:{mode:inline}},"
    "{from:3,recompute:{mode:early,sets:2},data:{global_batch_size:12},pipeline:{num_microbatches:6}},"
    "{from:6,recompute:{segments:2},data:{sequence_length:48}}]"
)
RUN = [
    "experiment=smoke", "data=text", "model.dropout=0.1", f"steps={STEPS}", "optim.warmup_steps=2",
    "data.eval_bytes=768", "snapshot.every_steps=1", "snapshot.keep_last=99", "observe.progress=false", PHASES,
]  # fmt: skip


KEYS = ("loss", "grad_norm", "lr", "tokens", "tokens_seen", "phase")
assert_same = functools.partial(assert_same_training, steps=STEPS, keys=KEYS)


def trained(folder: str, *runs: Sequence[str]) -> list[str]:
    """On every rank: these runs, one after the other; what the outcome of each says."""
    os.chdir(folder)
    return [train(load_config([*RUN, f"data.path={folder}/text", *overrides])).message for overrides in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where `text` is, and `whole`, the run that nobody disturbed, on two ranks; and runs that go on from some of its snapshots."""
    folder = tmp_path_factory.mktemp("runs")
    make_text(folder / "text")
    resumed = [
        [f"resume=whole/snapshots/step-{step:08d}", f"run_dir=from-{step}", "snapshot.every_steps=null"]
        for step in (5, 6)
    ]
    run_ranks(2, trained, str(folder), ["run_dir=whole"], *resumed)
    return folder


@pytest.mark.parametrize("step", [5, 6])
def test_a_run_goes_on_in_any_phase_and_at_its_border(folder: pathlib.Path, step: int) -> None:
    """And in another folder, where it tells of the phases that it has seen."""
    assert_same(folder / f"from-{step}", folder / "whole", from_step=step + 1)
    phases = read_report(folder / f"from-{step}" / "report.json").phases
    assert [(one.phase, one.first_step) for one in phases] == [(1, 6), (2, 7)][step - 5 :]


def test_the_steps_are_those_of_their_phases(folder: pathlib.Path) -> None:
    lines = metrics_of(folder / "whole")
    assert [line["phase"] for line in lines] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [line["tokens"] for line in lines] == [8 * 32] * 3 + [12 * 32] * 3 + [8 * 48] * 3
    ran = [json.loads(line) for line in (folder / "whole" / "events" / "rank-0000.jsonl").read_text().splitlines()]
    microbatches = {step: {one["op"].split("F")[-1] for one in ran if one.get("step") == step} for step in (1, 4, 7)}
    assert [len({text for text in found if text.isdigit()}) for found in microbatches.values()] == [4, 6, 4]


def test_each_phase_is_reported_by_itself(folder: pathlib.Path) -> None:
    run = folder / "whole"
    report = read_report(run / "report.json")
    assert report == read_report(run / "report.json")
    assert [one.phase for one in report.phases] == [0, 1, 2]
    assert report.phase is None
    assert [(one.first_step, one.steps) for one in report.phases] == [(1, 3), (4, 6), (7, 9)]
    assert [one.recompute_mode for one in report.phases] == ["inline", "early", "overlap"]
    assert [(one.batch_size, one.sequence_length, one.num_microbatches) for one in report.phases] == [
        (8, 32, 4),
        (12, 32, 6),
        (8, 48, 4),
    ]
    lines = metrics_of(run)
    assert [one.loss for one in report.phases] == [lines[step - 1]["loss"] for step in (3, 6, 9)]
    assert all(one.heldout_loss is not None for one in report.phases)
    assert report.heldout_loss == report.phases[2].heldout_loss
    for number, one in enumerate(report.phases):
        most = [
            max(line["peak_activation_bytes"][rank] for line in lines if line["phase"] == number) for rank in (0, 1)
        ]
        assert list(one.peak_activation_bytes) == most
        assert read_report(run / "phases" / str(number) / "report.json") == one
        assert (run / "phases" / str(number) / "timeline.html").is_file()
    assert report.peak_activation_bytes == tuple(
        max(one.peak_activation_bytes[rank] for one in report.phases) for rank in (0, 1)
    )
    assert report.step_seconds_measured == report.phases[2].step_seconds_measured
    keys = set(json.loads((run / "report.json").read_text()))
    assert all(set(one) == keys for one in json.loads((run / "report.json").read_text())["phases"])
    text = (run / "report.md").read_text()
    assert "The run had 3 phases" in text
    assert "4 to 6 | 12 x 32 |            6 |     early |" in text
    assert "phase 1, steps 4 to 6" in (run / "phases" / "1" / "report.md").read_text()
    assert "The run had 3 phases" in (run / "timeline.html").read_text()


def test_each_phase_leaves_its_plan_and_schedule(folder: pathlib.Path) -> None:
    run = folder / "whole"
    plans = [json.loads((run / "phases" / str(number) / "plan.json").read_text()) for number in range(3)]
    assert [plan["num_microbatches"] for plan in plans] == [4, 6, 4]
    assert len({tuple(plan["balance"]) for plan in plans}) == 1
    assert json.loads((run / "plan.json").read_text()) == plans[0]
    first = (run / "phases" / "0" / "schedule.csv").read_text()
    assert (run / "schedule.csv").read_text() == first
    second = (run / "phases" / "1" / "schedule.csv").read_text()
    assert "F5" in second
    assert "F5" not in first


# Killed, and gone on ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["stages", "replicas"])
def test_a_run_that_is_killed_in_each_phase_goes_on(folder: pathlib.Path, mesh: str) -> None:
    """Two stages; and two replicas of one that share out the state."""
    stage, whole, options = 1, "whole", list[str]()
    if mesh == "replicas":
        stage, whole = 0, "whole-replicas"
        options = ["parallel.num_replicas=2", "pipeline.num_stages=1", "parallel.zero_stage=1"]
        run_ranks(2, trained, str(folder), [f"run_dir={whole}", *options])
    for step, op in ((2, "B0"), (5, "B1"), (7, "F0")):  # the third one is the first step of its phase
        outcomes = run_outcomes(2, killed, str(folder), f"{stage}{op} step={step}", f"run_dir={mesh}", *options)
        assert outcomes[1].exit_code == -signal.SIGKILL
        assert outcomes[0].error
    run_ranks(2, trained, str(folder), [f"run_dir={mesh}", "resume=auto", *options])
    assert_same(folder / mesh, folder / whole)
    report = read_report(folder / mesh / "report.json")
    assert [one.phase for one in report.phases] == [0, 1, 2]  # those that were over before it was killed, too
    assert [one.steps for one in report.phases] == [3, 6, 9]
    # A phase is told of from where it was last gone on with, which is a step or two before the kill: a snapshot is whole after the next step.
    for one, begins, last in zip(report.phases, (1, 4, 7), (2, 6, 9)):
        assert begins <= one.first_step <= last


def killed(folder: str, where: str, *options: str) -> list[str]:
    """The run goes on in its folder from its newest snapshot, until rank 1 is killed at an op of a step."""
    os.environ[VARIABLE] = f"kill rank=1 op={where}"
    return trained(folder, ["resume=auto", *options])


# Over a border, backwards -------------------------------------------------------------------------------------------------


def rolled_back(folder: str) -> None:
    """Step 4, the first of its phase, is refused once: the run goes back to the snapshot after step 2."""
    problem_of, refused = Guard._problem_of, list[int]()

    def refuse(self: Guard, step: int, loss: float, norm: float | None) -> tuple[str | None, bool]:
        if step == 4 and not refused:
            refused.append(step)
            return f"step {step} is refused", False
        return problem_of(self, step, loss, norm)

    Guard._problem_of = refuse  # type: ignore[method-assign]
    back = ["run_dir=back", "guard.not_finite=rollback", "snapshot.every_steps=2"]
    after = ["run_dir=after", "resume=back/snapshots/step-00000004", "snapshot.every_steps=null"]
    trained(folder, back, after)


def test_a_rollback_over_a_border_runs_the_older_phase_again(folder: pathlib.Path) -> None:
    run_ranks(2, rolled_back, str(folder))
    lines, whole = metrics_of(folder / "back"), metrics_of(folder / "whole")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["phase"] for line in lines] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in whole]
    assert [line["loss"] for line in lines[:2]] == [line["loss"] for line in whole[:2]]
    assert all(ours["loss"] != theirs["loss"] for ours, theirs in zip(lines[2:], whole[2:], strict=True))
    report = read_report(folder / "back" / "report.json")
    assert report.rollbacks == 1
    assert [(one.first_step, one.steps) for one in report.phases] == [(1, 3), (4, 6), (7, 9)]
    assert_same(folder / "after", folder / "back", from_step=5)
