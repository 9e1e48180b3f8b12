"""A run folder as a run leaves it, to be damaged; and commands that must answer in a line, whatever lies there."""

from __future__ import annotations

import json
import os
import pathlib
import threading
from dataclasses import asdict

import pytest

from pipetrain.cli.main import main
from pipetrain.config.load import as_yaml, load_config
from pipetrain.monitor.report import RunReport, write_report
from pipetrain.plan.plan import make_plan

SECONDS = 20.0  # a command that only reads takes one or two
REPORT = RunReport(
    experiment="smoke",
    schedule="gpipe",
    recompute_mode="overlap",
    balance=(1, 1),
    steps=2,
    loss=1.9,
    heldout_loss=2.05,
    tokens_per_second=12_345.6,
    step_seconds_measured=0.5,
    step_seconds_predicted=0.49,
    bubble_fraction=0.125,
    stopped_by=None,
    recompute_hidden_seconds=(0.25, 0.0),
    recompute_exposed_seconds=(0.125, 0.0),
    peak_activation_bytes=(1_500_000, 900),
    peak_activation_bytes_never=(2_000_000_000, 900),
)


def make_run(folder: pathlib.Path) -> pathlib.Path:
    """What `report` reads of a run of two steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(as_yaml(load_config(["experiment=smoke"])))
    write_report(folder / "report.json", REPORT)
    (folder / "plan.json").write_text(json.dumps(asdict(make_plan(2, num_ranks=2))))
    lines = [json.dumps({"step": step, "loss": 2.0 - step / 10}) + "\n" for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and all output of `pipetrain WORDS`, which must come within `SECONDS`, without a traceback."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(int(main(words))), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, f"{' '.join(words)}: no answer after {SECONDS:.0f} s"
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    assert "please report" not in told.err, told.err
    return found[0], told.out + told.err


def pipe_at(path: pathlib.Path) -> None:
    """In place of the file: whoever opens it waits for somebody who writes."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
