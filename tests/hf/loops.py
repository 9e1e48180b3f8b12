"""transformers' own loop over microbatches, which a pipeline must equal; and what differs between two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.models.loss import count_tokens, next_token_loss
from pipetrain.runtime.cut import cut

LossFn = Callable[[Any, Tensor], Tensor]


def loop_step(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    *,
    num_microbatches: int,
    loss_of: LossFn = lambda output, targets: next_token_loss(output.logits, targets),
) -> Tensor:
    """Forward and backward of the model itself on each microbatch; gradients are added up. Returns the loss, weighted by tokens."""
    total = torch.zeros(())
    for one, wanted in zip(cut(inputs, num_microbatches), cut(targets, num_microbatches)):
        batch = dict(one) if isinstance(one, Mapping) else {"input_ids": one}
        loss = loss_of(model(**batch, use_cache=False), wanted) * (count_tokens(wanted) / count_tokens(targets))
        loss.backward()
        total = total + loss.detach()
    return total


def differing_gradients(ours: nn.Module, theirs: nn.Module, *, within: float = 0.0) -> list[str]:
    """The parameters whose gradients differ: by a bit, or by more than `within` of the largest entry of their own."""
    found = dict(ours.named_parameters())
    return [
        name for name, parameter in theirs.named_parameters() if not _same(found[name].grad, parameter.grad, within)
    ]


def _same(one: Tensor | None, other: Tensor | None, within: float) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) if not within else bool((one - other).abs().max() <= within * other.abs().max())
