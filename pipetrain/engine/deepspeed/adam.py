"""DeepSpeed's two AdamW kernels as optimizers of a `Pipeline`, with the state that AdamW of torch has: so snapshots hold it."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import Tensor

_HOST = torch.device("cpu")


class HostAdam(DeepSpeedCPUAdam):  # type: ignore[misc]
    """AdamW with its state in host memory, updated by the CPU. Parameters of a GPU are brought over for it, one by one.

    The kernel alone is DeepSpeed's: its own `step` refuses parameters of a GPU, and counts steps in a plain integer.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state; torch would move it to where the parameters are."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({key: value.to(_HOST) for key, value in state.items()})

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, host = self._state_of(parameter), parameter.detach().to(_HOST)
        assert parameter.grad is not None
        gradient = parameter.grad.to(_HOST).contiguous()
        state["step"] += 1
        self.ds_opt_adam.adam_update(
            self.opt_id,
            int(state["step"]),
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            host,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
        )
        if parameter.device != _HOST:
            parameter.copy_(host)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, device=_HOST, memory_format=torch.contiguous_format)
        return state


class CudaAdam(FusedAdam):  # type: ignore[misc]
    """FusedAdam. It counts steps in an integer of the last parameter of each group; a snapshot wants a tensor of each.

    Not run yet: there was no GPU at hand.
    """

    def step(self, closure: None = None) -> None:
        """One update of all parameters that have a gradient."""
        assert closure is None
        for state in self.state.values():
            state["step"] = int(state["step"])
        super().step()
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
            steps = max((state["step"] for state in states), default=0)
            for state in states:
                state["step"] = torch.tensor(float(steps))
