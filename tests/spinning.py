"""Ranks as threads that share one device, with real ends of NCCL and a stand-in for NCCL itself whose receives really wait.

A transfer meets its other half on the device, in the order of streams, and the host does not wait: as with NCCL. A wait is a
`Flag` on a stream: a small kernel that spins on a GPU (tests/gpu/flags.py), a thread that waits on the CPU. It gives up in the
end, so that an order that hangs is told and not sat out.

Each rank has a stream of its own where others have the default stream; the hosts talk over real gloo. Generators are the
process's, so layers must not draw.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from ranks import PATIENCE_SECONDS
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store

from pipetrain.comm.device import HIGH, Device, Stream
from pipetrain.comm.group import Group

_numbers = itertools.count()
ROOM_BYTES = 2**20  # of the largest message
TIMEOUT_SECONDS = PATIENCE_SECONDS / 2


class Flag(Protocol):
    """A number on the device that grows. Both verbs are given to the current stream."""

    def raise_to(self, value: int) -> None: ...

    def wait_for(self, value: int) -> None:
        """What the stream gets from now on comes after the flag has been raised to `value`; or much later."""


@dataclass
class Mailbox:
    """One direction of a communicator: how many receives have begun and sends have ended, and the message on its way."""

    posted: Flag
    sent: Flag
    room: Tensor


class SpinningRanks:
    """`num_ranks` ranks. `device_of_rank` gives the device verbs of each, `make_flag` a flag of that device."""

    def __init__(
        self,
        num_ranks: int,
        device: torch.device,
        device_of_rank: Callable[[int], Device],
        make_flag: Callable[[], Flag],
        on_own_stream: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._num_ranks = num_ranks
        self._torch_device = device
        self._device_of_rank = device_of_rank
        self._make_flag = make_flag
        self._on_own_stream = on_own_stream
        self._store = HashStore()
        self._lock = threading.Lock()
        self._mailboxes: dict[str, Mailbox] = {}
        self._here = threading.local()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """`function(rank)` on every rank, where it makes a `Pipeline` and calls it.

        Raises:
            What the first rank to fail raised.
        """
        values: list[Any] = [None] * self._num_ranks
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            self._here.rank, self._here.streams = rank, list[Stream]()
            try:
                with self._on_own_stream():
                    values[rank] = function(rank)
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
        return values

    @property
    def device(self) -> Device:
        """That of the rank whose thread asks."""
        return self._device_of_rank(self._here.rank)

    def wait_for_own_streams(self) -> None:
        """The host of the rank whose thread asks waits for all that its own device was given, as some calls of CUDA do."""
        for stream in self._here.streams:
            self.device.finish(stream)

    def mailbox(self, name: str, sender: int) -> Mailbox:
        with self._lock:
            key = f"{name}/{sender}"
            if key not in self._mailboxes:
                room = torch.empty(ROOM_BYTES, dtype=torch.uint8, device=self._torch_device)
                self._mailboxes[key] = Mailbox(self._make_flag(), self._make_flag(), room)
            return self._mailboxes[key]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with ExitStack() as stack:

            def put(target: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(target, name, value))

            if not hasattr(dist, "ProcessGroupNCCL"):  # torch without CUDA
                stack.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", SpinningGroup, create=True))
            from pipetrain.comm import lanes, nccl
            from pipetrain.runtime import agreement, pipeline, runner

            def make_edges(
                store: Store,
                lanes: Any,
                monitor: Any,
                device: Any,
                ranks: Any,
                *,
                communicators: str,
                of_all: Store,
                **_: Any,
            ) -> Any:
                return nccl.NcclEdges(store, of_all, lanes, monitor, device, ranks, communicators)

            put(nccl, "ProcessGroupNCCL", _Maker(self))
            put(pipeline, "join_group", self._join_group)
            put(agreement, "carrier_of", lambda edges, device: "nccl")
            put(agreement, "identity_of", lambda device: f"GPU {self._here.rank}")
            put(lanes, "device_of", lambda _: _Noting(self.device, self._here.streams))
            put(runner, "make_edges", make_edges)
            yield

    def _join_group(self, *_: Any, timeout_seconds: float, **__: Any) -> Group:
        return Group(
            self._here.rank, self._num_ranks, self._torch_device, self._store, min(timeout_seconds, TIMEOUT_SECONDS)
        )

    def communicator(self, store: PrefixStore, place: int) -> SpinningGroup:
        stream = self.device.stream(priority=HIGH)
        self._here.streams.append(stream)
        # Both ends agree over the store: the first to come has named the communicator.
        name = store.compare_set("mailbox", "", str(next(_numbers))).decode()
        return SpinningGroup(self, self.device, stream, name, place)


class _Noting:
    """A device that writes down the streams that it makes: those of one rank."""

    def __init__(self, device: Device, streams: list[Stream]) -> None:
        self._device = device
        self._streams = streams

    def stream(self, **options: Any) -> Stream:
        self._streams.append(self._device.stream(**options))
        return self._streams[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@dataclass
class _Options:
    config: SimpleNamespace = field(default_factory=SimpleNamespace)
    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(0)


class _Maker:
    """`ProcessGroupNCCL` as `comm/nccl.py` uses it."""

    Options = _Options

    def __init__(self, ranks: SpinningRanks) -> None:
        self._ranks = ranks

    def __call__(self, store: PrefixStore, place: int, size: int, options: Any) -> SpinningGroup:  # noqa: ARG002
        assert size == 2
        return self._ranks.communicator(store, place)


@dataclass
class _Work:
    device: Device
    end: Any

    def wait(self, _: timedelta | None = None) -> bool:
        self.device.wait(self.device.current(), self.end)
        return True


class SpinningGroup:
    """`ProcessGroupNCCL` of two ranks: transfers run on a stream of its own, each after the stream that asked for it."""

    Options = _Options

    def __init__(self, ranks: SpinningRanks, device: Device, stream: Stream, name: str, place: int) -> None:
        self._ranks = ranks
        self._device = device
        self._stream = stream
        self._name = name
        self._place = place
        self._num = {0: 0, 1: 0}  # transfers by the place that sends

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Work:  # noqa: ARG002
        (tensor,) = tensors
        mailbox, number = self._next(self._place)
        with self._begun(tensor):
            mailbox.posted.wait_for(number)
            self._device.copy(mailbox.room[: tensor.nbytes].view(tensor.dtype), tensor)
            mailbox.sent.raise_to(number)
            return _Work(self._device, self._device.record(self._stream))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:  # noqa: ARG002
        (tensor,) = tensors
        mailbox, number = self._next(source)
        with self._begun(tensor):
            mailbox.posted.raise_to(number)
            mailbox.sent.wait_for(number)
            self._device.copy(tensor, mailbox.room[: tensor.nbytes].view(tensor.dtype))
            return _Work(self._device, self._device.record(self._stream))

    def _next(self, sender: int) -> tuple[Mailbox, int]:
        self._num[sender] += 1
        return self._ranks.mailbox(self._name, sender), self._num[sender]

    @contextmanager
    def _begun(self, tensor: Tensor) -> Iterator[None]:
        self._device.follow(self._stream, self._device.current())
        with self._device.on(self._stream):
            yield
        if tensor.is_cuda:  # as torch does with all that it sends and receives
            tensor.record_stream(self._stream)

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...
