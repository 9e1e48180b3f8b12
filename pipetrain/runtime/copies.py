"""Tensors that several ranks hold: a parameter that two stages share, and the weights of a stage in each replica.

    stage 0, rank 0    .grad = what B0 .. B7 of the embedding gave     ----+        .grad = the sum
    stage 3, rank 3    .grad = what B0 .. B7 of the head gave          ----+-->     .grad = the sum, the same bits

A sum of two has the same bits in either order, so the copies stay equal if both ranks have the same optimizer. Copies and
replicas are made equal at the start; replicas can be compared during training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.comm.device import Fetch
from pipetrain.comm.failure import PipelineError
from pipetrain.models.sharing import Tie, groups_of, parameter_of, put_in_place
from pipetrain.schedule.op import Op
from pipetrain.stage.tensor_copies import fingerprint

_PIECE_BYTES = 1 << 24
_WHAT = "the weights of the replicas"

Layers = Mapping[int, nn.Module]  # by global index
Tensors = Mapping[str, Tensor]  # by name in the whole model; all replicas have the same names in the same order


def carry(num_bytes: int, source: Tensor | None, *, wanted: bool, by: Callable[[bytes | None], bytes]) -> Tensor:
    """Transfer the bytes of `source`, a tensor on one rank and None on the others. Returns them as a uint8 host tensor if `wanted`, else
    an empty one. Collective. The bytes travel in pieces of 16 MiB; `by` gets a piece of `source` or None, and returns the one received."""
    data = None if source is None else source.detach().cpu().contiguous().flatten().view(torch.uint8)
    came = torch.empty(num_bytes if wanted else 0, dtype=torch.uint8)
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = by(None if data is None else data[start : start + _PIECE_BYTES].numpy().tobytes())
        if wanted:
            came[start : start + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    return came


@torch.no_grad()
def _send_over(own: Tensor | None, num_bytes: int, root: int, what: str, chain: Chain) -> None:
    """Copy `own` of rank `root` into `own` of each other rank whose `own` is not None. Collective over the chain."""
    target = None if chain.rank == root else own
    source, wanted = own if chain.rank == root else None, target is not None
    came = carry(num_bytes, source, wanted=wanted, by=lambda piece: chain.broadcast(piece or b"", root, what))
    if target is not None:
        target.copy_(came.view(target.dtype).view(target.shape))


# What stages share ----------------------------------------------------------------------------------------------------


def make_one(tied: Iterable[tuple[str, str]], layers: Layers) -> None:
    """`tied` has pairs of names that are one parameter. Among this rank's layers, put the first name's parameter in place of the others'.
    Raises ValueError: the parameters differ in shape, or a layer has no parameter of that name."""
    for names in groups_of(tied):
        first: nn.Parameter | None = None
        for name in names:
            own = parameter_of(layers, name)
            if first is None:
                first = own
            elif own is not None and own is not first:
                put_in_place(layers, name, first)


class Copies:
    """This rank's copies of parameters that two stages share.

    `apart` has the parameters whose other copy is on another rank, by their name in the lower stage, as in the whole model.
    `second` has the `id` of each parameter of `apart` that is the copy in the higher stage: the norm of all gradients leaves it out.
    """

    def __init__(self, ties: Sequence[Tie], layers: Layers) -> None:
        self._ties = ties
        self._own = {
            name: parameter
            for tie in ties
            for name in (tie.name, tie.copy)
            if (parameter := parameter_of(layers, name)) is not None
        }
        alone = [tie for tie in ties if (tie.name in self._own) != (tie.copy in self._own)]
        self.apart = {tie.name: self._own[tie.name if tie.name in self._own else tie.copy] for tie in alone}
        self.second = frozenset(id(self._own[tie.copy]) for tie in alone if tie.copy in self._own)
        self._first_names = {tie.copy: tie.name for tie in ties}

    def name(self, name: str) -> str:
        """Return the name that parameter `name` has in the whole model: a shared parameter has its name in the lower stage."""
        return self._first_names.get(name, name)

    def bucket(self, op: Op) -> list[nn.Parameter]:
        """`op` is a REDUCE_GRAD of two stages. Return this rank's copies of the parameters whose gradients it sums."""
        ties = [tie for tie in self._ties if {op.stage, op.peer} == set(tie.stages)]
        return [self._own[tie.name if op.stage == tie.stages[0] else tie.copy] for tie in ties]

    def make_equal(self, chain: Chain) -> None:
        """Copy the weights of the copy in the lower stage into the other one, before the first step. Collective. Raises ValueError, on
        every rank: two copies differ in shape, dtype or requires_grad."""
        if not self._ties:
            return
        own = {
            name: [list(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad, one.nbytes]
            for name, one in self._own.items()
        }
        parts = [json.loads(part) for part in chain.concatenate(json.dumps(own).encode(), "what stages share")]
        holder = {name: rank for rank, part in enumerate(parts) for name in part}
        for tie in self._ties:
            first, second = (parts[holder[name]][name] for name in (tie.name, tie.copy))
            if first != second:
                looks = [
                    f"{shape} of {dtype}, {'trained' if grad else 'frozen'}"
                    for shape, dtype, grad, _ in (first, second)
                ]
                raise ValueError(
                    f"{tie.name} and {tie.copy} are tied as one parameter, but differ: {looks[0]} and {looks[1]}"
                )
        for tie in self._ties:
            if (root := holder[tie.name]) != holder[tie.copy]:
                mine = self._own.get(tie.name if chain.rank == root else tie.copy)
                num_bytes = parts[root][tie.name][-1]
                _send_over(mine, num_bytes, root, f"the weights of {tie.name}", chain)

    def other_names(self, state: Any) -> dict[str, str]:
        """A shared parameter has two names. If `state` has only one, map the missing name to it, for this rank's parameters. Raises
        ValueError: `state` has both names, with different values."""
        found: dict[str, str] = {}
        for tie in self._ties if isinstance(state, Mapping) else ():
            if tie.name not in self._own and tie.copy not in self._own:
                continue
            there = [name for name in (tie.name, tie.copy) if name in state]
            values = [state[name] for name in there if isinstance(state[name], Tensor)]
            if len(values) == 2 and (values[0].shape != values[1].shape or not torch.equal(*(v.cpu() for v in values))):
                raise ValueError(
                    f"{tie.name} and {tie.copy} are one parameter, but have different values in the state: give both the same, or only one"
                )
            found |= {name: there[0] for name in (tie.name, tie.copy) if there and name not in there}
        return found


# Replicas -------------------------------------------------------------------------------------------------------------


def make_replicas_equal(own: Tensors, replicas: Chain, fetch: Fetch) -> None:
    """Copy each tensor that differs between replicas from the first replica to the others. Collective. Raises PipelineError: replicas
    differ in the names, shapes or dtypes of their tensors."""
    if replicas.num_ranks == 1:
        return
    parts = _digests(own, replicas, fetch)
    shapes = [[(name, shape, dtype) for name, shape, dtype, _ in part] for part in parts]
    if other := next((place for place, found in enumerate(shapes) if found != shapes[0]), None):
        raise PipelineError(
            f"replica {other} has other parameters and buffers than replica 0: build the same layers in each replica"
        )
    for number, (name, tensor) in enumerate(own.items()):
        if any(part[number] != parts[0][number] for part in parts):
            _send_over(tensor, tensor.nbytes, 0, f"the values of {name}", replicas)


def check_replicas_equal(
    own: Tensors, chain: Chain, replicas: Chain, name_of: Callable[[int], str], fetch: Fetch
) -> None:
    """Compare a sum over the bits of each tensor between replicas. `name_of(replica)` names the rank with these stages in that replica, for
    the error. Collective over all ranks. Raises PipelineError, the same on every rank: replicas differ. The pipeline itself can go on."""
    if replicas.num_ranks == 1:
        return
    said = _difference(_digests(own, replicas, fetch), name_of)
    texts = [text.decode() for text in chain.concatenate(said.encode(), _WHAT)]
    if any(texts):
        chain.wait_sent(_WHAT)  # this process may exit with the error before the others have it
        raise PipelineError(
            f"replicas do not hold the same weights: {'; '.join(filter(None, texts))}. Change weights on all replicas alike; to make them "
            "equal again load a state_dict or the last snapshot on all"
        )


def _difference(parts: Sequence[list[list[Any]]], name_of: Callable[[int], str]) -> str:
    """Return what differs between ranks with the same stages; empty: nothing. It names the ranks that differ from the largest group that
    agrees, or all ranks if no two agree."""
    held = [json.dumps(part) for part in parts]
    most, times = Counter(held).most_common(1)[0]
    odd = [replica for replica, own in enumerate(held) if own != most]
    if not odd:
        return ""
    first = held.index(most)
    differing = [one[0] for one, other in zip(parts[first], parts[odd[0]]) if one != other]
    rest = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    names = [name_of(replica) for replica in odd]
    if times == 1:  # no two ranks agree, so none can be called wrong
        return f"{', '.join([name_of(first), *names])} differ in {differing[0]}{rest}"
    return (
        f"{', '.join(names)} {'differs' if len(names) == 1 else 'differ'} from {name_of(first)} in {differing[0]}{rest}"
    )


def _digests(own: Tensors, replicas: Chain, fetch: Fetch) -> list[list[list[Any]]]:
    """Return, for each replica, the name, shape, dtype and sum of bits of each tensor. Collective."""
    none = torch.zeros((), dtype=torch.int64)  # for a tensor without plain bits: its values are not compared
    sums = [none.to(one.device) if (bits := fingerprint(one)) is None else bits for one in own.values()]
    values = fetch(torch.stack(sums), "a sum over the weights").tolist() if sums else []
    looks = [[name, list(tensor.shape), str(tensor.dtype), value] for (name, tensor), value in zip(own.items(), values)]
    return [json.loads(part) for part in replicas.concatenate(json.dumps(looks).encode(), _WHAT)]
