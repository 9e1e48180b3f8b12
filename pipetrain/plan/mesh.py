"""The mesh of a run: where each rank stands, and what it holds and sends in a step. Computed before anything runs.

             place 0   place 1
    replica 0  rank 0 -> rank 1       -> activations, and gradients back, microbatch by microbatch
                 |         |          |  gradients of a stage, added up over the replicas
    replica 1  rank 2 -> rank 3

Counted are the messages of the schedule and their bytes: of a send what is sent, of an all-reduce what each rank
puts in. A library may move more: a ring moves 2 (n - 1) / n of it from each of n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipetrain.comm.coordinates import Coordinates, Grid, named_place
from pipetrain.plan.plan import Plan
from pipetrain.schedule.kinds import Direction
from pipetrain.schedule.messages import partner_of
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.schedule import Schedule

Shapes = Sequence[Sequence[int]]

ACTIVATIONS, GRADIENTS, REDUCE, SHARED, UPDATES = "activations", "gradients", "reduce", "shared", "updates"
MESSAGES = {
    ACTIVATIONS: "sent to the next stage",
    GRADIENTS: "sent to the stage before",
    REDUCE: "gradients added up over the replicas",
    SHARED: "gradients of parameters that two stages share, added up over both and the replicas",
    UPDATES: "weights from the replica that updates them (parallel.zero_stage=1)",
}


@dataclass(frozen=True)
class RankPlace:
    """`rank` counts all ranks of the run, `place` those of its replica; `stages` are those that live there."""

    rank: int
    replica: int = 0
    place: int = 0
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        return named_place(self.rank, self.replica, self.stages)


def name_of(rank: int, ranks: Sequence[RankPlace]) -> str:
    """`rank 3`; if `ranks`, in their order, are of several replicas, with its replica and stages."""
    return str(ranks[rank]) if num_replicas_of(ranks) > 1 else f"rank {rank}"


def num_replicas_of(ranks: Iterable[RankPlace]) -> int:
    return len({where.replica for where in ranks})


@dataclass(frozen=True)
class NumberBytes:
    """Bytes of one element: of a weight, its gradient, all that the optimizer keeps for it, and of what goes between stages."""

    weight: int
    gradient: int
    optimizer: int
    boundary: int


@dataclass(frozen=True)
class Holds:
    """What the model is, as far as it is known: parameters per layer and their shapes; `width`: the hidden size.

    `tied` are pairs of layers that share parameters, taken to be all of the smaller layer (head and embedding). `tokens[i]` are
    those of microbatch i of the step, replica after replica.
    """

    parameters: tuple[int, ...] | None = None
    shapes: tuple[Shapes, ...] | None = None
    tied: tuple[tuple[int, int], ...] = ()
    width: int | None = None
    tokens: tuple[int, ...] | None = None
    number_bytes: NumberBytes | None = None


@dataclass(frozen=True)
class Sent:
    """Messages of one kind in a step: how many, and the bytes of all of them; None: not known."""

    number: int | None
    num_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MeshRank(RankPlace):
    """One rank. Bytes are those of its stages; None: not known. `optimizer_bytes` with parallel.zero_stage=1 are its share."""

    node: int
    parameters: int | None
    weight_bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    sent: dict[str, Sent]  # by kind (of `MESSAGES`), if it sends any


@dataclass(frozen=True)
class MeshEdge:
    """What one rank sends another in a step."""

    sender: int
    receiver: int
    sent: dict[str, Sent]
    crosses_nodes: bool


@dataclass(frozen=True)
class ReduceGroup:
    """Ranks that add up gradients with each other: those of one place in all replicas."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    sent: Sent  # by each of them
    crosses_nodes: bool


@dataclass(frozen=True)
class Mesh:
    """All ranks, in their order; what goes from one to another, and what is added up by whom."""

    grid: Grid
    ranks_per_node: int
    ranks: tuple[MeshRank, ...]
    edges: tuple[MeshEdge, ...]
    groups: tuple[ReduceGroup, ...]
    zero: int = 0

    @property
    def num_nodes(self) -> int:
        return self.ranks[-1].node + 1

    def rank_at(self, replica: int, place: int) -> MeshRank:
        return self.ranks[self.grid.rank_of(Coordinates(replica, place, 0))]

    def as_json(self) -> dict[str, Any]:
        """Plain lists and numbers; lists of ranks are in their order."""
        return asdict(self)


def rank_places(plan: Plan, grid: Grid) -> tuple[RankPlace, ...]:
    """Each rank's replica, place and stages."""
    found = []
    for rank in range(grid.size):
        at = grid.coordinates_of(rank)
        found.append(RankPlace(rank, at.replica, at.stage, plan.stages_of(at.stage)))
    return tuple(found)


def mesh_of(
    plan: Plan, schedule: Schedule, grid: Grid, *, ranks_per_node: int, model: Holds = Holds(), zero: int = 0
) -> Mesh:
    """The mesh of `schedule`, which each replica runs, on the ranks of `grid`. What `model` does not tell stays None."""
    made = _Maker(plan, schedule, grid, ranks_per_node, model, zero)
    ranks = tuple(map(made.rank, rank_places(plan, grid)))
    return Mesh(grid, ranks_per_node, ranks, tuple(made.edges(ranks)), tuple(made.groups()), zero)


