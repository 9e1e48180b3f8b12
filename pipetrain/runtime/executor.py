"""Runs one rank's part of a schedule: a table with a method for each kind of op, and a loop.

    F2   take     the microbatch, or the output of the stage before: from a message, or from a stage of this rank     [1]
         run      the stage                                                                                           [2]
         give     its output to the SEND, or to the next stage if that is on this rank                                [3]

One thread runs (on a GPU: launches) all compute and recompute ops of the rank, and starts its transfers and copies. Other threads move
the bytes and report the ends. The loop is work-conserving: while the next compute op waits for a message, the next recompute op runs if it may.
On a GPU the loop does not choose: it launches the ops in the order that the schedule has fixed (`launch_order`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipetrain.comm.crossing import cross, memories
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError
from pipetrain.comm.lanes import Lanes
from pipetrain.comm.transport import Transport
from pipetrain.runtime.gradients import SharedGradients
from pipetrain.runtime.host_copies import HostCopies
from pipetrain.runtime.program import COMPUTING, Places, Program, ProgramEntry
from pipetrain.schedule.grid import grid
from pipetrain.schedule.op import Kind, Op
from pipetrain.stage.microbatch import StageInput, StageOutput
from pipetrain.stage.past import Past
from pipetrain.stage.seeding import layer_seeds
from pipetrain.stage.segments import AnyStage, infer, prepare_stage

OnCall = Callable[[Op, Sequence[nn.Module]], None]
"""What a CALL runs: a function of the op and the layers of the op's stage."""


@dataclass
class Step:
    """The data of one call of the pipeline on one rank. The ops fill `outputs` on the last stage's rank: loss or output by microbatch."""

    index: int
    seed: int
    with_graph: bool
    with_loss: bool
    microbatches: Sequence[Any] = ()  # of stage 0
    targets: Sequence[Any] = ()  # of the last stage
    weights: Sequence[float] = ()  # the factor of each microbatch's loss
    shares: Sequence[float] = ()  # each microbatch's share of the batch
    idle: frozenset[int] = frozenset()  # microbatches whose weight in the loss is 0: their ops do nothing
    whole_inputs: Mapping[int, str] = field(default_factory=dict)  # index of a `Whole` leaf -> why it is read-only
    whole_targets: Mapping[int, str] = field(default_factory=dict)  # likewise
    first_microbatch: int = 0  # the number of this replica's first microbatch, counted over all replicas
    scale: float = 1.0  # the factor of all gradients
    past: Past | None = None  # in generation: what layers keep of the earlier tokens
    on_layer: Callable[[int, int, Any], None] | None = None  # called in F with microbatch, layer, output of the layer
    on_op: Callable[[Op], None] | None = None  # called before each op
    explain: Callable[[Exception, int], Exception | None] | None = None  # given an error and its stage: a clearer error
    outputs: dict[int, Any] = field(default_factory=dict)
    proved: Places = frozenset()  # (stage, microbatch): F inspects the layers, and R, if any, is compared with F
    witnessed: Places = frozenset()  # (stage, microbatch): F and R are compared by checksums


class _Boundary(NamedTuple):
    """What a stage gives its neighbour: the leaves of its output, with the tree structure `spec`, or the gradients of its input's leaves.
    `wants_gradient` has the indices of leaves that need a gradient. `fixed`: index of a leaf -> why it may not be changed in place.
    `is_shared`: a stage of this rank made the leaves, and may still read their memory."""

    leaves: Sequence[Any]
    wants_gradient: frozenset[int] = frozenset()
    spec: pytree.TreeSpec | None = None
    fixed: Mapping[int, str] = {}
    is_shared: bool = True


