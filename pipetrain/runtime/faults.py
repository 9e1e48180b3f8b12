"""Injects faults at an op of one rank, in one step or in many, to test how a run reacts.

    PIPETRAIN_FAULTS="kill rank=1 op=1F2 step=3; slow rank=0 step=2 num_steps=5 seconds=0.1" pipetrain train

A fault strikes just before the rank starts `op` (`2B1`, `1SEND_F0`, `0RECV_B3`). Without `op`, it strikes before every F, R, B, I, W
and CALL of the rank. Steps count from 1. A rank that torchrun has restarted has no faults.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Op

VARIABLE = "PIPETRAIN_FAULTS"
_FORM = "write DEED rank=R op=OP step=S, as in `kill rank=1 op=1F2 step=3`"


class Deed(StrEnum):
    """What happens just before the op."""

    RAISE = "raise"  # raises an exception, as a bug in a layer would
    KILL = "kill"  # SIGKILL, as the out-of-memory killer sends
    STOP = "stop"  # SIGSTOP: the process exists and does nothing
    SLOW = "slow"  # sleeps for `seconds`, then goes on
    DROP = "drop"  # breaks the connection of `op`, or all connections of the rank, as `Pipeline.disconnect` does


class InjectedFault(RuntimeError):
    """What `Deed.RAISE` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault. In each of its steps it happens before `op`, or without `op` before each computing op of the rank."""

    rank: int
    step: int  # the first one, as `Pipeline.step_index` counts: from 0
    op: Op | None  # None: every F, R, B, I, W and CALL of the rank
    deed: Deed
    seconds: float = 0.0
    num_steps: int = 1

    def strikes(self, op: Op, step: int) -> bool:
        """Whether the fault happens before `op` in `step` (from 0)."""
        wanted = op.kind.computes if self.op is None else op == self.op
        return wanted and self.step <= step < self.step + self.num_steps


def faults_of_environment() -> list[Fault]:
    """Return the faults in `PIPETRAIN_FAULTS`; none if torchrun has started this rank again. Raises ValueError: it cannot be parsed."""
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    return faults_in(os.environ.get(VARIABLE, "")) if is_first else []


def faults_in(text: str) -> list[Fault]:
    """Return the faults that `text` describes. Raises ValueError: it cannot be parsed."""
    return [_parse(part) for part in text.split(";") if part.strip()]


def _parse(text: str) -> Fault:
    deed, *words = text.split()
    if deed not in list(Deed):
        raise ValueError(f"{VARIABLE}: there is no {deed!r}; allowed are {', '.join(Deed)}; {_FORM}")
    values = dict(word.partition("=")[::2] for word in words)
    unknown = values.keys() - {"rank", "op", "step", "num_steps", "seconds"}
    try:
        if unknown:
            raise ValueError(f"there is no {', '.join(sorted(unknown))}")
        return Fault(
            rank=int(values["rank"]),
            step=int(values["step"]) - 1,
            op=Op.parse(values["op"]) if "op" in values else None,
            deed=Deed(deed),
            seconds=float(values.get("seconds", 0)),
            num_steps=int(values.get("num_steps", 1)),
        )
    except (ValueError, KeyError) as error:
        raise ValueError(f"{VARIABLE}: {text.strip()!r} cannot be read ({error}); {_FORM}") from error


def inject(pipeline: Pipeline, faults: Iterable[Fault]) -> None:
    """Make `pipeline` fail as `faults` say. A rank may get the faults of all ranks: it uses only its own."""
    own = [fault for fault in faults if fault.rank == pipeline.rank]

    def before(op: Op, step: int) -> None:
        for fault in own:
            if not fault.strikes(op, step):
                continue
            match fault.deed:
                case Deed.RAISE:
                    raise InjectedFault(
                        f"a fault was injected at {op} of rank {fault.rank} in step {step + 1}, counted from 1"
                    )
                case Deed.SLOW:
                    time.sleep(fault.seconds)
                case Deed.DROP:
                    pipeline.disconnect(op)
                case Deed.KILL | Deed.STOP:
                    os.kill(os.getpid(), signal.SIGKILL if fault.deed is Deed.KILL else signal.SIGSTOP)

    pipeline.before_ops(before if own else None)
