"""Which token comes next: the likeliest, or one that is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipetrain.runtime.arguments import checked_seed, is_number
from pipetrain.stage.seeding import mix

_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen by their logits.

    temperature: 0: the likeliest token each time; else the logits are divided by it, and a token is drawn by their softmax.
    top_k: of the likeliest so many alone; None: of all.
    top_p: of the likeliest that have this share of the probability together, at least one (Holtzman et al., "The curious case of neural
        text degeneration", 2020, section 3.1); None: of all. Where both are given, top_k comes first.
    seed: what is drawn for a sample depends on this, the sample's number and the token's alone.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r}: allowed is 0 (the likeliest token each time) or more")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise ValueError(f"top_k={self.top_k!r}: allowed is a whole number from 1 on, or None for all tokens")
        if self.top_p is not None and (not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p={self.top_p!r}: allowed is more than 0 and at most 1, or None for all tokens")
        checked_seed(self.seed)
        if self.temperature == 0.0 and (self.top_k or self.top_p):
            raise ValueError(
                f"temperature=0 takes the likeliest token each time, so that top_k={self.top_k} top_p={self.top_p} do nothing: leave "
                "them out, or set a temperature"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def choose(self, logits: Tensor, samples: range, token: int) -> Tensor:
        """Token ids `[rows]`, int64, by logits `[rows, vocabulary]` on the host: row i is of sample `samples[i]`, whose token number
        `token` this is."""
        if self.is_greedy:
            return logits.argmax(-1)
        chances = self.chances(logits)
        return torch.stack([self._drawn(row, mix(self.seed, sample, token)) for row, sample in zip(chances, samples)])

    def chances(self, logits: Tensor) -> Tensor:
        """The probabilities `[rows, vocabulary]` by which a token is drawn, float32."""
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if self.top_p is not None:
            ordered, places = scaled.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
            before[..., 0] = 0.0
            outside = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, places, before >= self.top_p)
            scaled = scaled.masked_fill(outside, -math.inf)
        return scaled.softmax(-1)

    @staticmethod
    def _drawn(chances: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed & _MASK)
        return torch.multinomial(chances, 1, generator=generator).squeeze(0)
