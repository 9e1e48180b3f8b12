"""A model as DeepSpeed's `PipelineModule`: our layers on our stages, from our seeds.

DeepSpeed calls `seed_fn(base_seed + layer)` before it builds a layer, and `seed_fn(base_seed * n + layer)` before it runs one,
n counting the forwards of the stage from 2, in F and again when it recomputes. So base_seed only has to be larger than any
layer's number, and both numbers can be read back: the dropout masks are then those of the native engine. The weights are, because the
model's spec seeds for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

from pipetrain.comm.coordinates import STAGE_REPLICA, Grid
from pipetrain.models.spec import ModelSpec
from pipetrain.plan.plan import Plan
from pipetrain.runtime import weights
from pipetrain.schedule.policy import LastStage, Mode, RecomputePolicy
from pipetrain.stage.seeding import layer_seed, seed_generators
from pipetrain.stage.stage import LossFn

_BASE_SEED = 1 << 20
_FIRST_FORWARD = 2  # where a layer is built, 1 stands instead


class _Layer(LayerSpec):  # type: ignore[misc]
    """A layer that only the rank of its stage builds."""

    def __init__(self, spec: ModelSpec, number: int, seed: int) -> None:
        super().__init__(nn.Module)
        self._spec = spec
        self._number = number
        self._seed = seed

    def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002, the signature is DeepSpeed's
        (layer,) = self._spec.build(self._number, self._number + 1, seed=self._seed)
        return layer


class Seeds:
    """The seed of each layer's dropout in the step that runs; `first_microbatch` is this replica's first among those of all."""

    def __init__(self, seed: int, device: torch.device, first_microbatch: int) -> None:
        self.step = 0  # from 0, as a Pipeline counts
        self._seed = seed
        self._device = device
        self._first_microbatch = first_microbatch

    def __call__(self, number: int) -> None:
        call, layer = divmod(number, _BASE_SEED)
        if call >= _FIRST_FORWARD:
            microbatch = self._first_microbatch + call - _FIRST_FORWARD
            seed_generators(layer_seed(self._seed, self.step, microbatch, layer), self._device)


class StagedModule(PipelineModule):  # type: ignore[misc]
    """The layers, cut as the plan says. With recompute, each stage is one checkpointed region."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, policy: RecomputePolicy, grid: Grid, seed: int, seeds: Seeds
    ) -> None:
        assert spec.loss_fn is not None, "make_engine refuses a model without a loss"
        self._plan = plan
        super().__init__(
            [_Layer(spec, number, seed) for number in range(spec.num_layers)],
            topology=_topology(grid),
            loss_fn=partial(weighted_loss, spec.loss_fn),
            seed_layers=True,
            seed_fn=seeds,
            base_seed=_BASE_SEED,
            # The reentrant default recomputes nothing on the first stage, whose input needs no gradient.
            activation_checkpoint_func=non_reentrant_checkpoint,
        )
        self.activation_checkpoint_interval = self._interval(policy)

    def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002, the signature is DeepSpeed's
        """DeepSpeed's own methods know equal numbers and balanced weights, and no list."""
        self.parts = [self._plan.layers_of(stage).start for stage in range(self._plan.num_stages)] + [
            self._plan.num_layers
        ]
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def _interval(self, policy: RecomputePolicy) -> int:
        """Layers per checkpointed region on this rank; 0: nothing is recomputed."""
        is_last = self.stage_id == self._plan.num_stages - 1
        if policy.mode is Mode.NEVER or (is_last and policy.last_stage is LastStage.AUTO):
            return 0
        return self._plan.balance[self.stage_id]

    def start_step(self) -> None:
        """Microbatches are counted from here."""
        self.micro_offset = 0

    @property
    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers by their number in the whole model."""
        return dict(zip(self._plan.layers_of(self.stage_id), self.forward_funcs))


def _topology(grid: Grid) -> ProcessTopology:
    """Who is where, as DeepSpeed has it: ranks along the last axis are neighbours."""
    if grid.order == STAGE_REPLICA:
        return ProcessTopology(["pipe", "data"], [grid.stage, grid.replica])
    return ProcessTopology(["data", "pipe"], [grid.replica, grid.stage])


class StageModel:
    """This rank's tensors under the whole model's names; `on_load` hears when they have changed."""

    def __init__(self, layers: Mapping[int, nn.Module], on_load: Callable[[], None] | None) -> None:
        self._layers = layers
        self._on_load = on_load

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(weights.named_parameters(self._layers))

    def state_dict(self) -> dict[str, Any]:
        return weights.state_dict(self._layers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        weights.load_state_dict(self._layers, state)
        if self._on_load is not None:
            self._on_load()


def weighted_loss(loss_fn: LossFn, output: Tensor, label: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a microbatch times its weight: DeepSpeed takes the plain mean over microbatches.

    `label` is the targets and a 0-dim weight: this microbatch's share of what counts, times the number of microbatches.
    """
    targets, weight = label
    return loss_fn(output, targets) * weight
