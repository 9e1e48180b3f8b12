"""A run with plan=auto: it trains by the first plan within the budget, and its report has foreseen bytes beside measured ones."""

import json
import subprocess
from pathlib import Path

import pytest
from commands import PIPETRAIN, environment
from ranks import PATIENCE_SECONDS

KEYS = [
    "experiment=smoke", "plan=auto", "plan.memory_budget_bytes=20000000", "pipeline.search_seconds=0", "run_dir=run",
    "observe.progress=false",
]  # fmt: skip


@pytest.mark.slow
def test_a_planned_run_holds_what_was_foreseen(tmp_path: Path) -> None:
    own = {**environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = subprocess.run(
        [*PIPETRAIN, *KEYS], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert found.returncode == 0, found.stderr
    assert "plan=auto: step" in found.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    pairs = list(zip(report["peak_activation_bytes_predicted"], report["peak_activation_bytes"], strict=True))
    assert pairs
    # A smoke test's sets are as small as its messages.
    assert all(0.7 <= foreseen / measured <= 1.5 for foreseen, measured in pairs), pairs
    assert "foreseen by the profile" in (tmp_path / "run" / "report.md").read_text()
