"""When ops ran, on a device that is far behind its host and whose clock runs at another speed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from pipetrain.comm.clocks import AnchoredClock, Clock
from pipetrain.comm.device import DeviceMemory
from pipetrain.comm.lanes import Recording
from pipetrain.monitor.step_report import RankReport, Report
from pipetrain.runtime.measure import measure_rank
from pipetrain.schedule.make import make_schedule

BEHIND_SECONDS = 3.0


@dataclass(frozen=True)
class Happens:
    """An event: when it happens, in seconds of the host's clock, which nobody can read."""

    at: float


class World:
    """A host and its device. Each look at the host's clock takes a moment; now and then something else takes a long one."""

    def __init__(self, seed: int, *, drift: float, answers: float = 2e-5) -> None:
        self.chance = random.Random(seed)
        self.time = 100.0
        self.drift = drift
        self.answers = answers  # seconds until the idle stream has come to an event
        self.clock = AnchoredClock(self.record, self.has_ended, self.finish, self.elapsed, self.now)

    def now(self) -> float:
        self.time += self.chance.choice((1e-6, 1e-6, 2e-6, 4e-4))
        return self.time

    def record(self) -> Happens:
        return Happens(self.now() + self.chance.uniform(0, self.answers))

    def has_ended(self, event: Happens) -> bool:
        return event.at <= self.now()

    def finish(self, event: Happens) -> None:
        self.time = max(self.time, event.at)

    def elapsed(self, one: Happens, other: Happens) -> float:
        milliseconds = np.float32((other.at - one.at) * (1 + self.drift) * 1e3)
        return float(milliseconds) / 1e3


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
@pytest.mark.parametrize("seed", range(5))
def test_ops_start_when_they_did_within_the_error_that_is_said(seed: int, drift: float) -> None:
    world = World(seed, drift=drift)
    for _ in range(20):
        clock = world.clock.of_step()
        launched = world.time
        starts = [Happens(launched + BEHIND_SECONDS + 0.1 * number) for number in range(8)]
        found = [clock.read(start) for start in starts]
        error = clock.error_seconds()
        assert all(abs(at - start.at) <= error for at, start in zip(found, starts)), (found, starts, error)
        assert error < 2e-3, "an error that explains everything says nothing"
        world.time += 2.0


def test_a_step_far_from_the_last_comparison_is_compared_again() -> None:
    world = World(0, drift=1e-4)
    world.clock.of_step()
    world.time += 3600.0
    clock = world.clock.of_step()
    start = Happens(world.time + 1.0)
    assert abs(clock.read(start) - start.at) <= clock.error_seconds() < 2e-3


def test_an_idle_stream_that_is_not_asked_in_time() -> None:
    """Its hardware queue is another stream's, too: the old comparison has to do, and the error grows; never does the host hang."""
    world = World(0, drift=1e-4)
    world.clock.of_step()
    world.answers, world.time = 1e9, world.time + 60.0
    clock = world.clock.of_step()
    start = Happens(world.time + 1.0)
    assert abs(clock.read(start) - start.at) <= clock.error_seconds()
    assert clock.error_seconds() > 5e-3


def test_the_first_comparison_is_waited_for() -> None:
    world = World(1, drift=0.0, answers=0.5)
    clock = world.clock.of_step()
    start = Happens(world.time + 1.0)
    assert abs(clock.read(start) - start.at) <= clock.error_seconds() < 0.5


def test_a_report_says_what_its_device_tells() -> None:
    """The error of the ranks' clocks and of the device's add up; memory that a device does not tell of is None."""
    recording = Recording(lambda: (), lambda: True, lambda: 0.25)
    known = {"step": 7, "peak_activation_bytes": 10, "peak_stage_bytes": 8}
    told = measure_rank(
        recording, Clock(1.0, 0.5), {}, DeviceMemory(20, 30, 1000), rank=1, communicator_bytes=40, **known
    )
    silent = measure_rank(recording, Clock(0.0, 0.0), {}, DeviceMemory(20), rank=0, communicator_bytes=None, **known)
    ranks = [RankReport.from_json(report.to_json()) for report in (told, silent)]
    assert ranks == [told, silent]
    report = Report.of(ranks, make_schedule(num_stages=2, num_microbatches=1))
    assert report.per_rank("peak_memory_bytes") == (20, 20)
    assert report.per_rank("peak_reserved_bytes") == (None, 30)
    assert report.per_rank("communicator_bytes") == (None, 40)
    assert report.per_rank("clock_error_seconds") == (0.25, 0.75)
