"""Gradients over ranks: ranks that hold the same parameter sum its gradients, and all gradients are clipped by their norm.

    replica 0   .grad = what its microbatches gave    ----+        .grad = the sum
    replica 1   .grad = what its microbatches gave    ----+-->     .grad = the sum, the same bits

These ranks are the replicas of a stage, or those of two stages that share a parameter. Gradients are summed, not averaged: the factor
of a microbatch's loss is its part of the count of all replicas, n_i / N, or 1 if `loss_reduction="sum"`. If `.grad` holds gradients of
earlier steps, a step puts them aside, sums its own over the ranks, and then adds the earlier ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipetrain.comm.device import Fetch
from pipetrain.runtime.cut import is_number
from pipetrain.schedule.op import Op

# Smaller gradients are copied into one buffer and stay there. A larger one is summed alone: the copy would take longer than its message.
_ALONE_BYTES = 1 << 20

Part = tuple[int, int | None]  # a stage and a part of it, as a REDUCE_GRAD names it


class SharedGradients:
    """The gradients that the REDUCE_GRAD ops of one rank sum.

    `copies` has, by op, the parameters that two stages share, in the same order on the ranks of both. `of_parts` has, by part of a stage,
    the parameters whose gradients replicas sum. A parameter of several parts is summed with the part that is ready last. A parameter in
    `copies` is summed only by its op there.
    All replicas have the same parameters, and the same ones need a gradient. `now` returns the stages' present parameters, with names.
    `runs_ahead`: the device may read a gradient after the host has released it, so gradients are held until the end of the step.
    """

    def __init__(
        self,
        copies: Mapping[Op, Sequence[nn.Parameter]],
        of_parts: Mapping[Part, Sequence[nn.Parameter]] | None = None,
        *,
        now: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple,
        runs_ahead: bool = True,
    ) -> None:
        self._copies, self._of_parts, self._now, self._runs_ahead = copies, of_parts or {}, now, runs_ahead
        self._buckets: dict[tuple[Op, ...], dict[Op, list[nn.Parameter]]] = {}  # by the tuple of all reduces of a step
        self._trained: dict[Op, list[nn.Parameter]] = {}  # in this step
        self._before: dict[nn.Parameter, Tensor | None] = {}  # gradients of earlier steps
        self._read: list[Tensor] = []  # gradients that the device may still read
        # Parameters without any gradient here, each with a mark, a 0-dim tensor: its sum is the number of replicas with a gradient.
        self._in_doubt: list[tuple[nn.Parameter, Tensor]] = []
        self._sparse: dict[nn.Parameter, int] = {}  # with sparse gradients -> their number of sparse dimensions

    def start_step(self, reduces: Sequence[Op]) -> None:
        """Put the gradients of earlier steps aside for all parameters of `reduces`, so that `.grad` has only this step's gradients. Raises
        ValueError: a stage has a parameter that it did not have when the pipeline was made."""
        if not reduces:
            self._trained = {}
            return
        self._refuse_replaced()
        key = tuple(reduces)
        if key not in self._buckets:
            self._buckets[key] = self._share_out(key)
        self._trained = {op: [one for one in bucket if one.requires_grad] for op, bucket in self._buckets[key].items()}
        for bucket in self._trained.values():
            for parameter in bucket:
                self._before[parameter], parameter.grad = parameter.grad, None

    def _refuse_replaced(self) -> None:
        """Raise ValueError for a parameter that was added later: no bucket would sum its gradient, and replicas would drift apart."""
        known = {id(one) for bucket in (*self._copies.values(), *self._of_parts.values()) for one in bucket}
        if replaced := [name for name, parameter in self._now() if id(parameter) not in known]:
            raise ValueError(
                f"{', '.join(replaced[:3])}: not a parameter that the stage had when the Pipeline was made, so that its gradient "
                "would not be summed over the ranks that have a copy. Add or replace parameters (adapters, "
                "load_state_dict(assign=True)) before the Pipeline is made, or copy values into those that it has"
            )

    def _share_out(self, reduces: Sequence[Op]) -> dict[Op, list[nn.Parameter]]:
        buckets = {op: list(self._copies[op]) for op in reduces if op.peer is not None}
        taken = {parameter for bucket in self._copies.values() for parameter in bucket}
        for op in reversed(reduces):  # the last REDUCE_GRAD of the lane is the last to have its gradients
            if op.peer is None:
                buckets[op] = [one for one in dict.fromkeys(self._of_parts[op.stage, op.part]) if one not in taken]
                taken.update(buckets[op])
        return buckets

    @torch.no_grad()
    def given(self, op: Op) -> list[Tensor]:
        """Return the gradients of this step that `op` sums, as dense tensors, in which the all-reduce puts the sums."""
        bucket = self._trained[op]
        if op.peer is not None:
            # Zeros stand for a missing gradient (a stage did not use the layer). If both stages lack it, the sum is zeros.
            return [self._alone(parameter) for parameter in bucket]
        sizes = {parameter: parameter.numel() * _grad_dtype(parameter).itemsize for parameter in bucket}
        small = [parameter for parameter in bucket if sizes[parameter] < _ALONE_BYTES]
        tensors = []
        for number, dtype in enumerate(dict.fromkeys(map(_grad_dtype, bucket))):
            together = [parameter for parameter in small if _grad_dtype(parameter) is dtype]
            tensors.append(self._together(together, dtype, bucket if number == 0 else ()))
        large = [self._alone(parameter) for parameter in bucket if sizes[parameter] >= _ALONE_BYTES]
        return [*(one for one in tensors if one.numel()), *large]

    def _together(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, marked: Sequence[nn.Parameter]
    ) -> Tensor:
        """Put the gradients of `parameters` into one tensor, and behind them a mark for each of `marked`: 1 if it has a gradient here, else
        0. The sum of a mark over replicas is the number of replicas in which the parameter has a gradient."""
        size = sum(parameter.numel() for parameter in parameters)
        piece = torch.empty(size + len(marked), dtype=dtype, device=(*parameters, *marked, torch.empty(0))[0].device)
        marks = piece[size:].fill_(1)
        for mark, parameter in zip(marks.unbind(), marked):
            if parameter.grad is None:
                mark.zero_()
                if self._before[parameter] is None:
                    self._in_doubt.append((parameter, mark))
        there, given, start = list[Tensor](), list[Tensor](), 0
        for parameter in parameters:
            strides = parameter.stride()
            if not parameter.is_contiguous():  # strides in the parameter's order of dimensions, but without gaps
                strides = torch.empty_like(parameter, device="meta").stride()
            room = piece.as_strided(parameter.shape, strides, start)
            start += parameter.numel()
            if parameter.grad is None:
                room.zero_()
            else:
                there.append(room)
                given.append(self._dense(parameter, parameter.grad))
            parameter.grad = room
        if given:
            torch._foreach_copy_(there, given)
        return piece

    def _alone(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            dtype = _grad_dtype(parameter)
            dense = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
        else:
            dense = self._dense(parameter, parameter.grad).contiguous()
        parameter.grad = dense
        return dense

    def _dense(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        self._keep(gradient)
        if gradient.layout is torch.strided:
            return gradient.detach()
        self._sparse[parameter] = gradient.sparse_dim()
        return gradient.to_dense()

    def _keep(self, read: Tensor) -> None:
        if self._runs_ahead:
            self._read.append(read)

    @torch.no_grad()
    def settle(self, op: Op) -> None:
        """Add the gradients of earlier steps to the sums of `op`, which are complete."""
        for parameter in self._trained[op]:
            before, own = self._before.pop(parameter), parameter.grad
            if before is not None and own is not None:
                self._keep(own)
                self._keep(before)
                parameter.grad = before.add_(own) if before.layout is torch.strided else own.add_(before)

    def end_step(self) -> None:
        """End the step: the caller's stream waits for all lanes, so gradients need no longer be held."""
        assert not self._before, "some gradients were not summed over their ranks"
        self._read.clear()

    def finish(self, fetch: Fetch) -> None:
        """After the step: set `.grad` to None for parameters that have a gradient in no replica, and make sparse gradients sparse again.
        Waits for the device only if a parameter has no gradient here, or a sparse one."""
        if self._in_doubt:
            counts = torch.stack([mark.abs().double() for _, mark in self._in_doubt])
            for (parameter, _), count in zip(self._in_doubt, fetch(counts, "which gradients there are").tolist()):
                if not count:
                    parameter.grad = None
            self._in_doubt.clear()
        if not self._sparse:
            return
        replicated = {parameter for op, bucket in self._trained.items() if op.peer is None for parameter in bucket}
        for parameter, dimensions in self._sparse.items():
            if parameter in replicated and parameter.grad is not None and parameter.grad.layout is torch.strided:
                parameter.grad = parameter.grad.to_sparse(dimensions)

    def drop(self) -> None:
        """Drop the gradients of a failed step, and put those of earlier steps back into `.grad`."""
        for parameter, before in self._before.items():
            parameter.grad = before
        for held in (self._before, self._read, self._in_doubt):
            held.clear()


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return dtype


