"""The links of a rank, measured: to its neighbours, by messages of two sizes both ways at once; and to the memory of its host, by copies.

`torchrun -m pipetrain.trainer.links FILE`, on a rank per stage, writes what `measure_links` finds. `measure_copies` needs one process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.comm.device import device_of
from pipetrain.monitor.measured_costs import measure_costs
from pipetrain.plan.plan import make_plan
from pipetrain.plan.profile import HostLink, Link, Links
from pipetrain.runtime.pipeline import Pipeline

_SMALL, _LARGE = 1 << 10, 1 << 22  # bytes of a message
_MICROBATCHES, _STEPS = 8, 4
_LEAST_SECONDS = 1e-7  # what clocks tell apart
_MOST_SECONDS = 60.0  # that a rank waits for another
_NUMBER_BYTES = 4
_COPY, _COPIES = 1 << 25, 5  # bytes of a copy to host memory; how many there are one way, of which the median counts


class _Pass(nn.Module):
    """Gives what it gets, times a weight: its F and B take little beside the message."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, given: Tensor) -> Tensor:
        return given * self.weight


def measure_links(num_stages: int, edges: str = "auto") -> Links | None:
    """What rank 0 finds; None on the other ranks, and if there is only one. Collective, over so many stages. `edges`: as in `make_plan`.

    1F1B has an activation and a gradient on each link at once. A hop lasts from when both ends are ready to the arrival.
    """
    layers = [_Pass() for _ in range(num_stages)]
    plan = make_plan(num_stages, num_ranks=num_stages, num_microbatches=_MICROBATCHES, edges=edges)
    options: dict[str, Any] = {"schedule": "1f1b", "recompute": "never", "timeout_seconds": _MOST_SECONDS}
    with Pipeline(layers, lambda output, _: output.mean(), plan=plan, **options) as pipeline:
        of_small, of_large = _hops(pipeline, _SMALL), _hops(pipeline, _LARGE)
        with _copying(pipeline.device):
            beside_copies = _hops(pipeline, _LARGE)
    links = []
    for small, large in zip(of_small, of_large):
        per_byte = max(large - small, _LEAST_SECONDS) / (_LARGE - _SMALL)
        links.append(Link(max(0.0, small - _SMALL * per_byte), 1 / per_byte))
    if not links:
        return None
    slower = [busy / max(alone, _LEAST_SECONDS) for busy, alone in zip(beside_copies, of_large)]
    return Links(tuple(links), max(1.0, statistics.median(slower)))


def _hops(pipeline: Pipeline, size: int) -> list[float]:
    """Seconds of a message of so many bytes over each link, the mean of both directions; on rank 0, on the others nothing."""
    batch, steps = torch.zeros(_MICROBATCHES, size // _NUMBER_BYTES), []
    for step in range(1 + _STEPS):
        pipeline.step(batch, batch)
        report = pipeline.gather_report()
        if step and report is not None:  # the first announces shapes
            steps.append(report.timelines)
    if not steps:
        return []
    costs = measure_costs(pipeline.plan.num_stages, steps)
    return [statistics.fmean(pair) for pair in zip(costs.hop_forward, costs.hop_backward)]


def measure_copies(device: torch.device) -> HostLink:
    """Copies between `device` and pinned memory of its host, of 32 MiB: down alone, up alone, both at once. On a CPU: between two arenas."""
    down, up = _copiers(device)
    with ThreadPoolExecutor(2) as threads:
        alone = [_seconds_of(threads, [copy]) for copy in (down, up)]
        both = _seconds_of(threads, [down, up])
    return HostLink(*(_COPY / seconds for seconds in (*alone, max(both, *alone))))


def _copiers(device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions that make one copy each, and return when it has ended: down to the host, and up from it. For a thread each."""
    verbs = device_of(device)

    def copy(target: Tensor, source: Tensor) -> Callable[[], None]:
        stream = verbs.stream()

        def run() -> None:
            with verbs.on(stream):
                verbs.copy(target, source)
            verbs.finish(stream)

        return run

    there, back = (torch.zeros(_COPY, dtype=torch.uint8, device=device) for _ in range(2))
    return copy(verbs.host_memory(_COPY), there), copy(back, verbs.host_memory(_COPY).zero_())


def _seconds_of(threads: ThreadPoolExecutor, copies: Sequence[Callable[[], None]]) -> float:
    """The median time of one copy, where each of `copies` is made again and again at the same time."""
    start = threading.Barrier(len(copies))

    def measured(copy: Callable[[], None]) -> float:
        taken = []
        for _ in range(1 + _COPIES):  # the first takes memory
            start.wait(_MOST_SECONDS)
            begin = time.perf_counter()
            copy()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])

    return max(threads.map(measured, copies))


@contextmanager
def _copying(device: torch.device) -> Iterator[None]:
    """Within it, two threads copy to host memory and back without a pause."""
    ended = threading.Event()

    def keep_on(copy: Callable[[], None]) -> None:
        while not ended.is_set():
            copy()

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(keep_on, copy) for copy in _copiers(device)]
        try:
            yield
        finally:
            ended.set()
    for one in running:
        one.result()


def main(arguments: Sequence[str]) -> None:
    """Rank 0 writes the links to the file."""
    links = measure_links(int(os.environ["WORLD_SIZE"]))
    if links is not None:
        Path(arguments[0]).write_text(json.dumps(asdict(links)))


if __name__ == "__main__":
    main(sys.argv[1:])
