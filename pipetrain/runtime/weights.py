"""The part of a pipeline that is about weights: parameters, the clip of their gradients, states, and whether replicas hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipetrain.comm.group import Group
from pipetrain.plan.plan import Plan
from pipetrain.runtime.assembly import Assembly
from pipetrain.runtime.clipping import clip_grad_norm
from pipetrain.runtime.same_weights import check_replicas_equal
from pipetrain.runtime.whole_state import gather, load_state_dict, named_parameters, parameters_of, state_dict
from pipetrain.stage.segments import AnyStage


class StageWeights:
    """The part of a `Pipeline` that is about the parameters and buffers of its rank's stages."""

    plan: Plan
    _parts: Assembly
    _group: Group
    _stages: Mapping[int, AnyStage]
    _training: bool

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names of `nn.Sequential(*layers)`. One that two stages share has there one name, the first,
        and so have its two copies."""
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
        """Put this rank's layers into training mode. Collective in meaning: do it on every rank."""
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

        The norms of single tensors are summed in the whole model's parameter order, so that the result does not depend
        on the split; of a parameter that two stages share one counts.
        """
        of_stages = parameters_of({s.index: s.layers_by_number() for s in self._stages.values()})
        return clip_grad_norm(
            of_stages,
            max_norm,
            lambda own: self._group.chain.concatenate(own, "the gradient norms"),
            self._group.device,
            lambda norms: self._parts.fetch(norms, "the norms of the gradients"),
            uncounted=self._parts.copies.second,
        )

    def check_replicas(self) -> None:
        """Whether all replicas hold the same weights, by a sum over the bits of each. Collective.

        Raises:
            PipelineError: they do not; with the ranks that differ, the same on every rank. The pipeline can go on.
        """
        names = [self._group.names(rank) for rank in self._group.grid.ranks_of_stage(self._group.rank)]
        own = dict(named_parameters(self._parts.layers))
        check_replicas_equal(own, self._group.chain, self._group.replicas, names.__getitem__, self._parts.fetch)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's layers, by name."""
        return {
            f"{number}.{name}": tensor
            for number, layer in sorted(self._parts.layers.items())
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
            if tensor.layout is torch.strided
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors, under the whole model's names."""
        return state_dict(self._parts.layers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's tensors from `state`, which may hold the whole model's. Of a parameter that two stages share one name is enough.

        Raises:
            ValueError: a tensor that is missing or has another shape, or a name that the model does not have.
        """
        numbers = tuple(f"{number}." for number in range(self.plan.num_layers))
        unknown = [name for name in state if not str(name).startswith(numbers)] if isinstance(state, Mapping) else []
        if unknown:
            raise ValueError(
                f"the state has {unknown[0]!r} (and {len(unknown) - 1} more), which the model does not: its tensors are named as in "
                f"nn.Sequential(*layers), 0.* to {self.plan.num_layers - 1}.*"
            )
        load_state_dict(self._parts.layers, self._parts.copies.in_state(state))

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's tensors on the CPU of rank 0, None on the others; of several replicas, those of the first. Collective.

        Only rank 0 needs room for the whole model: on their way tensors pass the other ranks in pieces of 16 MiB.
        """
        first = self._group.coordinates.replica == 0
        gathered = gather(self.state_dict(), self._group.chain) if first else None
        if gathered is None:
            return None
        return dict(sorted(gathered.items(), key=lambda item: int(item[0].split(".", 1)[0])))
