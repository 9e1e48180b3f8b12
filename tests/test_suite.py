"""What the suite itself promises."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from left_over import OTHERS
from mutants.table import MUTANTS
from shares import RUN_IF_CHANGED, always_runs, in_turn, long_first

TESTS = Path(__file__).parent
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
    promised: str, ended: str, tmp_path: Path
) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    said = pytest_in(tmp_path, PIPETRAIN_NEEDS_ROOT=promised)
    assert ended in said.splitlines()[-1], said
    assert ("PIPETRAIN_NEEDS_ROOT is set: " in said) == bool(promised)
    assert ("a disk of its own needs root" in said) == bool(promised)


LATE = """
import conftest

def pytest_collection_modifyitems(items):
    for item in items:
        item.stash[conftest._in_time] = True
"""


def test_a_test_of_a_changed_file_that_is_too_late_is_skipped_though_it_needs_rights(tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    (tmp_path / "late.py").write_text(LATE)
    said = pytest_in(tmp_path, "-rs", "-p", "late", "--seconds=0", PIPETRAIN_NEEDS_ROOT="1")
    assert "2 skipped" in said.splitlines()[-1], said
    assert "not begun in 0 s" in said


@pytest.mark.parametrize("num_turns", [1, 3, 8])
def test_commits_in_a_row_try_all_rows(num_turns: int) -> None:
    rows = list(range(20))
    turns = [in_turn(rows, num_turns, turn) for turn in range(1000, 1000 + num_turns)]
    assert sorted(row for turn in turns for row in turn) == rows
    with pytest.raises(ValueError, match="0 turns"):
        in_turn(rows, 0, 1)


def test_long_tests_begin_first_in_each_worker() -> None:
    paths = [
        *["tests/train/test_a.py"] * 2,
        *["tests/plan/test_b.py"] * 6,
        "tests/train/test_c.py",
        "tests/zoo/test_d.py",
    ]
    assert long_first(paths, 2) == [[0, 1, 2, 3, 4], [8, 5, 6, 7, 9]]
    assert long_first(paths, 1) == [[0, 1, 8, *range(2, 8), 9]]
    assert long_first([], 2) == [[], []]


@pytest.mark.parametrize(
    ("path", "file", "runs"),
    [
        ("tests/slurm/test_jobs.py", "pipetrain/launcher/launch.py", True),
        ("tests/slurm/test_jobs.py", "launch/env.sh", True),
        ("tests/slurm/test_jobs.py", "pipetrain/stage/stage.py", False),
        ("tests/hosts/test_docker.py", "docker/Dockerfile", True),
        ("tests/hosts/test_docker.py", "pipetrain/launcher/launch.py", False),
        ("tests/hosts/test_hosts.py", "pipetrain/launcher/launch.py", True),
        ("tests/train/test_resume.py", "pipetrain/launcher/launch.py", False),
    ],
)
def test_tests_of_clusters_and_images_run_if_what_they_test_changed(path: str, file: str, runs: bool) -> None:
    assert always_runs(path, {"README.md", file}) == runs


def test_paths_that_decide_what_always_runs_exist() -> None:
    for tests, starts in RUN_IF_CHANGED:
        for start in (tests, *starts):
            assert list(TESTS.parent.glob(start.rstrip("/") + "*")), start


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_the_command_for_one_test_selects_one(page: str) -> None:
    command = re.search(r"pytest (tests/\S+\.py) -k (\w+)", (TESTS.parent / page).read_text())
    assert command is not None
    path, word = command.groups()
    assert re.search(rf"^def test_\w*{word}", (TESTS.parent / path).read_text(), re.MULTILINE), (
        f"{path} has no test of {word!r}"
    )


LEAVES = """
import os, pathlib, subprocess, sys, tempfile

def test_leaves():
    tempfile.mkstemp(prefix="forgotten-")
    pathlib.Path(f"/dev/shm/torch_forgotten_{os.getpid()}").touch()
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('listens', flush=True); time.sleep(60)"
    left = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert left.stdout.readline()

def test_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
"""


def test_a_run_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    (tmp_path / "test_left.py").write_text(LEAVES)
    assert pytest_in(tmp_path, "-k", "nothing").splitlines()[-1].strip("= ").startswith("1 passed")
    found = pytest_in(tmp_path, "-k", "not nothing", LEFT_OVER_PATIENCE_SECONDS="0.2")
    try:
        assert "left behind by the tests" in found
        assert "forgotten-" in found
        assert "/dev/shm/torch_forgotten" in found or OTHERS in found
        assert re.search(r"process \d+ \(.*\), listens on \d+", found)
    finally:
        for pid in re.findall(r"process (\d+)", found):
            os.kill(int(pid), signal.SIGKILL)
        for path in Path("/dev/shm").glob("torch_forgotten_*"):
            path.unlink()


ROWS = """
import pytest

@pytest.mark.quick("7")
@pytest.mark.parametrize("row", range(8))
def test_row(row):
    pass
"""


def test_rows_that_are_not_named_as_quick_are_slow_and_a_turn_has_a_share_of_them(tmp_path: Path) -> None:
    file = tmp_path / "test_rows.py"
    file.write_text(ROWS)
    assert "1 passed, 7 deselected" in pytest_in(tmp_path, "-m", "not slow")
    done = pytest_in(tmp_path, "-v", "--turns=3")
    found = [row for row in range(8) if f"test_row[{row}] PASSED" in done]
    assert found == [*range(found[0], 7, 3), 7], done
    assert f"{8 - len(found)} deselected" in done.splitlines()[-1]
    file.write_text(ROWS.replace('"7"', '"8"'))
    assert "test_row: there is no row '8'; rows are 0, 1, 2" in pytest_in(tmp_path)


def pytest_in(folder: Path, *words: str, **variables: str) -> str:
    """What pytest prints of the tests in `folder`, which has this folder's conftest."""
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    around = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "--rootdir=.", "-W", "ignore::pytest.PytestUnknownMarkWarning", *words],
        cwd=folder, env={**around, "PYTHONPATH": str(TESTS), "TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout


def test_each_mutant_finds_its_line_and_compiles() -> None:
    """Else it is found out when its turn comes in CI, eight commits later."""
    for mutant in MUTANTS:
        text = (TESTS.parent / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.name
        if mutant.file.endswith(".py"):
            compile(text.replace(mutant.old, mutant.new), mutant.name, "exec")
