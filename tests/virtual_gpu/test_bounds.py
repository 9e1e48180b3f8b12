"""With a host infinitely far ahead: what the allocator reserves, and how often the host waits for its device."""

from __future__ import annotations

import pytest

from virtual_gpu.cases import Case, clips, play
from virtual_gpu.recorded import RankRecording
from virtual_gpu.reserved import host_waits, reserved_bytes

SCALAR = 8  # the loss of a microbatch, of which each is kept for the sum


def reserved(recording: RankRecording) -> int:
    """All bytes but those of the caller's stream, on which the batch is made, and the losses."""
    return sum(size for stream, size in reserved_bytes(recording, SCALAR + 1).items() if stream != "caller")


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages_per_rank"), [("1f1b", 3, 1), ("interleaved", 2, 2)], ids=["1f1b", "interleaved"]
)
@pytest.mark.parametrize("mode", ["overlap", pytest.param("never", marks=pytest.mark.slow)])
def test_as_much_memory_for_any_number_of_microbatches(
    schedule: str, ranks: int, stages_per_rank: int, mode: str
) -> None:
    few, many = (
        [
            reserved(recording)
            for recording in play(Case(schedule, mode, 1, ranks, stages_per_rank, microbatches=m)).recording
        ]
        for m in (8, 32)
    )
    assert few == many


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_from_the_second_step_on_the_host_waits_for_the_loss_and_for_the_norm(schedule: str) -> None:
    recording = play(Case(schedule, also=clips)).recording
    for rank, one in enumerate(recording):
        for call, waits in host_waits(one)[2:]:
            expected = {"step": ["the loss of the step"] if rank == len(recording) - 1 else []}
            assert waits == expected.get(call, ["the norms of the gradients"]), f"rank {rank}: {call}"
