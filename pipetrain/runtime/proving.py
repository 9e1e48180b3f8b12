"""Which microbatches are proved: F keeps the set, and R is compared with it.

A stage that was right once is right again as long as it runs the same code: so the first microbatch of each kind of step is
proved, and `recompute.verify` can ask for more. A kind is: shapes of the call, modes of the layers, what needs a gradient. Each
rank decides for itself; nobody else has to know.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from torch import nn

from pipetrain.runtime.program import Program
from pipetrain.runtime.segmented import AnyStage
from pipetrain.schedule.op import Kind
from pipetrain.schedule.policy import EVERY, FIRST, OFF

Places = frozenset[tuple[int, int | None]]  # (stage, microbatch)
_NOTHING: Places = frozenset()


class Proving:
    """The choice for one rank; `verify` is `recompute.verify`."""

    def __init__(self, stages: Mapping[int, AnyStage], verify: str | int) -> None:
        self._stages = stages
        self._verify = verify
        self._proved: set[Hashable] = set()
        self._recomputed: tuple[Program | None, list[tuple[int, list[int | None]]]] = (None, [])  # by stage

    def choose(self, signature: int, step: int, program: Program, idle: frozenset[int] = frozenset()) -> Places:
        """What is proved in this step, of a call with this signature; the microbatches `idle` do not run."""
        if self._verify == OFF:
            return _NOTHING
        kind = (signature, *self._flags())
        if kind not in self._proved:
            if first := _in_turn(program, 0, idle):  # nothing of a replica whose microbatches are all idle
                self._proved.add(kind)
            return first | (program.recomputed if self._verify == EVERY else _NOTHING)
        if self._verify == FIRST:
            return _NOTHING
        if self._verify == EVERY:
            return program.recomputed
        assert isinstance(self._verify, int)
        turn, rest = divmod(step, self._verify)
        return _NOTHING if rest else _in_turn(program, turn, idle) & program.recomputed

    def witnessed(self, step: int, program: Program) -> Places:
        """One recomputed microbatch of each stage, in turn."""
        if self._verify == OFF:
            return _NOTHING
        if self._recomputed[0] is not program:
            stages = sorted({stage for stage, _ in program.recomputed})
            numbers = {s: sorted((m for stage, m in program.recomputed if stage == s), key=str) for s in stages}
            self._recomputed = program, list(numbers.items())
        return frozenset((stage, numbers[step % len(numbers)]) for stage, numbers in self._recomputed[1])

    def _flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        layers = [layer for stage in self._stages.values() for layer in stage.layers]
        return tuple(_modes(layers)), tuple(
            parameter.requires_grad for layer in layers for parameter in layer.parameters()
        )


def _modes(layers: Iterable[nn.Module]) -> Iterable[bool]:
    return (module.training for layer in layers for module in layer.modules())


def _in_turn(program: Program, turn: int, idle: frozenset[int]) -> Places:
    """One microbatch of each stage: of those with an R where there are any, else of all."""
    found: dict[int, list[int | None]] = {}
    for kind in (Kind.F, Kind.R):
        ops = [op for op in program.ops if op.kind is kind and op.microbatch not in idle]
        found |= {stage: [op.microbatch for op in ops if op.stage == stage] for stage in {op.stage for op in ops}}
    found = {stage: list(dict.fromkeys(microbatches)) for stage, microbatches in found.items()}  # R may come in parts
    return frozenset((stage, microbatches[turn % len(microbatches)]) for stage, microbatches in found.items())
