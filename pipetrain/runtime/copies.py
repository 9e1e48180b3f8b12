"""The parameters that two stages share, as one rank has them: by name, by op, and in a state.

    stage 0, rank 0    .grad = what B0 .. B7 of the embedding gave     ----+        .grad = the sum
    stage 3, rank 3    .grad = what B0 .. B7 of the head gave          ----+-->     .grad = the sum, the same bits

A sum of two is the same whichever comes first, so with one optimizer the copies stay equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.models.sharing import Tie, groups_of, parameter_of, put_in_place
from pipetrain.runtime.same_weights import send_over
from pipetrain.schedule.op import Op

Layers = Mapping[int, nn.Module]  # by global index


def make_one(tied: Iterable[tuple[str, str]], layers: Layers) -> None:
    """Make one parameter of those of this rank that `tied` says are one: the first of them, however the layers were built.

    Raises:
        ValueError: they cannot be one; or a layer has no parameter of that name.
    """
    for names in groups_of(tied):
        first: nn.Parameter | None = None
        for name in names:
            own = parameter_of(layers, name)
            if first is None:
                first = own
            elif own is not None and own is not first:
                put_in_place(layers, name, first)


class Copies:
    """What one rank has of parameters that two stages share.

    `apart` are those whose other copy is on another rank: by their name in the whole model, which is that of the lower stage.
    `second` are the ids of the parameters of this rank that are a second copy: what is counted over the model counts them elsewhere.
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

    def make_equal(self, chain: Chain) -> None:
        """Before the first step: the weights of the lower stage in both copies. Collective.

        Raises:
            ValueError: two that can be no copies of each other; on every rank.
        """
        _make_equal([(tie.name, tie.copy) for tie in self._ties], self._own, chain)

    def buckets(self, reduces: Iterable[Op]) -> dict[Op, list[nn.Parameter]]:
        """What those of the REDUCE_GRAD of this rank add up that are of two stages."""
        return {op: list(self._bucket(op)) for op in reduces if op.peer is not None}

    def _bucket(self, op: Op) -> Iterator[nn.Parameter]:
        for tie in self._ties:
            if {op.stage, op.peer} == set(tie.stages):
                yield self._own[tie.name if op.stage == tie.stages[0] else tie.copy]

    def name(self, name: str) -> str:
        """What the parameter called `name` is called in the whole model, where each has one name."""
        return self._first_names.get(name, name)

    def in_state(self, state: Any) -> Any:
        """`state` with both names of each parameter of this rank, also where it has one of them.

        Raises:
            ValueError: it has both, with other values.
        """
        if not isinstance(state, Mapping):
            return state
        missing: dict[str, str] = {}
        for tie in self._ties:
            if tie.name not in self._own and tie.copy not in self._own:
                continue
            there = [name for name in (tie.name, tie.copy) if name in state]
            if len(there) == 2 and _differ(*(state[name] for name in there)):
                raise ValueError(
                    f"{tie.name} and {tie.copy} are one parameter and have other values in the state: give both the same, or one of them alone"
                )
            missing |= {name: there[0] for name in (tie.name, tie.copy) if there and name not in there}
        return _WithNames(state, missing) if missing else state


class _WithNames(Mapping[str, Any]):
    """A state in which some tensors have a second name."""

    def __init__(self, state: Mapping[str, Any], other_names: Mapping[str, str]) -> None:
        self._state = state
        self._other_names = other_names

    def __getitem__(self, name: str) -> Any:
        return self._state[self._other_names.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from self._state
        yield from self._other_names

    def __len__(self) -> int:
        return len(self._state) + len(self._other_names)


def _differ(one: Any, other: Any) -> bool:
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return one.shape != other.shape or not torch.equal(one.cpu(), other.cpu())


def _make_equal(pairs: Sequence[tuple[str, str]], own: Mapping[str, nn.Parameter], chain: Chain) -> None:
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
