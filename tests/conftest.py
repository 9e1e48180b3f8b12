"""Shared by all tests. That this file is here puts tests/ on the path, so that `import ranks` works in every folder."""

import gc
import importlib
import os
import time
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest
from left_over import Watch
from shares import ROOT, always_runs, changed_files, in_turn, long_first, this_turn

# Equality bit for bit is promised for one thread: a sum over several has another order.
# Said before anybody loads torch, whatever the user's own environment says.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

# Set where root's rights are promised: there a test that needs them must not be left out without a word.
NEEDS_ROOT = "PIPETRAIN_NEEDS_ROOT"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_watch = pytest.StashKey[Watch]()
_in_time = pytest.StashKey[bool]()  # True: begun only within --seconds; False: it was too late
_left = pytest.StashKey[list[str]]()
_STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--turns",
        type=int,
        default=1,
        help="slow tests: those of changed files, and of the others every so many-th, in turn",
    )
    parser.addoption(
        "--seconds", type=float, default=None, help="after so many, no more slow tests of changed files are begun"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not IS_WORKER:
        config.stash[_watch] = Watch()
        if hasattr(config, "cache"):  # not with -p no:cacheprovider
            config.pluginmanager.register(Seconds(config))


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Rows that `@pytest.mark.quick("id", ...)` does not name are slow."""
    quick = item.get_closest_marker("quick")
    if quick is not None and isinstance(item, pytest.Function) and item.callspec.id not in quick.args:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(name: str) -> Generator[None, Any, Any]:
    """An id in `@pytest.mark.quick` that no row has is a mistake, not a row less."""
    made = yield
    rows = [one for one in made or () if isinstance(one, pytest.Function)] if isinstance(made, list) else []
    quick = rows[0].get_closest_marker("quick") if rows else None
    ids = [row.callspec.id for row in rows if hasattr(row, "callspec")]
    for one in quick.args if quick else ():
        if one not in ids:
            raise pytest.Collector.CollectError(f"{name}: there is no row {one!r}; rows are {', '.join(ids)}")
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has no turn in this run, and begins with what takes longest."""
    num_turns = config.getoption("--turns")
    slow = [item for item in items if item.get_closest_marker("slow")]
    paths = {item: os.path.relpath(item.path, ROOT) for item in slow}
    due, changed = (slow, []) if num_turns == 1 else _with_a_turn(config, slow, paths, num_turns)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    parts = [long_first([paths[item] for item in some], num_workers) for some in (due, changed)]
    items[:] = [item for item in items if item not in paths]
    for first, then in zip(*parts):
        items += [due[index] for index in first] + [changed[index] for index in then]


def _with_a_turn(
    config: pytest.Config, slow: list[pytest.Item], paths: dict[pytest.Item, str], num_turns: int
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The slow tests that are due in this turn, and others of changed files."""
    files = changed_files()
    always = {item: None for item in slow if always_runs(paths[item], files)}
    due = [*always, *in_turn([item for item in slow if item not in always], num_turns, this_turn())]
    changed = [item for item in slow if paths[item] in files and item not in set(due)]
    for item in changed:
        item.stash[_in_time] = True
    config.hook.pytest_deselected(items=[item for item in slow if item not in {*due, *changed}])
    return due, changed


def pytest_collection_finish() -> None:
    if IS_WORKER:  # for many tests; the first of them that makes an optimizer would load it
        importlib.import_module("torch._dynamo")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What has been loaded stays: nobody who looks for tensors among all objects needs to go through it in each test.

    A test of a changed file whose turn it is not is skipped where --seconds have passed; what the turns promise does not
    depend on the clock.
    """
    seconds = item.config.getoption("--seconds")
    if item.stash.get(_in_time, False) and seconds is not None and time.monotonic() - _STARTED > seconds:
        item.stash[_in_time] = False
        pytest.skip(f"not begun in {seconds:g} s; `make test-slow` tries all")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test marked `root` that is skipped fails where NEEDS_ROOT is set, but for one that was too late to begin."""
    report = yield
    is_late = not item.stash.get(_in_time, True)
    if report.skipped and not is_late and os.environ.get(NEEDS_ROOT) and item.get_closest_marker("root"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{NEEDS_ROOT} is set: {reason}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves a process, a port or a file behind fails, and says which."""
    if IS_WORKER:
        return
    watch = session.config.stash[_watch]
    session.config.stash[_left] = left = watch.found()
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    watch.keep = session.exitstatus == pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_left, []):
        terminalreporter.section("left behind by the tests", red=True)
        for line in left:
            terminalreporter.line(line)


class Seconds:
    """What each file of tests took, for `python -m tests.size`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        assert self._config.cache is not None
        self._config.cache.set("pipetrain/seconds", self._seconds)
