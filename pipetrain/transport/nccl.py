"""Messages between neighbouring stages on GPUs, over NCCL.

Not yet run on a machine with two GPUs.

Each stage edge and direction has a communicator and a stream of its own, so that no message waits behind another edge's.
Nothing waits on the host: F and B wait for the event that ends their RECV. Only the form of a message that is not known
yet has to reach the host; it travels over gloo, and its tensors are then received just in time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupNCCL, Store

from pipetrain.group.courier import Courier
from pipetrain.group.failure import Monitor
from pipetrain.group.pair import Pair, break_off, make_pair
from pipetrain.schedule.op import Lane, Op
from pipetrain.transport.forms import Form, flat_bytes
from pipetrain.transport.gloo import receive_form, send_form
from pipetrain.transport.lanes import Lanes

_TAG = 0
# A transfer needs few thread blocks; the rest of the GPU belongs to F, R and B.
_MAX_BLOCKS = 4


class NcclEdges:
    """Makes the ends of the stage edges of one rank."""

    def __init__(self, store: Store, lanes: Lanes, monitor: Monitor, device: torch.device) -> None:
        self._store = store
        self._lanes = lanes
        self._monitor = monitor
        self._device = device

    def inbound(self, edge: int, direction: str, place: int, peer: str) -> NcclInbound:
        data, forms = self._meet(edge, direction, place, sends=False)
        return NcclInbound(data, forms, 1 - place, peer, self._lanes, self._monitor)

    def outbound(self, edge: int, direction: str, place: int, peer: str) -> NcclOutbound:
        data, forms = self._meet(edge, direction, place, sends=True)
        return NcclOutbound(data, forms, 1 - place, peer, self._lanes, self._monitor)

    def _meet(self, edge: int, direction: str, place: int, *, sends: bool) -> tuple[Pair, Pair]:
        name = f"edge/{edge}/{direction}"
        forms = make_pair(self._store, f"{name}/forms", place, self._monitor.timeout_seconds)
        options = ProcessGroupNCCL.Options()
        options.config.max_ctas = _MAX_BLOCKS
        options._timeout = timedelta(seconds=self._monitor.timeout_seconds)
        data: Pair = ProcessGroupNCCL(PrefixStore(name, self._store), place, 2, options)  # type: ignore[assignment]
        # The communicator is made at its first use, which waits for the other rank: use it here, where every rank goes
        # through the edges in the same order, and not in a step.
        greeting = torch.zeros(1, device=self._device)
        work = data.send([greeting], 1 - place, _TAG) if sends else data.recv([greeting], 1 - place, _TAG)
        work.wait()
        self._lanes.device.finish(self._lanes.device.current())
        return data, forms


class NcclInbound:
    """The receiving end of one stage edge and direction: `transport.Inbound`."""

    def __init__(self, data: Pair, forms: Pair, source: int, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._data = data
        self._forms = forms
        self._source = source
        self._lanes = lanes
        self._courier = Courier(f"forms from {peer}", peer, monitor)

    def post(
        self,
        op: Op,
        form: Form | None,
        make_buffers: Callable[[Form], list[Tensor]],
        arrived: Callable[[Form, Callable[[], list[Tensor]]], None],
    ) -> None:
        if form is not None:
            tensors = self._receive(op, make_buffers, form)
            arrived(form, lambda: tensors)
            return

        def job() -> Callable[[], None]:
            found = receive_form(self._forms, self._source)
            return lambda: arrived(found, lambda: self._receive_now(op, make_buffers, found))

        self._courier.submit(str(op), job)

    def _receive(self, op: Op, make_buffers: Callable[[Form], list[Tensor]], form: Form) -> list[Tensor]:
        """Post the receive on the queue's own stream. [1] is the executor's [2] receive [3] record the arrival."""
        with self._lanes.on(Lane.RECV, (), op), self._lanes.timed(Lane.RECV, op):
            tensors = make_buffers(form)
            for tensor in tensors:
                self._data.recv([flat_bytes(tensor)], self._source, _TAG).wait()
        for tensor in tensors:
            self._lanes.share(tensor)  # allocated on the queue's stream, read by F, R and B on theirs
        return tensors

    def _receive_now(self, op: Op, make_buffers: Callable[[Form], list[Tensor]], form: Form) -> list[Tensor]:
        """Receive just in time: the lane that uses the tensors waits for them here."""
        tensors = self._receive(op, make_buffers, form)
        self._lanes.join(op)
        return tensors

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        break_off(self._forms, self._source)
        self._data.abort()  # type: ignore[attr-defined]


class NcclOutbound:
    """The sending end of one stage edge and direction: `transport.Outbound`.

    The host of the receiver does not wait for a message, so nobody there could read that its form has changed.
    """

    tells_changes = False

    def __init__(self, data: Pair, forms: Pair, target: int, peer: str, lanes: Lanes, monitor: Monitor) -> None:
        self.peer = peer
        self._data = data
        self._forms = forms
        self._target = target
        self._lanes = lanes
        self._courier = Courier(f"forms to {peer}", peer, monitor)

    def send(
        self,
        op: Op,
        form: Form | None,
        tensors: list[Tensor],
        left: Callable[[], None],
        expected: Form | None = None,
    ) -> None:
        assert expected is None, f"{op}: a change of form cannot be told over NCCL"
        if form is not None:

            def job() -> Callable[[], None]:
                send_form(self._forms, self._target, form)
                return lambda: None

            self._courier.submit(str(op), job)
        with self._lanes.timed(Lane.SEND, op):  # on the queue's own stream: the executor's `on`
            for tensor in tensors:
                self._data.send([flat_bytes(tensor)], self._target, _TAG).wait()
        left()

    def close(self) -> None:
        self._courier.close()

    def abort(self) -> None:
        break_off(self._forms, self._target)
        self._data.abort()  # type: ignore[attr-defined]
