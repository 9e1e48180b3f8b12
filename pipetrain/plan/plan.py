"""Where everything lives: which layers make a stage, which rank holds it, in which replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from pipetrain.config.read_files import DamagedFile, read_record
from pipetrain.config.records import COMMUNICATORS, EDGES
from pipetrain.plan.balance import balance_by_work, balance_evenly
from pipetrain.schedule.placement import Placement, ranks_named_in, stage_ranks_of
from pipetrain.schedule.policy import not_a_choice

DEFAULT_MICROBATCHES = 8


@dataclass(frozen=True)
class Plan:
    """Where a model lives: `balance[s]` layers make stage s, and `stage_ranks[s]` is the rank that holds it.

    Ranks count from 0 within one replica; `order` (`comm/coordinates.py`) numbers those of all replicas. `split_backward` makes I and W of each B.
    `warmup` is for the schedule `1f1b`: forwards in flight, a number or one per stage.
    `transport_ahead`, `communicators` and `edges` say how messages go between stages, as the keys of `transport` do.
    """

    balance: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    num_replicas: int = 1
    split_backward: bool = False
    warmup: int | tuple[int, ...] | None = None
    transport_ahead: int = 2
    communicators: str = "edge"
    edges: str = "auto"
    order: str = "replica-stage"

    @property
    def num_stages(self) -> int:
        return len(self.balance)

    @property
    def num_layers(self) -> int:
        return sum(self.balance)

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return ranks_named_in(self.stage_ranks)

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on `rank`, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    def stage_of(self, layer: int) -> int:
        """The stage that has the layer of this global index."""
        return next(stage for stage in range(self.num_stages) if layer in self.layers_of(stage))

    def tied_stages(self, layers: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The pairs of stages (lower, higher) that share a parameter, where these pairs of layers do; each pair once.

        They are in the order of their buckets: first the one whose lower stage runs its last B first.
        """
        stages = {tuple(sorted((self.stage_of(one), self.stage_of(other)))) for one, other in layers}
        return tuple(sorted(((low, high) for low, high in stages if low != high), reverse=True))

    def layers_of(self, stage: int) -> range:
        """Global indices of the layers of `stage`."""
        start = sum(self.balance[:stage])
        return range(start, start + self.balance[stage])


def read_plan(path: Path) -> Plan:
    """The plan of a run, from its folder.

    Raises:
        DamagedFile: there is none, it is of another version of pipetrain, or its stages and ranks do not belong together.
    """
    todo = "name another run"
    plan = read_record(Plan, path, todo)
    ranks = set(plan.stage_ranks)
    if len(plan.stage_ranks) != plan.num_stages or min(plan.balance, default=0) < 1 or ranks != set(range(len(ranks))):
        raise DamagedFile(path, f"its stages {plan.balance} and ranks {plan.stage_ranks} are no plan", todo)
    return plan


def whole_number(key: str, value: Any, *, least: int = 1) -> int:
    """`value` as an int: 2.5, True and "8" are no whole numbers.

    Raises:
        ValueError: with the key, the value and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{key}={value!r}: a whole number is needed, {least} or more")
    if value < least:
        raise ValueError(f"{key}={value}: at least {least} is needed")
    return int(value)


def layers_per_stage(balance: Any) -> str | tuple[int, ...]:
    """A balance as it was given: a word, or the number of layers of each stage.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(balance, str):
        return balance
    counts = list(balance) if isinstance(balance, Iterable) and not isinstance(balance, dict) else None
    if counts is None or any(isinstance(count, bool) or not isinstance(count, Integral) for count in counts):
        raise ValueError(
            f"pipeline.balance={balance!r}: allowed are 'auto' or a list of layers per stage, which are whole numbers"
        )
    return tuple(map(int, counts))


