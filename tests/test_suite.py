"""What the suite itself promises."""

import os
import pathlib
import subprocess
import sys

import pytest

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
