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

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupNCCL, Store

from pipetrain.comm.courier import Courier, Pair, break_off, make_pair
from pipetrain.comm.device import Device
from pipetrain.comm.ends import Arrived, Ended, MakeBuffers
from pipetrain.comm.failure import Monitor
from pipetrain.comm.forms import Form, flat_bytes
from pipetrain.comm.gloo import receive_form, send_form
from pipetrain.comm.lanes import Lanes
from pipetrain.schedule.op import Lane, Op

_TAG = 0
# A transfer needs few thread blocks; the rest of the GPU belongs to F, R and B.
_MAX_BLOCKS = 4


class NcclEdges:
    """Makes the ends of the stage edges of one rank; `store` is that of its replica, `of_all` that of all ranks. `communicators`: one for
    each edge and direction, or for each pair of ranks and direction."""

    def __init__(
        self,
        store: Store,
        lanes: Lanes,
        monitor: Monitor,
        device: torch.device,
        stage_ranks: Sequence[int],
        communicators: str,
        of_all: Store | None = None,
    ) -> None:
        self._store = store
        self._of_all = store if of_all is None else of_all
        self._lanes = lanes
        self._monitor = monitor
        self._device = device
        self._stage_ranks = stage_ranks
        self._per_pair = communicators == "pair"
        self._made: dict[str, Communicator] = {}

    def inbound(self, edge: int, direction: str, place: int, peer: str) -> NcclEnd:
        return NcclEnd(self._meet(edge, direction, place, peer, sends=False), self._lanes)

    def outbound(self, edge: int, direction: str, place: int, peer: str) -> NcclEnd:
        return NcclEnd(self._meet(edge, direction, place, peer, sends=True), self._lanes)

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> NcclReducer:
        name = f"reduce/{'/'.join(map(str, ranks))}"
        data = self._group(PrefixStore(name, self._of_all), place, len(ranks))
        data.allreduce([torch.zeros(1, device=self._device)], AllreduceOptions()).wait()
        self._lanes.device.finish(self._lanes.device.current())
        return NcclReducer(data, peer, self._lanes, self._monitor)

    def _meet(self, edge: int, direction: str, place: int, peer: str, *, sends: bool) -> Communicator:
        name = f"edge/{edge}/{direction}"
        if self._per_pair:
            own, other = self._stage_ranks[edge + place], self._stage_ranks[edge + 1 - place]
            source, target = (own, other) if sends else (other, own)
            name, place = f"pair/{source}/{target}", int(own > other)
        if name not in self._made:
            what = f"forms {'to' if sends else 'from'} {peer}"
            self._made[name] = Communicator(
                self._data(name, place, sends=sends),
                make_pair(self._store, f"{name}/forms", place, peer, self._monitor),
                1 - place,
                Courier(what, peer, self._monitor),
                self._lanes.device,
                self._monitor,
            )
        return self._made[name]

    def _data(self, name: str, place: int, *, sends: bool) -> Pair:
        data = self._group(PrefixStore(name, self._store), place)
        # The communicator is made at its first use, which waits for the other rank: use it here, where every rank goes
        # through the edges in the same order, and not in a step.
        greeting = torch.zeros(1, device=self._device)
        work = data.send([greeting], 1 - place, _TAG) if sends else data.recv([greeting], 1 - place, _TAG)
        work.wait()
        self._lanes.device.finish(self._lanes.device.current())
        return data

    def _group(self, store: Store, place: int, num_ranks: int = 2) -> Pair:
        options = ProcessGroupNCCL.Options()
        options.config.max_ctas = _MAX_BLOCKS
        # Its kernels run on a stream of its own, of this priority: a message that is there should not wait for F, R or B.
        options.is_high_priority_stream = True
        # torch ends the process when a transfer takes longer: so that the rank that hangs has been named before.
        options._timeout = timedelta(seconds=2 * self._monitor.timeout_seconds + 60)
        data: Pair = ProcessGroupNCCL(store, place, num_ranks, options)  # type: ignore[assignment]
        return data


