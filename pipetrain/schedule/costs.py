"""What each op of a schedule costs: the one record that the passes, the search, the simulator and the bound read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipetrain.schedule.kinds import COPY_LANES, Kind

Spread = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times in seconds: F, B and R per stage, a hop per stage edge (edge s joins stage s and stage s + 1).

    `forward`, `backward` and `recompute` have one entry per stage; `hop_forward` (activations) and
    `hop_backward` (gradients) one per edge, hence `num_stages - 1`. Where memory is known, `input_bytes` is the stage
    input that is stashed for one microbatch and `set_bytes` its whole set, one entry per stage.

    `kept_bytes`, a part of `set_bytes`, are the outputs that `recompute.selective` stores from F to B: R does not compute them.

    If bytes are unknown, `input_share` is the stashed input as a fraction of a set, and `kept_share` that of the kept outputs.

    `reduce` is the time in which a stage sums all its gradients over the replicas, one entry per stage; empty: 0 s. A part takes its
    share of it (`share_of`). `reduce_shared` is the time to sum a bucket with another stage; empty: as `reduce`.

    `offload` is the time to copy a set to host memory, or back, one entry per stage; empty: as long as F. In a schedule with
    copies, a hop takes `copy_contention` times as long, because both use the host's memory, and often the same links. It has an
    entry per edge; empty: copies do not slow hops.

    `input_gradient` and `weight_gradient` are I and W, into which a schedule may split B; empty: half of B each.

    Raises:
        ValueError: a number that is negative, nan or infinite.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    hop_forward: tuple[float, ...]
    hop_backward: tuple[float, ...]
    input_bytes: tuple[float, ...] = ()
    set_bytes: tuple[float, ...] = ()
    input_gradient: tuple[float, ...] = ()
    weight_gradient: tuple[float, ...] = ()
    input_share: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()
    kept_share: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    reduce_shared: tuple[float, ...] = ()
    offload: tuple[float, ...] = ()
    copy_contention: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            entries = getattr(self, field.name)
            if not all(0 <= entry < math.inf for entry in entries):
                raise ValueError(
                    f"{field.name}={list(entries)}: costs are finite numbers, 0 or more, in seconds or bytes"
                )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def beside_copies(self) -> Costs:
        """The costs of a schedule with copies: `copy_contention` is in its hops."""
        if not self.copy_contention:
            return self
        forward, backward = (
            tuple(hop * factor for hop, factor in zip(own, self.copy_contention))
            for own in (self.hop_forward, self.hop_backward)
        )
        return dataclasses.replace(self, hop_forward=forward, hop_backward=backward, copy_contention=())

    def of(self, kind: Kind, to_stage: bool = False) -> tuple[float, ...]:
        """Seconds of an op of `kind`, per stage. With `to_stage` the op names another stage (`Op.peer`). A message takes the same time at
        both ends, and 0 on a stage that has none or where no time is known.
        """
        row = kind.row
        if row.cost is None:
            return (0.0,) * self.num_stages
        seconds: tuple[float, ...] = getattr(self, row.cost)
        if row.per_stage:
            return (to_stage and self.reduce_shared) or seconds or (0.0,) * self.num_stages
        if row.lane in COPY_LANES:
            return seconds or self.forward
        if row.peer_kind is None:
            return seconds or tuple(backward / 2 for backward in self.backward)
        return (*seconds, 0.0) if row.uses_edge_after else (0.0, *seconds)

    @staticmethod
    def spread(
        num_stages: int,
        *,
        forward: Spread = 1.0,
        backward: Spread = 2.0,
        recompute: Spread = 1.0,
        hop: Spread = 0.0,
        input_gradient: Spread | None = None,
        weight_gradient: Spread | None = None,
        input_share: Spread | None = None,
        kept_share: Spread | None = None,
        reduce: Spread | None = None,
        offload: Spread | None = None,
        copy_contention: Spread | None = None,
    ) -> Costs:
        """Costs from numbers: one number for all stages (for `hop` and `copy_contention`: all edges), or one for each. If
        None, `input_gradient` and `weight_gradient` are half of B, `reduce` is 0, `offload` is as F, the shares are unknown.

        Raises:
            ValueError: a list of the wrong length, or a number that is negative, nan or infinite; the message names the key as `show` spells it.
        """

        def fill(key: str, value: Spread | None, count: int, what: str) -> tuple[float, ...]:
            if value is None:
                return ()
            values = (
                (float(value),) * count if isinstance(value, (int, float)) else tuple(float(entry) for entry in value)
            )
            if len(values) != count:
                raise ValueError(f"cost.{key} has {len(values)} numbers; give one number, or {count} (one per {what})")
            if not all(0 <= entry < math.inf for entry in values):
                raise ValueError(f"cost.{key}={list(values)}: times are finite, in seconds, 0 or more")
            return values

        hops, factors = (
            fill(key, value, num_stages - 1, "edge between stages")
            for key, value in (("hop_seconds", hop), ("copy_contention", copy_contention))
        )
        times = {"forward": forward, "backward": backward, "recompute": recompute, "reduce": reduce, "offload": offload}
        times |= {"input_gradient": input_gradient, "weight_gradient": weight_gradient}
        given = {f"{name}_seconds": time for name, time in times.items()}
        given |= {"input_share": input_share, "kept_share": kept_share}
        filled = {key.removesuffix("_seconds"): fill(key, value, num_stages, "stage") for key, value in given.items()}
        return Costs(hop_forward=hops, hop_backward=hops, copy_contention=factors, **filled)