def make_plan(
    num_layers: int,
    *,
    num_ranks: int | None = None,
    num_stages: int | None = None,
    stages_per_rank: int = 1,
    num_microbatches: int = DEFAULT_MICROBATCHES,
    num_replicas: int = 1,
    balance: str | Sequence[int] = "auto",
    work: Sequence[float] | None = None,
    placement: Placement = "loop",
    split_backward: bool = False,
    warmup: int | Sequence[int] | None = None,
    transport_ahead: int = 2,
    communicators: str = "edge",
    edges: str = "auto",
    order: str = "replica-stage",
) -> Plan:
    """Where `num_layers` layers live on `num_ranks` ranks of one replica; see `place_stages` for `placement`.

    `balance="auto"` gives stages about equal `work`, such as floating-point operations; None: equal numbers of layers.

    Messages: `transport_ahead` tensors of an edge are received before they are used; `edges="pinned"` takes them through memory of
    the host, where NCCL does not connect the GPUs or ranks share one.

    Raises:
        ValueError: numbers that do not fit each other; the message names the config key, the value and what is allowed.
    """
    stage_ranks = place_stages(
        placement,
        num_ranks=num_ranks,
        num_stages=None if num_stages is None else whole_number("pipeline.num_stages", num_stages),
        stages_per_rank=whole_number("pipeline.stages_per_rank", stages_per_rank),
    )
    for key, value, words in (
        ("transport.communicators", communicators, COMMUNICATORS),
        ("transport.backend", edges, EDGES),
    ):
        if value not in words:
            raise not_a_choice(key, value, words)
    if not isinstance(split_backward, bool):
        raise ValueError(f"pipeline.split_backward={split_backward!r}: allowed is True or False")
    return Plan(
        balance=_check_balance(num_layers, len(stage_ranks), balance, work),
        stage_ranks=stage_ranks,
        num_microbatches=whole_number("pipeline.num_microbatches", num_microbatches),
        num_replicas=whole_number("parallel.num_replicas", num_replicas),
        split_backward=split_backward,
        warmup=warmup if warmup is None or isinstance(warmup, int) else tuple(warmup),
        transport_ahead=whole_number("transport.prefetch", transport_ahead, least=0),
        communicators=communicators,
        edges=edges,
        order=order,
    )


