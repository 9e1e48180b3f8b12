"""Copies sets between a rank's device and its host's memory, in two lanes beside the compute lane: OFFLOAD to the host, RELOAD back.

On a GPU a copy is launched on the stream of its lane, from and to pinned memory. On a CPU a thread per lane makes the copies, and
this thread waits for other copies. The rules of memory on a GPU, none of which makes the host wait:

    [1] the host frees a set's device memory once the compute stream waits for its OFFLOAD, because that stream uses the memory next
    [2] a RELOAD fills a buffer that is free on the device (`Ring`), as a receive does
    [3] an OFFLOAD reuses a slab of the host if its stream waits for the RELOAD that read the slab; `most` counts enough slabs for this
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage

from pipetrain.comm.device import Device
from pipetrain.comm.failure import Monitor
from pipetrain.comm.lanes import Lanes, Moment, Ring
from pipetrain.runtime.program import ProgramEntry
from pipetrain.schedule.kinds import COPY_LANES
from pipetrain.schedule.op import Lane, Op
from pipetrain.stage.host_set import HostSet
from pipetrain.stage.meter import ActivationMeter

Ended = Callable[[Op, Callable[[], None]], None]
"""Called with an op whose copies have ended, and a function: the rest of the op's work, which the thread that computes runs."""


class HostPool:
    """Host memory of one rank for offloaded sets. A stage, or each of its parts, has slabs, which hold one set each and are reused.

    `most`: stage -> the most sets of it, or of one part, in host memory at once, whatever the timing. The first set of a stage or part
    reserves that many slabs. `limit` bounds the bytes of all slabs together.
    """

    def __init__(self, device: Device, limit: int, most: Mapping[int, int]) -> None:
        self._device, self._limit, self._most = device, limit, most
        # By stage and part: free slabs, each with the number of the RELOAD after which it is free.
        self._free: dict[tuple[int, int | None], list[tuple[Tensor, Moment]]] = {}
        self._num_taken = 0
        self._lock = threading.Lock()  # one thread takes slabs, another gives them back
        self.num_bytes = 0

    def _reserve(self, num_slabs: int, num_bytes: int) -> list[tuple[Tensor, Moment]]:
        if self.num_bytes + num_slabs * num_bytes > self._limit:
            raise ValueError(
                f"recompute.host_bytes={self._limit}: {num_slabs} sets of {num_bytes} bytes may be in host memory at once, beside "
                f"{self.num_bytes} bytes of other stages; allow {self.num_bytes + num_slabs * num_bytes} or more, or use "
                "recompute.offload=none"
            )
        self.num_bytes += num_slabs * num_bytes
        return [(self._device.host_memory(num_bytes), 0) for _ in range(num_slabs)]

    def take(self, op: Op, num_bytes: int, may_use: Callable[[Moment], bool] = lambda _: True) -> Tensor:
        """Take the smallest free slab of at least `num_bytes` that `may_use` allows, for the set of `op` or its part. If all are too small,
        the largest is replaced by a larger one. Thread-safe.

        Raises ValueError: the pool would exceed its limit.
        """
        with self._lock:
            return self._take((op.stage, op.part), num_bytes, may_use)

    def _take(self, own: tuple[int, int | None], num_bytes: int, may_use: Callable[[Moment], bool]) -> Tensor:
        if own not in self._free:
            self._free[own] = self._reserve(self._most[own[0]], num_bytes)
        free = self._free[own]
        usable = sorted((slab.nbytes, -at) for at, (slab, after) in enumerate(free) if may_use(after))
        assert usable, f"stage {own[0]} has more sets in host memory than its schedule allows"
        size, at = next((one for one in usable if one[0] >= num_bytes), usable[-1])
        slab, _ = free.pop(-at)
        if size < num_bytes:
            del slab
            self.num_bytes -= size
            ((slab, _),) = self._reserve(1, num_bytes)
        self._num_taken += 1
        return slab

    def give(self, op: Op, slab: Tensor, after: Moment = 0) -> None:
        """Give `slab` back: an OFFLOAD may use it again after RELOAD number `after`. Thread-safe."""
        with self._lock:
            self._free[op.stage, op.part].append((slab, after))
            self._num_taken -= 1

    def assert_nothing_is_held(self) -> None:
        assert not self._num_taken, f"{self._num_taken} sets are left over in host memory"


