"""A model as DeepSpeed's `PipelineModule`: our layers on our stages, from our seeds.

DeepSpeed calls `seed_fn(base_seed + layer)` before it builds a layer, and `seed_fn(base_seed * n + layer)` before it runs one,
n counting the forwards of the stage from 2, in F and again when it recomputes. So base_seed only has to be larger than any
layer's number, and both numbers can be read back: the dropout masks are then those of the native engine. The weights are, because the
model's spec seeds for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import lazy_init_hp_params_optimizer_state
from torch import Tensor, nn

from pipetrain.comm.coordinates import STAGE_REPLICA, Grid
from pipetrain.models.spec import ModelSpec
from pipetrain.optim.optimizer import ByWeight
from pipetrain.plan.plan import Plan
from pipetrain.runtime import weights
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy
from pipetrain.stage.seeding import mix, seed_generators
from pipetrain.stage.stage import LossFn

_BASE_SEED = 1 << 20
_FIRST_FORWARD = 2  # where a layer is built, 1 stands instead


class StagedModule(PipelineModule):  # type: ignore[misc]
    """The layers, cut as the plan says. With recompute, each stage is one checkpointed region."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, policy: RecomputePolicy, grid: Grid, seed: int, device: torch.device
    ) -> None:
        assert spec.loss_fn is not None, "make_engine refuses a model without a loss"
        self._plan, self._seed, self._device = plan, seed, device
        self._at = grid.coordinates_of(dist.get_rank())
        self.step = 0  # from 0, as a Pipeline counts
        self.on_load: Callable[[], None] | None = None  # called when the weights have changed
        own = plan.layers_of(self._at.stage)
        elsewhere = [nn.Identity()] * plan.num_layers  # DeepSpeed uses only the layers of its rank
        super().__init__(
            [*elsewhere[: own.start], *spec.build(own.start, own.stop, seed=seed), *elsewhere[own.stop :]],
            # Ranks along the last axis are neighbours.
            topology=ProcessTopology(["pipe", "data"], [grid.stage, grid.replica])
            if grid.order == STAGE_REPLICA
            else ProcessTopology(["data", "pipe"], [grid.replica, grid.stage]),
            loss_fn=partial(weighted_loss, spec.loss_fn),
            seed_layers=True,
            seed_fn=self._seed_dropout,
            base_seed=_BASE_SEED,
            # The reentrant default recomputes nothing on the first stage, whose input needs no gradient.
            activation_checkpoint_func=non_reentrant_checkpoint,
        )
        # Layers per checkpointed region on this rank; 0: nothing is recomputed.
        is_kept = self.stage_id == plan.num_stages - 1 and policy.last_stage is LastStage.AUTO
        self.activation_checkpoint_interval = 0 if policy.mode is Mode.NEVER or is_kept else plan.balance[self.stage_id]

    def _seed_dropout(self, number: int) -> None:
        """Seeds for a layer of a microbatch of the step that runs; replicas number their microbatches one after the other."""
        call, layer = divmod(number, _BASE_SEED)
        if call >= _FIRST_FORWARD:
            microbatch = self._at.replica * self._plan.num_microbatches + call - _FIRST_FORWARD
            seed_generators(mix(self._seed, self.step, microbatch, layer), self._device)

    def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002, the signature is DeepSpeed's
        """DeepSpeed's own methods know equal numbers and balanced weights, and no list."""
        self.parts = list(accumulate(self._plan.balance, initial=0))
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's tensors from `state`, which may have those of the whole model."""
        weights.load_state_dict(dict(zip(self._plan.layers_of(self.stage_id), self.forward_funcs)), state)
        if self.on_load is not None:
            self.on_load()


def weighted_loss(loss_fn: LossFn, output: Tensor, label: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a microbatch times its weight: DeepSpeed takes the plain mean over microbatches.

    `label` is the targets and a 0-dim weight: this microbatch's share of what counts, times the number of microbatches.
    """
    targets, weight = label
    return loss_fn(output, targets) * weight


# ZeRO 1 -----------------------------------------------------------------------------------------------------------------


class ShardedAdamW(ByWeight):
    """Looks like the AdamW inside of `zero`, a `DeepSpeedZeroOptimizer` of stage 1: with its state by parameter, as a plain AdamW has it. So one
    snapshot serves both, and the native engine too.

    ZeRO keeps state and gradients of all parameters of a group in flat tensors, of which each replica has a part of equal size. A cut may
    go through a parameter: then several replicas have a piece of it. DeepSpeed puts pieces together (`get_full_hp_param`) and takes them
    apart; where one begins in its parameter is its lp fragment address.

        parameters   | A A A A | B B B B B B | C |       replica 0 holds A, and makes B whole where its state is asked for
        flat parts   | replica 0 A A A A B B | replica 1 B B B B C |
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
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
            lazy_init_hp_params_optimizer_state(parameters, flat, self._zero.optimizer.state)  # finds their pieces
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
            lazy_init_hp_params_optimizer_state(parameters, flat, self._zero.optimizer.state)  # finds their pieces
            for parameter, one in zip(parameters, given):
                for key, value in one.items():
                    if value.dim():
                        parameter.set_full_hp_param(value, key)

    def drop_gradients(self) -> None:
        """The step is refused: what was reduced is not used."""
        for number in self._zero.averaged_gradients:
            self._zero.averaged_gradients[number] = None
        for number in self._zero.all_grad_tensors:
            self._zero.all_grad_tensors[number] = None

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is here of the reduced gradients, and of which parameter it is."""
        for number, parameters in enumerate(self._zero.params_in_partition):
            pieces = self._zero.averaged_gradients[number]
            yield from zip((piece for piece in pieces if not getattr(piece, "_zero_padding", False)), parameters)

    def _groups(self) -> Iterator[tuple[Tensor, list[Any]]]:
        """Flat part and parameters of each."""
        yield from zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups)
