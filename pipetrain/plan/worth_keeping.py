"""What is worth keeping by a profile of layers: the outputs of expensive operations, the most seconds of R per byte first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipetrain.plan.profile import LOSS, Profile


@dataclass(frozen=True)
class Advice:
    """Outputs worth keeping: `bytes_per_microbatch` more are held between F and B, and R of a step takes `seconds_per_step` less."""

    selective: str
    what: str
    bytes_per_microbatch: int
    seconds_per_step: float
    num_microbatches: int

    def __str__(self) -> str:
        size = self.bytes_per_microbatch
        return (
            f"keep {self.what}: {size / 1e6:.1f} MB more per microbatch in flight ({size * self.num_microbatches / 1e6:.1f} MB for all "
            f"{self.num_microbatches}), {self.seconds_per_step:.3g} s less R per step (recompute.selective=[{self.selective}])"
        )


def advice_of(profile: Profile, num_microbatches: int) -> list[Advice]:
    """What to keep, most seconds per byte first: each kind of expensive operation in each kind of layer."""
    found = []
    for layer in profile.layers:
        for word in sorted({op.word for op in layer.ops if op.word is not None}):
            ops = [op for op in layer.ops if op.word == word]
            size, seconds = sum(op.output_bytes for op in ops), sum(op.seconds for op in ops)
            if layer.kind == LOSS or not size or not seconds:
                continue
            for first, last in _runs(layer.numbers):
                count = last - first + 1
                where = f"layer {first}" if first == last else f"layers {first}-{last}"
                numbers = str(first) if first == last else f"{first}-{last}"
                found.append(
                    Advice(
                        f"{numbers}:{word}",
                        f"{word} outputs of {where}",
                        size * count,
                        seconds * count * num_microbatches,
                        num_microbatches,
                    )
                )
    return sorted(found, key=lambda one: one.bytes_per_microbatch / one.seconds_per_step)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers, as first and last."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
