"""`pipetrain bench` on a machine that lacks something, with wrong options, and a short run to its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import comparison, publish, trial
from benchmarks.command import NAMES, main
from benchmarks.comparison import PEERS, Comparison
from benchmarks.emulated import EmulatedWorkload
from benchmarks.links import hosts
from benchmarks.links.run import best_warmup
from benchmarks.ranks import RanksFailed, run_ranks
from benchmarks.result import Table
from benchmarks.systems import DeepSpeedPipe, Ours, TorchPipelining
from benchmarks.trial import OpSeconds, Row, Trial, all_systems, measure_ops, run_rounds
from pipetrain.schedule.policy import Mode

OPS = OpSeconds(0.04, 0.08, 0.04)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["cost", "trade", "foreseen", "segments", "balance", "replicas"])
def test_quick_runs_end(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--quick", f"--out={tmp_path}", "--json"]) == 0
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert json.loads(capfd.readouterr().out)[name] == written
    assert written["tables"]
    assert written["targets"]
    assert "crashed" not in json.dumps(written)


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds=0"]) == 2
    assert main(["overlapp"]) == 2
    assert "overlap" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "reason"),
    [(1000, "network namespaces need root: run it again with sudo"), (0, "tc is missing: apt-get install iproute2")],
)
def test_links_without_root_or_tc_are_skipped(
    user: int, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert main(["links", f"--out={tmp_path}"]) == 0
    assert capsys.readouterr().err == f"links: skipped: {reason}\n"


def test_without_deepspeed_its_rows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.importlib.util, "find_spec", lambda name: None)
    found, missing = all_systems(PEERS)
    assert not any(isinstance(system, DeepSpeedPipe) for system in found)
    assert len(found) == 4
    assert all("DS_BUILD_OPS=0 pip install deepspeed" in line for line in missing)


def test_a_peer_that_crashes_is_a_note_and_ours_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: Any, **named: Any) -> list[Any]:
        raise RanksFailed("rank 1: Traceback ...\nValueError: no such thing")

    monkeypatch.setattr(trial, "run_ranks", crash)
    peer = TorchPipelining("1f1b", recomputes=True)
    workload = EmulatedWorkload(2)
    rows = run_rounds([peer], workload, rounds=2, steps=1)
    found = Comparison("2 stages", workload, tuple(rows), OPS, 0.0, 0.0).faults()
    assert found == ["2 stages: torch 1f1b recompute crashed: ValueError: no such thing"]
    with pytest.raises(RanksFailed):
        run_rounds([Ours()], workload, rounds=1, steps=1)


@pytest.mark.parametrize(
    ("system", "seconds", "shares"),
    [
        (Ours(mode=Mode.OVERLAP), 38, (0.98, 1.02)),  # below its bound
        (TorchPipelining("gpipe", recomputes=False), (8 + 3) * 3, (1.2, 1.03)),  # far from the formula
    ],
)
def test_a_step_that_cannot_be_voids_the_row(system: Any, seconds: int, shares: tuple[float, float]) -> None:
    workload = EmulatedWorkload(4)
    least = seconds * workload.forward_seconds
    rows = [Row(system, [Trial((share * least,), (), None)]) for share in shares]
    assert [len(Comparison("", workload, (row,), OPS, 0.0, 0.0).faults()) for row in rows] == [1, 0]
    assert comparison.MOST_OF_NEVER < 1.2


def test_a_rank_that_raises_ends_the_others() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: .*KeyError: 'on rank 1'"):
        run_ranks(2, _raise_on_one, timeout_seconds=60.0)


def _raise_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("on rank 1")
    dist.barrier()


def test_best_warmup_grows_with_the_hop() -> None:
    workload = EmulatedWorkload(4)
    assert best_warmup(workload, 0.0) != best_warmup(workload, 0.04)
    assert sum(best_warmup(workload, 0.0)) < sum(best_warmup(workload, 0.04))


def test_columns_of_a_table_line_up() -> None:
    table = Table("title", ("", "time"), (("one", "1.0"), ("three", "10.25")))
    assert table.as_text().splitlines()[2:] == ["        time", "-----  -----", "one      1.0", "three  10.25"]


def test_pages_show_the_published_results() -> None:
    for page in publish.PAGES:
        assert publish.with_tables(page.read_text()) == page.read_text(), f"{page}: run python -m benchmarks.publish"


def test_every_benchmark_has_its_page() -> None:
    for name in NAMES:
        text = (publish.ROOT / "benchmarks" / name / "README.md").read_text()
        assert all(f"**{word}.**" in text for word in ("Claim", "Command", "How"))
        assert f"<!-- {name} -->" in text


def test_ops_are_measured_no_shorter_than_their_sleeps() -> None:
    ops = measure_ops(
        EmulatedWorkload(4, num_microbatches=2, forward_seconds=0.01, backward_seconds=0.03, tensor_bytes=64)
    )
    assert ops.forward >= 0.01
    assert ops.recompute >= 0.01
    assert ops.backward >= 0.03
