"""Whole runs on two ranks, as a user starts them: torchrun, gloo, a tiny model."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from commands import PIPETRAIN, begin, complete, is_alive, wait_until
from pages import drawn_in, panels_in
from ranks import PATIENCE_SECONDS
from resumed import num_steps_of
from small_text import make_text

from pipetrain.cli.advice import advice_on
from pipetrain.cli.main import main
from pipetrain.monitor.folder import RunFolder

Finished = tuple[pathlib.Path, "subprocess.CompletedProcess[str]"]
TINY = ["experiment=smoke", "data=text"]
METRICS = (
    "step loss perplexity lr grad_norm tokens counted_tokens tokens_seen tokens_per_second step_seconds bubble_fraction mfu recompute_hidden_seconds "
    "recompute_exposed_seconds wait_activation_seconds wait_gradient_seconds fill_seconds drain_seconds imbalance_seconds "
    "host_seconds handover_seconds machine_seconds wait_copy_seconds unexplained_seconds peak_activation_bytes peak_memory_bytes peak_reserved_bytes "
    "communicator_bytes reduce_exposed_seconds skipped phase"
)
FILES = "config.yaml plan.json schedule.csv profile.json metrics.jsonl report.json report.md timeline.html timeline.json weights events"
REPORT = (
    "format_version steps heldout_loss tokens_per_second step_seconds_measured step_seconds_predicted bubble_fraction "
    "stopped_by recompute_hidden_seconds recompute_exposed_seconds peak_activation_bytes peak_activation_bytes_never "
    "skipped_steps rollbacks stragglers deferred_share perplexity heldout_perplexity tokens_seen counted_tokens_seen ranks"
)
# smoke: two blocks of hidden 32 and MLP 88, samples of 32 tokens, 256 tokens to choose from; B takes two F
FLOPS_PER_TOKEN = 3 * (2 * (2 * (4 * 32 * 32 + 3 * 32 * 88) + 4 * 32 * 32) + 2 * 256 * 32)
PER_RANK = [
    key
    for key in METRICS.split()
    if key.endswith(("_seconds", "_activation_bytes", "_memory_bytes")) and key != "step_seconds"
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data") / "text"
    make_text(folder)
    return folder


@pytest.fixture(scope="module")
def finished(text: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of six steps that went to its end, in the folder of its own that it was started in."""
    start_dir = tmp_path_factory.mktemp("run")
    done = complete(start_dir, [*PIPETRAIN, *TINY, f"data.path={text}", "observe.peak_flops_per_second=1e12"])
    assert done.returncode == 0, done.stderr
    return start_dir, done


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_last_line_on_stdout_is_the_run_folder(finished: Finished) -> None:
    start_dir, done = finished
    assert done.stdout.splitlines()[-1].startswith("run folder: ")
    folder = pathlib.Path(done.stdout.splitlines()[-1].removeprefix("run folder: "))
    assert folder == (start_dir / "runs" / "latest").resolve()
    assert folder.name.endswith("-smoke")
    assert "step 6/6" in done.stderr


