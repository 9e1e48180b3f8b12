"""Runs a schedule op by op with blocking sends, and complains. Knows nothing of `check` nor of the passes.

It is as unlucky as it can be: a recomputation starts as soon as it may, a message moves only when nothing else can.
"""

from __future__ import annotations

from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule


class Complaint(Exception):
    pass


class Oracle:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.done: set[Op] = set()
        self.kept: set[tuple[int, int]] = set()
        self.recomputed: set[tuple[int, int]] = set()
        self.lanes = [{lane: list(schedule.lane(rank, lane)) for lane in Lane} for rank in range(schedule.num_ranks)]
        self.links: dict[tuple[Lane, int, Kind], list[Op]] = {}
        for rank, lane, op in schedule.ops():
            self.need(
                0 <= op.stage < schedule.num_stages and schedule.stage_ranks[op.stage] == rank, f"{op}: wrong rank"
            )
            if lane in (Lane.SEND, Lane.RECV):
                self.need(op.kind.startswith(lane.name), f"{op}: wrong lane")
                self.links.setdefault((lane, op.stage, op.kind), []).append(op)
            else:
                own = op.kind is Kind.R and schedule.policy.mode is Mode.OVERLAP
                self.need(op.kind.computes and own == (lane is Lane.RECOMPUTE), f"{op}: wrong lane")

    def need(self, truth: bool, complaint: str) -> None:
        if not truth:
            raise Complaint(complaint)

    def run(self) -> None:
        while self.compute() or self.move_message():
            pass
        left = [op for lanes in self.lanes for lane in (Lane.COMPUTE, Lane.RECOMPUTE) for op in lanes[lane]]
        self.need(not left and not any(self.links.values()), f"never runs: {left}")
        for stage in range(self.schedule.num_stages):
            for microbatch in range(self.schedule.num_microbatches):
                self.need(Op(stage, Kind.F, microbatch) in self.done, "F missing")
                wanted = stage >= self.schedule.first_backward
                self.need((Op(stage, Kind.B, microbatch) in self.done) == wanted, "B missing or too many")

    def ready(self, op: Op) -> bool:
        return all(other in self.done for other in self.schedule.waits.get(op, ()))

    def compute(self) -> bool:
        progress = False
        for lanes in self.lanes:
            for lane in (Lane.RECOMPUTE, Lane.COMPUTE):
                while lanes[lane] and self.ready(lanes[lane][0]):
                    self.execute(lanes[lane].pop(0))
                    progress = True
                    if lane is Lane.COMPUTE:
                        break
        return progress

    def move_message(self) -> bool:
        for (lane, stage, kind), sends in self.links.items():
            forward = kind is Kind.SEND_F
            receives = self.links.get(
                (Lane.RECV, stage + (1 if forward else -1), Kind.RECV_F if forward else Kind.RECV_B)
            )
            if lane is Lane.SEND and sends and receives and self.ready(sends[0]) and self.ready(receives[0]):
                send, receive = sends.pop(0), receives.pop(0)
                self.need(send.microbatch == receive.microbatch, f"{send} meets {receive}")
                self.need(
                    Op(stage, Kind.F if forward else Kind.B, send.microbatch) in self.done, f"{send}: nothing to send"
                )
                self.need(not {send, receive} & self.done, f"{send} twice")
                self.done |= {send, receive}
                return True
        return False

    def arrived(self, op: Op, kind: Kind) -> bool:
        """Whether the activation (F) or the gradient (B) for `op` is on its rank."""
        other = op.stage + (-1 if kind is Kind.F else 1)
        if not 0 <= other < self.schedule.num_stages:
            return True
        local = self.schedule.stage_ranks[other] == self.schedule.stage_ranks[op.stage]
        message = Kind.RECV_F if kind is Kind.F else Kind.RECV_B
        return (Op(other, kind, op.microbatch) if local else Op(op.stage, message, op.microbatch)) in self.done

    def execute(self, op: Op) -> None:
        place = (op.stage, op.microbatch or 0)
        self.need(op not in self.done, f"{op} twice")
        if op.kind is not Kind.R:
            self.need(self.arrived(op, op.kind), f"{op} without its input")
        if op.kind is Kind.F and place in self.schedule.kept:
            self.kept.add(place)
        if op.kind is Kind.R:
            self.need(Op(op.stage, Kind.F, op.microbatch) in self.done, f"{op} before its F")
            self.need(place not in self.kept | self.recomputed, f"{op} of a set that is there")
            inline = self.schedule.policy.mode is Mode.INLINE
            self.need(not inline or self.arrived(op, Kind.B), f"{op} before its gradient")
            self.recomputed.add(place)
        self.within_bounds(op)
        if op.kind is Kind.B:
            self.need(place in self.kept | self.recomputed, f"{op} without its set")
            self.kept.discard(place)
            self.recomputed.discard(place)
        self.done.add(op)

    def within_bounds(self, op: Op) -> None:
        policy = self.schedule.policy
        recomputed = sum(stage == op.stage for stage, _ in self.recomputed)
        total = recomputed + sum(stage == op.stage for stage, _ in self.kept)
        if policy.mode is not Mode.NEVER:
            self.need(recomputed <= policy.ahead and total <= policy.ahead + policy.keep, f"{op}: too many sets")
