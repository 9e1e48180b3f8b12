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


class _NcclGroup:
    """A group of NCCL with `peer`; several ends of messages may be one."""

    def __init__(self, data: Pair, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._data = data
        self._lanes = lanes
        self._monitor = monitor
        self._is_open = True

    def close(self) -> None:
        """Close the group when the device has done all that it was given; one of a pipeline that failed was aborted."""
        was_open, self._is_open = self._is_open, False
        if not was_open or self._monitor.failure is not None:
            return
        device = self._lanes.device
        ended = device.record(device.current())  # the caller's stream comes after all that the steps have launched
        device.waited("the last messages")
        self._monitor.wait_polling(
            lambda: device.has_ended(ended),
            lambda: f"{self._monitor.name} waits for its device: the last messages with {self.peer}",
        )
        self._data.shutdown()  # type: ignore[attr-defined]

    def abort(self) -> None:
        if self._is_open:
            self._data.abort()  # type: ignore[attr-defined]


class NcclEnd(_NcclGroup):
    """One direction between this rank and another, `ends.MessageEnd`: NCCL for tensors, and gloo for forms, in the order of their messages.

    Several edges may share it; they are closed together.
    """

    reads_later = True

    def __init__(
        self, data: Pair, forms: Pair, other: int, courier: Courier, peer: str, lanes: Lanes, monitor: Monitor
    ) -> None:
        super().__init__(data, peer, lanes, monitor)
        self._forms = forms
        self._other = other
        self._courier = courier

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        known = self.hear(op) if form is None else form
        with self._lanes.timed(Lane.RECV, op):  # on the queue's own stream: the executor's `on`
            tensors = make_buffers(known)
            for tensor in self._lent(tensors):
                self._data.recv([tensor], self._other, _TAG).wait()
        arrived(known, lambda: tensors)

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended) -> None:
        if form is not None:
            self.tell(op, form)
        with self._lanes.timed(Lane.SEND, op):
            for tensor in self._lent(tensors):
                self._data.send([tensor], self._other, _TAG).wait()
        left()

    def _lent(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """As bytes: NCCL does not know all dtypes. And lent: it would keep the memory from us until the device gets there."""
        for tensor in tensors:
            if tensor.numel():
                yield self._lanes.device.lent(flat_bytes(tensor).view(torch.uint8))

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
        if self._is_open:
            self._courier.close()
        super().close()

    def abort(self) -> None:
        if self._is_open:
            break_off(self._forms, self._other)
        super().abort()


class NcclReducer(_NcclGroup):
    """One end of several ranks that add up gradients: `ends.Reducer`. The sums are where the gradients were."""

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]) -> None:
        with self._lanes.timed(Lane.REDUCE, op):  # on the lane's own stream: the executor's `on`
            for tensor in tensors:
                self._data.allreduce([self._lanes.device.lent(tensor)], AllreduceOptions()).wait()
            settle()
        ended()


class NcclEdges:
    """Makes the ends of the stage edges of one rank; `store` is that of its replica, `of_all` that of all ranks. `communicators`: one for
    each edge and direction, or for each pair of ranks and direction."""

    def __init__(
        self,
        store: Store,
        of_all: Store,
        lanes: Lanes,
        monitor: Monitor,
        device: torch.device,
        stage_ranks: Sequence[int],
        communicators: str,
    ) -> None:
        self._store = store
        self._of_all = of_all
        self._lanes = lanes
        self._monitor = monitor
        self._device = device
        self._stage_ranks = stage_ranks
        self._per_pair = communicators == "pair"
        self._made: dict[str, NcclEnd] = {}

    def end(self, edge: int, direction: str, place: int, peer: str) -> NcclEnd:
        sends = (direction == "F") == (place == 0)
        name = f"edge/{edge}/{direction}"
        if self._per_pair:
            own, other = self._stage_ranks[edge + place], self._stage_ranks[edge + 1 - place]
            source, target = (own, other) if sends else (other, own)
            name, place = f"pair/{source}/{target}", int(own > other)
        if name not in self._made:
            data = self._group(PrefixStore(name, self._store), place)
            # The communicator is made at its first use, which waits for the other rank: use it here, where every rank goes
            # through the edges in the same order, and not in a step.
            transfer = data.send if sends else data.recv
            transfer([torch.zeros(1, device=self._device)], 1 - place, _TAG).wait()
            self._lanes.device.finish(self._lanes.device.current())
            forms = make_pair(self._store, f"{name}/forms", place, peer, self._monitor)
            courier = Courier(f"forms {'to' if sends else 'from'} {peer}", peer, self._monitor)
            self._made[name] = NcclEnd(data, forms, 1 - place, courier, peer, self._lanes, self._monitor)
        return self._made[name]

    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> NcclReducer:
        name = f"reduce/{'/'.join(map(str, ranks))}"
        data = self._group(PrefixStore(name, self._of_all), place, len(ranks))
        data.allreduce([torch.zeros(1, device=self._device)], AllreduceOptions()).wait()
        self._lanes.device.finish(self._lanes.device.current())
        return NcclReducer(data, peer, self._lanes, self._monitor)

    def _group(self, store: Store, place: int, num_ranks: int = 2) -> Pair:
        options = ProcessGroupNCCL.Options()
        options.config.max_ctas = _MAX_BLOCKS
        # Its kernels run on a stream of its own, of this priority: a message that is there should not wait for F, R or B.
        options.is_high_priority_stream = True
        # torch ends the process when a transfer takes longer: so that the rank that hangs has been named before.
        options._timeout = timedelta(seconds=2 * self._monitor.timeout_seconds + 60)
        data: Pair = ProcessGroupNCCL(store, place, num_ranks, options)  # type: ignore[assignment]
        return data
