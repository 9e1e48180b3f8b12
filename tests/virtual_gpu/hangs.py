"""Finds where a recording would hang: streams that wait for each other in a ring, also when a host waits for its device.

Kernels always end, so what counts is events, transfers and waits of hosts. A transfer ends when both its ends are at the head
of their queues. A queue is a stream, or a hardware queue that several streams share: there each entry waits for all that
was launched before it. What is left when nothing can go on any more hangs.

All of it can only ever get further: what may go on goes on in any order, with the same end. So one run per rank tries a wait
of its host for the whole device before each op and each transfer in turn: all other hosts are infinitely far ahead, and just
before it is launched all that this rank was given must be able to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipetrain.schedule.op import Op
from virtual_gpu.recorded import (
    Entry,
    EventRecord,
    EventWait,
    HostJoin,
    HostMessage,
    HostWait,
    Launch,
    Message,
    Recording,
)

Fold = Callable[[int], int]  # the hardware queue of a rank's stream


@dataclass(frozen=True)
class Hang:
    """`before` is the op ahead of which the host waited for its device (None: it did not), `stuck` what never ends."""

    rank: int
    before: Op | None
    stuck: tuple[str, ...]

    def __str__(self) -> str:
        when = "" if self.before is None else f" if its host waits for its device before {self.before}"
        return f"rank {self.rank} hangs{when}: {'; '.join(self.stuck)}"


def unfolded(stream: int) -> int:
    return stream


def folded(num_queues: int) -> Fold:
    """Streams in turn onto `num_queues` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS)."""
    return lambda stream: stream % num_queues


@dataclass
class _Item:
    """What stands in a queue: the record of an event, a wait for one, or one end of a transfer."""

    key: Any
    kind: str
    what: str


@dataclass
class _Host:
    """A rank: how far its host has come, and what its device was given and has not done."""

    rank: int
    entries: Sequence[Entry]
    names: list[str]
    place: int = 0
    op: Op | None = None
    queues: dict[int, deque[_Item]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # event -> how often it was recorded
    waits_for: Any = None  # a key that must be done before the host goes on
    helper_waits_for: Any = None
    marks: int = 0


class _Machine:
    """All ranks of a recording, from a state in which nothing was launched."""

    def __init__(self, recording: Recording, fold: Fold) -> None:
        self.hosts = [_Host(one.rank, _without_kernels(one.entries), one.streams) for one in recording]
        self._fold = fold
        self._done: set[Any] = set()
        self._ready: deque[tuple[_Host, int]] = deque()
        self._sleeping: dict[Any, list[tuple[_Host, int]]] = {}  # key -> queues whose head waits for it

    # Hosts ------------------------------------------------------------------------------------------------------------

    def launch(self, host: _Host, *, one_by_one: bool = False) -> bool:
        """Let a host go on as far as it can, or to where it may wait next; whether it came anywhere."""
        start = host.place
        while host.place < len(host.entries):
            if host.waits_for is not None:
                if host.waits_for not in self._done:
                    break
                host.waits_for = None
            entry = host.entries[host.place]
            if one_by_one and _may_wait_before(entry) and host.place > start:
                break
            host.place += 1
            self._give(host, entry)
        return host.place > start

    def at_launch_of(self, host: _Host) -> Op | None:
        """The op that a host is about to launch, or of which it is about to launch a transfer."""
        if host.place >= len(host.entries) or host.waits_for is not None:
            return None
        entry = host.entries[host.place]
        if isinstance(entry, Launch) and entry.begins:
            return entry.op
        return host.op if isinstance(entry, Message) else None

    def is_over(self, host: _Host) -> bool:
        return host.place == len(host.entries) and (host.waits_for is None or host.waits_for in self._done)

    def _give(self, host: _Host, entry: Entry) -> None:
        match entry:
            case Launch(op, _):
                host.op = op
            case EventRecord(stream, event):
                version = host.versions[event] = host.versions.get(event, 0) + 1
                self._put(host, stream, _Item((host.rank, event, version), "record", ""))
            case EventWait(stream, event):
                version = host.versions.get(event, 0)
                if version:  # else it counts as done
                    self._put(host, stream, _Item((host.rank, event, version), "wait", f"waits in {host.op}"))
            case Message(stream, channel, number, sends, _):
                what = f"{'sends' if sends else 'receives'} in {host.op}"
                self._put(host, stream, _Item((channel, number, sends), "transfer", what))
            case HostMessage(key, told):
                if told:
                    self._end(key)
                else:
                    host.waits_for = key
            case HostWait(_, event, stream, helper):
                mark = self._mark(host, event, stream)
                if helper:
                    host.helper_waits_for = mark
                else:
                    host.waits_for = mark
            case HostJoin():
                host.waits_for = host.helper_waits_for

    def _mark(self, host: _Host, event: int | None, stream: int | None) -> Any:
        """The key of what the host waits for."""
        if event is not None:
            version = host.versions.get(event, 0)
            return (host.rank, event, version) if version else None
        assert stream is not None, "no verb waits for a whole device"
        host.marks += 1
        key = host.rank, "mark", host.marks
        self._put(host, stream, _Item(key, "record", ""))
        return key

    # Queues -----------------------------------------------------------------------------------------------------------

    def _put(self, host: _Host, stream: int, item: _Item) -> None:
        number = self._fold(stream)
        items = host.queues.setdefault(number, deque())
        items.append(item)
        if len(items) == 1:
            self._ready.append((host, number))

    def run(self) -> None:
        """Until nothing that was launched can go on."""
        while self._ready:
            host, number = self._ready.popleft()
            items = host.queues[number]
            while items and self._may_end(items[0], host, number):
                items.popleft()

    def _may_end(self, item: _Item, host: _Host, number: int) -> bool:
        if item.kind == "record":
            self._end(item.key)
            return True
        if item.kind == "wait":
            return self._has_ended(item.key, host, number)
        channel, index, sends = item.key
        self._end(("started", *item.key))
        return self._has_ended(("started", channel, index, not sends), host, number)

    def _has_ended(self, key: Any, host: _Host, number: int) -> bool:
        if key in self._done:
            return True
        self._sleeping.setdefault(key, []).append((host, number))
        return False

    def _end(self, key: Any) -> None:
        if key not in self._done:
            self._done.add(key)
            self._ready.extend(self._sleeping.pop(key, ()))

    def stuck(self, host: _Host) -> tuple[str, ...]:
        """The heads of the queues that have not been emptied."""
        found = []
        for number, items in host.queues.items():
            if items:
                found.append(f"{host.names[number] if number < len(host.names) else number} {items[0].what}")
        if host.waits_for is not None and host.waits_for not in self._done:
            found.append(f"its host waits in {host.op}")
        return tuple(found)

    def run_to_the_end(self, hosts: Sequence[_Host]) -> None:
        """Let these hosts go on as far as they can, and all devices."""
        moved = True
        while moved:
            self.run()
            moved = sum(self.launch(host) for host in hosts) > 0


def find_hangs(recording: Recording, fold: Fold = unfolded) -> list[Hang]:
    """Where the recording hangs as it is; and, if it does not, before what a rank's host may not wait for its device."""
    machine = _Machine(recording, fold)
    machine.run_to_the_end(machine.hosts)
    hangs = [
        Hang(host.rank, None, machine.stuck(host))
        for host in machine.hosts
        if machine.stuck(host) or not machine.is_over(host)
    ]
    return hangs or [hang for rank in range(len(recording)) for hang in _with_waits(recording, fold, rank)]


