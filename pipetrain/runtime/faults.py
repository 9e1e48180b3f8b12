"""Faults on purpose, at one op of one rank in one step: to see what a run does then."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipetrain.runtime.executor import Program, Step
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Op

Act = Callable[[Op, Step, Program], None]


class Deed(StrEnum):
    """What happens just before the op."""

    RAISE = "raise"  # an exception, as a bug in a layer would
    KILL = "kill"  # SIGKILL, as the out-of-memory killer sends
    STOP = "stop"  # SIGSTOP: the process is there and does nothing
    SLOW = "slow"  # sleeps for `seconds`, then goes on


class InjectedFault(RuntimeError):
    """What `Deed.RAISE` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault; it happens once."""

    rank: int
    step: int  # `Pipeline.step_index`, from 0
    op: Op  # an F, R or B
    deed: Deed
    seconds: float = 0.0


def fail_at(rank: int, op: str | Op, *, step: int = 0, deed: Deed = Deed.RAISE, seconds: float = 0.0) -> Fault:
    """The fault at `op` (`2B1`) of `rank`.

    Raises:
        ValueError: not an op that a rank computes.
    """
    op = Op.parse(op) if isinstance(op, str) else op
    if not op.kind.computes:
        raise ValueError(f"{op}: a fault needs an op that a rank computes, an F, R or B such as {op.stage}F0")
    return Fault(rank, step, op, deed, seconds)


def inject(pipeline: Pipeline, faults: Iterable[Fault]) -> None:
    """Make `pipeline` fail so. Every rank may be given all faults: it takes those of its own."""
    executor = pipeline._executor
    own = {(fault.step, fault.op): fault for fault in faults if fault.rank == executor.rank}

    def before(act: Act) -> Act:
        def run(op: Op, step: Step, program: Program) -> None:
            fault = own.pop((step.index, op), None) if step.with_graph else None
            if fault is not None:
                _do(fault)
            act(op, step, program)

        return run

    executor._table = {kind: before(act) for kind, act in executor._table.items()}


def _do(fault: Fault) -> None:
    if fault.deed is Deed.RAISE:
        raise InjectedFault(f"a fault was injected at {fault.op} of rank {fault.rank} in step {fault.step}")
    if fault.deed is Deed.SLOW:
        time.sleep(fault.seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.deed is Deed.KILL else signal.SIGSTOP)
