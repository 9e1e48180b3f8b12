"""Cross entropy of the next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the target of a position that does not count


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, float32 and 0-dim, over the positions whose target is not IGNORED.

    `logits [batch, sequence, vocabulary]`, `targets [batch, sequence]`, int64: the token after each position. Where nothing counts
    the loss is 0 and so is its gradient, so a microbatch of padding does no harm.
    """
    flat = targets.flatten()
    total = F.cross_entropy(logits.float().flatten(0, -2), flat, ignore_index=IGNORED, reduction="sum")
    return total / (flat != IGNORED).sum().clamp(min=1)


def count_tokens(targets: Tensor) -> int:
    """Number of positions that count in `targets`: the weight of a microbatch (`count_fn` of a Pipeline)."""
    return int((targets != IGNORED).sum())