class Turns:
    """The progress of one run of a program. For one thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._open = list(program.num_waits)  # the same, without waits for ops that have ended
        self._heads = list(program.starts)  # the first op of each queue that has not started
        self._ended = [False] * len(program.ops)
        self.num_left = len(program.ops)  # ops that have not ended

    def take(self) -> int | None:
        """Return the next op that may start, and count it as started; None: no op may start."""
        for queue, head in enumerate(self._heads):
            if head != self._program.queues[queue].stop and not self._open[head]:
                self._heads[queue] = head + 1
                return head
        return None

    def end(self, place: int) -> None:
        """Record that an op has ended: the ops that wait for it wait for one op less."""
        assert not self._ended[place], f"{self._program.ops[place]} ended twice"
        self._ended[place] = True
        self.num_left -= 1
        for follower in self._program.followers[place]:
            self._open[follower] -= 1

    def awaited(self) -> tuple[Op, Op]:
        """For when no op may start: return the first op that has not started, and the running transfer or copy for which it waits, directly
        or through other ops. If all ops have started, return the first that has not ended, twice."""
        program = self._program
        heads = [head for queue, head in zip(program.queues, self._heads) if head < queue.stop]
        under_way = first = min(heads) if heads else self._ended.index(False)
        while not any(under_way in queue and under_way < head for queue, head in zip(program.queues, self._heads)):
            waits = (program.number[op] for op in program.entries[under_way].waits)
            under_way = next((place for place in waits if not self._ended[place]), under_way - 1)
        return program.ops[first], program.ops[under_way]


class Executor:
    """Runs the ops of one rank, in a loop."""

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
        self.before_op: Callable[[Op, int], None] | None = None  # called before each op of a training step
        self.copies: HostCopies | None = None  # to host memory and back; None: the schedule offloads nothing
        self.on_call: OnCall | None = None
        self.rank, self._stages, self._transport, self._lanes = rank, stages, transport, lanes
        self._monitor, self._board = monitor, board
        self._shared = SharedGradients({}) if shared is None else shared
        # Boundary tensors that nobody has taken yet, by `ProgramEntry.writes`: the SEND, or the op itself if this rank has the next stage.
        self._given: dict[Op, _Boundary] = {}

    def change(self, stages: Mapping[int, AnyStage], shared: SharedGradients) -> None:
        """Set stages and gradient buckets of the next steps. Only between two steps, when nothing is held."""
        self._assert_nothing_is_held()
        self._stages, self._shared = stages, shared

    def run(self, program: Program, step: Step) -> None:
        """Run every op of the rank; returns when all ops have ended, sends included.

        Only this thread starts transfers. So if a message arrives during an F, R or B, a transfer that waited for it starts after
        that op.

        Raises PipelineError: another rank failed. Also raises what an op of this rank raises, with a note that names the op.
        """
        turns, ended = Turns(program), self._transport.ended
        self._lanes.start_step()
        if program.reduces:
            self._shared.start_step(program.reduces)
        if self.copies is not None:
            self.copies.start_step()
        while True:
            while ended:
                turns.end(self._take_ended(program, step))
            if not turns.num_left:
                break
            index = turns.take()
            if index is None:

                def doing() -> str:
                    op, awaited = turns.awaited()
                    return self._transport.describe(awaited) or f"{self._monitor.name} waits in {op} for {awaited}"

                with self._lanes.waiting():
                    self._monitor.wait(lambda: bool(ended), doing)
            elif self._run(program, program.entries[index], step):
                turns.end(index)
        self._lanes.end_step()
        if program.reduces:
            self._shared.end_step()
        self._assert_nothing_is_held()

    def _take_ended(self, program: Program, step: Step) -> int:
        """Take the first transfer or copy that has ended, run the rest of its work on this thread, and return its number in the program."""
        op, land = self._transport.ended.popleft()
        number = program.number[op]
        try:
            land()
        except Exception as error:
            self._report(error, program, program.entries[number], step)
            raise
        return number

    def prepare(self, past: Past) -> None:
        """Let this rank's stages prepare for new tokens while they wait for a message. Not on the rank of stage 0: it has its input."""
        if 0 not in self._stages:
            for stage in self._stages.values():
                prepare_stage(stage, past)

    def _run(self, program: Program, entry: ProgramEntry, step: Step) -> bool:
        """Run one op. Returns whether it has ended: a transfer, or a copy in a thread, only starts here, so it returns False."""
        op, lane = entry.op, entry.lane
        self._monitor.doing = op
        try:
            with self._lanes.on(lane, entry.waits, op):
                if op.microbatch in step.idle:
                    self._lanes.mark(lane, op)
                    return True
                if self.before_op is not None and step.with_graph:
                    self.before_op(op, step.index)
                if step.on_op is not None:
                    step.on_op(op)
                has_ended = _TABLE[op.kind](self, entry, step)
        except PipelineError:
            raise
        except BaseException as error:
            meant = step.explain(error, op.stage) if step.explain and isinstance(error, Exception) else None
            self._report(meant or error, program, entry, step)
            if meant is not None:
                raise meant from error
            raise
        return lane in COMPUTING if has_ended is None else has_ended

    # The table ----------------------------------------------------------------------------------------------------

    def _forward(self, entry: ProgramEntry, step: Step) -> None:
        op, stage, number = entry.op, self._stages[entry.op.stage], entry.microbatch
        taken = None if entry.reads is None else self._taken(entry.reads, entry)
        given = _stage_input(step, number, taken, is_last=entry.is_last)  # [1]
        with self._lanes.timed(entry.lane, op):
            if step.with_graph:
                output = stage.forward(  # [2]
                    number,
                    given,
                    keep=entry.keep,
                    prove=(op.stage, number) in step.proved,
                    witness=(op.stage, number) in step.witnessed,
                    has_backward=entry.has_backward,
                    split=entry.split,
                    moves=entry.moves,
                )
            else:
                output = infer(stage, given, with_loss=step.with_loss, past=step.past)
            if entry.writes is not None:  # before the op ends, because this may copy the output
                self._given[entry.writes] = _crossed(stage, output, given)  # [3]
        if entry.is_last and step.with_loss:
            (step.outputs[number],) = output.leaves
        elif entry.is_last:
            step.outputs[number] = pytree.tree_unflatten(list(output.leaves), output.spec)

    def _recompute(self, entry: ProgramEntry, _: Step) -> None:
        with self._lanes.timed(entry.lane, entry.op):
            self._stages[entry.op.stage].recompute(entry.microbatch, entry.op.part)

    def _backward(self, entry: ProgramEntry, step: Step) -> None:
        op, stage = entry.op, self._stages[entry.op.stage]
        given = () if entry.reads is None else self._taken(entry.reads, entry).leaves
        with self._lanes.timed(entry.lane, op):
            gradients = stage.backward(entry.microbatch, given, scale=step.scale, part=op.part)
        if entry.writes is not None:
            self._given[entry.writes] = _Boundary(gradients)

    def _backward_weights(self, entry: ProgramEntry, _: Step) -> None:
        with self._lanes.timed(entry.lane, entry.op):
            self._stages[entry.op.stage].backward_weights(entry.microbatch)

    def _offload(self, entry: ProgramEntry, _: Step) -> bool:
        host_set = self._stages[entry.op.stage].host_set(entry.microbatch, entry.op.part)
        assert self.copies is not None
        return host_set is None or self.copies.offload(entry, host_set)

    def _reload(self, entry: ProgramEntry, _: Step) -> bool:
        host_set = self._stages[entry.op.stage].host_set(entry.microbatch, entry.op.part)
        assert self.copies is not None
        return host_set is None or self.copies.reload(entry, host_set)

    def _call(self, entry: ProgramEntry, _: Step) -> None:
        assert self.on_call is not None
        with self._lanes.timed(entry.lane, entry.op), torch.no_grad():
            self.on_call(entry.op, self._stages[entry.op.stage].layers)

    def _send(self, entry: ProgramEntry, _: Step) -> None:
        given = self._given.pop(entry.op)
        wants_gradient = [leaf in given.wants_gradient for leaf in range(len(given.leaves))]
        self._transport.send(entry.op, given.leaves, wants_gradient, given.spec, given.fixed)

    def _receive(self, entry: ProgramEntry, _: Step) -> None:
        self._transport.post(entry.op)

    def _reduce(self, entry: ProgramEntry, _: Step) -> None:
        op = entry.op
        self._transport.reduce(op, self._shared.given(op), functools.partial(self._shared.settle, op))

    def _taken(self, source: Op, entry: ProgramEntry) -> _Boundary:
        """Take the boundary tensors that `source` made: a receive, or an op of a neighbouring stage on this rank."""
        if not entry.is_received:
            return self._given.pop(source)
        leaves, form = self._transport.take(source)
        return _Boundary(leaves, form.wanted, form.spec, form.fixed, is_shared=False)

    # The end ------------------------------------------------------------------------------------------------------

    def _assert_nothing_is_held(self) -> None:
        """Assert that a step has released all that it held: a leftover would leak, or be mistaken for a message of the next step."""
        assert not self._given, f"nobody took the results of {', '.join(map(str, self._given))}"
        if self._transport.has_peers:
            self._transport.assert_nothing_is_held()
        if self.copies is not None:
            self.copies.pool.assert_nothing_is_held()
        for stage in self._stages.values():
            stage.end_step()

    def _report(self, error: BaseException, program: Program, entry: ProgramEntry, step: Step) -> None:
        """Name the op that raised `error`: for the other ranks on the failure board, for this rank in a note of the exception."""
        place = f"{self._monitor.name} failed in {entry.op} ({entry.lane} lane, step {step.index + 1})"
        first_line, *_ = str(error).strip().splitlines() or [""]
        self._board.post(f"{place}: {type(error).__name__}: {first_line}")
        error.add_note(f"{place}\n{grid(program.schedule, entry.op)}")

    def drop(self) -> None:
        """Release all that a failed step holds."""
        if self.copies is not None:
            self.copies.drop()
        for stage in self._stages.values():
            stage.drop()
        self._shared.drop()
        self._given.clear()


