"""Makes the parts of a pipeline on one rank: the plan, the programs of its calls, and its stages with their layers."""

from __future__ import annotations

import difflib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from pipetrain.comm.crossing import cross
from pipetrain.comm.device import Fetch, fetch
from pipetrain.comm.group import Group
from pipetrain.comm.lanes import Lanes
from pipetrain.models.sharing import SharedState
from pipetrain.models.spec import ModelSpec, check_built, check_sharing
from pipetrain.plan.plan import Plan, given_plan, make_plan
from pipetrain.runtime.arguments import check_loss_is_local
from pipetrain.runtime.call_programs import GivenSchedule, Programs, with_shortest_step
from pipetrain.runtime.copies import Copies, make_one
from pipetrain.runtime.gradients import SharedGradients
from pipetrain.runtime.weights import named_parameters
from pipetrain.schedule.policy import Mode, RecomputePolicy, layer_numbers
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.segments import AnyStage, make_stage, parameters_of_parts
from pipetrain.stage.stage import LossFn

_LOG = logging.getLogger(__name__)

Stages = dict[int, AnyStage]


class Assembly:
    """Makes the parts of a pipeline; `Pipeline.change` makes programs, stages and gradient buckets again with it. Its methods raise
    ValueError if the user's arguments do not fit each other."""

    def __init__(self, spec: ModelSpec, loss_fn: LossFn | None, seed: int, group: Group, lanes: Lanes) -> None:
        self.spec, self.loss_fn, self.group, self.lanes, self.meter = spec, loss_fn, group, lanes, ActivationMeter()
        self.place = group.chain.rank  # among the ranks of its replica, as plan and schedule count them
        self.fetch: Fetch = partial(fetch, device=lanes.device, monitor=group.monitor)
        self.seed = seed

    def make_plan(
        self,
        plan: Plan | None,
        schedule: GivenSchedule,
        policy: RecomputePolicy,
        balance: str | Sequence[int],
        **numbers: Any,
    ) -> Plan:
        """Return the given plan, or one made from `numbers`. With the balance `auto`, the plan gets the balance with the shortest simulated
        step, unless stages would then share more parameters, buffers or modules."""
        grid, work, num_layers = self.group.grid, self.spec.size.flops_per_layer, self.spec.num_layers
        numbers |= {"num_ranks": grid.stage, "num_replicas": grid.replica, "order": grid.order, "balance": balance}
        made = make_plan(num_layers, work=work, **numbers) if plan is None else given_plan(plan, num_layers, **numbers)
        if plan is None and balance == "auto" and min(made.balance) < policy.least_layers:
            made = make_plan(num_layers, **numbers)
        self.group.names.tell_stages(made.stage_ranks)
        policy.check_layers(made.num_layers)
        if plan is not None or balance != "auto":
            return made
        best, reason = with_shortest_step(made, schedule, policy, work)
        if not reason or _num_shared(self.spec, best) > _num_shared(self.spec, made):
            return made
        if self.place == 0:
            _LOG.info(reason)
        return best

    def build(self, plan: Plan, *, is_balanced: bool) -> None:
        """Build this rank's layers, and find the parameters and states that stages share. `is_balanced`: the balance was chosen
        automatically, so a stage without parameters is refused."""
        spec = self.spec
        self.ties = check_sharing(spec, plan.stage_of)
        self.shared = SharedState(spec.modules, plan.stage_of)
        self._tied = plan.tied_stages(tie.layers for tie in self.ties)
        self._layers: dict[int, list[nn.Module]] = {}
        for stage in plan.stages_of(self.place):
            numbers = plan.layers_of(stage)
            self._layers[stage] = spec.build(numbers.start, numbers.stop, seed=self.seed, device=self.group.device)
            if is_balanced:
                check_has_parameters(stage, self._layers[stage], numbers)
        self.layers = {n: one for stage, own in self._layers.items() for n, one in zip(plan.layers_of(stage), own)}
        make_one(spec.tied, self.layers)

    def check(self, plan: Plan) -> None:
        """Check that this rank's layers fit the loss and each other."""
        check_loss_is_local(self.loss_fn, self.known_layers, plan)
        check_built(self.spec, self.layers, plan.stage_of)
        self.copies = Copies(self.ties, self.layers)

    @property
    def known_layers(self) -> dict[int, nn.Module]:
        """The layers that this rank knows, by index: all, or only its own if callables make the layers."""
        return {**self.spec.modules, **self.layers}

    def programs(self, schedule: GivenSchedule, policy: RecomputePolicy, plan: Plan) -> Programs:
        runs_ahead, work = self.lanes.device.runs_ahead, self.spec.size.flops_per_layer
        return Programs(schedule, policy, plan, self.place, runs_ahead=runs_ahead, tied=self._tied, work=work)

    def stages(self, programs: Programs, policy: RecomputePolicy, plan: Plan) -> Stages:
        """The stages of this rank."""
        parts = programs.whole().schedule.policy
        kept = kept_layers(policy.keep_layers, self.layers, plan.num_layers)
        return {
            index: make_stage(
                index,
                layers,
                parts.parts[index] if parts.in_parts else (),
                first_layer=plan.layers_of(index).start,
                cross=cross,
                device=self.group.device,
                meter=self.meter,
                loss_fn=self.loss_fn if index == plan.num_stages - 1 else None,
                name_of=self.spec.name_of,
                selective=() if policy.mode is Mode.NEVER else policy.selective,
                keep_layers=kept,
            )
            for index, layers in self._layers.items()
        }

    def shared_gradients(self, stages: Stages, programs: Programs) -> SharedGradients:
        """The gradients that this rank's REDUCE_GRAD ops sum."""
        of_parts: dict[tuple[int, int | None], list[nn.Parameter]] = {}
        for index, stage in stages.items():
            of_parts |= {(index, part): own for part, own in enumerate(parameters_of_parts(stage))}
        copies = {op: self.copies.bucket(op) for op in programs.whole().reduces if op.peer is not None}
        return SharedGradients(copies, of_parts, now=self.named_parameters, runs_ahead=self.lanes.device.runs_ahead)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the whole model; a parameter that two stages share has its name in the lower one."""
        return ((self.copies.name(name), parameter) for name, parameter in named_parameters(self.layers))

    @property
    def fingerprint(self) -> str:
        """A text about the model that must be the same on every rank. It includes shared parameters: a rank that does not know of one
        would skip the all-reduce of its gradients, for which another rank waits."""
        tied = {"tied": self.spec.tied} if self.spec.tied else {}
        return json.dumps({**self.spec.fingerprint, **tied}, sort_keys=True)


def check_has_parameters(stage: int, layers: Sequence[nn.Module], numbers: range) -> None:
    """Raise ValueError if the automatic balance has made a stage without parameters."""
    if not any(True for layer in layers for _ in layer.parameters()):
        kinds = ", ".join(type(layer).__name__ for layer in layers)
        raise ValueError(
            f"pipeline.balance='auto' gives stage {stage} the layers {numbers.start} to {numbers.stop - 1} ({kinds}), which "
            "have no parameters: choose fewer stages, or give balance=[...], the number of layers of each stage"
        )


def kept_layers(entries: Sequence[str], layers: Mapping[int, nn.Module], num_layers: int) -> set[int]:
    """Return the layers of this rank that `recompute.keep_layers` names, by their index in the model. Raises ValueError with
    the most similar class if this rank has all layers, and none is of a class that an entry names."""
    kinds = {type(layer).__name__ for layer in layers.values()}
    kept: set[int] = set()
    for text in entries:
        numbers = layer_numbers(text)
        if numbers is None and text not in kinds and len(layers) == num_layers:
            nearest = difflib.get_close_matches(text, sorted(kinds), n=1, cutoff=0.0)
            raise ValueError(f"recompute.keep_layers={text}: no layer is of that class; did you mean {nearest[0]!r}?")
        kept |= {n for n, layer in layers.items() if (n in numbers if numbers else type(layer).__name__ == text)}
    return kept


def _num_shared(spec: ModelSpec, plan: Plan) -> float:
    """Return the number of parameters and states that stages share; infinity if a stage has no parameters, or the sharing is refused."""
    try:
        for stage in range(plan.num_stages):
            known = [spec.modules[index] for index in plan.layers_of(stage) if index in spec.modules]
            if len(known) == plan.balance[stage]:
                check_has_parameters(stage, known, plan.layers_of(stage))
        return len(check_sharing(spec, plan.stage_of)) + len(SharedState(spec.modules, plan.stage_of))
    except ValueError:
        return math.inf
