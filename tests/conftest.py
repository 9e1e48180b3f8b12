"""Shared by all tests. That this file is here puts tests/ on the path, so that `import ranks` works in every folder."""

import gc
import importlib
import os
from collections.abc import Generator

import pytest
import torch
from shares import share_of, this_commit

# Equality bit for bit is promised for one thread: a sum over several has another order.
torch.set_num_threads(1)

# Set where root's rights are promised: there a test that needs them must not be left out without a word.
NEEDS_ROOT = "PIPETRAIN_NEEDS_ROOT"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", type=int, default=1, help="of the slow tests every so many-th, from one that the commit chooses"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not in this run's share. Those that need root's rights are always tried: CI is where they can be."""
    num_shares = config.getoption("--share")
    if num_shares == 1:
        return
    slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("root")]
    others = set(slow) - set(share_of(slow, num_shares, this_commit()))
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """What has been loaded stays: neither the collector nor who looks for tensors needs to go through it in each test."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # for many tests; the first of them that makes an optimizer would load it
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test marked `root` that is skipped fails where NEEDS_ROOT is set."""
    report = yield
    if report.skipped and os.environ.get(NEEDS_ROOT) and item.get_closest_marker("root"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{NEEDS_ROOT} is set: {reason}"
    return report
