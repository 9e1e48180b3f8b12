"""Every crossing of streams is there for a reason: without it a race is found, or it is said here why none can be.

The waits of a kind are taken out of the recording of a step, as if the line that makes them were gone.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pipetrain.runtime.pipeline import Pipeline
from virtual_gpu.cases import Case, bridges, evaluates, evaluates_on_two_streams, gaps, on_two_streams, play, tied
from virtual_gpu.crossings import crossings, without
from virtual_gpu.races import find_races
from virtual_gpu.recorded import Recording


def steps_and_evaluates(pipeline: Pipeline, batch: Any) -> None:
    """From two streams; the values are not looked at."""
    inputs, targets = batch
    on_two_streams(
        pipeline,
        lambda: pipeline.step(inputs if pipeline.is_first else None, targets if pipeline.is_last else None),
        lambda: evaluates(pipeline, batch),
    )


CASES = (
    Case("1f1b", ranks=3, microbatches=6),
    Case("interleaved", stages_per_rank=2),
    Case("gpipe", stages_per_rank=2, placement="v"),
    Case("gpipe", last_stage="always", ranks=3, also=evaluates, saves=True),
    Case("1f1b", "inline"),
    Case("gpipe", ranks=3, also=steps_and_evaluates),
    Case("gpipe", ranks=3, also=evaluates_on_two_streams),
    Case("1f1b", "never", ranks=3, layers=bridges(gaps)),
    Case("1f1b", ranks=2, layers=tied),
)
# What is said of time and of memory, and not of what is read; or is said already by other waits.
WITHOUT_A_RACE = {
    "F <- F": "stages of one rank: both run on the compute stream",
    "B <- B": "stages of one rank: both run on the compute stream",
    "R <- RECV_B": "inline, R and B run on the compute stream: R only should not run before",
    "RECV_F <- B": "bounds what has come and is not used; of the buffers it is the ring that decides",
    "RECV_B <- F": "a receive should not stand there before its message can come",
    "start: recompute <- caller": "R waits for its F, whose stream comes after the caller's",
    "start: message <- caller": "the end of the call before says so, too",
    "start: other <- caller": "a stream that no op of the schedule uses",
    "end: caller <- recompute": "each R is waited for by its B",
    "end: caller <- other": "a stream that no op of the schedule uses",
    "end: message <- caller": "the start of the next call says so, too, if it comes from the same stream",
    "end: recompute <- caller": "R waits for its F",
    "end: other <- caller": "a stream that no op of the schedule uses",
    ": caller <- communicator": "what greets a communicator is not read",
}


@functools.cache
def recordings() -> tuple[Recording, ...]:
    return tuple(play(case).recording for case in CASES)


def is_noticed(crossing: str) -> bool:
    return any(crossing in crossings(one) and bool(find_races(without(one, crossing))) for one in recordings())


@pytest.mark.slow
def test_every_crossing_but_those_listed_is_needed() -> None:
    found = set().union(*map(crossings, recordings()))
    needed = {crossing for crossing in found if is_noticed(crossing)}
    assert found - needed == set(WITHOUT_A_RACE)
    assert {
        "F <- RECV_F",
        "B <- R",
        "R <- B",
        "SEND_F <- F",
        "RECV_B <- B",
        "F <- SEND_F",
        "REDUCE_GRAD <- B",
        "end: compute <- caller",
    } <= needed