def _with_waits(recording: Recording, fold: Fold, rank: int) -> Iterator[Hang]:
    """The host of `rank` waits for its device once; the others are infinitely far ahead."""
    machine = _Machine(recording, fold)
    own = machine.hosts[rank]
    others = [host for host in machine.hosts if host is not own]
    told: Op | None = None
    while not machine.is_over(own):
        moved = machine.launch(own, one_by_one=True)
        machine.run_to_the_end(others)
        op = machine.at_launch_of(own)
        if op is not None and op != told and (stuck := machine.stuck(own)):
            told = op  # once for all its transfers
            yield Hang(rank, op, stuck)
        if not moved and machine.at_launch_of(own) is None and not machine.is_over(own):
            raise AssertionError(f"rank {rank} hangs where it did not before: {machine.stuck(own)}")


def find_hangs_of_all(recording: Recording, fold: Fold = unfolded) -> list[Hang]:
    """Where it hangs if every host waits for its device before all that it launches: the least that a host may be ahead."""
    machine = _Machine(recording, fold)
    moved = True
    while moved:
        machine.run()
        moved = sum(_launch_one(machine, host) for host in machine.hosts) > 0
    return [
        Hang(host.rank, machine.at_launch_of(host), machine.stuck(host))
        for host in machine.hosts
        if not machine.is_over(host) or machine.stuck(host)
    ]


def _launch_one(machine: _Machine, host: _Host) -> bool:
    return not machine.stuck(host) and machine.launch(host, one_by_one=True)


def _may_wait_before(entry: Entry) -> bool:
    """Before each op, and before each transfer: a message may have several."""
    return isinstance(entry, Message) or (isinstance(entry, Launch) and entry.begins)


def _without_kernels(entries: Sequence[Entry]) -> list[Entry]:
    kinds = (Launch, EventRecord, EventWait, Message, HostMessage, HostWait, HostJoin)
    return [entry for entry in entries if isinstance(entry, kinds)]
