"""What ran on the GPU, by the profiler's own clock: which stream each op's kernels used, and what ran beside what."""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipetrain.monitor.breakdown import clipped, length, merged
from pipetrain.schedule.op import Kind, Op

_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the device. `op` launched it; None: no F, R or B did. Seconds on the profiler's clock."""

    op: Op | None
    stream: int
    start: float
    end: float
    is_transfer: bool  # between host and device memory, over a copy engine


@dataclass(frozen=True)
class Beside:
    """Where R's kernels ran, and for how many seconds something else ran at the same time."""

    recompute_streams: frozenset[int]
    compute_streams: frozenset[int]
    recompute_seconds: float
    beside_transfers_seconds: float
    beside_compute_seconds: float

    def __str__(self) -> str:
        return (
            f"R's kernels ran {self.recompute_seconds * 1e3:.1f} ms on stream {_names(self.recompute_streams)}, F's and B's on "
            f"{_names(self.compute_streams)}; {self.beside_transfers_seconds * 1e3:.1f} ms of R beside transfers, "
            f"{self.beside_compute_seconds * 1e3:.1f} ms beside F and B"
        )


def beside(kernels: Sequence[Kernel]) -> Beside:
    """R's kernels against transfers, and against F's and B's."""
    recompute = [kernel for kernel in kernels if kernel.op is not None and kernel.op.kind is Kind.R]
    compute = [kernel for kernel in kernels if kernel.op is not None and kernel.op.kind is not Kind.R]
    transfers = [kernel for kernel in kernels if kernel.is_transfer]
    return Beside(
        frozenset(kernel.stream for kernel in recompute),
        frozenset(kernel.stream for kernel in compute),
        length(_busy(recompute)),
        _shared_seconds(recompute, transfers),
        _shared_seconds(recompute, compute),
    )


def kernels_of(profile: torch.profiler.profile) -> list[Kernel]:
    """Everything that ran on the device while `profile` was open, with the op that launched it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return kernels_in(json.loads(path.read_text()))


def kernels_in(trace: Mapping[str, Any]) -> list[Kernel]:
    """The same from a Chrome trace.

    A launch belongs to the op in whose range it falls, on whichever thread: autograd launches B from a thread of its own
    while the thread that runs the ops waits for it. Transfers belong to no op: couriers launch them at any time.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], op)
        for event in events
        if event.get("cat") == "user_annotation" and (op := _op(event["name"])) is not None
    )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        is_transfer = event["cat"] == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"])
        at = launched.get(event["args"].get("correlation"))
        op = None if is_transfer or at is None else _at(ranges, at)
        start, end = event["ts"] * _MICROSECOND, (event["ts"] + event["dur"]) * _MICROSECOND
        found.append(Kernel(op, event["args"]["stream"], start, end, is_transfer))
    return found


def _op(name: str) -> Op | None:
    try:
        return Op.parse(name)
    except ValueError:
        return None


def _at(ranges: Sequence[tuple[float, float, Op]], time: float) -> Op | None:
    """The op whose range holds `time`; ranges do not overlap, because one thread runs all ops."""
    place = bisect.bisect_right(ranges, time, key=lambda one: one[0]) - 1
    return ranges[place][2] if place >= 0 and time <= ranges[place][1] else None


def _busy(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    return merged((kernel.start, kernel.end) for kernel in kernels)


def _shared_seconds(first: Iterable[Kernel], second: Iterable[Kernel]) -> float:
    others = _busy(second)
    return sum(length(clipped(others, window)) for window in _busy(first))


def _names(streams: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(streams))) or "none"
