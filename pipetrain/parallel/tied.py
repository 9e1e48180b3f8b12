"""A parameter that two stages share and two ranks hold: equal copies at the start, one sum of gradients in each step.

    stage 0, rank 0    .grad = what B0 .. B7 of the embedding gave     ----+        .grad = the sum
    stage 3, rank 3    .grad = what B0 .. B7 of the head gave          ----+-->     .grad = the sum, the same bits

A sum of two is the same whichever comes first, so with one optimizer the copies stay equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipetrain.group.chain import Chain

_PIECE_BYTES = 1 << 24

Copies = Mapping[str, nn.Parameter]  # by the name in the whole model, on the rank that holds them


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
            send_over(own.get(name), own.get(copy), holder[name], f"the weights of {name}", chain)


def _looks(said: Sequence[object]) -> str:
    shape, dtype, is_trained = said
    return f"{shape} of {str(dtype).removeprefix('torch.')}, {'trained' if is_trained else 'frozen'}"


def send_over(source: Tensor | None, target: Tensor | None, root: int, what: str, chain: Chain) -> None:
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