def _crossed(stage: AnyStage, output: StageOutput, given: StageInput) -> _Boundary:
    """Return the output of a stage as the next stage gets it, whether that stage is on this rank or not."""
    fixed = memories(given.leaves, given.fixed)
    leaves, may_not_change = cross(output.leaves, output.spec, stage.device, stage.end, fixed)
    wants = frozenset(leaf for leaf, want in enumerate(output.wants_gradient) if want)
    return _Boundary(leaves, wants, output.spec, may_not_change)


def _stage_input(step: Step, microbatch: int, taken: _Boundary | None, *, is_last: bool) -> StageInput:
    """Return the input of a stage's F: `taken`, which the stage before returned. If `taken` is None, it is a microbatch of the batch."""
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


# A method for each kind of op in `schedule/kinds.py`. A new kind needs an entry here, a method above, and often a method of the stage.
# A method returns whether the op has ended. None means: it has, if its lane is compute or recompute.
_TABLE: Mapping[Kind, Callable[[Executor, ProgramEntry, Step], bool | None]] = {
    Kind.F: Executor._forward,
    Kind.R: Executor._recompute,
    Kind.B: Executor._backward,
    Kind.I: Executor._backward,
    Kind.W: Executor._backward_weights,
    Kind.OFFLOAD: Executor._offload,
    Kind.RELOAD: Executor._reload,
    Kind.CALL: Executor._call,
    Kind.SEND_F: Executor._send,
    Kind.SEND_B: Executor._send,
    Kind.RECV_F: Executor._receive,
    Kind.RECV_B: Executor._receive,
    Kind.REDUCE_GRAD: Executor._reduce,
}
