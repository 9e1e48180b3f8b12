"""What the loop of one replica has to do with the others: which samples are its own, the tokens of all, who writes, when to compare."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipetrain.data.batch import Share
from pipetrain.group.chain import Chain
from pipetrain.group.coordinates import Coordinates
from pipetrain.loop.tokens import Tokens
from pipetrain.model.weights import Shard
from pipetrain.plan.plan import Plan


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
