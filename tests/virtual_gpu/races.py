"""Finds races in a recording, by what must have happened before what (vector clocks; Lamport 1978, Mattern 1989).

On one stream all happens in order. Between streams only an event that had been recorded when it was waited for, a message (its
receive ends after its send began, and not the other way round: small messages are buffered), and a wait of the host order
anything.

What the allocator adds: a block that was freed on the host goes back to the stream that allocated it, and the next allocation
there may get it, whatever its size. So at the first use of a new block, all uses of every block freed there so far must have
happened before. What comes before the end of a stream that the block was kept for (`record_stream`) has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipetrain.schedule.op import Op
from virtual_gpu.recorded import (
    Allocation,
    Entry,
    EventRecord,
    EventWait,
    Free,
    HostJoin,
    HostWait,
    Keep,
    Kernel,
    Launch,
    Message,
    Recording,
)

Clock = list[int]  # by stream of all ranks, how many of its uses have happened


class Use(NamedTuple):
    """A kernel or a transfer: where it was launched from, and on which stream it runs."""

    op: Op | None
    name: str
    stream: int
    stream_name: str
    number: int  # on its stream, from 1

    def __str__(self) -> str:
        return f"{self.name} of {self.op or 'the caller'} on {self.stream_name}"


@dataclass(frozen=True)
class Race:
    """Two uses of memory of which nothing says that the first has happened before the second.

    `reused`: the memory was freed after the first and may have been allocated again for the second.
    """

    rank: int
    first: Use
    second: Use
    block: int
    reused: bool

    def __str__(self) -> str:
        why = "took over memory that was freed under" if self.reused else "does not wait for"
        return f"rank {self.rank}: {self.second} {why} {self.first}"


@dataclass
class _Block:
    stream: int
    before: dict[int, Use]  # of memory that it may have got: the last use per stream
    is_fresh: bool = True
    written: Use | None = None
    uses: dict[int, Use] = field(default_factory=dict)  # the last per stream
    kept: set[int] = field(default_factory=set)


class _Rank:
    """One rank's device, as far as it has come in its recording."""

    def __init__(
        self, number: int, names: list[str], first_stream: int, num_streams: int, entries: list[Entry]
    ) -> None:
        self.number = number
        self.names = names
        self.first = first_stream
        self.entries = entries
        self.place = 0
        self.op: Op | None = None
        self.clocks: list[Clock] = [[0] * num_streams for _ in names]
        self.events: dict[int, Clock] = {}
        self.blocks: dict[int, _Block] = {}
        self.helpers: Clock = [0] * num_streams  # what threads of the host beside its own have waited for
        self.freed: list[dict[int, Use]] = [{} for _ in names]  # by allocating stream: the last uses of what was freed

    def come_after(self, clock: Clock) -> None:
        """What is launched from now on comes after `clock`."""
        for own in self.clocks:
            _join(own, clock)


