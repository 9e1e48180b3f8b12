"""Runs one rank's part of a schedule: a table from kind to what it does, and a loop.

    F2   take     the microbatch, or what the stage before gave: a message, or left by a stage of this rank      [1]
         run      the stage                                                                                      [2]
         give     its output to the SEND, or to the stage of this rank that comes next                           [3]

One thread runs (on a GPU: launches) all F, R and B of the rank and starts its transfers; the threads of the transport only
say what has ended. It is work-conserving: when the next op of the compute lane waits for a message and the recompute lane
has an op that may run, that one runs. On a device it launches in the order of the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from pipetrain.comm.crossing import cross, memories
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError
from pipetrain.comm.lanes import Lanes
from pipetrain.comm.transport import Transport, fixed_leaves, wanted
from pipetrain.runtime.program import COMPUTING, Program, Turns
from pipetrain.runtime.replicas import SharedGradients
from pipetrain.schedule.grid import grid
from pipetrain.schedule.messages import local_source, reads_boundary, receive_of, send_of, writes_boundary
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.stage.microbatch import StageInput, StageOutput
from pipetrain.stage.past import Past
from pipetrain.stage.seeding import layer_seeds
from pipetrain.stage.segments import AnyStage


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
    weights: Sequence[float] = ()  # what the loss of each microbatch is multiplied by
    shares: Sequence[float] = ()  # what of the batch each is
    idle: frozenset[int] = frozenset()  # microbatches that count nothing: their ops do nothing
    whole_inputs: Mapping[int, str] = field(default_factory=dict)  # leaves that are the same in all microbatches, and
    whole_targets: Mapping[int, str] = field(default_factory=dict)  # why they may not be changed in place
    first_microbatch: int = 0  # of this replica, among those of all
    scale: float = 1.0
    past: Past | None = None  # the tokens before, where text is made: stages go on from them
    on_layer: Callable[[int, int, Any], None] | None = None  # given microbatch, layer and its output, in F
    on_op: Callable[[Op], None] | None = None  # called ahead of each op
    explain: Callable[[Exception, int], Exception | None] | None = None  # given what a stage raised: what it means
    outputs: dict[int, Any] = field(default_factory=dict)
    proved: frozenset[tuple[int, int | None]] = frozenset()  # (stage, microbatch) whose R is compared with its F
    witnessed: frozenset[tuple[int, int | None]] = frozenset()  # those whose R is, by checksums


class _Boundary(NamedTuple):
    """What a stage gives its neighbour: the leaves of a tree and its structure, which of them want a gradient, and which may not be
    changed in place, and why; `is_shared`: a stage of this rank gave it, in whose memory they lie."""

    leaves: Sequence[Any]
    wants_gradient: frozenset[int] = frozenset()
    spec: pytree.TreeSpec | None = None
    fixed: Mapping[int, str] = {}
    is_shared: bool = True


class _Entry(NamedTuple):
    """An op of a program."""

    op: Op
    lane: Lane
    program: Program

    @property
    def microbatch(self) -> int:
        assert self.op.microbatch is not None
        return self.op.microbatch


_Run = Callable[[Step], None]


class Executor:
    """The loop of one rank."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, AnyStage],
        transport: Transport,
        lanes: Lanes,
        monitor: Monitor,
        board: FailureBoard,
        shared: SharedGradients | None = None,
    ) -> None:
        self.rank = rank
        self.before_op: Callable[[Op, int], None] | None = None  # called ahead of each op of a training step
        self._stages = stages
        self._transport = transport
        self._lanes = lanes
        self._monitor = monitor
        self._board = board
        self._shared = SharedGradients({}) if shared is None else shared
        self._compiled: dict[Program, list[_Run]] = {}  # what each op of a program does, decided once
        # By the SEND that takes it, or by the op that gave it where a stage of this rank does.
        self._given: dict[Op, _Boundary] = {}

    def change(self, stages: Mapping[int, AnyStage], shared: SharedGradients) -> None:
        """What the next steps run on; between two steps nothing is held of the one before."""
        self._assert_nothing_is_held()
        self._stages, self._shared = stages, shared
        self._compiled.clear()

    def run(self, program: Program, step: Step) -> None:
        """Run every op of the rank; returns when all have ended: its messages have left, too.

        Only this thread starts transfers: one that waits for a message alone starts after the F, R or B that runs when the
        message comes.

        Raises:
            PipelineError: another rank failed. What an op of this rank raises, with a note that names the op.
        """
        if program not in self._compiled:
            entries = (_Entry(op, lane, program) for op, lane in zip(program.ops, program.lanes))
            self._compiled[program] = [_TABLE[entry.op.kind](self, entry) for entry in entries]
        runs, turns = self._compiled[program], Turns(program)
        self._lanes.start_step()
        self._shared.start_step(program.reduces)
        while True:
            for transfer in self._transport.take_ended():
                turns.end(program.number[transfer])
            if not turns.num_left:
                break
            index = turns.take()
            if index is None:
                self._monitor.wait(self._transport.has_ended, lambda: self._describe(*turns.awaited()))
            elif self._run(program, index, runs[index], step):
                turns.end(index)
        self._lanes.end_step()
        self._shared.end_step()
        self._assert_nothing_is_held()

    def prepare(self, past: Past) -> None:
        """What the stages of this rank can do towards new tokens before what they wait for has come."""
        if 0 not in self._stages:
            for stage in self._stages.values():
                stage.prepare(past)

    def _run(self, program: Program, index: int, run: _Run, step: Step) -> bool:
        """Run or start one op; whether it has ended: a transfer is under way then."""
        op, lane = program.ops[index], program.lanes[index]
        self._monitor.doing = op
        try:
            with self._lanes.on(lane, program.waits[index], op):
                if op.microbatch in step.idle:
                    self._lanes.mark(lane, op)
                    return True
                if self.before_op is not None and step.with_graph:
                    self.before_op(op, step.index)
                if step.on_op is not None:
                    step.on_op(op)
                run(step)
        except PipelineError:
            raise
        except BaseException as error:
            meant = step.explain(error, op.stage) if step.explain and isinstance(error, Exception) else None
            self._report(meant or error, program, index, step)
            if meant is not None:
                raise meant from error
            raise
        return lane in COMPUTING

    def _describe(self, op: Op, awaited: Op) -> str:
        """What this rank waits in."""
        return self._transport.describe(awaited) or f"{self._monitor.name} waits in {op} for {awaited}"

    # The table: each gives what an op of a program does in a step -------------------------------------------------

    def _forward(self, entry: _Entry) -> _Run:
        (op, lane, program), number = entry, entry.microbatch
        stage, place = self._stages[op.stage], (op.stage, number)
        keep, split = place not in program.recomputed, place in program.split
        has_backward = op.stage >= program.schedule.first_backward
        is_last = op.stage == program.schedule.num_stages - 1
        take = None if op.stage == 0 else self._taking(program, op)
        to = send_of(program.schedule, op) or op

        def run(step: Step) -> None:
            given = _stage_input(step, number, take() if take else None, is_last=is_last)  # [1]
            with self._lanes.timed(lane, op):
                if step.with_graph:
                    output = stage.forward(  # [2]
                        number,
                        given,
                        keep=keep,
                        prove=place in step.proved,
                        witness=place in step.witnessed,
                        has_backward=has_backward,
                        split=split,
                    )
                else:
                    output = stage.infer(given, with_loss=step.with_loss, past=step.past)
                if not is_last:  # before the op ends: what it gives may have to be copied
                    self._given[to] = self._crossed(stage, output, given)  # [3]
            if not is_last:
                return
            if step.with_loss:
                (step.outputs[number],) = output.leaves
            else:
                step.outputs[number] = pytree.tree_unflatten(list(output.leaves), output.spec)

        return run

    def _recompute(self, entry: _Entry) -> _Run:
        (op, lane, _), stage, number = entry, self._stages[entry.op.stage], entry.microbatch

        def run(_: Step) -> None:
            with self._lanes.timed(lane, op):
                stage.recompute(number, op.part)

        return run

    def _backward(self, entry: _Entry) -> _Run:
        (op, lane, program), stage, number = entry, self._stages[entry.op.stage], entry.microbatch
        schedule = program.schedule
        from_next = op.stage < schedule.num_stages - 1 and reads_boundary(schedule, op)
        take = self._taking(program, op) if from_next else None
        to = (send_of(schedule, op) or op) if op.stage > schedule.first_backward and writes_boundary(op) else None

        def run(step: Step) -> None:
            gradients = take().leaves if take else ()
            with self._lanes.timed(lane, op):
                wanted_back = stage.backward(number, gradients, scale=step.scale, part=op.part)
            if to is not None:
                self._given[to] = _Boundary(wanted_back)

        return run

    def _backward_weights(self, entry: _Entry) -> _Run:
        (op, lane, _), stage, number = entry, self._stages[entry.op.stage], entry.microbatch

        def run(_: Step) -> None:
            with self._lanes.timed(lane, op):
                stage.backward_weights(number)

        return run

    def _send(self, entry: _Entry) -> _Run:
        op = entry.op

        def run(_: Step) -> None:
            given = self._given.pop(op)
            wants_gradient = [leaf in given.wants_gradient for leaf in range(len(given.leaves))]
            self._transport.send(op, given.leaves, wants_gradient, given.spec, given.fixed)

        return run

    def _receive(self, entry: _Entry) -> _Run:
        return lambda _: self._transport.post(entry.op)

    def _reduce(self, entry: _Entry) -> _Run:
        op, settle = entry.op, functools.partial(self._shared.settle, entry.op)
        return lambda _: self._transport.reduce(op, self._shared.given(op), settle)

    # Boundary tensors ---------------------------------------------------------------------------------------------

    def _taking(self, program: Program, op: Op) -> Callable[[], _Boundary]:
        """How F or B gets what the neighbouring stage gives: by a message, or from this rank's own."""
        message = receive_of(program.schedule, op)
        if message is None:
            source = local_source(program.schedule, op)
            assert source is not None
            return functools.partial(self._given.pop, source)

        def take() -> _Boundary:
            leaves, form = self._transport.take(message)
            return _Boundary(leaves, wanted(form), form.spec, fixed_leaves(form), is_shared=False)

        return take

    def _crossed(self, stage: AnyStage, output: StageOutput, given: StageInput) -> _Boundary:
        """The output of a stage as the next one gets it, here or on another rank."""
        fixed = memories(given.leaves, given.fixed)
        leaves, may_not_change = cross(output.leaves, output.spec, stage.device, stage.end, fixed)
        wants = frozenset(leaf for leaf, want in enumerate(output.wants_gradient) if want)
        return _Boundary(leaves, wants, output.spec, may_not_change)

    # The end ------------------------------------------------------------------------------------------------------

    def _assert_nothing_is_held(self) -> None:
        """A step gives back all that it took: what it left would be memory that grows, or another step's message."""
        assert not self._given, f"nobody took the results of {', '.join(map(str, self._given))}"
        self._transport.assert_nothing_is_held()
        for stage in self._stages.values():
            stage.end_step()

    def _report(self, error: BaseException, program: Program, index: int, step: Step) -> None:
        """Say where it happened: to the other ranks on the board, to this one in a note."""
        op = program.ops[index]
        place = f"{self._monitor.name} failed in {op} ({program.lanes[index]} lane, step {step.index})"
        first_line = (str(error).strip().splitlines() or [""])[0]
        self._board.post(f"{place}: {type(error).__name__}: {first_line}")
        error.add_note(f"{place}\n{grid(program.schedule, op)}")

    def drop(self) -> None:
        """Forget everything that is held: a step has failed."""
        for stage in self._stages.values():
            stage.drop()
        self._shared.drop()
        self._given.clear()


