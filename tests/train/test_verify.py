"""`verify`: what it compares, and that a difference does not pass."""

import json

import pytest
import torch
from ranks import run_ranks

from pipetrain.cli.main import main
from pipetrain.schedule.families import AUTO, FAMILIES
from pipetrain.verify import verify
from pipetrain.verify.beside_loop import differences
from pipetrain.verify.verify import Case, Row, cases, parity_table

CASE = Case("dense", 2, "gpipe", "overlap")


def test_every_schedule_that_trains_and_every_mode() -> None:
    found = set(cases(2))
    assert len(found) == len(list(cases(2)))
    assert {case.schedule for case in found} == {*FAMILIES, AUTO} - {"inference"}
    assert {case.mode for case in found} == {"never", "inline", "early", "overlap"}


def test_a_difference_ends_with_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(CASE, None, 0.0), Row(CASE, "gradient of 3.weight in step 1", 1e-8)]
    monkeypatch.setattr(verify, "_on_ranks", lambda *_: rows)
    assert main(["verify", "--quick"]) == 3
    assert "gradient of 3.weight in step 1 differs by 1e-08" in capsys.readouterr().out
    assert main(["verify", "--quick", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)[1]["differs"] == "gradient of 3.weight in step 1"
    rows.pop()
    assert main(["verify", "--quick"]) == 0
    assert capsys.readouterr().out == parity_table(rows) + "\n"


def different(ours: torch.Tensor | None, theirs: torch.Tensor, within: float = 0.0) -> list[tuple[str, float]]:
    return list(differences({"x": ours}, {"x": theirs}, lambda _: within))


def test_the_last_bit_counts() -> None:
    one = torch.ones(3)
    assert different(one, one.clone()) == []
    assert different(torch.nextafter(one, 2 * one), one) == [("x", pytest.approx(1.19e-7, rel=0.01))]
    assert different(None, one) == [("x", float("inf"))]


def test_replicas_are_compared_within_rounding_and_no_more() -> None:
    one = torch.ones(4)
    assert different(one + 9e-7, one, 1e-6) == []
    assert different(one + 2e-6, one, 1e-6) == [("x", pytest.approx(2e-6, rel=0.1))]
    assert different(one * float("nan"), one, 1e-6) != []
    row = Row(Case("dense", 4, "gpipe", "overlap", 2), None, 0.0)
    assert "2 x 2" in parity_table([row])
    assert parity_table([row]).endswith(
        "1 cases, all equal bit for bit but 1 of several replicas, which are equal within 1e-06"
    )


def differences_of_two_replicas() -> list[tuple[str, float]]:
    cases = [Case(model, 2, "1f1b", "overlap", num_replicas=2) for model in ("dense", "transformer")]
    return [difference for case in cases for difference in verify._differences(case)]


def test_two_replicas_equal_one_process() -> None:
    assert run_ranks(2, differences_of_two_replicas) == [[], []]


@pytest.mark.slow
def test_two_ranks_equal_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick"]) == 0
    assert f"{len(list(cases(2)))} cases, all equal bit for bit" in capsys.readouterr().out
