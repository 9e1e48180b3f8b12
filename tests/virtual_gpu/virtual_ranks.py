"""Runs the real `Pipeline` on virtual GPUs, a thread per rank, and gives back what each rank's GPU was told.

What is replaced: the group that `Pipeline` joins (its chain and forms go through queues in memory), torch's
`ProcessGroupNCCL`, and the device verbs. Executor, lanes, stages, transport and the ends of `comm/nccl.py` are the
ones that run everywhere.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store

from pipetrain.comm import lanes as lanes_module
from pipetrain.comm.coordinates import grid_of
from pipetrain.comm.courier import Courier
from pipetrain.comm.failure import Monitor
from pipetrain.comm.forms import Form
from pipetrain.comm.group import Group
from pipetrain.comm.lanes import Lanes
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.messages import partner_of
from pipetrain.schedule.op import Lane, Op
from virtual_gpu.baton import Baton
from virtual_gpu.recorded import Recording
from virtual_gpu.virtual_device import VirtualDevice
from virtual_gpu.virtual_nccl import VirtualGroup, Wires

CPU = torch.device("cpu")
TIMEOUT_SECONDS = 120.0
_numbers = itertools.count()


class VirtualRanks:
    """`num_ranks` ranks in this process. `slow` is one that goes on only when no other can."""

    def __init__(self, num_ranks: int, *, slow: int | None = None) -> None:
        self._num_ranks = num_ranks
        self._baton = Baton(slow)
        self._wires = Wires(self._baton)
        self._store = HashStore()
        self._hosts = _Hosts()
        self._here = threading.local()
        self._devices = [VirtualDevice(rank) for rank in range(num_ranks)]

    def run(self, function: Callable[[], Any]) -> tuple[Recording, list[Any]]:
        """`function()` on every rank, where it makes a `Pipeline` and calls it. What was recorded, and what it returned.

        Raises:
            What the first rank to fail raised.
        """
        values: list[Any] = [None] * self._num_ranks
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            self._here.rank = rank
            self.device.is_launched_here()
            try:
                with self._baton.held(rank), self._devices[rank].kernels():
                    values[rank] = function()
            except BaseException as error:
                errors.append(error)

        with self._in_place():
            threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self._num_ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return [device.recording for device in self._devices], values

    @property
    def device(self) -> VirtualDevice:
        """That of the rank whose thread asks."""
        return self._devices[self._here.rank]

    @property
    def replica(self) -> int:
        """That of the rank whose thread asks."""
        return self._here.replica

    # What is put in the place of torch's, and what is written down besides ------------------------------------------

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with ExitStack() as stack:

            def put(target: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(target, name, value))

            stack.enter_context(nccl_there())
            from pipetrain.comm import chain, nccl
            from pipetrain.runtime import pipeline, runner
            from pipetrain.snapshot import saver

            put(nccl, "ProcessGroupNCCL", _Maker(self))
            put(pipeline, "join_group", self._join_group)
            put(lanes_module, "device_of", lambda _: self.device)
            put(runner, "make_edges", _nccl_edges)
            for module in (chain, nccl):
                put(module, "make_pair", self._hosts.pair)
            for module in (chain, nccl):
                put(module, "break_off", lambda pair, _: pair.cut())
            put(Lanes, "on", _marked(Lanes.on, self))
            put(nccl.NcclEnd, "tell", _told(nccl.NcclEnd.tell, self))
            put(nccl.NcclEnd, "hear", _heard(nccl.NcclEnd.hear, self))
            put(Courier, "close", self._passing_on(Courier.close))
            put(saver, "device_of", lambda _: self.device)
            for method in ("before_update", "wait"):
                put(saver.Saver, method, self._joining(getattr(saver.Saver, method)))
            for call in ("step", "evaluate", "__call__", "clip_grad_norm_"):
                put(Pipeline, call, _call(getattr(Pipeline, call), call, self))
            yield

    def _join_group(self, *_: Any, timeout_seconds: float, num_replicas: int, order: str, **__: Any) -> Group:
        grid = grid_of(self._num_ranks, num_replicas, order)
        seconds = min(timeout_seconds, TIMEOUT_SECONDS)
        group = Group(self._here.rank, self._num_ranks, CPU, self._store, seconds, grid=grid)
        self._here.replica = group.coordinates.replica
        group.monitor.wait = self._passing_on(group.monitor.wait)  # type: ignore[method-assign]
        return group

    def _passing_on(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            with self._baton.passed_on():
                return wait(*args)

        return waiting

    def _joining(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            result = wait(*args)
            self.device.joins_helpers()
            return result

        return waiting

    def offer(self) -> None:
        self._baton.offer()

    def communicator(self, store: Store, place: int, options: Any) -> VirtualGroup:
        return VirtualGroup(self.device, self._wires, store, place, options)


def nccl_there() -> AbstractContextManager[object]:
    """Within it `comm/nccl.py` can be imported, also with a torch that has no NCCL."""
    return mock.patch.object(dist, "ProcessGroupNCCL", VirtualGroup, create=True)


def _nccl_edges(
    store: Store,
    lanes: Lanes,
    monitor: Monitor,
    device: Any,
    stage_ranks: Any,
    *,
    communicators: str,
    of_all: Store,
    **_: Any,
) -> Any:
    """What `make_edges` makes for GPUs."""
    from pipetrain.comm.nccl import NcclEdges

    return NcclEdges(store, of_all, lanes, monitor, device, stage_ranks, communicators)


class _Maker:
    """`ProcessGroupNCCL` as `comm/nccl.py` uses it."""

    Options = VirtualGroup.Options

    def __init__(self, ranks: VirtualRanks) -> None:
        self._ranks = ranks

    def __call__(self, store: Store, place: int, size: int, options: Any) -> VirtualGroup:
        assert size == 2
        return self._ranks.communicator(store, place, options)


def _marked(on: Callable[..., AbstractContextManager[Any]], ranks: VirtualRanks) -> Any:
    """`Lanes.on`: which op is launched, and what its stream is called."""

    @contextmanager
    def marked(lanes: Lanes, lane: Lane, waits: Sequence[Op], op: Op) -> Iterator[None]:
        ranks.offer()
        device = ranks.device
        with device.launching(op), on(lanes, lane, waits, op):
            computes = lane in (Lane.COMPUTE, Lane.RECOMPUTE)
            device.name(device.current(), str(lane) if computes or lane is Lane.REDUCE else f"{op.stage}{op.kind}")
            yield

    return marked


# Where a form is not known the host of a receiver waits for the sender's host, before it goes on.


def _told(tell: Callable[..., None], ranks: VirtualRanks) -> Any:
    def told(end: Any, op: Op, form: Form) -> None:
        ranks.device.tell((ranks.replica, ranks.device.num_calls, op))
        tell(end, op, form)

    return told


def _heard(hear: Callable[..., Form], ranks: VirtualRanks) -> Any:
    def heard(end: Any, op: Op) -> Form:
        form = hear(end, op)
        ranks.device.hear((ranks.replica, ranks.device.num_calls, partner_of(op)))
        return form

    return heard


def _call(method: Callable[..., Any], name: str, ranks: VirtualRanks) -> Any:
    def called(pipeline: Pipeline, *args: Any, **options: Any) -> Any:
        for stage in pipeline._stages.values():
            for layer in stage.layers:
                for tensor in (*layer.parameters(), *layer.buffers()):
                    ranks.device.blocks.put_on_device(tensor)
        with ranks.device.call(name):
            return method(pipeline, *args, **options)

    return called


# Messages between hosts ------------------------------------------------------------------------------------------


class _Hosts:
    """Pairs of ranks whose hosts talk through queues: what `comm/courier.py` makes over gloo."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int], queue.SimpleQueue[Tensor | None]] = {}

    def pair(self, store: Store, name: str, place: int, peer: str, monitor: Monitor) -> _HostPair:  # noqa: ARG002
        # Replicas and pipelines have parts of the store of their own; both ends agree there: the first to come has named the pair.
        number = store.compare_set(f"host pair {name}", "", str(next(_numbers))).decode()
        with self._lock:
            ways = [self._queues.setdefault((number, sender), queue.SimpleQueue()) for sender in (0, 1)]
        return _HostPair(ways[place], ways[1 - place])


class _HostPair:
    def __init__(self, out: queue.SimpleQueue[Tensor | None], into: queue.SimpleQueue[Tensor | None]) -> None:
        self._out = out
        self._in = into

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _HostWork:  # noqa: ARG002
        self._out.put(tensors[0].clone())
        return _HostWork(lambda _: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _HostWork:  # noqa: ARG002
        def receive(seconds: float) -> None:
            try:
                found = self._in.get(timeout=min(seconds, TIMEOUT_SECONDS))
            except queue.Empty:
                found = None
            if found is None:
                raise RuntimeError("the other rank did not send, or is gone")
            tensors[0].copy_(found)

        return _HostWork(receive)

    def cut(self) -> None:
        for one in (self._out, self._in):
            one.put(None)


class _HostWork:
    def __init__(self, finish: Callable[[float], None]) -> None:
        self._finish = finish

    def wait(self, timeout: timedelta) -> bool:
        self._finish(timeout.total_seconds())
        return True
