"""What `precision` means: the dtype of the weights, and whether layers run under autocast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipetrain.config.records import WEIGHTS_IN

_CUDA = "cuda"


@dataclass(frozen=True)
class Precision:
    """weights: the dtype of parameters, and of layers where there is no autocast. autocast: matrix products in bfloat16."""

    weights: torch.dtype
    autocast: bool

    def context(self, device: torch.device) -> torch.autocast:
        """Within it forwards, backwards and losses run as this precision says."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast)


def precision_of(word: str, device: torch.device) -> Precision:
    """That of the key `precision` on `device`; `auto` is bfloat16 by autocast on a GPU, and float32 on the CPU."""
    if word == "auto":
        word = "bf16-mixed" if device.type == _CUDA else "fp32"
    return Precision(getattr(torch, WEIGHTS_IN[word]), autocast=word == "bf16-mixed")
