"""DeepSpeed's AdamW for the CPU as an optimizer of a `Pipeline`, with the state that AdamW of torch has: so snapshots hold it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from filelock import FileLock
from torch import Tensor

from pipetrain.config.terminal import say
from pipetrain.engine.deepspeed.environment import quiet_stdout

_HOST = torch.device("cpu")
_FOLDER = "TORCH_EXTENSIONS_DIR"


def host_adam(groups: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """AdamW with its state in host memory. Its kernel is compiled where nobody has, once, by one process.

    Raises OSError: it cannot be compiled.
    """
    folder = _folder()
    with FileLock(folder / "pipetrain.lock"), quiet_stdout():
        # torch waits for this file without an end, and a compilation that was killed leaves it behind.
        (folder / "cpu_adam" / "lock").unlink(missing_ok=True)
        if not (folder / "cpu_adam" / "cpu_adam.so").is_file():
            say(f"compiling DeepSpeed's cpu_adam for this machine, once, about a minute: {folder / 'cpu_adam'}")
        try:
            optimizer: torch.optim.Optimizer = HostAdam(groups, lr=learning_rate, betas=betas)
        except (RuntimeError, ImportError) as error:
            (*_, reason) = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise OSError(
                f"DeepSpeed's cpu_adam cannot be compiled ({reason[:160]}); see above, or use optim=adamw"
            ) from error
    return optimizer


def _folder() -> Path:
    """`TORCH_EXTENSIONS_DIR`; by default a folder of the Python environment, or torch's own where that cannot be written."""
    if _FOLDER not in os.environ:
        own = Path(sys.prefix) / "share" / "torch_extensions" / f"torch-{torch.__version__}"
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError:
            own = Path.home() / ".cache" / "torch_extensions" / f"torch-{torch.__version__}"
        os.environ[_FOLDER] = str(own)
    folder = Path(os.environ[_FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class HostAdam(DeepSpeedCPUAdam):  # type: ignore[misc]
    """AdamW with its state in host memory, updated by the CPU. Parameters of a GPU are brought over for it, one by one.

    The kernel alone is DeepSpeed's: its own `step` refuses parameters of a GPU, and counts steps in a plain integer.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have a gradient."""
        assert closure is None
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for group, parameter in pairs:
            if parameter.grad is None:
                continue
            state: dict[str, Tensor] = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(parameter, device=_HOST, memory_format=torch.contiguous_format)
            state["step"] += 1
            host, step = parameter.detach().to(_HOST), int(state["step"])
            options = (*group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
            tensors = (host, parameter.grad.to(_HOST).contiguous(), state["exp_avg"], state["exp_avg_sq"])
            self.ds_opt_adam.adam_update(self.opt_id, step, group["lr"], *options, *tensors)
            if parameter.device != _HOST:
                parameter.copy_(host)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state; torch would move it to where the parameters are."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({key: value.to(_HOST) for key, value in state.items()})
