"""How many bytes the allocator would reserve with a host infinitely far ahead of its device.

Each stream has a pool of its own, which never gives back: the sum over streams of each stream's peak, in the order of the
host. What another stream was to be waited for with (`record_stream`) comes back when the device gets there: with such a
host, not within the call.
"""

from __future__ import annotations

from virtual_gpu.recorded import Allocation, CallMark, Free, HostWait, Keep, RankRecording


def reserved_bytes(recording: RankRecording, smallest: int = 0) -> dict[str, int]:
    """The peak of each stream, by its name, of blocks of at least `smallest` bytes."""
    blocks: dict[int, tuple[int, int]] = {}  # block -> stream, bytes
    kept: set[int] = set()
    late: list[int] = []
    now = [0] * len(recording.streams)
    peak = list(now)

    def give_back(block: int) -> None:
        stream, size = blocks.pop(block)
        now[stream] -= size

    for entry in recording.entries:
        match entry:
            case Allocation(block, stream, size) if size >= smallest:
                blocks[block] = stream, size
                now[stream] += size
                peak[stream] = max(peak[stream], now[stream])
            case Keep(block, _) if block in blocks:
                kept.add(block)
            case Free(block) if block in kept:
                late.append(block)
            case Free(block) if block in blocks:
                give_back(block)
            case CallMark(_, _, False):
                for block in late:
                    give_back(block)
                late.clear()
    return {recording.streams[stream] or f"stream {stream}": size for stream, size in enumerate(peak) if size}


def host_waits(recording: RankRecording) -> list[tuple[str, list[str]]]:
    """Per call of the pipeline, what the host waited for its device for."""
    return [
        (call, [entry.what for entry in entries if isinstance(entry, HostWait)]) for call, entries in recording.calls()
    ]
