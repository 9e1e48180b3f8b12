"""`pipetrain verify --faults`: real faults, and a verdict that can be bad."""

import json
import pathlib
import re

import pytest

from pipetrain.cli.main import main
from pipetrain.verify.drill import _DRILLS, Result, _Drill, _Ground, _run, drill_table

HANDLED = Result("a rank is killed", 2, 1, 0.4, "rank 1 is gone", "from step 2, equal bit for bit", None)
MISSED = Result("a rank is stopped", 2, 1, 40.0, "", "not tried", "all ranks ended after 40.0 s, 19 s are promised")


def test_the_table_has_a_verdict_for_each_fault_and_for_all() -> None:
    lines = drill_table([HANDLED, MISSED]).splitlines()
    assert "as promised" in lines[1]
    assert "NOT HANDLED" in lines[3]
    assert "19 s are promised" in lines[4]
    assert lines[-1] == "2 faults, 1 not handled as promised"
    assert drill_table([HANDLED]).splitlines()[-1] == "1 faults, all handled as promised"


@pytest.mark.slow
def test_the_faults_of_two_ranks(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--faults", "--quick", f"--json={tmp_path / 'faults.json'}"]) == 0
    results = json.loads((tmp_path / "faults.json").read_text())
    assert len(results) == 5
    assert [result["problem"] for result in results] == [None] * 5
    assert "5 faults, all handled as promised" in capsys.readouterr().out


def test_each_drill_has_a_folder_of_its_own() -> None:
    """... whose name the command line takes as it is, and each place of two replicas is lost once."""
    folders = [one.run for one in _DRILLS]
    assert len({*folders}) == len(folders)
    assert all(re.fullmatch(r"[\w-]+", folder) for folder in folders)
    lost = [one.fault.split()[1] for one in _DRILLS if one.num_replicas == 2 and one.fault.startswith("kill")]
    assert lost == [f"rank={rank}" for rank in range(4)]


@pytest.mark.slow
def test_a_promise_that_is_not_kept_is_seen(tmp_path: pathlib.Path) -> None:
    """A message that is never given, an exit code that is another, and a time that is too short."""
    with _Ground(tmp_path) as ground:
        wrong = _Drill("", 2, "kill rank=1 op=1F1 step=3", "rank 7 is gone", 0.0, exit_code=75, resumes=False)
        problem = _run(wrong, ground).problem
    assert problem is not None
    assert "exit code 1 in place of 75" in problem
    assert "the message does not say" in problem
    assert "0.0 s are promised" in problem
