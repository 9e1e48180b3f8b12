"""The global gradient norm over stages, equal bit for bit to that of the model in one piece."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

Fetch = Callable[[Tensor], Tensor]  # a tensor of the device on the host


def clip_grad_norm(
    parameters_of: Mapping[int, Iterable[nn.Parameter]],
    max_norm: float,
    exchange: Callable[[bytes], list[bytes]],
    device: torch.device,
    fetch: Fetch = Tensor.cpu,
    uncounted: Collection[int] = (),
) -> Tensor:
    """Scale the gradients so that the global 2-norm is at most `max_norm`; returns the norm before, 0-dim on the host.

    `parameters_of` are this rank's parameters per stage; `exchange` gives what each rank gave, to every rank. The norms of
    single tensors are put in the whole model's order and summed as torch.nn.utils.clip_grad_norm_ does, so that the result
    does not depend on the split. `uncounted` are the ids of parameters that are scaled and count in the norm on another rank. `fetch` brings the norms of all tensors to the host at once: on a GPU the one wait for the
    gradients.

    Raises ValueError: a `max_norm` that is no norm, on whichever rank; the same on every rank.
    """
    own = {stage: list(parameters) for stage, parameters in parameters_of.items()}
    mistake = _mistake_in(max_norm)
    counted = {stage: [one for one in group if id(one) not in uncounted] for stage, group in own.items()}
    said = {"mistake": mistake, "norms": _norms(counted, fetch)}
    parts = [json.loads(part) for part in exchange(json.dumps(said).encode())]
    if mistakes := [part["mistake"] for part in parts if part["mistake"]]:
        raise ValueError(mistakes[0])
    of_stage = {int(stage): norms for part in parts for stage, norms in part["norms"].items()}
    norms = [
        torch.tensor(norm, dtype=getattr(torch, kind)) for stage in sorted(of_stage) for norm, kind in of_stage[stage]
    ]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if math.isfinite(max_norm):  # infinite: the norm is wanted, and nothing is scaled
        # Filled in: a copy from the host would wait for the device.
        (value,) = total.reshape(1).tolist()
        there = torch.full((), value, dtype=total.dtype, device=device)
        _scale([parameter for group in own.values() for parameter in group], max_norm, there)
    return total


def _mistake_in(max_norm: Any) -> str | None:
    if not isinstance(max_norm, bool) and isinstance(max_norm, Real) and float(max_norm) >= 0:
        return None
    return f"clip_grad_norm_ was given max_norm={max_norm!r}: a number, 0 or more, is needed; inf gives the norm and scales nothing"


def _norms(parameters_of: Mapping[int, Iterable[nn.Parameter]], fetch: Fetch) -> dict[int, list[tuple[float, str]]]:
    """Per stage the norm and dtype of each gradient there is. float64 holds any of the dtypes exactly."""
    norms = {
        stage: [_norm(parameter.grad) for parameter in parameters if parameter.grad is not None]
        for stage, parameters in parameters_of.items()
    }
    of_all = [norm.double() for group in norms.values() for norm in group]
    values = iter(fetch(torch.stack(of_all)).tolist() if of_all else [])
    return {
        stage: [(next(values), str(norm.dtype).removeprefix("torch.")) for norm in group]
        for stage, group in norms.items()
    }


def _norm(gradient: Tensor) -> Tensor:
    """The 2-norm of a gradient: of a sparse one, of the sums of entries that meet; of a DTensor, over all of its ranks."""
    if gradient.layout is not torch.strided:
        gradient = (gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient).values()
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return whole() if (whole := getattr(norm, "full_tensor", None)) else norm


@torch.no_grad()
def _scale(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """As torch.nn.utils.clip_grads_with_norm_ does, which knows dense gradients alone."""
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    plain = [parameter for parameter, gradient in gradients if _is_plain(gradient)]
    torch.nn.utils.clip_grads_with_norm_(plain, max_norm, total)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, gradient in gradients:
        if not _is_plain(gradient):
            gradient.mul_(factor)


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and not hasattr(gradient, "full_tensor")