def test_the_run_folder_has_everything(finished: Finished) -> None:
    folder = finished[0] / "runs" / "latest"
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(FILES.split())
    assert [file.name for file in sorted((folder / "events").iterdir())] == ["rank-0000.jsonl", "rank-0001.jsonl"]
    assert json.loads((folder / "plan.json").read_text())["balance"] == [2, 2]
    page = (folder / "timeline.html").read_text()
    above, below = panels_in(page)
    assert above["name"].startswith("Predicted from the op times of steps")
    assert (below["name"], below["ranks"], below["bytes"]) == ("Measured, step 6", ["rank 0", "rank 1"], True)
    assert [step["step"] for step in drawn_in(page)["steps"]] == [1, 2, 3, 6]
    assert drawn_in(page)["charts"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert "block" in drawn_in(page)["stages"][0]
    assert "unexplained" in page


def test_metrics_have_exactly_the_keys(finished: Finished) -> None:
    lines = lines_of(finished[0] / "runs" / "latest" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert sorted(line) == sorted(METRICS.split())
        assert all(len(line[key]) == 2 for key in PER_RANK)
        assert math.isfinite(line["loss"])
        assert 0 <= line["bubble_fraction"] < 1
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * FLOPS_PER_TOKEN / (2 * 1e12))
    assert lines[0]["lr"] == pytest.approx(1.5e-3)  # half-way up a warm-up of two steps
    assert lines[1]["lr"] == pytest.approx(3e-3)
    assert lines[-1]["lr"] == pytest.approx(3e-4)  # a tenth, at the end of the cosine
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_the_report_has_exactly_what_scripts_rely_on(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished[0] / "runs" / "latest"
    assert main(["report", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [key for key in REPORT.split() if key not in report] == []
    assert (report["steps"], report["stopped_by"]) == (6, None)
    assert 0 < report["heldout_loss"] < math.log(256) + 0.5
    assert report["step_seconds_predicted"] > 0
    assert report["step_seconds_measured"] > 0
    assert all(len(report[key]) == 2 for key in [*PER_RANK[:2], "peak_activation_bytes", "peak_activation_bytes_never"])
    # rank 0 recomputes one set at a time, so it holds less than all of them
    assert report["peak_activation_bytes"][0] < report["peak_activation_bytes_never"][0]
    assert main(["report", str(folder)]) == 0
    printed, _, advice = capsys.readouterr().out.rstrip("\n").partition("\n\n## What to do next\n\n")
    assert printed + "\n" == (folder / "report.md").read_text()
    assert advice.splitlines() == [f"- {one}" for one in advice_on(RunFolder(folder.resolve()))]


def test_events_are_those_of_the_schedule(finished: Finished) -> None:
    for rank in (0, 1):
        events = lines_of(finished[0] / "runs" / "latest" / "events" / f"rank-{rank:04d}.jsonl")
        assert {event["step"] for event in events} == {1, 2, 3, 4, 5, 6}
        assert {event["rank"] for event in events} == {rank}
        computed = [event["op"] for event in events if event["step"] == 6 and event["lane"] in ("compute", "recompute")]
        ops = {f"{rank}{kind}{microbatch}" for kind in "FB" for microbatch in range(4)}
        assert set(computed) == ops | ({f"0R{microbatch}" for microbatch in range(4)} if rank == 0 else set())
        assert all(event["start"] <= event["end"] for event in events)


def interrupted(folder: pathlib.Path, text: pathlib.Path, interrupt: Callable[[int], object]) -> tuple[int, str]:
    """A long run to which something happens after two steps: its exit code, and the last line of stderr."""
    command = [*PIPETRAIN, *TINY, f"data.path={text}", "steps=100000", "run_dir=run"]
    started = begin(folder, command, TMPDIR=str(folder))
    try:
        wait_until(lambda: num_steps_of(folder / "run") >= 2, started)
        interrupt(started.pid)
        stdout, stderr = started.communicate(timeout=PATIENCE_SECONDS)
    finally:
        started.kill()
    assert stdout.splitlines()[-1] == f"run folder: {folder / 'run'}"
    assert "Traceback" not in stderr
    return started.returncode, stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_request_to_stop_writes_the_report_and_ends_with_75(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What a terminal's Ctrl-C does."""
    code, last = interrupted(tmp_path, text, lambda pid: os.killpg(pid, signal.SIGINT))
    assert code == 75, last
    assert last.startswith("pipetrain: stopped by SIGINT; the report is written, and resume=")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["stopped_by"] == "SIGINT"
    assert report["steps"] == num_steps_of(tmp_path / "run") < 100000


def test_a_killed_rank_is_named_and_nothing_is_left(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ranks: list[int] = []

    def kill_one(_: int) -> None:
        ranks.extend(int(file.read_text()) for file in sorted(tmp_path.glob("pipetrain-*/process-*")))
        os.kill(ranks[1], signal.SIGKILL)

    code, last = interrupted(tmp_path, text, kill_one)
    assert (code, len(ranks)) == (1, 2), last
    # by the rank that waited for it or, where torchrun ended that one first, by the launcher
    assert re.match(r"pipetrain: .*rank 1 (is gone|was killed by SIGKILL)", last)
    assert [pid for pid in ranks if is_alive(pid)] == []
    assert list(tmp_path.glob("pipetrain-*")) == []
