"""Runs one rank's part of a schedule: a table from kind to what it does, and a loop.

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

from pipetrain.group.failure import FailureBoard, Monitor, PipelineError
from pipetrain.parallel.replicas import SharedGradients
from pipetrain.runtime.program import COMPUTING, Program, Turns
from pipetrain.schedule.grid import grid
from pipetrain.schedule.messages import local_source, reads_boundary, receive_of, send_of, writes_boundary
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.stage.past import Past
from pipetrain.stage.seeding import layer_seed
from pipetrain.stage.segments import AnyStage
from pipetrain.stage.stage import StageInput, StageOutput
from pipetrain.transport.crossing import cross, memories
from pipetrain.transport.lanes import Lanes
from pipetrain.transport.transport import Transport, fixed_leaves, wanted


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
    whole_inputs: Mapping[int, str] = field(
        default_factory=dict
    )  # leaves that are one tensor for all microbatches, and their names
    whole_targets: Mapping[int, str] = field(default_factory=dict)
    first_microbatch: int = 0  # of this replica, among those of all
    scale: float = 1.0
    past: Past | None = None  # the tokens before, where text is made: stages go on from them
    on_layer: Callable[[int, int, Any], None] | None = None  # given microbatch, layer and its output, in F
    on_op: Callable[[Op], None] | None = None  # called ahead of each op
    explain: Callable[[Exception, int], Exception | None] | None = None  # given what a stage raised: what it means
    outputs: dict[int, Any] = field(default_factory=dict)
    proved: frozenset[tuple[int, int | None]] = frozenset()  # (stage, microbatch) whose R is compared with its F
    witnessed: frozenset[tuple[int, int | None]] = frozenset()  # those whose R is, by checksums

    def seed_of(self, microbatch: int) -> Callable[[int], int]:
        number = self.first_microbatch + microbatch
        return lambda layer: layer_seed(self.seed, self.index, number, layer)


class _Turn(NamedTuple):
    """One op that runs now."""

    op: Op
    lane: Lane
    program: Program
    step: Step

    @property
    def microbatch(self) -> int:
        assert self.op.microbatch is not None
        return self.op.microbatch


@dataclass(frozen=True)
class _Result:
    """What F or B gives a neighbouring stage: the leaves of a tree, which of them want a gradient, and its structure.

    `fixed` are leaves that the other stage may not change in place, and why.
    """

    leaves: Sequence[Any]
    wants_gradient: Sequence[bool]
    spec: pytree.TreeSpec | None = None
    fixed: Mapping[int, str] = field(default_factory=dict)


class _Received(NamedTuple):
    """What F or B gets: the leaves of a tree, which of them want a gradient, which may not be changed in place, and its
    structure; `is_shared`: from a stage of this rank, in whose memory they lie."""

    leaves: Sequence[Any]
    wants_gradient: frozenset[int]
    fixed: Mapping[int, str]
    spec: pytree.TreeSpec | None
    is_shared: bool


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
        # Until they are taken: by the SEND that takes them, or by the op that gave them where a stage of this rank does.
        self._results: dict[Op, _Result] = {}

    def change(self, stages: Mapping[int, AnyStage], shared: SharedGradients) -> None:
        """What the next steps run on; between two steps nothing is held of the one before."""
        self._assert_nothing_is_held()
        self._stages, self._shared = stages, shared

    def run(self, program: Program, step: Step) -> None:
        """Run every op of the rank; returns when all have ended: its messages have left, too.

        Raises:
            PipelineError: another rank failed. What an op of this rank raises, with a note that names the op.
        """
        turns = Turns(program)
        self._lanes.start_step()
        self._shared.start_step(program.reduces)
        while True:
            for transfer in self._transport.take_ended():
                turns.end(program.number[transfer])
            if turns.over:
                break
            if not self._start_one(turns, program, step):
                self._monitor.wait(self._transport.has_ended, lambda: self._describe(*turns.awaited()))
        self._lanes.end_step()
        self._shared.end_step()
        self._assert_nothing_is_held()

    def prepare(self, past: Past) -> None:
        """What the stages of this rank can do towards new tokens before what they wait for has come."""
        if 0 not in self._stages:
            for stage in self._stages.values():
                stage.prepare(past)

    # Order --------------------------------------------------------------------------------------------------------

    def _start_one(self, turns: Turns, program: Program, step: Step) -> bool:
        """Start the next transfer, or run the next F, R or B; False where all wait.

        Only this thread starts transfers: one that waits for a message alone starts after the F, R or B that runs when the
        message comes.
        """
        for queue in range(len(program.queues)):
            place = turns.take(queue)
            if place is not None:
                lane = program.lanes[place]
                self._run(_Turn(program.ops[place], lane, program, step), program.waits[place])
                if lane in COMPUTING:
                    turns.end(place)
                return True
        return False

    def _run(self, turn: _Turn, waits: Sequence[Op]) -> None:
        op, lane, _, step = turn
        self._monitor.doing = op
        try:
            with self._lanes.on(lane, waits, op):
                if self.before_op is not None and step.with_graph:
                    self.before_op(op, step.index)
                if step.on_op is not None:
                    step.on_op(op)
                _TABLE[op.kind](self, turn)
        except PipelineError:
            raise
        except BaseException as error:
            meant = step.explain(error, op.stage) if step.explain and isinstance(error, Exception) else None
            self._report(meant or error, turn)
            if meant is not None:
                raise meant from error
            raise

    def _describe(self, op: Op, awaited: Op) -> str:
        """What this rank waits in."""
        return self._transport.describe(awaited) or f"{self._monitor.name} waits in {op} for {awaited}"

    # The table ----------------------------------------------------------------------------------------------------

    def _forward(self, turn: _Turn) -> None:
        op, lane, program, step = turn
        stage = self._stages[op.stage]
        given = self._given(turn)
        is_last = op.stage == program.schedule.num_stages - 1
        with self._lanes.timed(lane, op):
            if step.with_graph:
                place = op.stage, op.microbatch
                output = stage.forward(
                    turn.microbatch,
                    given,
                    keep=place not in program.recomputed,
                    prove=place in step.proved,
                    witness=place in step.witnessed,
                    has_backward=op.stage >= program.schedule.first_backward,
                    split=place in program.split,
                )
            else:
                output = stage.infer(given, with_loss=step.with_loss, past=step.past)
            if not is_last:  # before the op ends: what it gives may have to be copied
                self._give(turn, self._crossed(stage, output, given))
        if is_last:
            self._finish_microbatch(turn.microbatch, output, step)

    def _recompute(self, turn: _Turn) -> None:
        with self._lanes.timed(turn.lane, turn.op):
            self._stages[turn.op.stage].recompute(turn.microbatch, turn.op.part)

    def _backward(self, turn: _Turn) -> None:
        op, lane, program, step = turn
        gradients: Sequence[Any] = ()
        if op.stage < program.schedule.num_stages - 1 and reads_boundary(program.schedule, op):
            gradients = self._received(op, program).leaves
        with self._lanes.timed(lane, op):
            stage = self._stages[op.stage]
            wanted_back = stage.backward(turn.microbatch, gradients, scale=step.scale, part=op.part)
        if op.stage > program.schedule.first_backward and writes_boundary(op):
            self._give(turn, _Result(wanted_back, (False,) * len(wanted_back)))

    def _backward_weights(self, turn: _Turn) -> None:
        with self._lanes.timed(turn.lane, turn.op):
            self._stages[turn.op.stage].backward_weights(turn.microbatch)

    def _send(self, turn: _Turn) -> None:
        result = self._results.pop(turn.op)
        self._transport.send(turn.op, result.leaves, result.wants_gradient, result.spec, result.fixed)

    def _receive(self, turn: _Turn) -> None:
        self._transport.post(turn.op)

    def _reduce(self, turn: _Turn) -> None:
        self._transport.reduce(turn.op, self._shared.given(turn.op), functools.partial(self._shared.settle, turn.op))

    # What F and B get and give ------------------------------------------------------------------------------------

    def _given(self, turn: _Turn) -> StageInput:
        op, _, program, step = turn
        if op.stage == 0:
            leaves, spec = pytree.tree_flatten(step.microbatches[turn.microbatch])
            received = _Received(leaves, frozenset(), _why_fixed(step.whole_inputs), spec, is_shared=False)
        else:
            received = self._received(op, program)
            assert received.spec is not None
            spec = received.spec
        scored = step.with_loss and op.stage == program.schedule.num_stages - 1
        return StageInput(
            tuple(received.leaves),
            spec,
            received.wants_gradient,
            step.seed_of(turn.microbatch),
            step.targets[turn.microbatch] if scored else None,
            step.weights[turn.microbatch] if scored else 1.0,
            None if step.on_layer is None else functools.partial(step.on_layer, turn.microbatch),
            received.is_shared,
            received.fixed,
            _why_fixed(step.whole_targets) if scored else {},
        )

    def _received(self, op: Op, program: Program) -> _Received:
        """What F or B gets from the neighbouring stage: by a message, or from this rank's own."""
        message = receive_of(program.schedule, op)
        if message is not None:
            leaves, form = self._transport.take(message)
            return _Received(leaves, wanted(form), fixed_leaves(form), form.spec, is_shared=False)
        source = local_source(program.schedule, op)
        assert source is not None
        result = self._results.pop(source)
        wants = frozenset(n for n, want in enumerate(result.wants_gradient) if want)
        return _Received(result.leaves, wants, result.fixed, result.spec, is_shared=True)

    def _crossed(self, stage: AnyStage, output: StageOutput, given: StageInput) -> _Result:
        """The output of a stage as the next one gets it, here or on another rank."""
        fixed = memories(given.leaves, given.fixed)
        leaves, may_not_change = cross(output.leaves, output.spec, stage.device, stage.end, fixed)
        return _Result(leaves, output.wants_gradient, output.spec, may_not_change)

    def _give(self, turn: _Turn, result: _Result) -> None:
        self._results[send_of(turn.program.schedule, turn.op) or turn.op] = result

    def _finish_microbatch(self, microbatch: int, output: StageOutput, step: Step) -> None:
        if not step.with_loss:
            step.outputs[microbatch] = pytree.tree_unflatten(list(output.leaves), output.spec)
        else:
            (step.outputs[microbatch],) = output.leaves

    # The end ------------------------------------------------------------------------------------------------------

    def _assert_nothing_is_held(self) -> None:
        """A step gives back all that it took: what it left would be memory that grows, or another step's message."""
        assert not self._results, f"nobody took the results of {', '.join(map(str, self._results))}"
        self._transport.assert_nothing_is_held()
        for stage in self._stages.values():
            stage.end_step()

    def _report(self, error: BaseException, turn: _Turn) -> None:
        """Say where it happened: to the other ranks on the board, to this one in a note."""
        op, lane, program, step = turn
        place = f"{self._monitor.name} failed in {op} ({lane} lane, step {step.index})"
        first_line = (str(error).strip().splitlines() or [""])[0]
        self._board.post(f"{place}: {type(error).__name__}: {first_line}")
        error.add_note(f"{place}\n{grid(program.schedule, op)}")

    def drop(self) -> None:
        """Forget everything that is held: a step has failed."""
        for stage in self._stages.values():
            stage.drop()
        self._shared.drop()
        self._results.clear()


def _why_fixed(names: Mapping[int, str]) -> dict[int, str]:
    return {
        number: f"{name}, which is Whole: every microbatch gets the very same tensor" for number, name in names.items()
    }


# What the executor does in an op of each kind that `runs` by its row: a new kind is one entry here, one method above, and what its stage does.
_TABLE: Mapping[Kind, Callable[[Executor, _Turn], None]] = {
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