def shares_of(shapes: Shapes, num_shares: int) -> list[list[int]]:
    """The sizes of the parameters that each of `num_shares` replicas updates if whole parameters are distributed as torch's
    `ZeroRedundancyOptimizer` does it: matrices, then the others, the largest first, each to the replica that has least."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for group in ([shape for shape in shapes if len(shape) > 1], [shape for shape in shapes if len(shape) <= 1]):
        for size in sorted(map(math.prod, group), reverse=True):
            min(shares, key=sum).append(size)
    return shares


@dataclass(frozen=True)
class _Maker:
    plan: Plan
    schedule: Schedule
    grid: Grid
    ranks_per_node: int
    model: Holds
    zero: int

    def rank(self, where: RankPlace) -> MeshRank:
        parameters = self._parameters(where.stages)
        share, updated = None, parameters  # by this rank, and how many parameters these are
        if self.zero and parameters is not None:
            share = self._share(where)
            updated = -(-parameters // self.grid.replica) if share is None else sum(share)
        sent = self._messages(self.schedule.lane(where.place, Lane.SEND), where.replica)
        if (reduced := self._reduced(where.place)) is not None:
            sent[REDUCE] = reduced
        if shared := [op.stage for op in self.schedule.lane(where.place, Lane.REDUCE) if op.peer is not None]:
            known = None if parameters is None else self._shared(shared)
            sent[SHARED] = Sent(len(shared), self._bytes(known, "gradient"))
        if self.zero:
            sent[UPDATES] = Sent(None if share is None else len(share), self._bytes(updated, "weight"))
        return MeshRank(
            **vars(where),
            node=where.rank // self.ranks_per_node,
            parameters=parameters,
            weight_bytes=self._bytes(parameters, "weight"),
            gradient_bytes=self._bytes(parameters, "gradient"),
            optimizer_bytes=self._bytes(updated, "optimizer"),
            sent=sent,
        )

    def edges(self, ranks: Iterable[RankPlace]) -> Iterable[MeshEdge]:
        for where in ranks:
            to: dict[int, list[Op]] = {}
            for op in self.schedule.lane(where.place, Lane.SEND):
                to.setdefault(self.schedule.stage_ranks[partner_of(op).stage], []).append(op)
            for place, ops in sorted(to.items()):
                both = where.rank, self.grid.rank_of(Coordinates(where.replica, place, 0))
                yield MeshEdge(*both, self._messages(ops, where.replica), self._cross_nodes(both))

    def groups(self) -> Iterable[ReduceGroup]:
        for place in range(self.grid.stage):
            if (sent := self._reduced(place)) is not None:
                ranks = self.grid.ranks_of_stage(self.grid.rank_of(Coordinates(0, place, 0)))
                yield ReduceGroup(ranks, self.plan.stages_of(place), sent, self._cross_nodes(ranks))

    def _cross_nodes(self, ranks: Iterable[int]) -> bool:
        return len({rank // self.ranks_per_node for rank in ranks}) > 1

    def _parameters(self, stages: Iterable[int]) -> int | None:
        """Parameters of these stages of one rank; one that two of them share counts once."""
        if (known := self.model.parameters) is None:
            return None
        layers = self._layers(stages)
        return sum(known[layer] for layer in layers) - self._tied(layers, 2)

    def _shared(self, stages: Iterable[int]) -> int:
        """Parameters of these stages that other ranks of the replica have, too."""
        return self._tied(self._layers(stages), 1)

    def _tied(self, layers: set[int], count: int) -> int:
        """Parameters of the pairs of which so many are among `layers`."""
        known = self.model.parameters or ()
        return sum(min(known[one] for one in pair) for pair in self.model.tied if len({*pair} & layers) == count)

    def _layers(self, stages: Iterable[int]) -> set[int]:
        return {layer for stage in stages for layer in self.plan.layers_of(stage)}

    def _share(self, where: RankPlace) -> list[int] | None:
        """With ZeRO the sizes of the parameters whose optimizer state the rank holds; None: not known."""
        if self.model.shapes is None:
            return None
        shapes = [shape for layer in sorted(self._layers(where.stages)) for shape in self.model.shapes[layer]]
        return shares_of(shapes, self.grid.replica)[where.replica]

    def _messages(self, sends: Iterable[Op], replica: int) -> dict[str, Sent]:
        sizes: dict[str, list[int | None]] = {}
        for op in sends:
            kind = ACTIVATIONS if op.kind.row.direction is Direction.FORWARD else GRADIENTS
            sizes.setdefault(kind, []).append(self._boundary_bytes(replica, op.microbatch or 0))
        return {kind: Sent(len(own), None if None in own else sum(filter(None, own))) for kind, own in sizes.items()}

    def _boundary_bytes(self, replica: int, microbatch: int) -> int | None:
        model = self.model
        if model.width is None or model.tokens is None:
            return None
        number = replica * self.schedule.num_microbatches + microbatch
        return self._bytes(model.tokens[number] * model.width, "boundary")

    def _reduced(self, place: int) -> Sent | None:
        """What a rank at `place` puts into the all-reduce over replicas."""
        buckets = [op for op in self.schedule.lane(place, Lane.REDUCE) if op.is_replica_allreduce]
        if not buckets:
            return None
        stages = {op.stage for op in buckets}
        whole = self._parameters(stages)
        alone = None if whole is None else whole - self._shared(stages)
        return Sent(len(buckets), self._bytes(alone, "gradient"))

    def _bytes(self, number: int | None, of: str) -> int | None:
        """Bytes of `number` elements of the kind `of`."""
        sizes = self.model.number_bytes
        return None if number is None or sizes is None else number * int(getattr(sizes, of))
