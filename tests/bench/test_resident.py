"""What a process grows by in a step is what the meter counts."""

from __future__ import annotations

import sys

import pytest

from benchmarks.resident import measure

MOST_OFF = 0.15
LEAST_SET = 200e6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("model", "share"), [("perceptron", 2), ("gpt2", 2), ("convolutions", 1)])
def test_a_process_grows_by_what_the_meter_counts(model: str, share: int) -> None:
    """`python -m benchmarks.resident` looks at all models, with `--mode=never` at sets that are kept."""
    found = measure(model, "overlap", share=share)
    assert found.set_bytes >= LEAST_SET / share
    assert found.metered >= found.set_bytes * 0.9
    assert found.ratio == pytest.approx(1.0, abs=MOST_OFF), found
