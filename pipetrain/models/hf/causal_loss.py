"""The loss of a causal language model: of logits, of logits with a router loss, or of logits that are never all there.

A vocabulary of 152 000 makes logits of 600 kB per token in float32, and cross entropy holds them two or three times. So where they would be
large they are made piece by piece, along the sequence, inside the loss:

    any head                                  each piece under torch.utils.checkpoint: B makes its logits once more
    logits = c x linear(h, W), in float32     torch's `linear_cross_entropy`, which makes the gradients of a piece while its logits are there

Not in bfloat16: there `linear_cross_entropy` of torch 2.13 adds the losses up in bfloat16 (256 tokens: 5024 instead of 5150).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.models.loss import IGNORED, next_token_loss

# Logits of a microbatch of at most so many bytes in float32 are made whole, and a piece has at most so many.
PIECE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class LinearHead:
    """Logits are `scale * linear(after(hidden), weight)`."""

    after: Callable[[Tensor], Tensor]
    weight: nn.Parameter
    scale: float


@dataclass(frozen=True)
class UnmadeLogits:
    """In the place of logits: the last hidden state `[batch, sequence, width]`, and what makes logits of it."""

    hidden: Tensor
    logits_of: Callable[[Tensor], Tensor]
    vocabulary_size: int
    linear: LinearHead | None = None
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


def _in_pieces(output: UnmadeLogits, targets: Tensor) -> Tensor:
    count = (targets != IGNORED).sum().clamp(min=1)
    if output.linear is not None and _is_plain_float32(output.hidden):
        return _fused(output.hidden, output.linear, targets) / count
    length = max(1, PIECE_BYTES // (4 * output.vocabulary_size * output.hidden.shape[0]))
    total = torch.zeros((), device=output.hidden.device)
    for hidden, wanted in zip(torch.split(output.hidden, length, dim=1), torch.split(targets, length, dim=1)):
        piece: Tensor = checkpoint(_piece, output.logits_of, hidden, wanted, use_reentrant=False)
        total = total + piece
    return total / count


def _is_plain_float32(hidden: Tensor) -> bool:
    return hidden.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type)


def _piece(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = logits_of(hidden).float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _fused(hidden: Tensor, head: LinearHead, targets: Tensor) -> Tensor:
    rows = head.after(hidden).flatten(0, 1) * head.scale
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        rows, head.weight, targets.flatten(), reduction="sum", ignore_index=IGNORED, options=options
    )


def scale_of_linear(logits_of: Callable[[Tensor], Tensor], weight: Any) -> float | None:
    """The c of a head whose logits of a normed hidden state h are c x linear(h, weight); None: it is another, or torch has no loss for it.

    It is tried on small and large numbers: a soft cap is linear near zero.
    """
    if not isinstance(weight, nn.Parameter) or weight.dtype != torch.float32 or weight.is_meta or weight.dim() != 2:
        return None
    if not hasattr(F, "linear_cross_entropy"):
        return None
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(1, 3, weight.shape[1], generator=generator).to(weight.device)
    tolerance = 16 * torch.finfo(weight.dtype).eps
    scale: float | None = None
    with torch.no_grad():
        for size in (1.0, 1e-2, 1e3):
            found, plain = logits_of(size * some).double(), F.linear(size * some, weight).double()
            if scale is None:
                scale = float((found * plain).sum() / (plain * plain).sum().clamp(min=1e-300))
            if not bool((found - scale * plain).abs().max() <= tolerance * max(1.0, abs(scale)) * plain.abs().max()):
                return None
    assert scale is not None
    return 1.0 if abs(scale - 1) < tolerance else scale
