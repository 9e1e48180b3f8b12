"""A plan beside other arguments that say where a model lives: it must fit the model and the ranks, and nothing is said twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipetrain.plan.plan import DEFAULT_MICROBATCHES, Plan, layers_per_stage, make_plan, whole_number
from pipetrain.schedule.placement import stage_ranks_of


def plan_of(
    given: Plan | None,
    num_layers: int,
    *,
    num_ranks: int,
    num_stages: int | None,
    stages_per_rank: int,
    num_microbatches: int,
    balance: str | Sequence[int],
    work: Sequence[float] | None = None,
    num_replicas: int = 1,
    order: str = "replica-stage",
) -> Plan:
    """The plan that was `given`, if it fits the model and the ranks and nothing else says otherwise; else one made of the rest. `num_ranks`
    are those of one replica.

    Raises:
        ValueError: what does not fit.
    """
    if given is None:
        return make_plan(
            num_layers,
            num_ranks=num_ranks,
            num_stages=num_stages,
            stages_per_rank=stages_per_rank,
            num_microbatches=num_microbatches,
            balance=balance,
            work=work,
            num_replicas=num_replicas,
            order=order,
        )
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
    _check_said_once(given, num_stages, stages_per_rank, num_microbatches, balance)
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
    """What is said beside a plan and is not the default says what the plan says."""
    per_rank = {len(plan.stages_of(rank)) for rank in range(plan.num_ranks)}
    layers = layers_per_stage(balance)
    said = (
        ("num_stages", num_stages, num_stages in (None, plan.num_stages), plan.num_stages),
        ("stages_per_rank", stages_per_rank, stages_per_rank == 1 or per_rank == {stages_per_rank}, max(per_rank)),
        (
            "num_microbatches",
            num_microbatches,
            num_microbatches in (DEFAULT_MICROBATCHES, plan.num_microbatches),
            plan.num_microbatches,
        ),
        ("balance", balance, layers in ("auto", plan.balance), list(plan.balance)),
    )
    for name, value, fits, planned in said:
        if not fits:
            raise ValueError(
                f"{name}={value}: the plan says {planned}; leave {name} out where there is a plan, or make another plan"
            )
