"""Runs one rank's part of a schedule: a table from kind to what it does, and a loop.

One thread runs (on a GPU: launches) all F, R and B of the rank. It is work-conserving: when the next op of the compute
lane waits for a message and the recompute lane has an op that may run, that one runs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from pipetrain.group.failure import FailureBoard, Monitor, PipelineError
from pipetrain.schedule.grid import grid
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.seeding import layer_seed
from pipetrain.stage.stage import Stage, StageInput, StageOutput
from pipetrain.transport.forms import spec_text, structure
from pipetrain.transport.lanes import Lanes
from pipetrain.transport.transport import Transport, wanted

_SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}


@dataclass
class Step:
    """What one call of the pipeline works on. `outputs` is filled on the last stage's rank: losses, or output trees."""

    index: int
    seed: int
    num_layers: int
    with_graph: bool
    with_loss: bool
    microbatches: Sequence[Any] = ()  # of stage 0
    targets: Sequence[Any] = ()  # of the last stage
    weights: Sequence[float] = ()
    scale: float = 1.0
    on_layer: Callable[[int, int, Any], None] | None = None  # given microbatch, layer and its output, in F
    outputs: dict[int, Any] = field(default_factory=dict)

    def seed_of(self, microbatch: int) -> Callable[[int], int]:
        return lambda layer: layer_seed(self.seed, self.index, microbatch, layer)


@dataclass(frozen=True)
class Program:
    """One rank's part of a schedule, laid out for the loop: `then[op]` are the transfers that start when `op` has ended."""

    schedule: Schedule
    compute: tuple[Op, ...]
    recompute: tuple[Op, ...]
    first: tuple[Op, ...]
    then: Mapping[Op, tuple[Op, ...]]
    recomputed: frozenset[Op]

    @staticmethod
    def of(schedule: Schedule, rank: int) -> Program:
        compute, recompute = schedule.lane(rank, Lane.COMPUTE), schedule.lane(rank, Lane.RECOMPUTE)
        place = {op: number for number, op in enumerate(compute)}
        first: list[Op] = []
        then: dict[Op, list[Op]] = {}
        for op in (*schedule.lane(rank, Lane.RECV), *schedule.lane(rank, Lane.SEND)):
            before = [wait for wait in schedule.waits.get(op, ()) if wait in place]
            if before:
                then.setdefault(max(before, key=place.__getitem__), []).append(op)
            else:
                first.append(op)
        recomputed = frozenset(
            Op(op.stage, Kind.F, op.microbatch) for op in (*compute, *recompute) if op.kind is Kind.R
        )
        return Program(
            schedule, compute, recompute, tuple(first), {op: tuple(ops) for op, ops in then.items()}, recomputed
        )