class RaceFinder:
    """Goes through a recording, rank by rank as far as the messages allow."""

    def __init__(self, recording: Recording) -> None:
        self.races: dict[tuple[int, Op | None, str, Op | None, str, int], Race] = {}
        self._sent: dict[tuple[tuple[int, int], int], Clock] = {}
        total = sum(len(rank.streams) for rank in recording)
        self._ranks = []
        first = 0
        for one in recording:
            self._ranks.append(_Rank(one.rank, one.streams, first, total, one.entries))
            first += len(one.streams)
        self._steps: dict[type, Callable[[_Rank, Any], bool]] = {
            Kernel: self._kernel,
            Message: self._message,
            EventRecord: self._record,
            EventWait: self._wait,
            Allocation: self._allocate,
            Free: self._free,
            Keep: self._keep,
            HostWait: self._host_wait,
            HostJoin: self._host_join,
            Launch: self._launch,
        }

    def run(self) -> list[Race]:
        """All races. Where a message is never sent, only those before it: `hangs` names it."""
        moved = True
        while moved:
            moved = False
            for rank in self._ranks:
                moved |= self._go_on(rank)
        return list(self.races.values())

    def _go_on(self, rank: _Rank) -> bool:
        start = rank.place
        while rank.place < len(rank.entries):
            entry = rank.entries[rank.place]
            step = self._steps.get(type(entry))
            if step is not None and not step(rank, entry):
                break
            rank.place += 1
        return rank.place > start

    # Entries: each returns whether the rank may go on -----------------------------------------------------------------

    def _kernel(self, rank: _Rank, kernel: Kernel) -> bool:
        use = self._use(rank, kernel.stream, kernel.name)
        for block in kernel.reads:
            self._access(rank, block, use, writes=False)
        for block in kernel.writes:
            self._access(rank, block, use, writes=True)
        return True

    def _message(self, rank: _Rank, message: Message) -> bool:
        key = message.channel, message.number
        if not message.sends:
            if key not in self._sent:
                return False
            _join(rank.clocks[message.stream], self._sent[key])
        use = self._use(rank, message.stream, "send" if message.sends else "receive")
        self._access(rank, message.block, use, writes=not message.sends)
        if message.sends:
            self._sent[key] = list(rank.clocks[message.stream])
        return True

    def _record(self, rank: _Rank, record: EventRecord) -> bool:
        rank.events[record.event] = list(rank.clocks[record.stream])
        return True

    def _wait(self, rank: _Rank, wait: EventWait) -> bool:
        if wait.event in rank.events:  # one that was not recorded yet counts as done
            _join(rank.clocks[wait.stream], rank.events[wait.event])
        return True

    def _host_wait(self, rank: _Rank, wait: HostWait) -> bool:
        """What the host launches from now on comes later."""
        if wait.event is not None:
            ended = [rank.events[wait.event]] if wait.event in rank.events else []
        else:
            assert wait.stream is not None
            ended = [rank.clocks[wait.stream]]
        for before in [list(clock) for clock in ended]:
            if wait.helper:
                _join(rank.helpers, before)
            else:
                rank.come_after(before)
        return True

    def _host_join(self, rank: _Rank, _: HostJoin) -> bool:
        rank.come_after(rank.helpers)
        return True

    def _allocate(self, rank: _Rank, allocation: Allocation) -> bool:
        rank.blocks[allocation.block] = _Block(allocation.stream, dict(rank.freed[allocation.stream]))
        return True

    def _free(self, rank: _Rank, free: Free) -> bool:
        block = rank.blocks.pop(free.block, None)
        if block is not None:
            last = rank.freed[block.stream]
            ends = [rank.clocks[stream] for stream in block.kept]
            for stream, use in block.uses.items():
                is_kept = any(end[rank.first + stream] >= use.number for end in ends)
                if not is_kept and (stream not in last or last[stream].number < use.number):
                    last[stream] = use
        return True

    def _keep(self, rank: _Rank, keep: Keep) -> bool:
        rank.blocks[keep.block].kept.add(keep.stream)
        return True

    def _launch(self, rank: _Rank, launch: Launch) -> bool:
        rank.op = launch.op
        return True

    # Uses -------------------------------------------------------------------------------------------------------------

    def _use(self, rank: _Rank, stream: int, name: str) -> Use:
        clock = rank.clocks[stream]
        clock[rank.first + stream] += 1
        return Use(rank.op, name, stream, rank.names[stream] or f"stream {stream}", clock[rank.first + stream])

    def _access(self, rank: _Rank, number: int, use: Use, *, writes: bool) -> None:
        block = rank.blocks.setdefault(number, _Block(use.stream, {}))  # memory of the host has no allocation
        if block.is_fresh:
            block.is_fresh = False
            for before in block.before.values():
                self._check(rank, number, before, use, reused=True)
            block.before = {}
        if writes:
            for before in block.uses.values():
                self._check(rank, number, before, use)
            block.written = use
        elif block.written is not None:
            self._check(rank, number, block.written, use)
        block.uses[use.stream] = use

    def _check(self, rank: _Rank, block: int, first: Use, second: Use, *, reused: bool = False) -> None:
        if first.stream == second.stream or rank.clocks[second.stream][rank.first + first.stream] >= first.number:
            return
        key = rank.number, first.op, first.stream_name, second.op, second.stream_name, block
        self.races.setdefault(key, Race(rank.number, first, second, block, reused))


def find_races(recording: Recording) -> list[Race]:
    return RaceFinder(recording).run()


def _join(clock: Clock, other: Clock) -> None:
    for place, count in enumerate(other):
        if count > clock[place]:
            clock[place] = count
