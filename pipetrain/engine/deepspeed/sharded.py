"""ZeRO 1's optimizer state by parameter, as a plain AdamW has it: so one snapshot serves both, and the native engine too.

ZeRO keeps the state of all parameters of a group in flat tensors, of which each replica has a part. There is one replica, so
its part is the whole, and each parameter's place in it is what DeepSpeed calls its hp fragment address.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class ShardedAdamW:
    """Looks like the AdamW inside of `zero`, a `DeepSpeedZeroOptimizer` of stage 1 with one replica."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with the model's own parameters, where AdamW itself has the flat ones."""
        groups = zip(self._zero.optimizer.param_groups, self._zero.bit16_groups)
        return [{**group, "params": list(parameters)} for group, parameters in groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """By parameter: views of the flat state, and the step that all parameters of a group share."""
        return {
            parameter: {key: _part_of(value, parameter) for key, value in state.items()}
            for flat, parameters in self._groups()
            if (state := self._zero.optimizer.state.get(flat))
            for parameter in parameters
        }

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizers give: states and groups with parameters by number."""
        numbers = {id(p): number for number, p in enumerate(p for _, group in self._groups() for p in group)}
        groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups]
        return {
            "state": {numbers[id(parameter)]: state for parameter, state in self.state.items()},
            "param_groups": groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes the states; options of groups stay as they are."""
        saved, number = state_dict["state"], 0
        for flat, parameters in self._groups():
            for parameter in parameters:
                for key, value in saved.get(number, {}).items():
                    _part_of(self._room(flat, key, value), parameter).copy_(value)
                number += 1

    def _room(self, flat: Tensor, key: str, value: Tensor) -> Tensor:
        """Where `key` of a group is kept; zeros before the first step has made it. Padding stays zero."""
        state: dict[str, Tensor] = self._zero.optimizer.state[flat]
        if key not in state:
            state[key] = torch.zeros_like(value) if value.dim() == 0 else torch.zeros_like(flat)
        return state[key]

    def _groups(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        yield from zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups)


def _part_of(value: Tensor, parameter: Any) -> Tensor:
    """What of a flat state is of `parameter`; the step, which is no list, is of all."""
    if value.dim() == 0:
        return value
    place = parameter._hp_mapping.get_hp_fragment_address()
    return value.narrow(0, place.start, place.numel).view_as(parameter)
