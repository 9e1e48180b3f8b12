"""What a run leaves for the next: costs from timelines in profile.json, and schedules made for what its ops took."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipetrain.cli.main import main
from pipetrain.monitor.measured_costs import measure_costs
from pipetrain.plan.profile import PROFILE, Profile, check_profile, read_profile
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.simulate import simulate

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


COSTS = Costs(
    forward=(1.0, 1.5, 2.0),
    backward=(2.0, 3.0, 2.5),
    recompute=(0.5, 0.75, 1.0),
    hop_forward=(0.25, 0.5),
    hop_backward=(0.125, 1.0),
)


@pytest.mark.parametrize("mode", ["inline", "early", "overlap"])
def test_costs_come_back_from_a_simulated_step(mode: str) -> None:
    schedule = make_schedule("gpipe", num_stages=3, num_microbatches=4, recompute=mode)
    timeline = simulate(schedule, COSTS)
    found = measure_costs(3, [[timeline]])
    assert found.forward == pytest.approx(COSTS.forward)
    assert found.backward == pytest.approx(COSTS.backward)
    assert found.recompute[:2] == pytest.approx(COSTS.recompute[:2])  # the last stage has no R
    assert found.hop_forward == pytest.approx(COSTS.hop_forward)
    assert found.hop_backward == pytest.approx(COSTS.hop_backward)
    assert simulate(schedule, found).step_seconds == pytest.approx(timeline.step_seconds)


def one_hop(posted: float, sent: float, arrived: float) -> float:
    events = (
        OpEvent(0, Lane.SEND, Op.parse("0SEND_F0"), sent, arrived),
        OpEvent(1, Lane.RECV, Op.parse("1RECV_F0"), posted, arrived),
    )
    return measure_costs(2, [[Timeline(2, events)]]).hop_forward[0]


def test_a_hop_begins_when_both_ends_are_ready() -> None:
    assert one_hop(posted=0.0, sent=5.0, arrived=6.0) == 1.0
    assert one_hop(posted=5.5, sent=0.0, arrived=6.0) == 0.5
    assert one_hop(posted=0.0, sent=6.0, arrived=5.999) == 0.0  # clocks of two ranks


def test_one_slow_step_does_not_count() -> None:
    def step(seconds: float) -> Timeline:
        return Timeline(1, (OpEvent(0, Lane.COMPUTE, Op.parse("0F0"), 0.0, seconds),))

    assert measure_costs(1, [[step(1.0)], [step(9.0)], [step(1.1)]]).forward == (1.1,)
