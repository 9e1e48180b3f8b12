"""What the loop of one replica has to do with the others: which samples are its own, the tokens of all, who writes, when to compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.comm.chain import Chain
from pipetrain.comm.coordinates import Coordinates
from pipetrain.data.batch import Batch, Share
from pipetrain.models.spec import ModelSpec
from pipetrain.models.weights import Shard
from pipetrain.plan.plan import Plan


class Tokens(NamedTuple):
    """all: positions of the targets, with padding and all else that does not count. counted: those that the loss is a mean over."""

    all: int
    counted: int


def tokens_of(batch: Batch, spec: ModelSpec) -> Tokens:
    """The tokens of a batch; `spec` knows which count."""
    leaves = pytree.tree_leaves(batch.targets)
    return Tokens(sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), int(spec.count(batch.targets)))


class TokensSeen:
    """Tokens of all steps that changed the weights, those before a resume too. Its state belongs into a snapshot."""

    def __init__(self) -> None:
        self.total = Tokens(0, 0)

    def add(self, tokens: Tokens) -> None:
        """Another step."""
        self.total = Tokens(self.total.all + tokens.all, self.total.counted + tokens.counted)

    def state_dict(self) -> dict[str, int]:
        """What JSON can say."""
        return self.total._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what `state_dict` gave; an empty mapping (a snapshot of an older version) begins at 0."""
        self.total = Tokens(int(state.get("all", 0)), int(state.get("counted", 0)))


@dataclass(frozen=True)
class OverReplicas:
    """One rank's; `replicas` are the ranks that stand where it does in each replica, None where there is one."""

    share: Share | None  # of a batch; None: all of it
    shard: Shard  # of the weights at the end of the run
    replicas: Chain | None
    check_every_steps: int | None

    @classmethod
    def of(cls, plan: Plan, at: Coordinates, replicas: Chain, check_every_steps: int | None) -> OverReplicas:
        """What a rank that stands `at` these coordinates has to know."""
        share = Share(at.replica, plan.num_replicas, plan.num_microbatches)
        shard = Shard(at.stage if at.replica == 0 else None, plan.num_ranks)
        if plan.num_replicas == 1:
            return cls(None, shard, None, None)
        return cls(share, shard, replicas, check_every_steps)

    def add_up(self, own: Tokens) -> Tokens:
        """The tokens of all replicas, where this one has `own`. Collective.

        Raises:
            PipelineError: a rank is gone, or did not come.
        """
        if self.replicas is None:
            return own
        parts = [json.loads(part) for part in self.replicas.concatenate(json.dumps(own).encode(), "tokens of a step")]
        return Tokens(sum(part[0] for part in parts), sum(part[1] for part in parts))

    def are_compared(self, step: int, *, saving: bool) -> bool:
        """Whether it is time to see that all replicas have the same weights after `step`; it is before each save."""
        every = self.check_every_steps
        return every is not None and (saving or step % every == 0)