class Communicator:
    """One direction between this rank and another: NCCL for tensors, and gloo for forms, in the order of their messages.

    Several ends may share it; they are closed together.
    """

    def __init__(self, data: Pair, forms: Pair, other: int, courier: Courier, device: Device, monitor: Monitor) -> None:
        self.peer = courier.peer
        self._data = data
        self._forms = forms
        self._other = other
        self._courier = courier
        self._device = device
        self._monitor = monitor
        self._is_open = True

    def send(self, tensors: Sequence[Tensor]) -> None:
        """On the current stream. The tensors are held by whoever calls until it has ended."""
        for tensor in tensors:
            if tensor.numel():
                self._data.send([self._bytes_of(tensor)], self._other, _TAG).wait()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """On the current stream."""
        for tensor in tensors:
            if tensor.numel():
                self._data.recv([self._bytes_of(tensor)], self._other, _TAG).wait()

    def _bytes_of(self, tensor: Tensor) -> Tensor:
        """As bytes: NCCL does not know all dtypes. And lent: it would keep the memory from us until the device gets there."""
        return self._device.lent(flat_bytes(tensor).view(torch.uint8))

    def tell(self, op: Op, form: Form) -> None:
        """The other rank gets the form of the message that comes next: see `hear`."""

        def job() -> Callable[[], None]:
            send_form(self._forms, self._other, form)
            return lambda: None  # nobody waits for a form to have left

        self._courier.submit(str(op), job)

    def hear(self, op: Op) -> Form:
        """The next form that the other rank tells.

        Raises:
            PipelineError: it does not, or another rank has failed.
        """
        came: list[Form] = []

        def job() -> Callable[[], None]:
            form = receive_form(self._forms, self._other)
            return lambda: came.append(form)

        self._courier.submit(str(op), job)
        self._monitor.wait(lambda: bool(came), lambda: f"{self._monitor.name} waits in {op} from {self.peer}")
        return came[0]

    def close(self) -> None:
        """Everything has been sent and received, or is on its way."""
        if not self._is_open:
            return
        self._is_open = False
        self._courier.close()
        _shut(self._data, self.peer, self._device, self._monitor)

    def abort(self) -> None:
        if self._is_open:
            break_off(self._forms, self._other)
            self._data.abort()  # type: ignore[attr-defined]


def _shut(data: Pair, peer: str, device: Device, monitor: Monitor) -> None:
    """Close a group when the device has done all that it was given; one of a pipeline that failed was aborted."""
    if monitor.failure is not None:
        return
    ended = device.record(device.current())  # the caller's stream comes after all that the steps have launched
    device.waited("the last messages")
    monitor.wait_polling(
        lambda: device.has_ended(ended), lambda: f"{monitor.name} waits for its device: the last messages with {peer}"
    )
    data.shutdown()  # type: ignore[attr-defined]


class NcclEnd:
    """Either end of one stage edge and direction: `ends.Inbound`, `ends.Outbound`."""

    reads_later = True

    def __init__(self, communicator: Communicator, lanes: Lanes) -> None:
        self.peer = communicator.peer
        self._communicator = communicator
        self._lanes = lanes
        self.close, self.abort = communicator.close, communicator.abort

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        known = self._communicator.hear(op) if form is None else form
        with self._lanes.timed(Lane.RECV, op):  # on the queue's own stream: the executor's `on`
            tensors = make_buffers(known)
            self._communicator.receive(tensors)
        arrived(known, lambda: tensors)

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended) -> None:
        if form is not None:
            self._communicator.tell(op, form)
        with self._lanes.timed(Lane.SEND, op):
            self._communicator.send(tensors)
        left()


class NcclReducer:
    """One end of several ranks that add up gradients: `ends.Reducer`. The sums are where the gradients were."""

    def __init__(self, data: Pair, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._data = data
        self._lanes = lanes
        self._monitor = monitor
        self._is_open = True

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]) -> None:
        with self._lanes.timed(Lane.REDUCE, op):  # on the lane's own stream: the executor's `on`
            for tensor in tensors:
                self._data.allreduce([self._lanes.device.lent(tensor)], AllreduceOptions()).wait()
            settle()
        ended()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            _shut(self._data, self.peer, self._lanes.device, self._monitor)

    def abort(self) -> None:
        if self._is_open:
            self._data.abort()  # type: ignore[attr-defined]
