"""Trackers by themselves: one that fails is left behind, and what is missing is said before anything starts."""

import dataclasses
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import wandb_log
from ranks import run_ranks
from shows import show

from pipetrain.cli.main import main
from pipetrain.config.load import load_config
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import read_lines
from pipetrain.monitor.step_report import StepMetrics
from pipetrain.monitor.trackers import Ending, JsonLines, TensorBoardTracker, Tracker, Trackers, figures, make_trackers

SECONDS: dict[str, Any] = {
    field.name: (0.0, 0.0) for field in dataclasses.fields(StepMetrics) if field.name.endswith("_seconds")
}
METRICS = StepMetrics(
    **SECONDS | {"step_seconds": 0.25, "recompute_hidden_seconds": (0.0, 0.125)},
    step=3,
    loss=1.5,
    perplexity=4.5,
    lr=0.1,
    grad_norm=None,
    tokens=128,
    counted_tokens=100,
    tokens_seen=384,
    tokens_per_second=100.0,
    bubble_fraction=0.5,
    mfu=None,
    peak_activation_bytes=(10, 20),
    peak_memory_bytes=(None, 30),
    peak_reserved_bytes=(None, 40),
    communicator_bytes=(None, None),
)
PICTURE = show("gpipe", num_stages=2, num_microbatches=2, recompute="inline")
REPORT: Any = dataclasses.make_dataclass("Report", ["steps", "heldout_loss"])(6, 0.5)
CALLS = ("start", "step", "evaluated", "finish", "close")


def at_step(step: int) -> StepMetrics:
    return dataclasses.replace(METRICS, step=step, loss=1 / step)


def tell_step(trackers: Trackers, step: int) -> None:
    trackers.tell(lambda tracker: tracker.step(at_step(step)))


def call_all(trackers: Trackers, ending: Any) -> None:
    trackers.tell(lambda tracker: tracker.start({}))
    trackers.tell(lambda tracker: tracker.step(METRICS))
    trackers.tell(lambda tracker: tracker.evaluated(3, 1.0))
    trackers.tell(lambda tracker: tracker.finish(ending))
    trackers.close()


class Recorded(Tracker):
    """Writes down what it is told; raises at one of the calls."""

    def __init__(self, fails_at: str = "") -> None:
        self.heard: list[str] = []
        for name in CALLS:
            setattr(self, name, lambda *_, name=name: self._hear(name, fails_at))

    def _hear(self, name: str, fails_at: str) -> None:
        self.heard.append(name)
        if name == fails_at:
            raise RuntimeError("the server said no\nand more")


