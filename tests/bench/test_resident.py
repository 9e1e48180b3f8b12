"""What a process grows by in a step is what the meter counts."""

from __future__ import annotations

import sys

import pytest

from benchmarks.resident import MODELS, measure

MOST_OFF = 0.15
LEAST_SET = 200e6


def check(model: str, mode: str, share: int = 1) -> None:
    found = measure(model, mode, share=share)
    assert found.set_bytes >= LEAST_SET / share
    assert found.metered >= found.set_bytes * (2 if mode == "never" else 1) * 0.9
    assert found.ratio == pytest.approx(1.0, abs=MOST_OFF), found


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
def test_a_process_grows_by_what_the_meter_counts() -> None:
    check("perceptron", "overlap", share=2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_model_grows_by_what_the_meter_counts(model: str) -> None:
    """`python -m benchmarks.resident --mode=never` looks at sets that are kept."""
    check(model, "overlap")
