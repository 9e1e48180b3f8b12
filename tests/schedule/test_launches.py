"""What a device is given: one order of launching on all ranks, in which nothing hangs, and the waits of its transfers."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from pipetrain.schedule.check import check
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.schedule import Schedule

some = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(some, max_examples=2000)


def launched(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.launch_order[rank]))


def test_ranks_launch_in_one_order() -> None:
    schedule = for_device(make_schedule("1f1b", num_stages=2, num_microbatches=3, recompute="overlap"))
    assert launched(schedule, 0) == (
        "0F0 0R0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0R1 0F2 0SEND_F2 0RECV_B1 0B1 0R2 0RECV_B2 0B2"
    )
    assert launched(schedule, 1) == ("1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2")
    check(schedule, serial=True)
