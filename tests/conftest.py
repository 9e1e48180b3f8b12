"""Shared by all tests. That this file is here puts tests/ on the path, so that `import ranks` works in every folder."""

import os
from collections.abc import Generator

import pytest
import torch

# Equality bit for bit is promised for one thread: a sum over several has another order.
torch.set_num_threads(1)

# Set where root's rights are promised: there a test that needs them must not be left out without a word.
NEEDS_ROOT = "PIPETRAIN_NEEDS_ROOT"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test marked `root` that is skipped fails where NEEDS_ROOT is set."""
    report = yield
    if report.skipped and os.environ.get(NEEDS_ROOT) and item.get_closest_marker("root"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{NEEDS_ROOT} is set: {reason}"
    return report
