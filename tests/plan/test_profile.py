"""What a run leaves for the next: profile.json, and schedules made for what its ops took."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipetrain.cli.main import main
from pipetrain.plan.profile import PROFILE, Profile, check_profile, read_profile
from pipetrain.schedule.costs import Costs

SLOW_MIDDLE = Costs.spread(3, forward=[1, 2, 1], backward=[2, 3, 2], hop=[0.5, 0.25])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 3 stages and 6 microbatches."""
    (tmp_path / PROFILE).write_text(Profile(SLOW_MIDDLE, 6).as_json())
    return tmp_path


def test_a_profile_comes_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Profile(SLOW_MIDDLE, 6)
    assert read_profile(str(run)) == read_profile(str(run / PROFILE)) == expected
    monkeypatch.chdir(run)
    (run / "runs").mkdir()
    (run / "runs" / "latest").symlink_to(run)
    assert read_profile("latest") == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format_version": 9}', '{"format_version": 1, "costs": {"forward": ["x"]}}']
)
def test_a_file_that_is_none_is_named(run: Path, text: str) -> None:
    (run / PROFILE).write_text(text)
    with pytest.raises(ValueError, match=r"profile.json cannot be read .*; name another run"):
        read_profile(str(run))


def test_no_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"plan.profile=.*profile.json is not there; a run of engine=native writes it at its end"
    ):
        read_profile(str(tmp_path))


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 6), (3, 8)])
def test_a_profile_of_other_stages_or_microbatches_is_refused(run: Path, stages: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"a run with pipeline.num_(stages=3|microbatches=6), and this has (4|8); set"):
        check_profile("RUN", read_profile(str(run)), stages, microbatches)
    check_profile("RUN", read_profile(str(run)), 3, 6)


def shown(capsys: pytest.CaptureFixture[str], *typed: str) -> dict[str, Any]:
    assert main(["show", *typed, "pipeline.search_seconds=0", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_show_draws_for_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = f"plan.profile={run}"
    gpipe = shown(capsys, mine)
    auto = shown(capsys, mine, "pipeline.schedule=auto", "recompute.sets=2")
    assert len({op["op"] for op in auto["ops"] if op["rank"] == 1 and "F" in op["op"] and "_" not in op["op"]}) == 6
    assert max(op["rank"] for op in auto["ops"]) == 2
    assert auto["step_seconds"] <= gpipe["step_seconds"]
    assert "proven_gap" not in gpipe
    assert auto["proven_gap"] >= 0
    (second,) = [op for op in gpipe["ops"] if op["op"] == "1F0"]
    assert (second["start"], second["end"]) == (1.5, 3.5)


def test_the_proof_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["pipeline.schedule=auto", "pipeline.search_seconds=0", "pipeline.num_stages=4"]
    assert main(["show", *typed, "pipeline.num_microbatches=4"]) == 0
    assert "step 21, proven optimal" in capsys.readouterr().out
    assert main(["show", *typed, "pipeline.num_microbatches=16", "recompute.sets=2"]) == 0
    assert re.search(r"step 63, at least 5\d\n", capsys.readouterr().out)
    found = shown(capsys, *typed, "pipeline.num_microbatches=4")
    assert (found["step_seconds"], found["proven_gap"]) == (21, 0)


def test_halves_of_a_backward_come_back(run: Path) -> None:
    costs = dataclasses.replace(SLOW_MIDDLE, input_gradient=(1.0, 1.0, 1.0), weight_gradient=(0.5, 0.5, 0.5))
    (run / PROFILE).write_text(Profile(costs, 6).as_json())
    assert read_profile(str(run)).costs == costs