class HostCopies:
    """Makes the copies of one rank, to and from `pool`. Only the thread that computes calls its methods."""

    def __init__(
        self,
        lanes: Lanes,
        monitor: Monitor,
        meter: ActivationMeter,
        device: torch.device,
        limit: int,
        most: Mapping[int, int],
        ended: Ended,
    ) -> None:
        """`limit` and `most` are those of `HostPool`. A copying thread calls `ended`, through `Monitor.done`."""
        self._lanes, self._monitor, self._meter, self._ended = lanes, monitor, meter, ended
        self.pool = HostPool(lanes.device, limit, most)
        self._ring = None if lanes.ahead is None else Ring(lanes.ahead, Lane.RELOAD, device)
        self._copiers = {} if lanes.ahead is not None else {lane: _Copier(lane) for lane in COPY_LANES}
        self._made: set[Op] = set()  # copies that threads have made in this step
        self._progress = threading.Condition()
        self._is_dropped = False

    def start_step(self) -> None:
        self._made.clear()

    def offload(self, entry: ProgramEntry, host_set: HostSet) -> bool:
        """Copy a set to host memory. Returns whether the executor may count the op as ended: True once a GPU's copy is launched."""
        op, lane, ahead = entry.op, entry.lane, self._lanes.ahead
        if ahead is None:
            return self._in_thread(entry, functools.partial(self._leave, op, host_set))
        slab = self.pool.take(op, host_set.num_bytes, lambda after: ahead.comes_after(lane, after, Lane.RELOAD))  # [3]
        with self._lanes.timed(lane, op):
            held = host_set.leave(slab, self._lanes.device.copy)
        ahead.hold(lane, op, held.clear)  # [1]
        return True

    def reload(self, entry: ProgramEntry, host_set: HostSet) -> bool:
        """Copy a set back to the device. Returns the same as `offload`."""
        op, lane, ahead = entry.op, entry.lane, self._lanes.ahead
        if ahead is None:
            return self._in_thread(entry, functools.partial(self._come_back, op, host_set))
        assert self._ring is not None
        with self._lanes.timed(lane, op):
            slab = host_set.come_back(self._ring.memory, self._lanes.device.copy)  # [2]
        self.pool.give(op, slab, ahead.moment(lane))
        return True

    # On a CPU: in the threads of the lanes -----------------------------------------------------------------------------

    def _leave(self, op: Op, host_set: HostSet) -> None:
        held = host_set.leave(self.pool.take(op, host_set.num_bytes), self._lanes.device.copy)
        with self._meter.apart():
            held.clear()

    def _come_back(self, op: Op, host_set: HostSet) -> None:
        copies: list[tuple[Tensor, Tensor]] = []
        with self._meter.apart():
            slab = host_set.come_back(_new_memory, lambda *pair: copies.append(pair))
        for target, source in copies:
            self._lanes.device.copy(target, source)
        self.pool.give(op, slab)

    def _in_thread(self, entry: ProgramEntry, copy: Callable[[], None]) -> bool:
        """Let the thread of the lane run `copy` once all copies that `entry` waits for are made. Returns False: the op has not ended."""
        op, awaited = entry.op, set(entry.waits_of_thread)

        def job() -> None:
            with self._progress:
                self._progress.wait_for(lambda: self._is_dropped or awaited <= self._made)
            if self._is_dropped:
                return
            start, land = time.perf_counter(), _nothing
            try:
                with torch.no_grad():
                    copy()
            except Exception as error:
                land = functools.partial(_raise, error)
            self._lanes.record(entry.lane, op, start, time.perf_counter())
            if land is _nothing:
                with self._progress:
                    self._made.add(op)
                    self._progress.notify_all()
            self._monitor.done(functools.partial(self._ended, op, land))

        self._copiers[entry.lane].submit(job)
        return False

    def drop(self) -> None:
        """After a failed step: start no more copies, and wait for running ones, because they read and write the step's sets."""
        with self._progress:
            self._is_dropped = True
            self._progress.notify_all()
        for copier in self._copiers.values():
            copier.close(self._monitor.timeout_seconds)

    close = drop


class _Copier:
    """Runs the copies of one lane, one after the other, in a thread of its own."""

    def __init__(self, lane: Lane) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{lane} copies", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds a set

    def close(self, timeout_seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(timeout_seconds)


def _new_memory(num_bytes: int) -> UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def _nothing() -> None:
    """The rest of an op's work after its copies have succeeded: none."""


def _raise(error: Any) -> NoReturn:
    raise error