# The clip -------------------------------------------------------------------------------------------------------------


def clip_grad_norm(
    parameters_of: Mapping[int, Iterable[nn.Parameter]],
    max_norm: float,
    exchange: Callable[[bytes], list[bytes]],
    device: torch.device,
    fetch: Callable[[Tensor], Tensor] = Tensor.cpu,
    uncounted: Collection[int] = (),
) -> Tensor:
    """Scale the gradients so that the global 2-norm is at most `max_norm`; returns the norm before, 0-dim on the host.

    `parameters_of` are this rank's parameters per stage; `exchange` sends this rank's bytes and returns those of all ranks. The norms of
    single tensors are combined in the whole model's order, as torch.nn.utils.clip_grad_norm_ does, so the result has the same bits as for
    the model on one rank. `uncounted` are the ids of parameters that are scaled here, but counted on another rank. `fetch` brings the norms
    of all tensors to the host at once; on a GPU this is the only wait for the gradients.

    Raises ValueError, the same on every rank: `max_norm` of a rank is not a number of 0 or more.
    """
    own = {stage: list(parameters) for stage, parameters in parameters_of.items()}
    mistake = ""
    if not is_number(max_norm) or not max_norm >= 0:
        mistake = f"clip_grad_norm_ was given max_norm={max_norm!r}: a number, 0 or more, is needed; inf gives the norm and scales nothing"
    counted = {stage: [one for one in group if id(one) not in uncounted] for stage, group in own.items()}
    said = {"mistake": mistake, "norms": _norms(counted, fetch)}
    parts = [json.loads(part) for part in exchange(json.dumps(said).encode())]
    if mistakes := [part["mistake"] for part in parts if part["mistake"]]:
        raise ValueError(mistakes[0])
    of_stage = {int(stage): norms for part in parts for stage, norms in part["norms"].items()}
    in_order = (pair for stage in sorted(of_stage) for pair in of_stage[stage])
    norms = [torch.tensor(norm, dtype=getattr(torch, dtype)) for norm, dtype in in_order]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if math.isfinite(max_norm):  # if it is infinite, the caller wants only the norm
        # `torch.full` fills the tensor on the device; a copy from the host would wait for the device.
        (value,) = total.reshape(1).tolist()
        there = torch.full((), value, dtype=total.dtype, device=device)
        _scale([parameter for group in own.values() for parameter in group], max_norm, there)
    return total


