"""ZeRO 1: each replica of a stage holds the optimizer state of its share of the parameters (Rajbhandari et al., "ZeRO", 2020).

    replica 0   .grad of A B C, the same bits ──► update of A, C ──┐ each sends
    replica 1   .grad of A B C, the same bits ──► update of B ─────┴ what it updated ──► weights A B C, the same bits

torch's `ZeroRedundancyOptimizer` divides them: whole parameters, the largest first, each to whoever has least. So a state keeps the
name of its parameter, any optimizer may make the updates, and they are those of a run without ZeRO, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipetrain.comm.failure import PipelineError

Groups = list[dict[str, Any]]


class ShardedOptimizer:
    """Looks like an optimizer of all of `groups`, and holds the state of this rank's share of their parameters.

    Args:
        groups: parameters and their options, as a torch optimizer takes them; the same on all `replicas`, of one dtype.
        make: the optimizer of the groups of a share, of which some may be empty.
        replicas: the ranks that have these parameters.

    Raises:
        ValueError: parameters of several dtypes.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], Any], replicas: dist.ProcessGroup) -> None:
        # Imported here: it loads all optimizers of torch.distributed, for who asks for one of them.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        dtypes = sorted({str(weight.dtype).removeprefix("torch.") for group in groups for weight in group["params"]})
        if len(dtypes) > 1:
            raise ValueError(
                f"parallel.zero_stage=1: a stage has weights of {' and '.join(dtypes)}, and shares are divided among weights of one dtype; use "
                "parallel.zero_stage=0"
            )
        self._replicas = replicas
        self._zero = ZeroRedundancyOptimizer(
            [{**group, "params": list(group["params"])} for group in groups],
            make,  # type: ignore[arg-type]
            process_group=replicas,
        )
        self._share = {weight for group in self._zero.optim.param_groups for weight in group["params"]}

    @property
    def param_groups(self) -> Groups:
        """All parameters, with the options that the next step has."""
        groups: Groups = self._zero.param_groups
        return groups

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By parameter of this rank's share."""
        return dict(self._zero.optim.state)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the state of `parameter` is on this rank."""
        return parameter in self._share

    def step(self) -> None:
        """One update of all parameters. Collective over the replicas.

        Raises:
            PipelineError: one of them is gone, or did not come.
        """
        try:
            self._zero.step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PipelineError(self._explain(str(error))) from error

    def zero_grad(self) -> None:
        """No parameter has a gradient any more."""
        self._zero.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizers give, with parameters by number; of the states, those of this rank's share."""
        number = {weight: number for number, weight in enumerate(self._in_order())}
        groups = [{**group, "params": [number[weight] for weight in group["params"]]} for group in self.param_groups]
        return {"state": {number[weight]: state for weight, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes options, and of the states those of this rank's share, whoever held them when they were saved."""
        of_weight = {weight: state_dict["state"].get(number) for number, weight in enumerate(self._in_order())}
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        optimizer: Any = self._zero.optim
        share = (weight for group in optimizer.param_groups for weight in group["params"])
        states = {number: state for number, weight in enumerate(share) if (state := of_weight[weight]) is not None}
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})

    def _in_order(self) -> list[nn.Parameter]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def _explain(self, reason: str) -> str:
        rank = dist.get_rank()
        others = [str(other) for other in dist.get_process_group_ranks(self._replicas) if other != rank]
        peers = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(others)}"
        if "timed out" in reason.lower() or "timeout" in reason.lower():
            return (
                f"rank {rank} waits for the weights that {peers} updates (parallel.zero_stage=1), and they did not come within timeout_seconds: "
                "that rank hangs, is stopped, or needs longer for a step than that"
            )
        line = (reason.strip().splitlines() or [""])[0].rsplit("] ", 1)[-1].split(". This is typically")[0][:160]
        return (
            f"{peers} is gone: rank {rank} lost its connection in the exchange of updated weights (parallel.zero_stage=1; {line}). It failed, was "
            "killed, ran out of memory, or its machine is down: see its own output"
        )
