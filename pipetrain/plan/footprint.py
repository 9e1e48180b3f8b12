"""What each rank holds of a schedule, in bytes: from a profile of layers, before anything runs.

Two figures. The peak is over all timings that the schedule allows: an R may start as soon as its waits have ended, and messages may
come as early as receives are posted. A simulated step holds no more than that, and is what a report is compared with.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

from pipetrain.plan.profile import Profile
from pipetrain.plan.stage_costs import StageProfile, stages_of
from pipetrain.schedule.alive import OPENS_STASH, brings_set, ends_stash, peak_stash, places_freed
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.kinds import FINISHING, OFFLOAD, PASS_SEQUENCES, RECOMPUTE, RELOAD, SPLITTING, Direction, Lane
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.recompute import order_of
from pipetrain.schedule.schedule import Schedule

_SENDING = 0.005  # seconds that a message is on its way at least: the thread that sends it waits for its turn
Proved = Set[tuple[int, int | None]]  # (stage, microbatch)

_BYTES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
# Of a GPU, none of which was measured: shares of the activations, and bytes of context and libraries.
_SLACK, _SLACK_EXPANDABLE, _CUDA_RUNTIME = 0.10, 0.02, 1 << 30


@dataclass(frozen=True)
class Holdings:
    """What a rank holds besides activations, as the run's keys say. A profile counts weights and two moments of their dtype.

    `has_masters`: float32 masters, moments and gradients of 16-bit weights. `casts`: 16-bit casts of float32 weights, once per step.
    `shards` ranks share the optimizer state. `tied` are pairs of layers with one parameter. `proves`: the first step proves R.
    """

    has_masters: bool = False
    casts: bool = False
    shards: int = 1
    tied: tuple[tuple[int, int], ...] = ()
    proves: bool = True
    on_cuda: bool = False
    prefetch: int = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, whatever the timing; a line per use. On a CPU the last three are 0.

    `masters` are float32 copies of weights of fewer bits. `inputs` are the stage inputs of microbatches between F and B, `sets` their
    activations, `weight_queue` those that W still needs after I. `message_buffers` are tensors received before their use or not sent yet,
    `backward_transients` what B makes for a moment (a peer's R too). `allocator_slack` is what CUDA's allocator holds
    without use, `allocator_slack_expandable` the same with `expandable_segments`; `cuda_runtime` are the context and the libraries.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    sets: int = 0
    weight_queue: int = 0
    message_buffers: int = 0
    backward_transients: int = 0
    allocator_slack: int = 0
    allocator_slack_expandable: int = 0
    cuda_runtime: int = 0

    @property
    def total(self) -> int:
        """Bytes that the device must have, without `expandable_segments`."""
        return int(sum(getattr(self, one.name) for one in fields(self))) - self.allocator_slack_expandable


class Footprint:
    """The bytes of stages of `balance` layers under a policy. Microbatches are those of one replica."""

    def __init__(
        self, profile: Profile, balance: Sequence[int], policy: RecomputePolicy, microbatches: int, holdings: Holdings
    ) -> None:
        sizes = policy.parts if policy.in_parts else tuple((layers,) for layers in balance)
        selective = () if policy.mode is Mode.NEVER else policy.selective
        flat = iter(stages_of(profile, [layers for parts in sizes for layers in parts], selective))
        self.parts = [list(itertools.islice(flat, len(parts))) for parts in sizes]
        self._holdings, self._microbatches = holdings, microbatches
        self._batch = self.parts[0][0].input * microbatches
        self._layers = [[layer for part in parts for layer in part.layers] for parts in self.parts]
        numbers = [{number for part in parts for number in part.numbers} for parts in self.parts]
        self._spared = [
            sum(min(profile.layer(one).parameter_bytes for one in pair) for pair in holdings.tied if {*pair} <= own)
            for own in numbers
        ]
        self._outputs = [layers[-1].output_bytes for layers in self._layers]
        whole = [sum(part.full for part in parts) for parts in self.parts]
        told = [[layer.deferred_bytes for layer in layers] for layers in self._layers]
        self._deferred = [full if None in own else min(full, sum(filter(None, own))) for full, own in zip(whole, told)]

    def fixed(self, stages: Sequence[int]) -> RankMemory:
        """What a rank with these stages holds in every step: weights and their state, messages, what B makes for a moment."""
        given, layers = self._holdings, [layer for stage in stages for layer in self._layers[stage]]
        weights, trained, moments = (sum(getattr(layer, name) for layer in layers) for name in _BYTES)
        spared, wide = sum(self._spared[stage] for stage in stages), 2 if given.has_masters else 1
        trained -= min(spared, trained)
        return RankMemory(
            weights=(weights - spared) * 3 // 2 if given.casts else weights - spared,
            gradients=trained * wide,
            masters=-(-trained * 2 // given.shards) if given.has_masters else 0,
            optimizer_state=-(-max(0, moments - 2 * spared) * wide // given.shards),
            inputs=2 * self._batch if 0 in stages else 0,
            # Of one layer: gradients of what is between its operations.
            backward_transients=max(
                one.output_bytes + one.input_bytes + 2 * max((tensor.bytes for tensor in one.largest), default=0)
                for one in layers
            ),
        )

    def messages(self, stage: int, in_flight: Sequence[int]) -> int:
        """Most bytes of tensors that `stage` has received and not used, or not sent yet. `in_flight` are microbatches between F and B.

        Of inputs and gradients `prefetch` are received ahead. An output waits if the next stage takes no more: it receives as many as
        it has in flight, and those ahead.
        """
        last, ahead = len(self.parts) - 1, min(self._holdings.prefetch, self._microbatches)
        found = 0
        if stage > 0:
            early = min(ahead, max(0, self._microbatches - in_flight[stage]))
            found += (early + 1) * self.parts[stage][0].input  # and a gradient that is not sent yet
        if stage < last:
            late = max(0, in_flight[stage] - in_flight[stage + 1] - ahead)
            found += (1 + late + ahead) * self._outputs[stage]
        return found

    def of_limits(self, limits: Sequence[int], slots: Sequence[int] | None) -> tuple[RankMemory, ...]:
        """The peak of each rank, one stage each, over all orders with so many microbatches in flight and so many slots per stage."""
        found = []
        for stage, limit in enumerate(limits):
            parts, fixed = self.parts[stage], self.fixed([stage])
            stash = sum(part.stash for part in parts)
            taken = min(limit * len(parts), limit * len(parts) if slots is None else slots[stage])
            sets, rest = divmod(taken, len(parts))
            largest = sorted((part.full - part.stash for part in parts), reverse=True)
            held = sets * max(sum(part.full_if_kept for part in parts), stash) + sum(largest[:rest])
            if self._holdings.proves and taken < limit * len(parts):  # the first that R brings back, beside full slots
                held += sum(part.full_if_proved - part.stash for part in parts) + max(part.largest for part in parts)
            found.append(self._on_device(fixed, (limit - sets) * stash, held, 0, self.messages(stage, limits)))
        return tuple(found)

    def of_schedule(self, schedule: Schedule) -> tuple[RankMemory, ...]:
        """The peak of each rank, over all timings."""
        in_flight, proved = peak_stash(schedule), self._proved(schedule)
        orders = enumerate(order_of(schedule))
        return tuple(self._of_rank(schedule, rank, ops, proved, in_flight) for rank, ops in orders)

    def _of_rank(
        self, schedule: Schedule, rank: int, ops: Sequence[Op], proved: Proved, in_flight: Sequence[int]
    ) -> RankMemory:
        stages = [stage for stage, holder in enumerate(schedule.stage_ranks) if holder == rank]
        fixed = self.fixed(stages)
        held = inputs = waiting = 0
        peak = (0, 0, 0)
        for op in ops:
            added, stashed = self._added(schedule, op, proved)
            held, inputs = held + added, inputs + stashed
            peak = max(peak, (held, inputs, waiting))
            held -= self._freed(schedule, op, proved)
            waiting += self._deferred[op.stage] * ((op.kind in SPLITTING) - (op.kind in FINISHING))
        most, own, queue = peak
        messages = sum(self.messages(stage, in_flight) for stage in stages)
        return self._on_device(fixed, own, max(0, most - own - queue), min(queue, most - own), messages)

    def _on_device(self, fixed: RankMemory, inputs: int, sets: int, queue: int, messages: int) -> RankMemory:
        inputs += fixed.inputs
        found = replace(fixed, inputs=inputs, sets=sets, weight_queue=queue, message_buffers=messages)
        if not self._holdings.on_cuda:
            return found
        moving = inputs + sets + queue + messages + fixed.backward_transients
        slack, expandable = int(moving * _SLACK), int(moving * _SLACK_EXPANDABLE)
        return replace(found, allocator_slack=slack, allocator_slack_expandable=expandable, cuda_runtime=_CUDA_RUNTIME)

    def _proved(self, schedule: Schedule) -> set[tuple[int, int | None]]:
        """The (stage, microbatch) of which the first step compares R with F: the first of each stage. Its F keeps the set for that."""
        found: dict[int, int | None] = {}
        for _, _, op in schedule.ops() if self._holdings.proves else ():
            if op.kind is RECOMPUTE:
                found.setdefault(op.stage, op.microbatch)
        return set(found.items())

    def _added(self, schedule: Schedule, op: Op, proved: Proved) -> tuple[int, int]:
        """Bytes of activations that `op` adds when it starts, and how many more of these are inputs alone."""
        parts, is_proved = self.parts[op.stage], (op.stage, op.microbatch) in proved
        if op.kind in OPENS_STASH and op.stage >= schedule.first_backward:
            if brings_set(schedule, op):
                return sum(part.full_if_kept for part in parts), 0
            stash = sum(part.stash for part in parts)
            return (sum(part.full_if_proved for part in parts), 0) if is_proved else (stash, stash)
        own = self._parts(op)
        if op.kind is RELOAD:
            return sum(part.can_leave for part in own), 0
        if op.kind is RECOMPUTE:
            stash = sum(part.stash for part in own)
            # The set of F goes layer by layer, as that of R comes.
            return (own[-1].largest, 0) if is_proved else (sum(part.full for part in own) - stash, -stash)
        return 0, 0

    def _freed(self, schedule: Schedule, op: Op, proved: Proved) -> int:
        """Bytes of activations that the end of `op` frees. What W needs stays after I."""
        parts, is_proved = self.parts[op.stage], (op.stage, op.microbatch) in proved
        is_offloaded = (op.stage, op.microbatch) in schedule.offloaded
        is_kept = is_offloaded or (op.stage, op.microbatch) in schedule.kept
        if op.kind is RECOMPUTE:
            return parts[op.part or 0].largest if is_proved else 0
        if op.kind is OFFLOAD:
            return sum(part.can_leave for part in self._parts(op))
        sizes = [part.full_if_kept if is_kept else part.full_if_proved if is_proved else part.full for part in parts]
        whole = sum(sizes)
        waiting = min(self._deferred[op.stage], whole)
        if op.kind in SPLITTING:
            return whole - waiting
        if op.kind in FINISHING:
            return waiting
        if not places_freed(schedule, op) and not ends_stash(op):
            return 0
        if is_kept and not is_offloaded:
            return 0 if op.part else whole
        return whole if op.part is None else sizes[op.part]

    def _parts(self, op: Op) -> Sequence[StageProfile]:
        """Of its stage, or the one that it means."""
        return self.parts[op.stage] if op.part is None else self.parts[op.stage][op.part : op.part + 1]

    def of_step(self, schedule: Schedule, timeline: Timeline) -> tuple[int, ...]:
        """The most activation bytes of each rank in a simulated step, the first (with its proof) or a later one; inputs that wait for F count,
        and outputs until their SEND has ended."""
        events = [list[OpEvent]() for _ in range(schedule.num_ranks)]
        for event in timeline.events:
            events[event.rank].append(event)
        first = schedule.stage_ranks[0]
        # After the first step one more batch counts as held, if the first stage keeps two sets or more.
        keeps = sum(stage == 0 for stage, _ in schedule.kept) > 1 and not any(
            e.op.kind in SPLITTING for e in events[first]
        )
        found = []
        for proved, batches in ((self._proved(schedule), 1), (set[Any](), 1 + keeps)):
            changes = (sorted(self._changes(schedule, own, proved)) for own in events)
            found.append([max(itertools.accumulate(change for _, change in own), default=0) for own in changes])
            found[-1][first] += batches * self._batch
        return tuple(map(max, *found))

    def _changes(self, schedule: Schedule, events: Sequence[OpEvent], proved: Proved) -> Iterator[tuple[float, int]]:
        times = {event.op: event for event in events}
        ends = sorted(event.end for event in events if event.op.kind.computes)
        for event in events:
            op = event.op
            if added := self._added(schedule, op, proved)[0]:
                yield event.start, added
            if freed := self._freed(schedule, op, proved):
                yield event.end, -freed
            if op.kind.computes or op.kind.row.direction is not Direction.FORWARD:
                continue
            forward = times[Op(op.stage, PASS_SEQUENCES[Direction.FORWARD][0][0], op.microbatch)]
            if op.kind.row.lane is Lane.RECV:
                yield event.end, self.parts[op.stage][0].input
                yield forward.start, -self.parts[op.stage][0].input
            elif not ((op.stage, op.microbatch) in schedule.kept and self._layers[op.stage][-1].saves_output):
                made = forward.end
                # However fast the link is, it is on its way when the next op of the rank begins.
                following = ends[min(bisect.bisect_right(ends, made), len(ends) - 1)]
                yield made, self._outputs[op.stage]
                yield max(event.end, following, made + _SENDING), -self._outputs[op.stage]