def _stage_input(step: Step, microbatch: int, taken: _Boundary | None, *, is_last: bool) -> StageInput:
    """What F of a stage gets: what another gave, or (None) a microbatch of the batch."""
    if taken is None:
        leaves, spec = pytree.tree_flatten(step.microbatches[microbatch])
        taken = _Boundary(leaves, frozenset(), spec, step.whole_inputs, is_shared=False)
    assert taken.spec is not None
    scored = step.with_loss and is_last
    return StageInput(
        tuple(taken.leaves),
        taken.spec,
        taken.wants_gradient,
        functools.partial(layer_seeds, step.seed, step.index, step.first_microbatch + microbatch),
        step.targets[microbatch] if scored else None,
        step.weights[microbatch] if scored else 1.0,
        None if step.on_layer is None else functools.partial(step.on_layer, microbatch),
        taken.is_shared,
        taken.fixed,
        step.whole_targets if scored else {},
    )


# What an op of each kind that `runs` by its row does: a new kind is one entry here, one method above, and what its stage does.
_TABLE: Mapping[Kind, Callable[[Executor, _Entry], _Run]] = {
    Kind.F: Executor._forward,
    Kind.R: Executor._recompute,
    Kind.B: Executor._backward,
    Kind.I: Executor._backward,
    Kind.W: Executor._backward_weights,
    Kind.SEND_F: Executor._send,
    Kind.SEND_B: Executor._send,
    Kind.RECV_F: Executor._receive,
    Kind.RECV_B: Executor._receive,
    Kind.REDUCE_GRAD: Executor._reduce,
}
