"""A parameter that two stages share and two ranks hold: equal copies at the start, one sum of gradients in each step.

    stage 0, rank 0    .grad = what B0 .. B7 of the embedding gave     ----+        .grad = the sum
    stage 3, rank 3    .grad = what B0 .. B7 of the head gave          ----+-->     .grad = the sum, the same bits

A sum of two is the same whichever comes first, so with one optimizer the copies stay equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipetrain.group.chain import Chain
from pipetrain.schedule.op import Op

_PIECE_BYTES = 1 << 24

Copies = Mapping[str, nn.Parameter]  # by the name in the whole model, on the rank that holds them


class SharedGradients:
    """What the REDUCE_GRAD of one rank add up. `buckets` are its copies, by op, in the order of the other end's.

    A step that adds to gradients of steps before gives only its own: so `.grad` is put aside in between.
    """

    def __init__(self, buckets: Mapping[Op, Sequence[nn.Parameter]]) -> None:
        self._buckets = buckets
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._read: list[Tensor] = []  # on a device perhaps still, when the host has no use for it any more

    def start_step(self, reduces: Iterable[Op]) -> None:
        """From now on `.grad` has what this step gives, for all that `reduces` add up."""
        for op in reduces:
            for parameter in self._trained(op):
                self._before[parameter], parameter.grad = parameter.grad, None

    def given(self, op: Op) -> list[Tensor]:
        """What the stage of `op` has added up in this step: dense tensors, in which the sums are to be."""
        tensors = []
        for parameter in self._trained(op):
            gradient = parameter.grad
            if gradient is None:
                # Where neither end has one, as where the layers of both are passed by, it comes out as zeros.
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                dense = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
            else:
                self._read.append(gradient)
                dense = (gradient if gradient.layout is torch.strided else gradient.to_dense()).detach().contiguous()
            parameter.grad = dense
            tensors.append(dense)
        return tensors

    @torch.no_grad()
    def settle(self, op: Op) -> None:
        """The sums of `op` are there: what the steps before gave comes to them."""
        for parameter in self._trained(op):
            before, own = self._before.pop(parameter), parameter.grad
            if before is not None and own is not None:
                self._read.append(own)
                parameter.grad = before.add_(own)

    def end_step(self) -> None:
        """All streams have come together."""
        assert not self._before, "gradients that stages share were not added up"
        self._read.clear()

    def drop(self) -> None:
        """A step has failed."""
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()
        self._read.clear()

    def _trained(self, op: Op) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._buckets[op] if parameter.requires_grad)


def make_equal(pairs: Sequence[tuple[str, str]], own: Copies, chain: Chain) -> None:
    """Each second one of `pairs` gets the weights of its first, whoever holds them. Collective.

    Raises:
        ValueError: two that can be no copies of each other, as they differ in shape, dtype or requires_grad; on every rank.
    """
    if not pairs:
        return
    said = {name: [list(one.shape), str(one.dtype), one.requires_grad] for name, one in own.items()}
    parts = [json.loads(part) for part in chain.concatenate(json.dumps(said).encode(), "what stages share")]
    holder = {name: rank for rank, part in enumerate(parts) for name in part}
    for name, copy in pairs:
        first, second = (parts[holder[one]][one] for one in (name, copy))
        if first != second:
            raise ValueError(
                f"{name} and {copy} are one parameter, and cannot be: {_looks(first)} and {_looks(second)}"
            )
    for name, copy in pairs:
        if holder[name] != holder[copy]:
            _send_over(own.get(name), own.get(copy), holder[name], f"the weights of {name}", chain)


def _looks(said: Sequence[object]) -> str:
    shape, dtype, is_trained = said
    return f"{shape} of {str(dtype).removeprefix('torch.')}, {'trained' if is_trained else 'frozen'}"


def _send_over(source: Tensor | None, target: Tensor | None, root: int, what: str, chain: Chain) -> None:
    """The chain has the values of `source` pass by in pieces, from the rank that gives one; another takes them as its `target`."""
    data = None if source is None else _bytes_of(source)
    count = int(chain.broadcast(b"" if data is None else str(len(data)).encode(), root, what))
    came = bytearray() if target is not None else None
    for start in range(0, count, _PIECE_BYTES):
        own = b"" if data is None else data[start : start + _PIECE_BYTES].numpy().tobytes()
        piece = chain.broadcast(own, root, what)
        if came is not None:
            came += piece
    if target is not None and came:
        values = torch.frombuffer(came, dtype=torch.uint8).view(target.dtype).view(target.shape)
        with torch.no_grad():
            target.copy_(values)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
