"""AdamW on this rank's parameters, its learning rate over the steps, float32 masters, and state divided over replicas.

Masters    .grad (float32) ──► step on the masters ──► weights = the masters, rounded

bfloat16 has 8 significant bits: what changes a weight by less than 1/512 of it is rounded away, so at a small learning rate most weights would
never move. A master adds up such updates until the weight can follow (Micikevicius et al., "Mixed Precision Training", 2018,
section 3.1). Gradients of microbatches are added up in float32 as well, by torch's own `grad_dtype`; so are norms, and the clip.
No optimizer of torch has masters (those of FSDP are shards of float32 weights), so one is wrapped here.

ZeRO 1     replica 0   .grad of A B C, the same bits ──► update of A, C ──┐ each sends
           replica 1   .grad of A B C, the same bits ──► update of B ─────┴ what it updated ──► weights A B C, the same bits

Each replica of a stage holds the optimizer state of its share of the parameters (Rajbhandari et al., "ZeRO", 2020). torch's
`ZeroRedundancyOptimizer` divides them: whole parameters, the largest first, each to whoever has least. So a state keeps the
name of its parameter, any optimizer may make the updates, and they are those of a run without ZeRO, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetrain.comm.failure import PipelineError
from pipetrain.config.records import OptimConfig
from pipetrain.models.trained import Optimizer

Groups = list[dict[str, Any]]
MakeAdamW = Callable[[Groups, float, tuple[float, float]], torch.optim.Optimizer]


class Updates(Optimizer, Protocol):
    """An optimizer that a training loop can use."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...


def make_optimizer(
    config: OptimConfig,
    parameters: Iterable[torch.nn.Parameter],
    replicas: dist.ProcessGroup | None = None,
    adamw: MakeAdamW | None = None,
) -> Updates:
    """AdamW (Loshchilov and Hutter 2019), torch's (fused) or what `adamw` makes of groups, learning rate and betas; vectors (norms, biases)
    are not decayed.

    bfloat16 weights have float32 masters, unless `config.masters` is off: then updates and AdamW's state are bfloat16 too. State and
    masters are divided over `replicas`, the ranks that have the same parameters, where they are given (ZeRO 1).
    """
    given = list(parameters)
    trained = [parameter for parameter in given if parameter.requires_grad]
    groups: Groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if not trained:  # a rank below the first adapter trains nothing
        return _adamw(config, groups[:1], adamw)
    groups = [group for group in groups if group["params"]]
    has_masters = config.masters == "auto" and any(map(has_few_bits, trained))
    if has_masters:
        take_float32_gradients(trained)

    def make(own: Groups) -> Updates:
        if has_masters:
            return MasterWeights(own, lambda masters: _adamw(config, masters, adamw))
        return _adamw(config, own, adamw)

    return make(groups) if replicas is None else ShardedOptimizer(groups, make, replicas)


def _adamw(config: OptimConfig, groups: Groups, adamw: MakeAdamW | None) -> torch.optim.Optimizer:
    if adamw is not None:
        return adamw(groups, config.learning_rate, config.betas)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    optimizer.register_load_state_dict_pre_hook(_without_masters)
    return optimizer


