"""The clocks of the thread that computes: it ran, it waited for a message, or it was ready and not run."""

import threading
import time

import torch
from ranks import run_ranks
from torch import nn

from pipetrain import Pipeline
from pipetrain.comm.lanes import HostTime
from pipetrain.schedule.op import Kind


def computes(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def lap_of(host: HostTime) -> tuple[float, float, float]:
    return host.lap(time.perf_counter())


def test_what_a_thread_computes_it_ran_and_what_it_waits_it_waited() -> None:
    host, begun = HostTime(), time.perf_counter()
    lap_of(host)
    computes(0.02)
    with host.waiting():
        threading.Event().wait(0.05)
    ran, waited, stalled = lap_of(host)
    assert ran >= 0.02
    assert waited >= 0.045
    assert ran + waited + stalled <= time.perf_counter() - begun + 1e-3
    assert sum(lap_of(host)) < 0.02, "each lap begins anew"


def test_it_is_stalled_while_another_thread_has_the_lock_of_python() -> None:
    """Which is handed on every 5 ms: of two that compute each is not run for half of the time."""
    host, other = HostTime(), threading.Thread(target=computes, args=(0.2,))
    other.start()
    lap_of(host)
    computes(0.1)
    ran, waited, stalled = lap_of(host)
    other.join()
    assert ran >= 0.1
    assert waited == 0
    assert stalled > 0.03


class Busy(nn.Linear):
    """Computes for some milliseconds beside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computes(0.02)
        return super().forward(x)


def test_what_an_op_computes_is_not_on_the_way_to_the_next() -> None:
    with Pipeline([Busy(2, 2)], nn.functional.mse_loss, num_microbatches=3, recompute="never") as pipeline:
        pipeline.step(torch.ones(3, 2), torch.ones(3, 2))
        pipeline.step(torch.ones(3, 2), torch.ones(3, 2))
        events = [event for event in pipeline.report.events if event.op.kind.computes]
    assert len(events) == 6
    assert all(0 < event.ran_seconds < 0.02 for event in events)
    assert all(event.waited_seconds == 0 for event in events)


def late_stage() -> list[float]:
    """What each rank waited for between its ops, where the first stage is slow."""
    layers = [Busy(2, 2), nn.Linear(2, 2)]
    with Pipeline(layers, nn.functional.mse_loss, num_microbatches=8, recompute="never", balance=[1, 1]) as pipeline:
        for _ in range(2):
            pipeline.step(torch.ones(8, 2), torch.ones(8, 2))
        events = [event for event in pipeline.report.events if event.op.kind.computes]
    return [event.waited_seconds for event in events if event.op.kind is Kind.F]


def test_the_rank_behind_a_slow_one_waits_for_its_message() -> None:
    first, second = run_ranks(2, late_stage)
    assert max(first) == 0
    assert max(second) > 0