class Executor:
    """The loop of one rank."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        lanes: Lanes,
        monitor: Monitor,
        board: FailureBoard,
    ) -> None:
        self.rank = rank
        self.done: set[Op] = set()
        self.before_op: Callable[[Op, int], None] | None = None  # called ahead of each op of a training step
        self._stages = stages
        self._transport = transport
        self._lanes = lanes
        self._monitor = monitor
        self._board = board
        self._handed: dict[Op, tuple[Sequence[Any], frozenset[int], pytree.TreeSpec | None]] = {}
        self._outgoing: dict[Op, tuple[Sequence[Any], Sequence[bool], str]] = {}
        self._table: Mapping[Kind, Callable[[Op, Step, Program], None]] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
        }

    def run(self, program: Program, step: Step) -> None:
        """Run every op of the rank; returns when all its messages have left.

        Raises:
            PipelineError: another rank failed. What an op of this rank raises, with a note that names the op.
        """
        queues = {Lane.COMPUTE: deque(program.compute), Lane.RECOMPUTE: deque(program.recompute)}
        self._lanes.start_step()
        for op in program.first:
            self._start_transfer(op, step)
        while queues[Lane.COMPUTE] or queues[Lane.RECOMPUTE]:
            lane = self._next_lane(program, queues)
            op = queues[lane].popleft()
            try:
                with self._lanes.on(lane, program.schedule.waits.get(op, ()), op):
                    self._announce(op, step)
                    self._table[op.kind](op, step, program)
            except PipelineError:
                raise
            except BaseException as error:
                self._report(error, op, lane, step, program)
                raise
            self.done.add(op)
            for transfer in program.then.get(op, ()):
                self._start_transfer(transfer, step)
        self._transport.finish()
        self._lanes.end_step()
        assert not self._handed
        assert not self._outgoing

    # Order --------------------------------------------------------------------------------------------------------

    def _next_lane(self, program: Program, queues: Mapping[Lane, deque[Op]]) -> Lane:
        """The lane whose head may run: compute before recompute. Waits for a message where neither may."""
        lane = self._ready_lane(program, queues)
        if lane is None:
            self._monitor.wait(
                lambda: self._ready_lane(program, queues) is not None, lambda: self._waits_for(program, queues)
            )
            lane = self._ready_lane(program, queues)
            assert lane is not None
        return lane

    def _ready_lane(self, program: Program, queues: Mapping[Lane, deque[Op]]) -> Lane | None:
        for lane, queue in queues.items():
            if queue and all(op in self.done for op in program.schedule.waits.get(queue[0], ())):
                return lane
        return None

    def _waits_for(self, program: Program, queues: Mapping[Lane, deque[Op]]) -> str:
        head = next(queue[0] for queue in queues.values() if queue)
        missing = [op for op in program.schedule.waits.get(head, ()) if op not in self.done]
        transfer = next((op for op in missing if op.kind in (Kind.RECV_F, Kind.RECV_B)), None)
        return self._transport.describe(transfer) if transfer else f"rank {self.rank} waits in {head} for {missing}"

    # The table ----------------------------------------------------------------------------------------------------

    def _forward(self, op: Op, step: Step, program: Program) -> None:
        assert op.microbatch is not None
        stage = self._stages[op.stage]
        given = self._given(op, step, program)
        with self._lanes.timed(Lane.COMPUTE, op):
            if step.with_graph:
                output = stage.forward(op.microbatch, given, keep=op not in program.recomputed)
            else:
                output = stage.infer(given, with_loss=step.with_loss)
        if op.stage == program.schedule.num_stages - 1:
            self._finish_microbatch(op.microbatch, output, given, step)
        else:
            self._hand_on(op, op.stage + 1, output.leaves, output.wants_gradient, output.spec, program)

    def _recompute(self, op: Op, step: Step, program: Program) -> None:  # noqa: ARG002
        assert op.microbatch is not None
        lane = Lane.RECOMPUTE if op in program.recompute else Lane.COMPUTE
        with self._lanes.timed(lane, op):
            self._stages[op.stage].recompute(op.microbatch)

    def _backward(self, op: Op, step: Step, program: Program) -> None:
        assert op.microbatch is not None
        gradients: Sequence[Any] = ()
        if op.stage < program.schedule.num_stages - 1:
            gradients, _, _ = self._received(op, Kind.RECV_B)
        with self._lanes.timed(Lane.COMPUTE, op):
            wanted_back = self._stages[op.stage].backward(op.microbatch, gradients, scale=step.scale)
        if op.stage > program.schedule.first_backward:
            self._hand_on(op, op.stage - 1, wanted_back, (False,) * len(wanted_back), None, program)

    # Hand-overs ---------------------------------------------------------------------------------------------------

    def _given(self, op: Op, step: Step, program: Program) -> StageInput:
        assert op.microbatch is not None
        if op.stage == 0:
            leaves, spec = pytree.tree_flatten(step.microbatches[op.microbatch])
            wants: frozenset[int] = frozenset()
        else:
            received, wants, found = self._received(op, Kind.RECV_F)
            assert found is not None
            leaves, spec = list(received), found
        last = op.stage == program.schedule.num_stages - 1
        on_layer = None if step.on_layer is None else functools.partial(step.on_layer, op.microbatch)
        return StageInput(
            tuple(leaves),
            spec,
            wants,
            step.seed_of(op.microbatch),
            step.targets[op.microbatch] if last and step.with_loss else None,
            step.weights[op.microbatch] if last and step.with_loss else 1.0,
            on_layer,
        )

    def _received(self, op: Op, kind: Kind) -> tuple[Sequence[Any], frozenset[int], pytree.TreeSpec | None]:
        """What F or B of `op` gets from the neighbouring stage: from this rank, or from another by a message of `kind`."""
        if op in self._handed:
            return self._handed.pop(op)
        leaves, form = self._transport.take(Op(op.stage, kind, op.microbatch))
        return leaves, wanted(form), structure(form.spec) if form.spec else None

    def _hand_on(
        self,
        op: Op,
        stage: int,
        leaves: Sequence[Any],
        wants: Sequence[bool],
        spec: pytree.TreeSpec | None,
        program: Program,
    ) -> None:
        """Give the result of `op` to `stage`: at once on the same rank, else when its SEND starts."""
        if program.schedule.stage_ranks[stage] == self.rank:
            needed = frozenset(n for n, want in enumerate(wants) if want)
            self._handed[Op(stage, op.kind, op.microbatch)] = (leaves, needed, spec)
        else:
            text = "" if spec is None else spec_text(spec)
            self._outgoing[Op(op.stage, _SEND[op.kind], op.microbatch)] = (leaves, wants, text)

    def _announce(self, op: Op, step: Step) -> None:
        if self.before_op is not None and step.with_graph:
            self.before_op(op, step.index)

    def _start_transfer(self, op: Op, step: Step) -> None:
        self._announce(op, step)
        if op.kind in (Kind.RECV_F, Kind.RECV_B):
            self._transport.post(op)
        else:
            self._transport.send(op, *self._outgoing.pop(op))

    def _finish_microbatch(self, microbatch: int, output: StageOutput, given: StageInput, step: Step) -> None:
        if not step.with_loss:
            step.outputs[microbatch] = pytree.tree_unflatten(list(output.leaves), output.spec)
        elif given.weight != 0:
            (step.outputs[microbatch],) = output.leaves

    # Failure ------------------------------------------------------------------------------------------------------

    def _report(self, error: BaseException, op: Op, lane: Lane, step: Step, program: Program) -> None:
        """Say where it happened: to the other ranks on the board, to this one in a note."""
        place = f"rank {self.rank} failed in {op} ({lane} lane, step {step.index})"
        first_line = (str(error).strip().splitlines() or [""])[0]
        self._board.post(f"{place}: {type(error).__name__}: {first_line}")
        error.add_note(f"{place}\n{grid(program.schedule, op)}")

    def drop(self) -> None:
        """Forget everything that is held: a step has failed."""
        for stage in self._stages.values():
            stage.drop()
        self._handed.clear()
        self._outgoing.clear()
