"""Messages between neighbouring stages on GPUs, over NCCL.

Not yet run on a machine with two GPUs.

Each stage edge and direction has a stream of its own, and a communicator of its own or, with `transport.communicators=pair`,
that of its two ranks and direction: then messages of several edges are sent and received in one order, which is the same
on both ranks because each launches its part of one order of all ops. Nothing waits on the host: F and B wait for the event
that ends their RECV. Only the form of a message that is not known yet has to reach the host, which waits for it at the turn of
the RECV: so ops are launched in the same order in every step. It travels over gloo at the turn of the SEND, ahead of the tensors:
a host that waited for its device between two of them would wait for a RECV that waits for the form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupNCCL, Store

from pipetrain.comm.courier import Courier, Pair, break_off, make_pair
from pipetrain.comm.ends import Arrived, Ended, MakeBuffers
from pipetrain.comm.failure import Monitor
from pipetrain.comm.forms import Form, flat_bytes
from pipetrain.comm.gloo import receive_form, send_form
from pipetrain.comm.lanes import Lanes
from pipetrain.schedule.op import Lane, Op

_TAG = 0
# A transfer needs few thread blocks; the rest of the GPU belongs to F, R and B.
_MAX_BLOCKS = 4


@dataclass(eq=False)
class _NcclGroup:
    """A group of NCCL with `peer`; several ends of messages may be one."""

    data: Pair
    peer: str
    lanes: Lanes
    monitor: Monitor
    is_open: bool = field(default=True, init=False)

    def close(self) -> None:
        """Close the group when the device has done all that it was given; one of a pipeline that failed was aborted."""
        was_open, self.is_open = self.is_open, False
        if not was_open or self.monitor.failure is not None:
            return
        device = self.lanes.device
        ended = device.record(device.current())  # the caller's stream comes after all that the steps have launched
        device.waited("the last messages")
        self.monitor.wait_polling(
            lambda: device.has_ended(ended),
            lambda: f"{self.monitor.name} waits for its device: the last messages with {self.peer}",
        )
        self.data.shutdown()  # type: ignore[attr-defined]

    def abort(self) -> None:
        if self.is_open:
            self.data.abort()  # type: ignore[attr-defined]


@dataclass(eq=False)
class NcclEnd(_NcclGroup):
    """One direction between this rank and another, `ends.MessageEnd`: NCCL for tensors, and gloo for forms, in the order of their messages.

    Several edges may share it; they are closed together.
    """

    forms: Pair
    other: int
    courier: Courier
    reads_later = True

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        known = self.hear(op) if form is None else form
        with self.lanes.timed(Lane.RECV, op):  # on the queue's own stream: the executor's `on`
            tensors = make_buffers(known)
            for tensor in self._lent(tensors):
                self.data.recv([tensor], self.other, _TAG).wait()
        arrived(known, lambda: tensors)

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended) -> None:
        if form is not None:
            self.tell(op, form)
        with self.lanes.timed(Lane.SEND, op):
            for tensor in self._lent(tensors):
                self.data.send([tensor], self.other, _TAG).wait()
        left()

    def _lent(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """As bytes: NCCL does not know all dtypes. And lent: it would keep the memory from us until the device gets there."""
        for tensor in tensors:
            if tensor.numel():
                yield self.lanes.device.lent(flat_bytes(tensor).view(torch.uint8))

    def tell(self, op: Op, form: Form) -> None:
        """The other rank gets the form of the message that comes next: see `hear`."""

        def job() -> Callable[[], None]:
            send_form(self.forms, self.other, form)
            return lambda: None  # nobody waits for a form to have left

        self.courier.submit(str(op), job)

    def hear(self, op: Op) -> Form:
        """The next form that the other rank tells.

        Raises PipelineError: it does not, or another rank has failed.
        """
        came: list[Form] = []

        def job() -> Callable[[], None]:
            form = receive_form(self.forms, self.other)
            return lambda: came.append(form)

        self.courier.submit(str(op), job)
        self.monitor.wait(lambda: bool(came), lambda: f"{self.monitor.name} waits in {op} from {self.peer}")
        return came[0]

    def close(self) -> None:
        """Everything has been sent and received, or is on its way."""
        if self.is_open:
            self.courier.close()
        super().close()

    def abort(self) -> None:
        if self.is_open:
            break_off(self.forms, self.other)
        super().abort()


class NcclReducer(_NcclGroup):
    """One end of several ranks that add up gradients: `ends.Reducer`. The sums are where the gradients were."""

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]) -> None:
        with self.lanes.timed(Lane.REDUCE, op):  # on the lane's own stream: the executor's `on`
            for tensor in tensors:
                self.data.allreduce([self.lanes.device.lent(tensor)], AllreduceOptions()).wait()
            settle()
        ended()


@dataclass(eq=False)
class NcclEdges:
    """Makes the ends of the stage edges of one rank; `store` is that of its replica, `of_all` that of all ranks. `communicators`: one for
    each edge and direction, or for each pair of ranks and direction."""

    store: Store
    of_all: Store
    lanes: Lanes
    monitor: Monitor
    device: torch.device
    stage_ranks: Sequence[int]
    communicators: str
    made: dict[str, NcclEnd] = field(default_factory=dict, init=False)

    def end(self, edge: int, direction: str, place: int, peer: str) -> NcclEnd:
        sends = (direction == "F") == (place == 0)
        name = f"edge/{edge}/{direction}"
        if self.communicators == "pair":
            own, other = self.stage_ranks[edge + place], self.stage_ranks[edge + 1 - place]
            source, target = (own, other) if sends else (other, own)
            name, place = f"pair/{source}/{target}", int(own > other)
        if name not in self.made:
            data = self._group(PrefixStore(name, self.store), place)
            # The communicator is made at its first use, which waits for the other rank: use it here, where every rank goes
            # through the edges in the same order, and not in a step.
            transfer = data.send if sends else data.recv
            transfer([torch.zeros(1, device=self.device)], 1 - place, _TAG).wait()
            self.lanes.device.finish(self.lanes.device.current())
            forms = make_pair(self.store, f"{name}/forms", place, peer, self.monitor)
            courier = Courier(f"forms {'to' if sends else 'from'} {peer}", peer, self.monitor)
            self.made[name] = NcclEnd(data, peer, self.lanes, self.monitor, forms, 1 - place, courier)
        return self.made[name]

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> NcclReducer:
        name = f"reduce/{'/'.join(map(str, ranks))}"
        data = self._group(PrefixStore(name, self.of_all), place, len(ranks))
        data.allreduce([torch.zeros(1, device=self.device)], AllreduceOptions()).wait()
        self.lanes.device.finish(self.lanes.device.current())
        return NcclReducer(data, peer, self.lanes, self.monitor)

    def _group(self, store: Store, place: int, num_ranks: int = 2) -> Pair:
        options = ProcessGroupNCCL.Options()
        options.config.max_ctas = _MAX_BLOCKS
        # Its kernels run on a stream of its own, of this priority: a message that is there should not wait for F, R or B.
        options.is_high_priority_stream = True
        # torch ends the process when a transfer takes longer: so that the rank that hangs has been named before.
        options._timeout = timedelta(seconds=2 * self.monitor.timeout_seconds + 60)
        data: Pair = ProcessGroupNCCL(store, place, num_ranks, options)  # type: ignore[assignment]
        return data
