"""With a host infinitely far ahead: what the allocator reserves."""

from __future__ import annotations

import pytest
from unsent import most_held_for_sends

from pipetrain.runtime import losses
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind
from virtual_gpu.cases import ROWS, WIDTH, Case, play
from virtual_gpu.recorded import RankRecording
from virtual_gpu.reserved import reserved_bytes

TENSOR = ROWS * WIDTH * 4  # a message
SCALAR = 8  # the loss of a microbatch, of which each is kept for the sum


@pytest.fixture(autouse=True)
def first_outputs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of the first step that the loss check keeps have a bound of their own in bytes, which so few never reach."""
    monkeypatch.setattr(losses, "_MOST_BYTES", 1)


def reserved(recording: RankRecording) -> int:
    """All bytes but those of the caller's stream, on which the batch is made, and the losses."""
    return sum(size for stream, size in reserved_bytes(recording, SCALAR + 1).items() if stream != "caller")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mode"),
    [("1f1b", "overlap"), ("interleaved", "overlap"), ("1f1b", "never"), ("interleaved", "inline")],
)
def test_as_much_memory_for_any_number_of_microbatches(schedule: str, mode: str) -> None:
    ranks = {"1f1b": (3, 1), "interleaved": (2, 2)}[schedule]
    few, many = (play(Case(schedule, mode, 1, *ranks, microbatches=m)).recording for m in (8, 20))
    assert [*map(reserved, few)] == [*map(reserved, many)]


@pytest.mark.slow
def test_of_gpipe_what_grows_are_the_stashed_inputs() -> None:
    few, many = 8, 24
    played = [play(Case("gpipe", ranks=3, microbatches=m, last_stage="always")).recording for m in (few, many)]
    growth = [reserved(two) - reserved(one) for one, two in zip(*played)]
    stash = TENSOR * (many - few)
    assert growth == [0, stash, stash], "those of the first stage are the batch itself"


@pytest.mark.slow
def test_of_gpipe_with_a_last_stage_that_alternates_what_is_not_sent_grows_too() -> None:
    """By as many tensors as the launches say, and not one more; the last stage stashes nothing."""
    few, many = 8, 24
    reserve, held = {}, {}
    for m in (few, many):
        reserve[m] = [reserved(one) for one in play(Case("gpipe", ranks=3, microbatches=m)).recording]
        held[m] = most_held_for_sends(for_device(make_schedule("gpipe", num_stages=3, num_microbatches=m)))
    more = {send: held[many][send] - count for send, count in held[few].items() if held[many][send] > count}
    assert set(more) == {(1, Kind.SEND_F), (2, Kind.SEND_B)}
    growth = [0, many - few + more[1, Kind.SEND_F], more[2, Kind.SEND_B]]
    assert [after - before for before, after in zip(reserve[few], reserve[many])] == [n * TENSOR for n in growth]