def _norms(
    parameters_of: Mapping[int, Iterable[nn.Parameter]], fetch: Callable[[Tensor], Tensor]
) -> dict[int, list[tuple[float, str]]]:
    """Return per stage the norm and dtype of each gradient. float64 holds any of the dtypes exactly."""
    norms = {stage: [_norm(p.grad) for p in group if p.grad is not None] for stage, group in parameters_of.items()}
    of_all = [norm.double() for group in norms.values() for norm in group]
    values = iter(fetch(torch.stack(of_all)).tolist() if of_all else [])
    dtypes = {stage: [str(norm.dtype).removeprefix("torch.") for norm in group] for stage, group in norms.items()}
    return {stage: [(next(values), dtype) for dtype in group] for stage, group in dtypes.items()}


def _norm(gradient: Tensor) -> Tensor:
    """The 2-norm of a gradient; for a DTensor, over all its ranks. In a sparse gradient, entries with the same index are summed first."""
    if gradient.layout is not torch.strided:
        gradient = (gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient).values()
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return whole() if (whole := getattr(norm, "full_tensor", None)) else norm


@torch.no_grad()
def _scale(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scale gradients as torch.nn.utils.clip_grads_with_norm_ does; sparse gradients and DTensors are scaled one by one."""
    plain, factor = [], torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is torch.strided and not hasattr(gradient, "full_tensor"):
            plain.append(parameter)
        else:
            gradient.mul_(factor)
    torch.nn.utils.clip_grads_with_norm_(plain, max_norm, total)
