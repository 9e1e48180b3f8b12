"""The waits of streams in a recording, by kind, and the recording without those of a kind: does anything notice?"""

from __future__ import annotations

from collections.abc import Iterator

from pipetrain.schedule.op import Op
from virtual_gpu.recorded import CallMark, Entry, EventRecord, EventWait, Launch, RankRecording, Recording


def crossings(recording: Recording) -> set[str]:
    """`F <- RECV_F`: the stream of an F waits for the end of a RECV_F. Around ops: `start: compute <- caller`."""
    return {crossing for rank in recording for crossing, _ in _named(rank) if crossing is not None}


def without(recording: Recording, crossing: str) -> Recording:
    """The recording as it would be without the waits of this kind."""
    return [
        RankRecording(rank.rank, [entry for found, entry in _named(rank) if found != crossing], rank.streams)
        for rank in recording
    ]


def _named(rank: RankRecording) -> Iterator[tuple[str | None, Entry]]:
    """Each entry, and of a wait its kind."""
    op: Op | None = None
    time = ""  # outside of ops: where in a call
    recorded: dict[int, tuple[Op | None, str]] = {}  # event -> in which op, on what stream
    for entry in rank.entries:
        crossing = None
        match entry:
            case CallMark(_, _, begins):
                time = "start" if begins else "between"
            case Launch(op, _):
                time = "end"
            case EventRecord(stream, event):
                recorded[event] = op, _role(rank.streams[stream])
            case EventWait(stream, event) if event in recorded:
                crossing = _crossing(op, time, _role(rank.streams[stream]), *recorded[event])
        yield crossing, entry


def _crossing(op: Op | None, time: str, role: str, source: Op | None, source_role: str) -> str | None:
    if role == source_role == "caller":
        return None
    if op is None:
        return f"{time}: {role} <- {source_role}"
    if op == source:
        return f"{op.kind}: {role} <- {source_role}"
    return f"{op.kind} <- {'caller' if source is None else source.kind}"


def _role(name: str) -> str:
    if name in ("compute", "recompute"):
        return name
    if name.startswith("caller"):
        return "caller"
    return "communicator" if name.startswith("communicator") else "message" if name else "other"
