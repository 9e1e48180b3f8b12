"""All messages of one rank between stages: posted, sent and taken by op; and which library carries them."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.utils import _pytree as pytree

from pipetrain.comm.ends import Collect, Edges, End, MessageEnd, Reducer
from pipetrain.comm.failure import Monitor
from pipetrain.comm.forms import Form, conform, pack, unpack
from pipetrain.comm.gloo import GlooEdges
from pipetrain.comm.lanes import Lanes, Ring
from pipetrain.comm.pinned import PinnedEdges
from pipetrain.schedule.kinds import REDUCING, Direction, Kind
from pipetrain.schedule.op import Lane, Op, queue_of
from pipetrain.stage.meter import ActivationMeter

_MOST_NAMED = 8  # ranks, in a message
AUTO = "auto"  # gloo on a CPU, NCCL on GPUs
GLOO, NCCL, PINNED = "gloo", "nccl", "pinned"


class Transport:
    """The ends of every stage edge of a rank, one per direction.

    A step that is `described` sends each message with its form in front, and both ends remember the form by op; a later
    step sends the tensors' bytes alone, and a message of another form than remembered is refused.

    `edges` makes the ends. A transfer that has ended stands in `ended` until the executor takes it: the threads of the ends only
    add to it.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        rank: int,
        edges: Edges | None,
        meter: ActivationMeter,
        device: torch.device,
        lanes: Lanes,
        tied: Sequence[tuple[int, int]] = (),
        replicas: Sequence[Sequence[int]] = (),
        named: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """`stage_ranks` are the ranks of this replica, `replicas` those of each, this one too, where there are several; `tied` are the pairs
        of stages that share parameters. `named` says what a rank is called."""
        self._rank = rank
        self._named = named
        self._meter = meter
        self._device = device
        self._lanes = lanes
        self._messages: dict[tuple[int, Kind], MessageEnd] = {}  # by own stage, and the kind of its receives or sends
        self._reducers: dict[tuple[int, int | None], Reducer] = {}  # by own stage and the other one
        self._arrived: dict[Op, tuple[Form, Collect]] = {}
        self._early: dict[Op, list[int]] = {}  # in the meter, from arrival to use
        self._unsent: set[Op] = set()
        self._reducing: set[Op] = set()
        self._rings: dict[tuple[int, Kind], Ring] = {}  # of receives, on a device that runs ahead
        self.ended: deque[tuple[Op, Callable[[], None]]] = deque()  # and what its end still has to launch
        self._forms: dict[Op, Form] = {}
        self._described = (True, True)
        self.has_peers = edges is not None  # False: one process, so no op of it is a transfer
        if edges is not None:
            self._connect(stage_ranks, edges)
            self._connect_reducers(stage_ranks, edges, tied, replicas or [stage_ranks])

    def _connect(self, stage_ranks: Sequence[int], edges: Edges) -> None:
        """Meet the ranks at the other ends.

        Every rank goes through the edges in the same order, so none waits in a ring; every second edge first, so that where a
        rank holds one stage all meet in two rounds, and not one after the other.
        """
        edge_ranks = list(enumerate(itertools.pairwise(stage_ranks)))
        for edge, (low, high) in (*edge_ranks[::2], *edge_ranks[1::2]):
            if low == high or self._rank not in (low, high):
                continue
            place = int(self._rank == high)
            kinds = (Kind.RECV_F, Kind.SEND_B) if place else (Kind.SEND_F, Kind.RECV_B)
            for direction, kind in zip("FB", kinds):
                peer = self._named(low if place else high)
                self._messages[edge + place, kind] = edges.end(edge, direction, place, peer)

    def _connect_reducers(
        self,
        stage_ranks: Sequence[int],
        edges: Edges,
        tied: Sequence[tuple[int, int]],
        replicas: Sequence[Sequence[int]],
    ) -> None:
        """One connection for the same ranks, whatever they have in common; all ranks go through them in one order."""
        made: dict[tuple[int, ...], Reducer] = {}

        def meet(*stages: int) -> Reducer:
            ranks = tuple(sorted({ranks[stage] for ranks in replicas for stage in stages}))
            if ranks not in made:
                place = ranks.index(self._rank)
                made[ranks] = edges.reducer(ranks, place, self._others(ranks))
            return made[ranks]

        for stage, rank in enumerate(stage_ranks):
            if len(replicas) > 1 and rank == self._rank:
                self._reducers[stage, None] = meet(stage)
        for stages in tied:
            holders = [stage_ranks[stage] for stage in stages]
            if holders[0] != holders[1] and self._rank in holders:
                own = holders.index(self._rank)
                self._reducers[stages[own], stages[1 - own]] = meet(*stages)

    def _others(self, ranks: Sequence[int]) -> str:
        others = [self._named(rank) for rank in ranks if rank != self._rank]
        rest = [f"one of {len(others) - _MOST_NAMED} more"] if len(others) > _MOST_NAMED else []
        return " or ".join([*others[:_MOST_NAMED], *rest])

    def start_step(self, forms: dict[Op, Form], *, described: tuple[bool, bool]) -> None:
        """`forms` of this kind of step: written where `described` (edges before, after the stage), else read."""
        self._forms, self._described = forms, described

    def assert_nothing_is_held(self) -> None:
        """A step takes all that came, and all that it sent has left."""
        for what, ops in (
            ("not taken", self._arrived),
            ("early", self._early),
            ("not sent", self._unsent),
            ("not added up", self._reducing),
        ):
            assert not ops, f"messages are left over, {what}: {', '.join(map(str, ops))}"
        assert not self.ended, f"nobody was told that {', '.join(str(op) for op, _ in self.ended)} ended"

    def _is_described(self, op: Op) -> bool:
        return self._described[op.kind.row.uses_edge_after]

    def post(self, op: Op) -> None:
        """Post a receive; it waits in its queue for those before it."""
        form = None if self._is_described(op) else self._forms[op]

        def arrived(found: Form, collect: Collect, land: Callable[[], None] = _nothing, /) -> None:
            self._arrived[op] = (found, collect)
            self._forms[op] = found

            def landed() -> None:
                land()
                # An input that has come counts as an activation from now on.
                coming = collect() if _is_activation(op) else ()
                self._early[op] = [self._meter.hold(tensor, on_its_way=True) for tensor in coming]

            if land is _nothing:
                landed()
            self.ended.append((op, land if land is _nothing else landed))

        self._messages[op.stage, op.kind].post(op, form, functools.partial(self._make_buffers, op), arrived)

    def _make_buffers(self, op: Op, form: Form) -> list[Tensor]:
        """What a message of this form is received into: on any thread, or where the device runs ahead on the one that launches."""
        if self._lanes.device.runs_ahead:
            ring = self._rings.get((op.stage, op.kind))
            if ring is None:
                assert self._lanes.ahead is not None
                ring = self._rings[op.stage, op.kind] = Ring(self._lanes.ahead, queue_of(Lane.RECV, op), self._device)
            return [ring.take(tensor) for tensor in form.tensors]
        return [tensor.empty(self._device) for tensor in form.tensors]

    def take(self, op: Op) -> tuple[list[Any], Form]:
        """The leaves of a message that has arrived, and its form."""
        form, collect = self._arrived.pop(op)
        for key in self._early.pop(op):
            self._meter.release(key, on_its_way=True)
        return unpack(form, collect()), form

    def send(
        self,
        op: Op,
        leaves: Sequence[Any],
        wants_gradient: Sequence[bool],
        spec: pytree.TreeSpec | None,
        fixed: Mapping[int, str] | None = None,
    ) -> None:
        """Send a message. The tensors count as activations until they have left, where they are outputs.

        On a device it is called on the stream of the queue, which comes after the ops that made them: so do copies of them
        that are made here, and the SEND comes after the copies.

        Raises PipelineError: another form than in earlier steps.
        """
        end = self._messages[op.stage, op.kind]
        form, tensors = pack(leaves, wants_gradient, spec, fixed)
        told = form if self._is_described(op) else None
        if told is not None:
            self._forms[op] = form
        elif form != self._forms[op]:
            tensors = conform(tensors, self._forms[op], form, self._device, f"{self._named(self._rank)} in {op}")
        keys = [self._meter.hold(tensor, on_its_way=True) for tensor in tensors] if _is_activation(op) else []
        self._unsent.add(op)
        # Of a tensor with gaps `tensors` has a copy, which the device may still have to make.
        given = list(leaves) if self._lanes.device.runs_ahead else []

        def let_go() -> None:
            for key in keys:
                self._meter.release(key, on_its_way=True)
            tensors.clear()
            given.clear()

        def left() -> None:
            if end.reads_later:
                assert self._lanes.ahead is not None
                self._lanes.ahead.hold(queue_of(Lane.SEND, op), op, let_go)
            else:
                let_go()
            self._unsent.discard(op)
            self.ended.append((op, _nothing))

        end.send(op, told, tensors, left)

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None]) -> None:
        """Make each of `tensors` the sum over all ranks that take part in `op`, then `settle()`. The caller holds them until the step ends."""
        self._reducing.add(op)

        def ended(land: Callable[[], None] = _nothing, /) -> None:
            self._reducing.discard(op)
            self.ended.append((op, land))

        self._reducers[op.stage, op.peer].reduce(op, tensors, settle, ended)

    def describe(self, op: Op) -> str:
        """What a rank that waits for `op` says; empty if it is no transfer."""
        end, word = self._end_of(op), {Lane.RECV: "from", Lane.SEND: "to"}.get(op.kind.row.lane, "for")
        return f"{self._named(self._rank)} waits in {op} {word} {end.peer}" if end is not None else ""

    def disconnect(self, op: Op) -> None:
        """Break the connection that carries `op`; every connection of this rank where `op` is no message of it."""
        end = self._end_of(op)
        for one in [end] if end is not None else self._ends():
            one.abort()

    def _end_of(self, op: Op) -> End | None:
        if op.kind in REDUCING:
            return self._reducers.get((op.stage, op.peer))
        return self._messages.get((op.stage, op.kind))

    def _ends(self) -> list[End]:
        return [*self._messages.values(), *dict.fromkeys(self._reducers.values())]

    def close(self) -> None:
        for end in self._ends():
            end.close()

    def abort(self) -> None:
        """A step has failed: break every connection, so that nobody waits on this rank."""
        for end in self._ends():
            end.abort()


