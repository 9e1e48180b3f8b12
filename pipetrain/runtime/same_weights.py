"""The weights of the replicas of a stage: made equal at the start, and compared while training goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipetrain.comm.chain import Chain
from pipetrain.comm.failure import PipelineError

_PIECE_BYTES = 1 << 24
_WHAT = "the weights of the replicas"
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry

Tensors = Mapping[str, Tensor]  # by the name in the whole model, the same ones in the same order in each replica
Fetch = Callable[[Tensor, str], Tensor]


def make_replicas_equal(own: Tensors, replicas: Chain, fetch: Fetch) -> None:
    """Each replica gets the values of the first, where they differ. Collective.

    Raises:
        PipelineError: the replicas have other tensors.
    """
    if replicas.num_ranks == 1:
        return
    parts = _told(own, replicas, fetch)
    shapes = [[(name, shape, dtype) for name, shape, dtype, _ in part] for part in parts]
    if other := next((place for place, found in enumerate(shapes) if found != shapes[0]), None):
        raise PipelineError(
            f"replica {other} has other parameters and buffers than replica 0: build the same layers in each replica"
        )
    for number, (name, *_) in enumerate(parts[0]):
        if any(part[number] != parts[0][number] for part in parts):
            mine = own[name]
            source, target = (mine, None) if replicas.rank == 0 else (None, mine)
            send_over(source, target, 0, f"the values of {name}", replicas)


def check_replicas_equal(
    own: Tensors, chain: Chain, replicas: Chain, name_of: Callable[[int], str], fetch: Fetch
) -> None:
    """Compare what the replicas hold: cheap, a sum over the bits of each tensor. `name_of` says what the rank in replica r is called. Collective
    over all ranks.

    Raises:
        PipelineError: they differ; the same text on every rank, with the ranks that do. The pipeline itself can go on.
    """
    if replicas.num_ranks == 1:
        return
    said = _difference(_told(own, replicas, fetch), name_of)
    texts = [text.decode() for text in chain.concatenate(said.encode(), _WHAT)]
    if any(texts):
        chain.wait_sent(_WHAT)  # this rank may end with the error, and the others are to know it
        raise PipelineError(
            f"replicas do not hold the same weights: {'; '.join(filter(None, texts))}. Change weights on all replicas alike; to make them "
            "equal again load a state_dict or the last snapshot on all"
        )


def _difference(parts: Sequence[list[list[Any]]], name_of: Callable[[int], str]) -> str:
    """What differs between the ranks of one place, or nothing. Who is alone with what it holds is named; of two, both."""
    held = [json.dumps(part) for part in parts]
    most, times = Counter(held).most_common(1)[0]
    odd = [replica for replica, own in enumerate(held) if own != most]
    if not odd:
        return ""
    first = held.index(most)
    differing = [one[0] for one, other in zip(parts[first], parts[odd[0]]) if one != other]
    rest = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    names = [name_of(replica) for replica in odd]
    if times == 1:  # nobody knows who is right
        return f"{', '.join([name_of(first), *names])} differ in {differing[0]}{rest}"
    return (
        f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'} from {name_of(first)} in {differing[0]}{rest}"
    )


def _told(own: Tensors, replicas: Chain, fetch: Fetch) -> list[list[list[Any]]]:
    """Of each replica: name, shape, dtype and sum of bits of each tensor."""
    sums = [_sum_of_bits(tensor) for tensor in own.values()]
    values = fetch(torch.stack(sums), "a sum over the weights").tolist() if sums else []
    looks = [[name, list(tensor.shape), str(tensor.dtype), value] for (name, tensor), value in zip(own.items(), values)]
    return [json.loads(part) for part in replicas.concatenate(json.dumps(looks).encode(), _WHAT)]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Of its entries, as whole numbers of their size; it wraps around."""
    dense = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return dense.contiguous().view(_WHOLE_NUMBERS[dense.element_size()]).sum(dtype=torch.int64)


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