def _without_masters(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that had masters, for one that has none; kept, they would be taken up again when they are old."""
    state = {
        number: {key: value for key, value in entries.items() if key != MASTER}
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of `step` (from 1): a line up to step `warmup_steps`, then a cosine to `final_fraction` at `num_steps`."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    cosine = (1.0 + math.cos(math.pi * min(progress, 1.0))) / 2.0
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


# Masters --------------------------------------------------------------------------------------------------------------

MASTER = "master"  # what a master is called among the state of its weight, and in snapshots


class ByWeight:
    """What wrapped optimizers have in common: groups and states of the model's own weights, as torch's optimizers give them."""

    param_groups: Groups

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """By weight, as far as it is on this rank."""
        raise NotImplementedError

    def weights(self) -> list[Any]:
        """All, in the order by which states are numbered."""
        return [weight for group in self.param_groups for weight in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizers give: states and groups, with weights by number. Collective where `state` is."""
        numbers = {weight: number for number, weight in enumerate(self.weights())}
        return {
            "state": {numbers[weight]: state for weight, state in self.state.items()},
            "param_groups": [
                {**group, "params": [numbers[weight] for weight in group["params"]]} for group in self.param_groups
            ],
        }


def has_few_bits(weight: Tensor) -> bool:
    """Whether a weight is of a dtype that rounds small updates away."""
    return weight.is_floating_point() and weight.element_size() < torch.float32.itemsize


def take_float32_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Those of few bits add up their gradients in float32 from now on."""
    for weight in filter(has_few_bits, weights):
        weight.grad_dtype = torch.float32


class MasterWeights(ByWeight):
    """An optimizer of weights, whose updates another makes on float32 masters; weights of more bits are their own masters.

    States and groups are told by weight, as if nothing stood between; the state of a weight has its `master` besides. A master begins
    as its weight was at the first step, or in what is loaded.

    Args:
        groups: the weights and their options, as a torch optimizer takes them. Their `.grad` is float32 (`take_float32_gradients`).
        make: the optimizer of such groups of masters.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer]) -> None:
        self._masters = {
            weight: nn.Parameter(torch.empty_like(weight, dtype=torch.float32)) if has_few_bits(weight) else weight
            for group in groups
            for weight in group["params"]
        }
        of_masters = [{**group, "params": [self._masters[weight] for weight in group["params"]]} for group in groups]
        self._optimizer = make(of_masters)
        # Who sets a learning rate sets it here; the masters' groups follow at each step.
        self.param_groups: Groups = [
            {**options, "params": list(group["params"])} for options, group in zip(self._optimizer.param_groups, groups)
        ]
        self._have_begun = False

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By weight: the optimizer's state, and the master."""
        return {
            weight: dict(self._optimizer.state[master]) | ({} if master is weight else {MASTER: master.detach()})
            for weight, master in self._masters.items()
            if master in self._optimizer.state
        }

    @torch.no_grad()
    def step(self) -> None:
        """One update of all weights that have a gradient."""
        if not self._have_begun:
            self._begin({})
        for own, group in zip(self.param_groups, self._optimizer.param_groups):
            group.update(_options_of(own))
        copied = [(weight, master) for weight, master in self._masters.items() if master is not weight]
        for weight, master in copied:
            master.grad = weight.grad
        self._optimizer.step()
        for weight, master in copied:
            master.grad = None
            if weight.grad is not None:
                weight.copy_(master)

    def zero_grad(self) -> None:
        """No weight has a gradient any more."""
        for weight in self._masters:
            weight.grad = None

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes states and options. A weight without a master in it has that of its present value."""
        saved: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        states = {
            number: {key: value for key, value in state.items() if key != MASTER} for number, state in saved.items()
        }
        self._optimizer.load_state_dict({"state": states, "param_groups": self._optimizer.state_dict()["param_groups"]})
        for own, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update(_options_of(given))
        self._begin({weight: saved[n][MASTER] for n, weight in enumerate(self.weights()) if MASTER in saved.get(n, {})})

    @torch.no_grad()
    def _begin(self, values: Mapping[Tensor, Tensor]) -> None:
        """The masters are these, or else what the weights are."""
        for weight, master in self._masters.items():
            if master is not weight:
                master.copy_(values.get(weight, weight))
        self._have_begun = True


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


# ZeRO 1 ---------------------------------------------------------------------------------------------------------------


class ShardedOptimizer(ByWeight):
    """Looks like an optimizer of all of `groups`, and holds the state of this rank's share of their parameters.

    Args:
        groups: parameters and their options, as a torch optimizer takes them; the same on all `replicas`, of one dtype.
        make: the optimizer of the groups of a share, of which some may be empty.
        replicas: the ranks that have these parameters.

    Raises ValueError: parameters of several dtypes.
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
        self.param_groups = self._zero.param_groups  # all, with the options that the next step has
        self._share = {weight for group in self._zero.optim.param_groups for weight in group["params"]}

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By parameter of this rank's share."""
        return dict(self._zero.optim.state)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the state of `parameter` is on this rank."""
        return parameter in self._share

    def step(self) -> None:
        """One update of all parameters. Collective over the replicas. Raises PipelineError: one of them is gone, or did not come."""
        try:
            self._zero.step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            rank = dist.get_rank()
            others = [str(other) for other in dist.get_process_group_ranks(self._replicas) if other != rank]
            peers = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(others)}"
            awaited = f"the weights that {peers} updates (parallel.zero_stage=1)"
            doing = "the exchange of updated weights (parallel.zero_stage=1)"
            raise PipelineError(what_broke(str(error), rank, peers, doing, awaited)) from error

    def zero_grad(self) -> None:
        """No parameter has a gradient any more."""
        self._zero.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes options, and of the states those of this rank's share, whoever held them when they were saved."""
        of_weight = {weight: state_dict["state"].get(number) for number, weight in enumerate(self.weights())}
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_options_of(given))
        optimizer: Any = self._zero.optim
        share = (weight for group in optimizer.param_groups for weight in group["params"])
        states = {number: state for number, weight in enumerate(share) if (state := of_weight[weight]) is not None}
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def what_broke(reason: str, rank: int, peer: str, doing: str, awaited: str) -> str:
    """What an error of torch.distributed means to `rank`: a time-out while it waits for `awaited`, or else a connection lost in `doing`."""
    if "timed out" in reason.lower() or "timeout" in reason.lower():
        return (
            f"rank {rank} waits for {awaited}, and nothing came within timeout_seconds: that rank hangs, is stopped, or needs longer for a "
            "step than that"
        )
    line = (reason.strip().splitlines() or [""])[0].rsplit("] ", 1)[-1].split(". ")[0][:160]
    return (
        f"{peer} is gone: rank {rank} lost its connection in {doing} ({line}). It failed, was killed, ran out of memory, or its machine is "
        "down: see its own output"
    )