def _is_activation(op: Op) -> bool:
    """Whether a message counts as an activation: gradients do not."""
    return op.kind.row.direction is Direction.FORWARD


def _nothing() -> None:
    """Of a transfer that has ended there is nothing left to launch."""


def make_edges(
    store: Store,
    lanes: Lanes,
    monitor: Monitor,
    device: torch.device,
    stage_ranks: Sequence[int],
    *,
    edges: str,
    communicators: str,
    of_all: Store,
) -> Edges:
    """The library that carries the messages, as `carrier_of` says. `store` is that of this replica, `of_all` that of all ranks.

    Raises ValueError: `edges` names one that there is not here.
    """
    carrier = carrier_of(edges, device)
    if carrier == NCCL:
        from pipetrain.comm.nccl import NcclEdges  # only where torch was built with NCCL

        return NcclEdges(store, of_all, lanes, monitor, device, stage_ranks, communicators)
    made = PinnedEdges if carrier == PINNED else GlooEdges
    return made(store, of_all, lanes, monitor)


def carrier_of(edges: str, device: torch.device) -> str:
    """What `edges` (`auto`, `nccl` or `pinned`) means where ranks compute on `device`: `gloo`, `nccl` or `pinned`.

    Raises ValueError: it cannot be had here; with the key and what to use instead.
    """
    if edges == PINNED:
        return PINNED
    if device.type == "cpu":
        if edges == NCCL:
            raise ValueError(
                "transport.backend=nccl: NCCL carries messages between GPUs, and the ranks compute on the CPU; use transport.backend=auto"
            )
        return GLOO
    if not dist.is_nccl_available():
        raise ValueError(
            f"transport.backend={edges}: this build of torch has no NCCL, which carries messages between GPUs; install one that has, "
            "or use transport.backend=pinned (make_plan(..., edges='pinned')), which takes them through memory of the host"
        )
    return NCCL
