"""The global gradient norm over stages, equal bit for bit to that of the model in one piece."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


def clip_grad_norm(
    parameters_of: Mapping[int, Iterable[nn.Parameter]],
    max_norm: float,
    exchange: Callable[[bytes], list[bytes]],
    device: torch.device,
) -> Tensor:
    """Scale the gradients so that the global 2-norm is at most `max_norm`; returns the norm before, 0-dim.

    `parameters_of` are this rank's parameters per stage; `exchange` gives what each rank gave, to every rank. The norms of
    single tensors are put in the whole model's order and summed as torch.nn.utils.clip_grad_norm_ does, so that the result
    does not depend on the split. On a GPU this waits for the gradients.
    """
    own = {stage: list(parameters) for stage, parameters in parameters_of.items()}
    parts = exchange(json.dumps({stage: _norms(parameters) for stage, parameters in own.items()}).encode())
    of_stage = {int(stage): norms for part in parts for stage, norms in json.loads(part).items()}
    norms = [
        torch.tensor(norm, dtype=getattr(torch, kind)) for stage in sorted(of_stage) for norm, kind in of_stage[stage]
    ]
    total = (torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())).to(device)
    if math.isfinite(max_norm):  # infinite: the norm is wanted, and nothing is scaled
        every = [parameter for group in own.values() for parameter in group]
        torch.nn.utils.clip_grads_with_norm_(every, max_norm, total)
    return total


def _norms(parameters: Iterable[nn.Parameter]) -> list[tuple[float, str]]:
    """Norm and dtype of each gradient there is. A Python float holds any of the dtypes exactly."""
    norms = [torch.linalg.vector_norm(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [(norm.item(), str(norm.dtype).removeprefix("torch.")) for norm in norms]
