"""Weights of few bits, trained through float32 masters.

    .grad (float32) ──► step on the masters ──► weights = the masters, rounded

bfloat16 has 8 significant bits: what changes a weight by less than 1/512 of it is rounded away, so at a small learning rate most weights would
never move. A master adds up such updates until the weight can follow (Micikevicius et al., "Mixed Precision Training", 2018,
section 3.1). Gradients of microbatches are added up in float32 as well, by torch's own `grad_dtype`; so are norms, and the clip.

No optimizer of torch has masters (those of FSDP are shards of float32 weights), so one is wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]

MASTER = "master"  # what a master is called among the state of its weight, and in snapshots


def has_few_bits(weight: Tensor) -> bool:
    """Whether a weight is of a dtype that rounds small updates away."""
    return weight.is_floating_point() and weight.element_size() < torch.float32.itemsize


def take_float32_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Those of few bits add up their gradients in float32 from now on."""
    for weight in filter(has_few_bits, weights):
        weight.grad_dtype = torch.float32


class MasterWeights:
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

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizers give: states and groups, with weights by number."""
        numbers = {weight: number for number, weight in enumerate(self._in_order())}
        groups = [
            {**_options_of(group), "params": [numbers[weight] for weight in group["params"]]}
            for group in self.param_groups
        ]
        return {
            "state": {numbers[weight]: state for weight, state in self.state.items()},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes states and options. A weight without a master in it has that of its present value."""
        saved: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        states = {
            number: {key: value for key, value in state.items() if key != MASTER} for number, state in saved.items()
        }
        self._optimizer.load_state_dict({"state": states, "param_groups": self._optimizer.state_dict()["param_groups"]})
        for own, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update(_options_of(given))
        self._begin(
            {weight: saved[n][MASTER] for n, weight in enumerate(self._in_order()) if MASTER in saved.get(n, {})}
        )

    @torch.no_grad()
    def _begin(self, values: Mapping[Tensor, Tensor]) -> None:
        """The masters are these, or else what the weights are."""
        for weight, master in self._masters.items():
            if master is not weight:
                master.copy_(values.get(weight, weight))
        self._have_begun = True

    def _in_order(self) -> list[nn.Parameter]:
        return [weight for group in self.param_groups for weight in group["params"]]


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