def place_stages(
    placement: Placement, *, num_ranks: int | None, num_stages: int | None, stages_per_rank: int
) -> tuple[int, ...]:
    """The rank of each of ranks x `stages_per_rank` stages, or of as many as a list has.

    `num_ranks` defaults to those that the list names or that `num_stages` needs, and to 1.

    Raises:
        ValueError: ranks, stages and placement do not fit each other.
    """
    if not isinstance(placement, str):
        return _place_as_listed(tuple(placement), num_ranks, num_stages, stages_per_rank)
    ranks = max(1, (num_stages or 1) // stages_per_rank) if num_ranks is None else num_ranks
    wanted = ranks * stages_per_rank
    stages = wanted if num_stages is None else num_stages
    if stages != wanted:
        raise ValueError(
            f"pipeline.num_stages={stages} does not fit {ranks} ranks x pipeline.stages_per_rank={stages_per_rank} "
            f"= {wanted} stages: start {stages} ranks / stages_per_rank, or set pipeline.num_stages={wanted}"
        )
    return stage_ranks_of(placement, stages, ranks)


def _place_as_listed(
    listed: tuple[int, ...], num_ranks: int | None, num_stages: int | None, stages_per_rank: int
) -> tuple[int, ...]:
    """A list says itself how many stages there are, and ranks may hold different numbers of them."""
    stage_ranks = stage_ranks_of(listed, len(listed) if num_stages is None else num_stages, num_ranks)
    most = max(stage_ranks.count(rank) for rank in stage_ranks)
    if stages_per_rank not in (1, most):
        raise ValueError(
            f"pipeline.stages_per_rank={stages_per_rank} does not fit pipeline.placement={list(listed)}, which has up to {most} "
            "stages on a rank: leave out pipeline.stages_per_rank"
        )
    return stage_ranks


def _check_balance(
    num_layers: int, num_stages: int, balance: str | Sequence[int], work: Sequence[float] | None
) -> tuple[int, ...]:
    layers = layers_per_stage(balance)
    if isinstance(layers, str):
        if layers != "auto":
            raise ValueError(f"pipeline.balance={layers!r}: allowed are 'auto' or a list of layers per stage")
        return balance_evenly(num_layers, num_stages) if work is None else balance_by_work(work, num_stages)
    if len(layers) != num_stages:
        raise ValueError(f"pipeline.balance={list(layers)} has {len(layers)} entries for {num_stages} stages")
    if any(count < 1 for count in layers):
        raise ValueError(f"pipeline.balance={list(layers)}: each stage needs at least one layer")
    if sum(layers) != num_layers:
        nearest = list(balance_evenly(num_layers, num_stages))
        raise ValueError(
            f"pipeline.balance={list(layers)} adds up to {sum(layers)} layers, the model has {num_layers}; "
            f"balance={nearest} would fit"
        )
    return layers


# A plan beside other arguments of `Pipeline`: it must fit the model and the ranks, and nothing is said twice -------------------------


def given_plan(
    given: Plan, num_layers: int, *, num_ranks: int, num_replicas: int = 1, order: str = "replica-stage", **said: Any
) -> Plan:
    """The plan that was `given`, which must fit the model, the ranks and what else is `said`. `num_ranks` are those of one replica.

    Raises:
        ValueError: what does not fit.
    """
    if not isinstance(given, Plan):
        raise ValueError(f"plan={given!r}: give what make_plan({num_layers}, ...) returns, or leave plan out")
    whole_number("plan: its num_microbatches", given.num_microbatches)
    if given.num_layers != num_layers:
        raise ValueError(
            f"plan: its balance {list(given.balance)} is for {given.num_layers} layers, the model has {num_layers}: "
            f"make it with make_plan({num_layers}, ...)"
        )
    if given.num_ranks != num_ranks:
        raise ValueError(_other_ranks(given.num_ranks, num_ranks, num_replicas))
    stage_ranks_of(given.stage_ranks, len(given.balance), num_ranks)
    _check_said_once(given, **said)
    fitting = dataclasses.replace(given, num_replicas=num_replicas, order=order)
    return given if fitting == given else fitting


def replicas_said(num_replicas: int, plan: Plan | None) -> int:
    """The number of replicas, said by an argument, by a plan or by neither.

    Raises:
        ValueError: both say it, and not the same.
    """
    said = whole_number("parallel.num_replicas", num_replicas)
    planned = plan.num_replicas if isinstance(plan, Plan) else 1
    if said != 1 and planned not in (1, said):
        raise ValueError(
            f"num_replicas={said}: the plan says {planned}; leave num_replicas out where there is a plan, or make another plan"
        )
    return max(said, planned)


def _other_ranks(planned: int, found: int, num_replicas: int) -> str:
    if num_replicas > 1:
        return (
            f"plan: it is for {planned} ranks of each replica, and there are {found * num_replicas} ranks for num_replicas={num_replicas}: "
            f"start {planned * num_replicas} ranks, or make it with make_plan(..., num_ranks={found})"
        )
    more = f", or set num_replicas={found // planned}" if found % planned == 0 else ""
    return (
        f"plan: it is for {planned} ranks, and there are {found}: start {planned} ranks, or make it with make_plan(..., num_ranks={found})"
        f"{more}"
    )


def _check_said_once(
    plan: Plan, num_stages: int | None, stages_per_rank: int, num_microbatches: int, balance: str | Sequence[int]
) -> None:
    """Refuses what is said beside a plan, is not the default and differs."""
    said = (
        ("num_stages", num_stages, None, plan.num_stages),
        ("stages_per_rank", stages_per_rank, 1, max(map(plan.stage_ranks.count, plan.stage_ranks))),
        ("num_microbatches", num_microbatches, DEFAULT_MICROBATCHES, plan.num_microbatches),
        ("balance", layers_per_stage(balance), "auto", plan.balance),
    )
    for name, value, default, planned in said:
        if value not in (default, planned):
            given, there = (list(one) if isinstance(one, tuple) else one for one in (value, planned))
            raise ValueError(
                f"{name}={given}: the plan says {there}; leave {name} out where there is a plan, or make another plan"
            )
