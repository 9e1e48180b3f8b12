"""A plan beside other arguments that say where a model lives: it must fit the model and the ranks, and nothing is said twice."""

from __future__ import annotations

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
) -> Plan:
    """The plan that was `given`, if it fits the model and the ranks and nothing else says otherwise; else one made of the rest.

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
        raise ValueError(
            f"plan: it is for {given.num_ranks} ranks, and there are {num_ranks}: start {given.num_ranks} ranks, or make it with "
            f"make_plan(..., num_ranks={num_ranks})"
        )
    stage_ranks_of(given.stage_ranks, len(given.balance), num_ranks)
    _check_said_once(given, num_stages, stages_per_rank, num_microbatches, balance)
    return given


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
