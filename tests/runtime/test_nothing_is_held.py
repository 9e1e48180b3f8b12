"""At the end of a step nothing is held: what a step forgot to give back is an error at once, and not memory that grows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from in_process import InProcessRun

from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Op
from pipetrain.stage.recompute import Recompute

LATE = Op.parse("0RECV_B9")

LEAKS: dict[str, tuple[Callable[[InProcessRun], dict[Any, Any] | set[Any]], str]] = {
    "a result": (lambda run: run.executors[0]._given, "nobody took the results of 0RECV_B9"),
    "a message": (lambda run: run.transports[0]._arrived, "messages are left over, not taken: 0RECV_B9"),
    "an early input": (lambda run: run.transports[0]._early, "messages are left over, early: 0RECV_B9"),
    "an unsent output": (lambda run: run.transports[0]._unsent, "messages are left over, not sent: 0RECV_B9"),
    "a microbatch": (lambda run: run.stages[0][0]._held, "stage 0 still holds microbatches 0RECV_B9"),
}


def two_ranks(mode: str = "overlap") -> InProcessRun:
    schedule = make_schedule(num_stages=2, num_microbatches=3, recompute=mode)
    return InProcessRun(schedule, random.Random(0).randrange)


@pytest.mark.parametrize("mode", ["never", "inline", "overlap"])
def test_a_step_gives_everything_back(mode: str) -> None:
    run = two_ranks(mode)
    for _ in range(2):
        run.step()
        assert [stage.meter.current_bytes for stages in run.stages for stage in stages.values()] == [0, 0]


@pytest.mark.parametrize("what", LEAKS)
def test_what_is_left_is_an_error(what: str) -> None:
    place, message = LEAKS[what]
    run = two_ranks()

    def leak(op: Op, step: int) -> None:
        held = place(run)
        if isinstance(held, dict):
            held[LATE] = None
        else:
            held.add(LATE)

    run.executors[0].before_op = leak
    with pytest.raises(AssertionError, match=message):
        run.step()


def test_slots_of_a_set_that_are_left_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Recompute.end

    def end_and_hold(again: Recompute, *given: Any) -> None:
        slots = list(again._slots)
        end(again, *given)
        again._slots += slots

    monkeypatch.setattr(Recompute, "end", end_and_hold)
    with pytest.raises(AssertionError, match="slots are still held after their B"):
        two_ranks().step()
