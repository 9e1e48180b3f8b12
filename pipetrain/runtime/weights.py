"""This rank's parameters and state, named as in the whole model; also clips gradients by norm, and compares the weights of replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.comm.group import Group
from pipetrain.plan.plan import Plan
from pipetrain.runtime.copies import Layers, carry, check_replicas_equal
from pipetrain.runtime.gradients import clip_grad_norm
from pipetrain.stage.segments import AnyStage

if TYPE_CHECKING:
    from pipetrain.runtime.assembly import Assembly


def named_parameters(layers: Layers) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters in the order and under the names of `nn.Sequential(*layers)`; a parameter of two layers only once."""
    seen: set[int] = set()
    for number, layer in sorted(layers.items()):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{number}.{name}", parameter


def state_dict(layers: Layers) -> dict[str, Any]:
    return {
        f"{number}.{name}": value
        for number, layer in sorted(layers.items())
        for name, value in layer.state_dict().items()
    }


def load_state_dict(layers: Layers, state: Mapping[str, Any], other_names: Mapping[str, str] = {}) -> None:
    """Load this rank's part of `state`, which may be the whole model's. `other_names`: a name of this rank -> the name that `state` has for
    it. Raises ValueError: a tensor of this rank is missing in `state` or has another shape, or `state` has a name that the layers do not
    have."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}: give tensors by name, as state_dict() returns them")
    for number, layer in sorted(layers.items()):
        own, start = layer.state_dict(), f"{number}."
        missing = [name for name in own if other_names.get(start + name, start + name) not in state]
        if missing:
            raise ValueError(f"the state has no {start}{missing[0]} (and {len(missing) - 1} more of layer {number})")
        unknown = [name for name in state if name.startswith(start) and name.removeprefix(start) not in own]
        if unknown:
            raise ValueError(
                f"the state has {unknown[0]} (and {len(unknown) - 1} more of layer {number}), which the model does not: leave it out, or "
                "load it into the model from which it was saved"
            )
        part = {name: state[other_names.get(start + name, start + name)] for name in own}
        for name, value in own.items():
            given = part[name]
            if isinstance(value, Tensor) and (not isinstance(given, Tensor) or given.shape != value.shape):
                found = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
                raise ValueError(f"{start + name} is {found} in the state, the model has a tensor {list(value.shape)}")
        layer.load_state_dict(part)


def _gather(own: Mapping[str, Any], chain: Chain) -> dict[str, Any]:
    """Return `own` of all ranks, merged, on the CPU of rank 0; an empty dict on other ranks. Collective.

    Tensors travel to rank 0 one by one. Rank 0 needs host memory for the whole model. Any other rank needs memory for a few pieces in
    transfer, and for a copy of one of its tensors if this tensor is on a GPU or not contiguous.

    Raises TypeError: a value that is neither a tensor nor known to JSON; PipelineError: another rank failed meanwhile.
    """
    told = {name: [None, value, 0] for name, value in own.items() if not isinstance(value, Tensor)}
    for name, value in own.items():
        if isinstance(value, Tensor):
            told[name] = [str(value.dtype).removeprefix("torch."), list(value.shape), value.nbytes]
    _, *others = map(json.loads, chain.concatenate(json.dumps(told).encode(), "the names of the state"))
    is_first = chain.rank == 0
    whole = {name: one.detach().cpu() if isinstance(one, Tensor) else one for name, one in own.items() if is_first}
    for holder, theirs in enumerate(others, start=1):
        for name, (dtype, value, num_bytes) in theirs.items():
            if dtype is not None:
                source, what = own[name] if chain.rank == holder else None, f"the state of {name}"
                came = carry(num_bytes, source, wanted=is_first, by=partial(chain.bring, what=what))
                value = came.view(getattr(torch, dtype)).view(value) if is_first else None
            if is_first:
                whole[name] = value
    return whole


class StageWeights:
    """The methods of `Pipeline` for the parameters and buffers of this rank's stages."""

    plan: Plan
    _parts: Assembly
    _group: Group
    _stages: Mapping[int, AnyStage]
    _training: bool

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names of `nn.Sequential(*layers)`. A parameter that two stages share has its name in the lower
        stage, on the ranks of both."""
        return self._parts.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def train(self, mode: bool = True) -> Self:
        """Put this rank's layers into training mode, or into eval mode if `mode` is False. Does not communicate; call it on every rank."""
        if not isinstance(mode, bool):
            raise ValueError(f"train was given mode={mode!r}: True or False is needed")
        self._training = mode
        for layer in self._parts.layers.values():
            layer.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before, on the host. Collective.

        The norms of single tensors are combined in the whole model's parameter order, so the result does not depend on the split. If
        two stages share a parameter, only one copy counts.
        """
        seen: set[int] = set()  # a parameter that two stages of this rank share counts only in the first
        of_stages: dict[int, list[nn.Parameter]] = {}
        for index, stage in sorted(self._stages.items()):
            own = [
                one
                for _, one in named_parameters(dict(enumerate(stage.layers, stage.first_layer)))
                if id(one) not in seen
            ]
            of_stages[index] = own
            seen.update(map(id, own))
        return clip_grad_norm(
            of_stages,
            max_norm,
            lambda own: self._group.chain.concatenate(own, "the gradient norms"),
            self._group.device,
            lambda norms: self._parts.fetch(norms, "the norms of the gradients"),
            uncounted=self._parts.copies.second,
        )

    def check_replicas(self) -> None:
        """Compare the weights of all replicas, by a sum over the bits of each tensor. Collective. Raises PipelineError, the same on every
        rank: weights differ; it names the ranks that differ. The pipeline can go on."""
        names = [self._group.names(rank) for rank in self._group.grid.ranks_of_stage(self._group.rank)]
        own = dict(named_parameters(self._parts.layers))
        check_replicas_equal(own, self._group.chain, self._group.replicas, names.__getitem__, self._parts.fetch)

    def _tensors(self) -> dict[str, Tensor]:
        """Dense parameters and buffers of this rank's layers, by name."""
        return {
            f"{number}.{name}": tensor
            for number, layer in sorted(self._parts.layers.items())
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
            if tensor.layout is torch.strided
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's tensors, under the whole model's names."""
        return state_dict(self._parts.layers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's tensors from `state`, which may have those of the whole model. For a parameter that two stages share, one name
        is enough. Raises ValueError: a tensor is missing or has another shape, or `state` has a name that the model does not have."""
        numbers = tuple(f"{number}." for number in range(self.plan.num_layers))
        unknown = [name for name in state if not str(name).startswith(numbers)] if isinstance(state, Mapping) else []
        if unknown:
            raise ValueError(
                f"the state has {unknown[0]!r} (and {len(unknown) - 1} more), which the model does not: its tensors are named as in "
                f"nn.Sequential(*layers), 0.* to {self.plan.num_layers - 1}.*"
            )
        load_state_dict(self._parts.layers, state, self._parts.copies.other_names(state))

    def full_state_dict(self) -> dict[str, Any] | None:
        """Return the whole model's tensors, those of the first replica, on the CPU of rank 0; None on other ranks. Collective.
        Only rank 0 needs memory for the whole model: tensors pass the other ranks in pieces of 16 MiB."""
        first = self._group.coordinates.replica == 0
        gathered = _gather(self.state_dict(), self._group.chain) if first else None
        if gathered is None or self._group.chain.rank:
            return None
        return dict(sorted(gathered.items(), key=lambda item: int(item[0].split(".", 1)[0])))
