"""Runs a schedule op by op with blocking sends, and complains. Knows nothing of `check` nor of the passes.

It is unlucky: recomputations run as early as they may (which fills the memory), a message moves only when no rank can
compute, and the queue of `late` (an op) gets its turn only when no other has one.
"""

from __future__ import annotations

from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule


class OracleError(Exception):
    pass


class Oracle:
    def __init__(self, schedule: Schedule, late: Op | None = None) -> None:
        self.schedule = schedule
        self.late = late
        self.done: set[Op] = set()
        self.added: set[tuple[int, frozenset[int]]] = set()
        self.over_replicas: set[Op] = set()
        self.kept: set[tuple[int, int]] = set()
        self.recomputed: set[tuple[int, int, int | None]] = (
            set()
        )  # the last: which part of a set; of a kept one, too, once it goes
        self.peaks = [0] * schedule.num_stages
        self.lanes = [{lane: list(schedule.lane(rank, lane)) for lane in Lane} for rank in range(schedule.num_ranks)]
        self.links: dict[tuple[Lane, int, Kind], list[Op]] = {}
        for rank, lane, op in schedule.ops():
            self.need(
                0 <= op.stage < schedule.num_stages and schedule.stage_ranks[op.stage] == rank, f"{op}: wrong rank"
            )
            if lane is Lane.REDUCE:
                self.need(op.kind is Kind.REDUCE_GRAD and op.microbatch is None, f"{op}: wrong lane")
            elif lane in (Lane.SEND, Lane.RECV):
                self.need(op.kind.startswith(lane.name), f"{op}: wrong lane")
                self.links.setdefault((lane, op.stage, op.kind), []).append(op)
            else:
                own = op.kind is Kind.R and schedule.policy.mode is Mode.OVERLAP
                self.need(op.kind.computes and own == (lane is Lane.RECOMPUTE), f"{op}: wrong lane")

    def need(self, truth: bool, complaint: str) -> None:
        if not truth:
            raise OracleError(complaint)

    def run(self) -> None:
        is_late = [self.late in lanes[Lane.RECOMPUTE] for lanes in self.lanes]
        while (
            self.add_up()
            or self.run_heads(Lane.RECOMPUTE, [lanes for lanes, late in zip(self.lanes, is_late) if not late])
            or self.run_heads(Lane.COMPUTE, self.lanes)
            or self.move()
            or self.run_heads(Lane.RECOMPUTE, self.lanes)
        ):
            pass
        self.need(self.added == self.tied(), "adds up what is not shared, or not what is")
        self.need(self.over_replicas == self.buckets(), "adds up over replicas what is not to be, or not what is")
        left = [
            op for lanes in self.lanes for lane in (Lane.COMPUTE, Lane.RECOMPUTE, Lane.REDUCE) for op in lanes[lane]
        ]
        self.need(not left and not any(self.links.values()), f"never runs: {left}")
        for stage in range(self.schedule.num_stages):
            for microbatch in range(self.schedule.num_microbatches):
                self.need(Op(stage, Kind.F, microbatch) in self.done, "F missing")
                wanted = stage >= self.schedule.first_backward
                whole, *halves = (Op(stage, kind, microbatch) in self.done for kind in (Kind.B, Kind.I, Kind.W))
                in_parts = [Op(stage, Kind.B, microbatch, part) in self.done for part in self.parts(stage)]
                self.need(whole + all(halves) + any(in_parts) == wanted, "B missing or too many")
                self.need(all(halves) == any(halves), "half a backward")
                self.need(not any(in_parts) or all(in_parts), "not all parts of a backward")

    def parts(self, stage: int) -> range:
        """The numbers of the parts in which a stage is recomputed; none where it is whole."""
        count = self.schedule.policy.num_parts(stage)
        return range(count if count > 1 else 0)

    def add_up(self) -> bool:
        """Gradients are added up as soon as nothing keeps them from it: whoever should wait longer is found too early."""
        heads = {lanes[Lane.REDUCE][0]: lanes[Lane.REDUCE] for lanes in self.lanes if lanes[Lane.REDUCE]}
        for op, queue in heads.items():
            if op.peer is None and self.ready(op):
                self.of_replicas(op, queue)
                return True
            other = Op(op.peer if op.peer is not None else -1, op.kind, None, op.part, op.stage)
            if op.part is not None and other in heads and self.ready(op) and self.ready(other):
                for one in (op, other):
                    later = [b for lanes in self.lanes for b in lanes[Lane.COMPUTE] if b.stage == one.stage]
                    self.need(not any(b.kind in (Kind.B, Kind.I, Kind.W) for b in later), f"{one} before {later}")
                self.need((op.part, frozenset((op.stage, other.stage))) not in self.added, f"{op} twice")
                self.added.add((op.part, frozenset((op.stage, other.stage))))
                self.done |= {op, other}
                queue.pop(0)
                heads[other].pop(0)
                return True
        return False

    def of_replicas(self, op: Op, queue: list[Op]) -> None:
        """Every other replica has come as far as this one: nothing may add to the bucket any more, and none before it is late."""
        self.need(op in self.buckets() and op not in self.over_replicas, f"{op}: no bucket, or twice")
        late = [b for lanes in self.lanes for b in lanes[Lane.COMPUTE] if b.stage == op.stage and b.kind in "BIW"]
        if self.parts(op.stage):
            late = [b for b in late if b.part in (None, op.part)]
        self.need(not late, f"{op} before {late}")
        self.over_replicas.add(op)
        self.done.add(op)
        queue.pop(0)
        earlier = [one for one in queue if one.peer is None and self.whole_at(one) < self.whole_at(op)]
        self.need(not earlier, f"{op} in front of {earlier}, which could go earlier")

    def whole_at(self, reduce: Op) -> tuple[int, int]:
        """How far its rank has come when the bucket is whole; of several at one place the last part goes first."""
        compute = self.schedule.lane(self.schedule.stage_ranks[reduce.stage], Lane.COMPUTE)
        bucket = (None, reduce.part) if self.parts(reduce.stage) else (None,)
        gives = [number for number, op in enumerate(compute) if op.stage == reduce.stage and op.kind in "BIW"]
        last = max((number for number in gives if compute[number].part in bucket), default=-1)
        self.need(last >= 0, f"{reduce}: nothing gives to its bucket")
        return last, -(reduce.part or 0)

    def buckets(self) -> set[Op]:
        stages = range(self.schedule.first_backward, self.schedule.num_stages if self.schedule.num_replicas > 1 else 0)
        return {Op(stage, Kind.REDUCE_GRAD, None, part) for stage in stages for part in self.parts(stage) or [0]}

    def tied(self) -> set[tuple[int, frozenset[int]]]:
        """What there is to add up: the bucket, and the stages that share it."""
        ranks, first = self.schedule.stage_ranks, self.schedule.first_backward
        buckets = enumerate(self.schedule.tied)
        return {(n, frozenset(two)) for n, two in buckets if min(two) >= first and len({ranks[s] for s in two}) > 1}

    def ready(self, op: Op) -> bool:
        return all(other in self.done for other in self.schedule.waits.get(op, ()))

    def run_heads(self, lane: Lane, ranks: list[dict[Lane, list[Op]]]) -> bool:
        ready = [lanes[lane].pop(0) for lanes in ranks if lanes[lane] and self.ready(lanes[lane][0])]
        for op in ready:
            self.execute(op)
        return bool(ready)

    def move(self) -> bool:
        late = (Lane.RECV, self.late.stage, self.late.kind) if self.late else None
        for queue in sorted(self.links, key=lambda queue: queue == late):
            _, stage, kind = queue
            if kind in (Kind.RECV_F, Kind.RECV_B):
                source = (stage - 1, Kind.SEND_F, Kind.F) if kind is Kind.RECV_F else (stage + 1, Kind.SEND_B, Kind.B)
                sends, receives = self.links.get((Lane.SEND, *source[:2]), []), self.links[queue]
                if sends and receives and self.ready(sends[0]) and self.ready(receives[0]):
                    self.pass_on(sends.pop(0), receives.pop(0), source[2])
                    return True
        return False

    def pass_on(self, send: Op, receive: Op, source: Kind) -> None:
        self.need(send.microbatch == receive.microbatch, f"{send} meets {receive}")
        self.need(self.ran(send.stage, source, send.microbatch), f"{send}: nothing to send")
        self.need(not {send, receive} & self.done, f"{send} twice")
        self.done |= {send, receive}

    def ran(self, stage: int, kind: Kind, microbatch: int | None) -> bool:
        """Whether the stage has what F, or B or the I in its place, gives."""
        kinds = (Kind.B, Kind.I) if kind is Kind.B else (kind,)
        first_part = Op(stage, kind, microbatch, 0)
        return first_part in self.done or any(Op(stage, one, microbatch) in self.done for one in kinds)

    def arrived(self, op: Op, kind: Kind) -> bool:
        """Whether the activation (F) or the gradient (B) for `op` is on its rank."""
        other = op.stage + (-1 if kind is Kind.F else 1)
        if not 0 <= other < self.schedule.num_stages:
            return True
        local = self.schedule.stage_ranks[other] == self.schedule.stage_ranks[op.stage]
        message = Kind.RECV_F if kind is Kind.F else Kind.RECV_B
        return self.ran(other, kind, op.microbatch) if local else Op(op.stage, message, op.microbatch) in self.done

    def execute(self, op: Op) -> None:
        place = (op.stage, op.microbatch or 0)
        its_part = (*place, op.part)
        parts = self.parts(op.stage)
        self.need(op not in self.done, f"{op} twice")
        self.need(op.part is None or (op.part in parts and op.kind in (Kind.R, Kind.B)), f"{op} has no such part")
        self.need(op.part is not None or op.kind is not Kind.R or not parts, f"{op} is no part")
        follows = op.kind is Kind.B and op.part is not None and op.part + 1 in parts
        if follows:
            after = op._replace(part=(op.part or 0) + 1)
            self.need(after in self.done, f"{op} before {after}")
        elif op.kind not in (Kind.R, Kind.W):
            self.need(self.arrived(op, Kind.F if op.kind is Kind.F else Kind.B), f"{op} without its input")
        if op.kind is Kind.W:
            self.need(Op(op.stage, Kind.I, op.microbatch) in self.done, f"{op} before its I")
        if op.kind is Kind.F and place in self.schedule.kept:
            self.kept.add(place)
        if op.kind is Kind.R:
            self.need(Op(op.stage, Kind.F, op.microbatch) in self.done, f"{op} before its F")
            self.need(place not in self.kept and its_part not in self.recomputed, f"{op} of a set that is there")
            inline = self.schedule.policy.mode is Mode.INLINE
            self.need(not inline or self.arrived(op, Kind.B), f"{op} before its gradient")
            self.recomputed.add(its_part)
        if op.kind is Kind.B and op.part is not None and place in self.kept:  # it goes part by part
            self.kept.discard(place)
            self.recomputed |= {(*place, part) for part in parts}
        self.within_bounds(op)
        if op.kind in (Kind.B, Kind.I, Kind.W):
            self.need(its_part in self.recomputed or (op.part is None and place in self.kept), f"{op} without its set")
        if op.kind in (Kind.B, Kind.W):
            self.kept.discard(place)
            self.recomputed.discard(its_part)
        self.done.add(op)

    def within_bounds(self, op: Op) -> None:
        per_set = self.schedule.policy.num_parts(op.stage)
        alive = sum(per_set * (stage == op.stage) for stage, _ in self.kept)
        alive += sum(stage == op.stage for stage, _, _ in self.recomputed)
        self.peaks[op.stage] = max(self.peaks[op.stage], alive)
        if self.schedule.policy.mode is not Mode.NEVER:
            sets = self.schedule.policy.sets
            most = sets[op.stage] if isinstance(sets, tuple) else sets
            self.need(alive <= round(most * per_set), f"{op}: too many sets")
