"""Where everything lives: which layers make a stage, which rank holds it, in which replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The placement of a model: `balance[s]` layers make stage s, and `stage_ranks[s]` is the rank that holds it.

    Ranks count from 0 within one replica.
    """

    balance: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    num_replicas: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.balance)

    @property
    def num_layers(self) -> int:
        return sum(self.balance)

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return max(self.stage_ranks) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on `rank`, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    def layers_of(self, stage: int) -> range:
        """Global indices of the layers of `stage`."""
        start = sum(self.balance[:stage])
        return range(start, start + self.balance[stage])


def balance_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers per stage, the remainder to the last stages.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} stages (pipeline.num_stages): each stage needs a layer; "
            f"use at most {num_layers} stages"
        )
    share, rest = divmod(num_layers, num_stages)
    return tuple(share + (stage >= num_stages - rest) for stage in range(num_stages))


def make_plan(
    num_layers: int,
    *,
    num_ranks: int = 1,
    num_stages: int | None = None,
    stages_per_rank: int = 1,
    num_microbatches: int = 8,
    num_replicas: int = 1,
    balance: str | Sequence[int] = "auto",
) -> Plan:
    """The placement of `num_layers` layers over `num_ranks` ranks of one replica.

    Stage s lives on rank s mod num_ranks, so that with several stages per rank a microbatch visits each rank in turn
    (Narayanan et al. 2021, section 2.2).

    Raises:
        ValueError: numbers that do not fit each other; the message names the config key, the value and what is allowed.
    """
    if num_microbatches < 1:
        raise ValueError(f"pipeline.num_microbatches={num_microbatches}: at least 1 is needed")
    if stages_per_rank < 1:
        raise ValueError(f"pipeline.stages_per_rank={stages_per_rank}: at least 1 is needed")
    wanted = num_ranks * stages_per_rank
    stages = wanted if num_stages is None else num_stages
    if stages != wanted:
        raise ValueError(
            f"pipeline.num_stages={stages} does not fit {num_ranks} ranks x pipeline.stages_per_rank={stages_per_rank} "
            f"= {wanted} stages: start {stages} ranks / stages_per_rank, or set pipeline.num_stages={wanted}"
        )
    return Plan(
        balance=_check_balance(num_layers, stages, balance),
        stage_ranks=tuple(stage % num_ranks for stage in range(stages)),
        num_microbatches=num_microbatches,
        num_replicas=num_replicas,
    )


def _check_balance(num_layers: int, num_stages: int, balance: str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(balance, str):
        if balance != "auto":
            raise ValueError(f"pipeline.balance={balance!r}: allowed are 'auto' or a list of layers per stage")
        return balance_evenly(num_layers, num_stages)
    layers = tuple(int(count) for count in balance)
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
