"""What is worth keeping by a profile of layers: the outputs of expensive operations, the most seconds of R per byte first."""

from __future__ import annotations

import itertools
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
            for _, pairs in itertools.groupby(enumerate(layer.numbers), key=lambda pair: pair[1] - pair[0]):
                run = [number for _, number in pairs]  # that follow one another
                numbers = f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
                what = f"{word} outputs of layer{'s' * (len(run) > 1)} {numbers}"
                total = seconds * len(run) * num_microbatches
                found.append(Advice(f"{numbers}:{word}", what, size * len(run), total, num_microbatches))
    return sorted(found, key=lambda one: one.bytes_per_microbatch / one.seconds_per_step)
