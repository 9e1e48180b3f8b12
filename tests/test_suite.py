"""What the suite itself promises."""

import os
import pathlib
import subprocess
import sys

import pytest
from shares import share_of

TESTS = pathlib.Path(__file__).parent
SKIPPED = """
import pytest

@pytest.mark.root
def test_with_rights():
    pytest.skip("a disk of its own needs root")

def test_without():
    pytest.skip("there is CUDA here")
"""


@pytest.mark.parametrize(("promised", "ended"), [("1", "1 failed, 1 skipped"), ("", "2 skipped")])
def test_where_rights_are_promised_a_test_that_needs_them_is_not_left_out(
    promised: str, ended: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir=.",
    ]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PIPETRAIN_NEEDS_ROOT": promised}
    done = subprocess.run(
        [*command, "-W", "ignore::pytest.PytestUnknownMarkWarning"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended in done.stdout.splitlines()[-1], done.stdout
    assert ("PIPETRAIN_NEEDS_ROOT is set: " in done.stdout) == bool(promised)
    assert ("a disk of its own needs root" in done.stdout) == bool(promised)


@pytest.mark.parametrize("num_shares", [1, 3, 6])
def test_shares_of_commits_make_the_whole(num_shares: int) -> None:
    rows = list(range(20))
    shares = [share_of(rows, num_shares, format(commit, "x")) for commit in range(num_shares)]
    assert sorted(row for share in shares for row in share) == rows
    assert share_of(rows, num_shares, "ff") == shares[255 % num_shares]
    with pytest.raises(ValueError, match="a share of 0"):
        share_of(rows, 0, "ff")


SLOW = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("row", range(7))
def test_slow(row):
    pass

@pytest.mark.slow
@pytest.mark.root
def test_slow_with_rights():
    pass

def test_quick():
    pass
"""


def test_a_share_of_the_slow_tests_has_all_others(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_many.py").write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "-v"]
    done = subprocess.run(
        [*command, "--rootdir=.", "--share=3", "-W", "ignore::pytest.PytestUnknownMarkWarning"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    ran = {line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line}
    slow = sorted(int(name[-2]) for name in ran if "[" in name)
    assert slow == list(range(slow[0], 7, 3)), done.stdout
    assert ran >= {"test_slow_with_rights", "test_quick"}
    assert f"{7 - len(slow)} deselected" in done.stdout.splitlines()[-1]