@pytest.mark.parametrize("fails_at", CALLS)
def test_one_that_fails_is_said_once_and_hears_nothing_more(fails_at: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken, whole = Recorded(fails_at), Recorded()
    call_all(Trackers({"broken": broken, "whole": whole}), None)
    assert whole.heard == list(CALLS)
    assert broken.heard == [*CALLS[: CALLS.index(fails_at) + 1], "close"]
    assert capsys.readouterr().err == (
        "pipetrain: broken keeps nothing from here on (RuntimeError: the server said no); the run goes on, and "
        "metrics.jsonl has its steps\n"
    )


def test_figures_are_flat_and_without_what_does_not_apply() -> None:
    flat = figures(json.loads(json.dumps(dataclasses.asdict(METRICS))))
    assert flat["loss"] == 1.5
    assert flat["recompute_hidden_seconds/rank-1"] == 0.125
    assert flat["peak_memory_bytes/rank-1"] == 30
    assert {"step", "grad_norm", "mfu", "peak_memory_bytes/rank-0"} & set(flat) == set()


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_package_that_is_missing_is_said_before_anything_starts(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    assert main(["train", f"observe={package}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the package {package} is not installed; pip install 'pipetrain[train]'" in line


def test_only_what_is_asked_for_is_made(tmp_path: Path) -> None:
    def names(*overrides: str) -> list[str]:
        made = make_trackers(load_config(overrides).observe, RunFolder(tmp_path), 1)
        Trackers(made).close()
        return list(made)

    assert names() == ["metrics.jsonl"]
    assert names("observe=wandb", "observe.tensorboard=true") == ["metrics.jsonl", "wandb", "tensorboard"]
    assert load_config(["observe=wandb"]).observe.wandb.mode == "offline"


def test_evaluations_on_the_way_are_kept_and_repeated_ones_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for first_step in (1, 3):
        lines = JsonLines(folder, first_step, evaluates=True)
        for step in range(first_step, 5):
            lines.step(at_step(step))
            lines.evaluated(step, step / 10)
        lines.close()
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2, 3, 4]
    assert [line["heldout_loss"] for line in read_lines(folder.heldout)] == [0.1, 0.2, 0.3, 0.4]


def cores() -> list[int]:
    """The processes of wandb that this one has started and that have not ended."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    stats = [Path(f"/proc/{pid}/stat").read_text() for file in children for pid in file.read_text().split()]
    return [int(stat.split()[0]) for stat in stats if "(wandb-core) S" in stat or "(wandb-core) R" in stat]


def end_cores() -> None:
    for core in cores():
        os.kill(core, signal.SIGTERM)
    while cores():
        pass


def lose_wandb_half_way(path: Path) -> tuple[list[int], list[int]]:
    """Forty steps; after half of them wandb's process is ended. Its processes then, and those at the end."""
    os.environ["HOME"] = str(path)
    trackers = Trackers(make_trackers(load_config(["observe=wandb"]).observe, RunFolder(path), 1))
    trackers.tell(lambda tracker: tracker.start({"steps": 40}))
    lost: list[int] = []
    for step in range(1, 41):
        tell_step(trackers, step)
        if step == 20:
            lost = cores()
            end_cores()
    trackers.close()
    return lost, cores()


@pytest.mark.slow
def test_wandb_is_started_again_with_all_steps_where_its_process_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `scancel` does, which signals every process of a job. In a process of its own: wandb loses a socket there."""
    ((lost, left),) = run_ranks(1, lose_wandb_half_way, tmp_path)
    assert (len(lost), left) == (1, [])
    assert "wandb keeps nothing" not in capfd.readouterr().err
    rows = wandb_log.rows(wandb_log.newest(tmp_path))
    assert [(row["_step"], row["loss"]) for row in rows] == [(step, 1 / step) for step in range(1, 41)]


def lose_wandb_at_the_end(path: Path) -> None:
    """Its process ends when it has been told all."""
    os.environ["HOME"] = str(path)
    trackers = Trackers(make_trackers(load_config(["observe=wandb"]).observe, RunFolder(path), 1))
    trackers.tell(lambda tracker: tracker.start({}))
    for step in range(1, 4):
        tell_step(trackers, step)
    trackers.tell(lambda tracker: tracker.finish(Ending(REPORT, [PICTURE], "<html></html>")))
    end_cores()
    trackers.close()


def test_wandb_gets_the_page_of_the_end_again_where_its_process_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A page belongs to the wandb run that it was first given to, so it has to be made again, too."""
    run_ranks(1, lose_wandb_at_the_end, tmp_path)
    assert "wandb keeps nothing" not in capfd.readouterr().err
    rows = wandb_log.rows(wandb_log.newest(tmp_path))
    assert [row["loss"] for row in rows if "loss" in row] == [1, 1 / 2, 1 / 3]
    assert {"timeline_page", "heldout_loss"} <= {key.partition("/")[0] for key in rows[-1]}


def test_tensorboard_has_each_step_at_once_and_a_run_that_goes_on_no_step_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    for first_step, last_step in ((1, 4), (3, 6)):
        tracker = TensorBoardTracker(folder, first_step)
        tracker.start({})
        for step in range(first_step, last_step + 1):
            tracker.step(at_step(step))
            seen = EventAccumulator(str(folder.tensorboard)).Reload()
            assert [event.step for event in seen.Scalars("loss")] == list(range(1, step + 1))
        if first_step == 3:
            tracker.finish(Ending(REPORT, [PICTURE], ""))
            tracker.close()
    seen = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [round(1 / event.value) for event in seen.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [(event.step, event.value) for event in seen.Scalars("heldout_loss")] == [(6, 0.5)]
    (drawn,) = seen.Tensors("timeline")
    assert f"{PICTURE.title}\n\nrank 0 F0" in drawn.tensor_proto.string_val[0].decode()
