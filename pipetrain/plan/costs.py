"""What each op of a schedule costs: the one record that generators, the simulator and the bound read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Spread = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times in seconds: F, B and R per stage, a hop per stage edge (edge s joins stage s and stage s + 1).

    `forward`, `backward` and `recompute` have one entry per stage; `hop_forward` (activations) and
    `hop_backward` (gradients) one per edge, hence `num_stages - 1`.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    hop_forward: tuple[float, ...]
    hop_backward: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @staticmethod
    def spread(
        num_stages: int, *, forward: Spread = 1.0, backward: Spread = 2.0, recompute: Spread = 1.0, hop: Spread = 0.0
    ) -> Costs:
        """Costs from a number for all stages (edges, for `hop`) or a list with one number for each.

        Raises:
            ValueError: a list of the wrong length, or a negative number; the message names the key as `show` spells it.
        """

        def fill(key: str, value: Spread, count: int, what: str) -> tuple[float, ...]:
            values = (
                (float(value),) * count if isinstance(value, (int, float)) else tuple(float(entry) for entry in value)
            )
            if len(values) != count:
                raise ValueError(f"cost.{key} has {len(values)} numbers; give one number, or {count} (one per {what})")
            if any(entry < 0 for entry in values):
                raise ValueError(f"cost.{key}={list(values)} holds a negative time; times are in seconds, 0 or more")
            return values

        hops = fill("hop_seconds", hop, num_stages - 1, "edge between stages")
        return Costs(
            forward=fill("forward_seconds", forward, num_stages, "stage"),
            backward=fill("backward_seconds", backward, num_stages, "stage"),
            recompute=fill("recompute_seconds", recompute, num_stages, "stage"),
            hop_forward=hops,
            hop_backward=hops,
        )
