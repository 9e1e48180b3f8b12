"""Gradients that several ranks have a part of: those of the replicas of a stage, and those of a parameter that two stages share.

    replica 0   .grad = what its microbatches gave    ----+        .grad = the sum
    replica 1   .grad = what its microbatches gave    ----+-->     .grad = the sum, the same bits

Each replica back-propagates with its share n_i / N of all that counts, so gradients are summed and not averaged. A step that adds to
gradients of steps before gives only its own: `.grad` is put aside in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipetrain.schedule.op import Op

# Smaller ones are copied into one piece of memory, in which they stay; of a larger one a copy would cost more than a message does.
_ALONE_BYTES = 1 << 20

Part = tuple[int, int | None]  # a stage and a part of it, as a REDUCE_GRAD names it
Fetch = Callable[[Tensor, str], Tensor]  # a tensor of the device on the host, and what it is called


class SharedGradients:
    """What the REDUCE_GRAD of one rank add up.

    `copies` are the parameters that stages share, by op, in the order of the other end's. `of_parts` are those of the parts of its stages,
    where there are replicas: one that stands in several is added up where the last of these is ready, and one that a stage on another rank
    shares with that stage alone. In all replicas they are the same, and the same of them need a gradient. `now` gives the parameters that the
    stages have, with their names. `runs_ahead`: of a device that may still read what the host has no use for any more.
    """

    def __init__(
        self,
        copies: Mapping[Op, Sequence[nn.Parameter]],
        of_parts: Mapping[Part, Sequence[nn.Parameter]] | None = None,
        *,
        now: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple,
        runs_ahead: bool = True,
    ) -> None:
        self._copies = copies
        self._of_parts = {} if of_parts is None else of_parts
        self._now = now
        self._runs_ahead = runs_ahead
        self._buckets: dict[tuple[Op, ...], dict[Op, list[nn.Parameter]]] = {}  # by all reduces of a step
        self._trained: dict[Op, list[nn.Parameter]] = {}  # in this step
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._read: list[Tensor] = []
        self._in_doubt: list[
            tuple[nn.Parameter, Tensor]
        ] = []  # without a gradient here; in how many replicas there is one
        self._sparse: dict[nn.Parameter, int] = {}  # those whose gradients are; how many of their dimensions

    def start_step(self, reduces: Sequence[Op]) -> None:
        """From now on `.grad` has what this step gives, for all that `reduces` add up.

        Raises ValueError: a stage has a parameter that it did not have when the pipeline was made.
        """
        key = tuple(reduces)
        if key:
            self._refuse_replaced()
        if key not in self._buckets:
            self._buckets[key] = self._share_out(key)
        self._trained = {op: [one for one in bucket if one.requires_grad] for op, bucket in self._buckets[key].items()}
        for bucket in self._trained.values():
            for parameter in bucket:
                self._before[parameter], parameter.grad = parameter.grad, None

    def _refuse_replaced(self) -> None:
        """The gradient of a parameter that came later would be summed by no bucket, and replicas would drift apart unseen."""
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
        for op in reversed(reduces):  # the last of the lane is ready last
            if op.peer is None:
                buckets[op] = [one for one in dict.fromkeys(self._of_parts[op.stage, op.part]) if one not in taken]
                taken.update(buckets[op])
        return buckets

    @torch.no_grad()
    def given(self, op: Op) -> list[Tensor]:
        """What this rank has added up of `op` in this step: dense tensors, in which the sums are to be."""
        bucket = self._trained[op]
        if op.peer is not None:
            # Where neither end has one, as where the layers of both are passed by, it comes out as zeros.
            return [self._alone(parameter) for parameter in bucket]
        dtypes = dict.fromkeys(map(_dtype_of_gradient, bucket))
        small = [parameter for parameter in bucket if _is_small(parameter)]
        tensors = []
        for number, dtype in enumerate(dtypes):
            together = [parameter for parameter in small if _dtype_of_gradient(parameter) is dtype]
            tensors.append(self._together(together, dtype, bucket if number == 0 else ()))
        return [*(one for one in tensors if one.numel()), *(self._alone(one) for one in bucket if not _is_small(one))]

    def _together(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, marked: Sequence[nn.Parameter]
    ) -> Tensor:
        """All their gradients in one piece of memory, and behind these a 1 for each of `marked` that has one here, else a 0: the sum is in
        how many replicas there is one."""
        size = sum(parameter.numel() for parameter in parameters)
        piece = torch.empty(size + len(marked), dtype=dtype, device=(*parameters, *marked, torch.empty(0))[0].device)
        marks = piece[size:].fill_(1)
        for mark, parameter in zip(marks.unbind(), marked):
            if parameter.grad is None:
                mark.zero_()
                if self._before[parameter] is None:
                    self._in_doubt.append((parameter, mark))
        there, given = list[Tensor](), list[Tensor]()
        for parameter, room in zip(parameters, _rooms(piece, parameters)):
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
            dtype = _dtype_of_gradient(parameter)
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
        """The sums of `op` are there: what the steps before gave comes to them."""
        for parameter in self._trained[op]:
            before, own = self._before.pop(parameter), parameter.grad
            if before is not None and own is not None:
                self._keep(own)
                self._keep(before)
                parameter.grad = before.add_(own) if before.layout is torch.strided else own.add_(before)

    def end_step(self) -> None:
        """All streams have come together."""
        assert not self._before, "gradients that several ranks have a part of were not added up"
        self._read.clear()

    def finish(self, fetch: Fetch) -> None:
        """After the step: a parameter without a gradient in any replica has none, and sparse gradients are sparse again. Where there are
        neither, nothing waits for the device."""
        if self._in_doubt:
            counts = torch.stack([mark.abs().double() for _, mark in self._in_doubt])
            for (parameter, _), count in zip(self._in_doubt, fetch(counts, "which gradients there are").tolist()):
                if not count:
                    parameter.grad = None
            self._in_doubt.clear()
        replicated = {parameter for op, bucket in self._trained.items() if op.peer is None for parameter in bucket}
        for parameter, dimensions in self._sparse.items():
            if parameter in replicated and parameter.grad is not None and parameter.grad.layout is torch.strided:
                parameter.grad = parameter.grad.to_sparse(dimensions)

    def drop(self) -> None:
        """A step has failed."""
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()
        self._read.clear()
        self._in_doubt.clear()


def _dtype_of_gradient(parameter: nn.Parameter) -> torch.dtype:
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return dtype


def _is_small(parameter: nn.Parameter) -> bool:
    return parameter.numel() * _dtype_of_gradient(parameter).itemsize < _ALONE_BYTES


def _rooms(piece: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """A part of `piece` for each, laid out as the parameter is where that is dense."""
    start = 0
    for parameter in parameters:
        strides = parameter.stride()
        if not parameter.is_contiguous():
            strides = torch.empty_like(parameter, device="meta").stride()
        yield piece.as_strided(parameter.shape, strides, start)
        start += parameter.numel()
