"""What a virtual GPU writes down: one list per rank, in the order in which its host did things.

Streams, events and blocks are numbered per rank. A block is the memory of one storage, from its allocation to its free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipetrain.schedule.op import Op


class Kernel(NamedTuple):
    """An op of aten on a stream, and the blocks that it reads and writes."""

    stream: int
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Message(NamedTuple):
    """One end of a transfer on a communicator's stream; `channel` and `number` are the same at both ends."""

    stream: int
    channel: tuple[int, int]
    number: int
    sends: bool
    block: int


class EventRecord(NamedTuple):
    stream: int
    event: int


class EventWait(NamedTuple):
    stream: int
    event: int


class Allocation(NamedTuple):
    block: int
    stream: int
    num_bytes: int


class Free(NamedTuple):
    """The last owner on the host let go."""

    block: int


class Keep(NamedTuple):
    """`record_stream`: the block goes to nobody before `stream` has done what it was given until the free."""

    block: int
    stream: int


class HostWait(NamedTuple):
    """The host waits for an event or for a stream; with `helper` a thread beside the one that launches ops does."""

    what: str
    event: int | None = None
    stream: int | None = None
    helper: bool = False


class HostJoin(NamedTuple):
    """The host waits for what its helpers have waited for."""


class Launch(NamedTuple):
    """From here on the host launches `op`; with `begins` False it goes on with it, after another inside it."""

    op: Op | None
    begins: bool


class HostMessage(NamedTuple):
    """A host tells another one something (`told`), or goes on when it has heard it."""

    key: tuple[Any, ...]
    told: bool


class CallMark(NamedTuple):
    """A call of the pipeline begins or ends."""

    call: str
    number: int
    begins: bool


Entry = (
    Kernel
    | Message
    | EventRecord
    | EventWait
    | Allocation
    | Free
    | Keep
    | HostWait
    | HostJoin
    | Launch
    | HostMessage
    | CallMark
)


@dataclass
class RankRecording:
    """`streams` are the names of the streams by number; stream 0 is the caller's."""

    rank: int
    entries: list[Entry] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)

    def calls(self) -> list[tuple[str, list[Entry]]]:
        """The calls of the pipeline in order, each with its entries."""
        found = []
        for place, entry in enumerate(self.entries):
            if isinstance(entry, CallMark) and entry.begins:
                end = self.entries.index(entry._replace(begins=False), place)
                found.append((entry.call, self.entries[place : end + 1]))
        return found


Recording = list[RankRecording]
