"""ZeRO 1's optimizer state by parameter, as a plain AdamW has it: so one snapshot serves both, and the native engine too.

ZeRO keeps state and gradients of all parameters of a group in flat tensors, of which each replica has a part of equal size. A cut may
go through a parameter: then several replicas have a piece of it. DeepSpeed puts pieces together (`get_full_hp_param`) and takes them
apart; where one begins in its parameter is its lp fragment address.

    parameters   | A A A A | B B B B B B | C |       replica 0 holds A, and makes B whole where its state is asked for
    flat parts   | replica 0 A A A A B B | replica 1 B B B B C |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.utils import lazy_init_hp_params_optimizer_state
from torch import Tensor

_Norms = dict[int, float]  # by a parameter's number in its stage: the norm of what a replica has of its gradient


class ShardedAdamW:
    """Looks like the AdamW inside of `zero`, a `DeepSpeedZeroOptimizer` of stage 1."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with the model's own parameters, where AdamW itself has the flat ones."""
        groups = zip(self._zero.optimizer.param_groups, self._zero.bit16_groups)
        return [{**group, "params": list(parameters)} for group, parameters in groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """By parameter whose first piece is here: its state, whole, and the step that all parameters of a group share.

        Copies of the flat state, put together by adding up what each replica has of it. Collective over the replicas.
        """
        states = {}
        for flat, parameters in self._groups():
            state = self._zero.optimizer.state.get(flat, {})
            self._link(flat, parameters)
            for parameter in parameters if state else ():
                whole = {
                    key: parameter.get_full_hp_param(key) if value.dim() else value for key, value in state.items()
                }
                if self.holds(parameter) and parameter._hp_mapping.lp_fragment_address.start == 0:
                    states[parameter] = whole
        return states

    def holds(self, parameter: Any) -> bool:
        """Whether some of the state of `parameter` is on this rank."""
        return parameter._hp_mapping is not None

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizers give: states and groups with parameters by number. Collective, as `state`."""
        numbers = {id(p): number for number, p in enumerate(p for _, group in self._groups() for p in group)}
        groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups]
        return {
            "state": {numbers[id(parameter)]: state for parameter, state in self.state.items()},
            "param_groups": groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes the states of what is here; options of groups stay as they are."""
        saved, number = state_dict["state"], 0
        for flat, parameters in self._groups():
            state = self._zero.optimizer.state[flat]
            given = [saved.get(number + place, {}) for place in range(len(parameters))]
            number += len(parameters)
            for key, value in ((key, value) for one in given for key, value in one.items()):
                if key not in state:  # the first step would make it; padding stays zero
                    state[key] = torch.zeros_like(flat if value.dim() else value)
                if not value.dim():
                    state[key].copy_(value)
            self._link(flat, parameters)
            for parameter, one in zip(parameters, given):
                for key, value in one.items():
                    if value.dim():
                        parameter.set_full_hp_param(value, key)

    @torch.no_grad()
    def clip(self, weights: Sequence[Tensor], stage: int, limit: float, of_all: Callable[[Any], list[Any]]) -> float:
        """Scales the reduced gradients so that their norm over all stages is at most `limit`; returns the norm before.

        Args:
            weights: this stage's parameters, in the model's order.
            of_all: gives what each rank gives, on every rank.
        """
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        own: _Norms = {
            numbers[id(weight)]: float(torch.linalg.vector_norm(piece)) for piece, weight in self._gradients()
        }
        pieces: dict[tuple[int, int], list[float]] = {}
        for of_stage, norms in of_all((stage, list(own.items()))):
            for number, norm in norms:
                pieces.setdefault((of_stage, number), []).append(norm)
        # One piece is the gradient: then the norm is that of a model in one piece, bit for bit.
        norms = [norms[0] if len(norms) == 1 else math.hypot(*norms) for _, norms in sorted(pieces.items())]
        total = torch.linalg.vector_norm(torch.tensor(norms))
        if math.isfinite(limit):
            factor = torch.clamp(limit / (total + 1e-6), max=1.0)
            for piece, _ in self._gradients():
                piece.mul_(factor)
        return float(total)

    def drop_gradients(self) -> None:
        """The step is refused: what was reduced is not used."""
        for number in self._zero.averaged_gradients:
            self._zero.averaged_gradients[number] = None
        for number in self._zero.all_grad_tensors:
            self._zero.all_grad_tensors[number] = None

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is here of the reduced gradients, and of which parameter it is."""
        for number, parameters in enumerate(self._zero.params_in_partition):
            pieces = self._zero.averaged_gradients[number]
            yield from zip((piece for piece in pieces if not getattr(piece, "_zero_padding", False)), parameters)

    def _groups(self) -> Iterator[tuple[Tensor, list[Any]]]:
        """Flat part and parameters of each."""
        yield from zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups)

    def _link(self, flat: Tensor, parameters: list[Any]) -> None:
        """Lets each parameter find its pieces of the flat state that there is."""
        lazy_init_hp_params_optimizer_state(parameters, flat, self._zero.optimizer.state)
