"""Wires for ranks in one process, which deliver late and in any legal order, and the theatre in which the ranks run in turns.

Each rank is a thread, and one runs at a time: it runs until it comes to an op or has to wait, and then `choose` picks what
happens next: a rank goes on, a message crosses an edge, or an end tells its rank that the transfer has ended. What is legal:
the messages of an edge and direction cross in the order in which they were sent; nothing else is promised. Where nothing
can happen any more, the ranks hang: `Hang` says what each waits in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipetrain.comm.forms import Form
from pipetrain.schedule.op import Op

Choose = Callable[[int], int]  # of so many things that may happen next, the one that does
Log = list[tuple[str, Op]]  # ("start" | "end", op) in the order in which it happened, of all ranks


class Hang(AssertionError):
    """Nothing can happen any more, and there are ops that have not ended."""


class _Given(BaseException):
    """Ends the thread of a rank whose run is given up."""


@dataclass
class _Paused:
    """A rank that has stopped: where, and when it may go on."""

    ready: Callable[[], bool]
    what: Callable[[], str]


class Theatre:
    """Lets one thread run at a time."""

    def __init__(self, choose: Choose) -> None:
        self.wires: list[Wire | Meeting] = []
        self._choose = choose
        self._paused: dict[int, _Paused] = {}
        self._turns: dict[int, threading.Semaphore] = {}
        self._director = threading.Semaphore(0)
        self._over = False

    def play(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run each part in a thread of its own, to its end.

        Raises:
            Hang, or what a part raises.
        """
        self._over = False
        errors: dict[int, BaseException] = {}
        threads = [threading.Thread(target=self._act, args=(rank, part, errors)) for rank, part in enumerate(parts)]
        for rank, thread in enumerate(threads):
            self._turns[rank] = threading.Semaphore(0)
            self._paused[rank] = _Paused(lambda: True, lambda: "the start")
            thread.start()
        try:
            while self._paused and not errors:
                moves = [*self._ranks_that_may_go_on(), *(move for wire in self.wires for move in wire.moves())]
                if not moves:
                    raise Hang("; ".join(f"rank {rank}: {at.what()}" for rank, at in self._paused.items()))
                moves[self._choose(len(moves))]()
        finally:
            self._over = True
            for rank in list(self._paused):
                self._resume(rank)
            for thread in threads:
                thread.join()
        for error in errors.values():
            raise error

    def pause(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Called by the thread of a rank: let others go on; returns when `ready()` and chosen."""
        self._paused[rank] = _Paused(ready, what)
        self._director.release()
        self._turns[rank].acquire()
        if self._over:
            raise _Given

    def _ranks_that_may_go_on(self) -> Iterator[Callable[[], None]]:
        for rank, at in list(self._paused.items()):
            if at.ready():
                yield lambda rank=rank: self._resume(rank)  # type: ignore[misc]

    def _resume(self, rank: int) -> None:
        del self._paused[rank]
        self._turns[rank].release()
        self._director.acquire()

    def _act(self, rank: int, part: Callable[[], None], errors: dict[int, BaseException]) -> None:
        self._turns[rank].acquire()
        try:
            if not self._over:
                part()
        except _Given:
            pass
        except BaseException as error:
            errors[rank] = error
        finally:
            self._director.release()


@dataclass
class _Message:
    op: Op
    form: Form | None
    tensors: list[Tensor]
    left: Callable[[], None]


@dataclass
class _Post:
    op: Op
    form: Form | None
    make_buffers: Callable[[Form], list[Tensor]]
    arrived: Callable[[Form, Callable[[], list[Tensor]]], None]


class Wire:
    """One stage edge and direction. `buffered`: a send may end before its receive is posted, as small messages of NCCL do."""

    def __init__(self, log: Log, *, buffered: bool) -> None:
        self.sends: deque[_Message] = deque()
        self.posts: deque[_Post] = deque()
        self._buffered = buffered
        self._flying: deque[tuple[Form | None, list[Tensor]]] = deque()
        self._sent: list[tuple[Op, Callable[[], None]]] = []  # what the sender's end has not been told: one at most
        self._came: list[tuple[Op, Callable[[], None]]] = []
        self._log = log

    def moves(self) -> Iterator[Callable[[], None]]:
        for told in (self._sent, self._came):
            if told:
                yield lambda told=told: self._tell(told)  # type: ignore[misc]
        if self.sends and not self._sent and (self._buffered or (self.posts and not self._came)):
            yield self._depart
        elif self._flying and self.posts and not self._came:
            yield self._arrive

    def _tell(self, told: list[tuple[Op, Callable[[], None]]]) -> None:
        op, tell = told.pop()
        self._log.append(("end", op))
        tell()

    def _depart(self) -> None:
        message = self.sends.popleft()
        self._flying.append((message.form, [tensor.clone() for tensor in message.tensors]))
        self._sent.append((message.op, message.left))
        if not self._buffered:
            self._arrive()

    def _arrive(self) -> None:
        post = self.posts.popleft()
        in_front, tensors = self._flying.popleft()
        form = in_front or post.form
        assert form is not None, f"{post.op}: neither end knows the form"
        buffers = post.make_buffers(form)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self._came.append((post.op, lambda: post.arrived(form, lambda: buffers)))


@dataclass
class _End:
    wire: Wire
    peer: str

    reads_later = False

    def post(self, op: Op, form: Form | None, make_buffers: Any, arrived: Any) -> None:
        self.wire.posts.append(_Post(op, form, make_buffers, arrived))

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Callable[[], None]) -> None:
        self.wire.sends.append(_Message(op, form, tensors, left))

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass
class _Sum:
    op: Op
    tensors: list[Tensor]
    settle: Callable[[], None]
    ended: Callable[[], None]
    log: Log


class Meeting:
    """Ranks that add up gradients: each in its own order, and all at once."""

    def __init__(self, num_ranks: int) -> None:
        self.queues: list[deque[_Sum]] = [deque() for _ in range(num_ranks)]
        self._told: list[list[_Sum]] = [[] for _ in range(num_ranks)]

    def moves(self) -> Iterator[Callable[[], None]]:
        for told in self._told:
            if told:
                yield lambda told=told: self._tell(told)  # type: ignore[misc]
        if all(self.queues) and not any(self._told):
            yield self._add

    def _add(self) -> None:
        sums = [queue.popleft() for queue in self.queues]
        first = sums[0].op
        stages = {first.stage, first.peer} - {None}
        for one in sums:
            is_same = {one.op.stage, one.op.peer} - {None} == stages and one.op.part == first.part
            assert is_same, f"{one.op} meets {first}"
        for tensors in zip(*(one.tensors for one in sums), strict=True):
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.copy_(total)
        for told, one in zip(self._told, sums):
            one.settle()
            told.append(one)

    def _tell(self, told: list[_Sum]) -> None:
        one = told.pop()
        one.log.append(("end", one.op))
        one.ended()


@dataclass
class _Reducer:
    queue: deque[_Sum]
    peer: str
    log: Log

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]) -> None:
        self.queue.append(_Sum(op, tensors, settle, ended, self.log))

    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass
class Edges:
    """`transport.Edges` of one replica: both ends of an edge get the same wire. `meetings` are those of all replicas."""

    theatre: Theatre
    buffered: bool
    log: Log
    meetings: dict[tuple[int, ...], Meeting]
    wires: dict[tuple[int, str], Wire] = field(default_factory=dict)

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> _Reducer:
        if ranks not in self.meetings:
            meeting = self.meetings[ranks] = Meeting(len(ranks))
            self.theatre.wires.append(meeting)
        return _Reducer(self.meetings[ranks].queues[place], peer, self.log)

    def end(self, edge: int, direction: str, place: int, peer: str) -> _End:  # noqa: ARG002
        if (edge, direction) not in self.wires:
            wire = self.wires[edge, direction] = Wire(self.log, buffered=self.buffered)
            self.theatre.wires.append(wire)
        return _End(self.wires[edge, direction], peer)
