"""Cross entropy of the next token: of logits, of logits with a router loss, or of logits that are never all there.

A vocabulary of 152 000 makes logits of 600 kB per token in float32, and cross entropy holds them two or three times. Where they would be
large they are made in pieces along the sequence, inside the loss, each under torch.utils.checkpoint: B makes its logits once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # the target of a position that does not count


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, float32 and 0-dim, over the positions whose target is not IGNORED.

    `logits [batch, sequence, vocabulary]`, `targets [batch, sequence]`, int64: the token after each position. Where nothing counts
    the loss is 0 and so is its gradient, so a microbatch of padding does no harm.
    """
    flat = targets.flatten()
    total = F.cross_entropy(logits.float().flatten(0, -2), flat, ignore_index=IGNORED, reduction="sum")
    return total / (flat != IGNORED).sum().clamp(min=1)


def count_tokens(targets: Any) -> int:
    """Number of positions that count in `targets`, a tensor or a tree: the weight of a microbatch (`count_fn` of a Pipeline)."""
    return sum(int((leaf != IGNORED).sum()) for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor))


# Logits of a microbatch of at most so many bytes in float32 are made whole, and a piece has at most so many.
PIECE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class UnmadeLogits:
    """In the place of logits: the last hidden state `[batch, sequence, width]`, and what makes logits of it."""

    hidden: Tensor
    logits_of: Callable[[Tensor], Tensor]
    vocabulary_size: int
    router_loss: Tensor | None = None


def are_large(hidden: Tensor, vocabulary_size: int) -> bool:
    """Whether the logits of `hidden [batch, sequence, width]` are better made in pieces."""
    return hidden.shape[0] * hidden.shape[1] * vocabulary_size * 4 > PIECE_BYTES


def causal_loss(output: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats over the positions that count, plus the router loss where there is one; float32, 0-dim.

    `output`: logits `[batch, sequence, vocabulary]`, a dict of them and `router_loss [1]`, or `UnmadeLogits`. `targets [batch, sequence]`:
    the token after each position, or IGNORED.
    """
    if isinstance(output, Tensor):
        return next_token_loss(output, targets)
    if isinstance(output, UnmadeLogits):
        loss, router_loss = _in_pieces(output, targets), output.router_loss
    else:
        loss, router_loss = next_token_loss(output["logits"], targets), output["router_loss"]
    return loss if router_loss is None else loss + router_loss.reshape(())


def score_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of a sequence classification as transformers takes it by default, a mean over the samples, 0-dim.

    `scores [batch, labels]`. `targets [batch]`: squared error for one label, else cross entropy; or `[batch, labels]` of floats: binary
    cross entropy.
    """
    if scores.shape[-1] == 1:
        return F.mse_loss(scores.flatten(), targets.flatten().to(scores.dtype))
    if targets.is_floating_point():
        return F.binary_cross_entropy_with_logits(scores, targets)
    return F.cross_entropy(scores, targets)


def _in_pieces(output: UnmadeLogits, targets: Tensor) -> Tensor:
    length = max(1, PIECE_BYTES // (4 * output.vocabulary_size * output.hidden.shape[0]))
    total = torch.zeros((), device=output.hidden.device)
    for hidden, wanted in zip(torch.split(output.hidden, length, dim=1), torch.split(targets, length, dim=1)):
        piece: Tensor = checkpoint(_piece, output.logits_of, hidden, wanted, use_reentrant=False)
        total = total + piece
    return total / (targets != IGNORED).sum().clamp(min=1)


def _piece(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = logits_of(hidden).float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
