"""The pipeline as a user's training loop sees it."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.group.clocks import align_clocks
from pipetrain.group.coordinates import REPLICA_STAGE, Coordinates
from pipetrain.group.failure import PipelineError
from pipetrain.group.group import join_group
from pipetrain.group.own_device import identity_of
from pipetrain.model.sharing import SharedState
from pipetrain.model.spec import ModelSpec, check_built, check_sharing, name_in, spec_of
from pipetrain.parallel.clipping import clip_grad_norm
from pipetrain.parallel.replicas import SharedGradients
from pipetrain.parallel.same_weights import check_replicas_equal, make_replicas_equal
from pipetrain.plan.plan import DEFAULT_MICROBATCHES, Plan, plan_of, replicas_said, whole_number
from pipetrain.runtime import whole_state as weights
from pipetrain.runtime.agreement import introduced
from pipetrain.runtime.arguments import (
    check_callable,
    check_loss_is_local,
    check_loss_is_plain,
    check_no_inference_tensors,
    checked_reduction,
    checked_seed,
    checked_timeout,
    mistake_in_step,
)
from pipetrain.runtime.build import build_stage_layers, check_has_parameters, kept_layers
from pipetrain.runtime.call_programs import GivenSchedule, Programs, with_shortest_step
from pipetrain.runtime.copies import Copies, make_one
from pipetrain.runtime.cut import join, own_rows
from pipetrain.runtime.diagnosis import Diagnosis, FiniteWatch
from pipetrain.runtime.executor import Step
from pipetrain.runtime.measure import measure_rank
from pipetrain.runtime.prompts import Prompts, agree_on, check_prompts, mistake_in_layers
from pipetrain.runtime.runner import CallRunner
from pipetrain.runtime.sampling import Sampling
from pipetrain.runtime.skips import Skips
from pipetrain.runtime.sync_watch import waits_told
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.past import set_trainable
from pipetrain.stage.segments import AnyStage, make_stage, parameters_of_parts
from pipetrain.stage.stage import LossFn
from pipetrain.timeline.step_report import RankReport, Report
from pipetrain.transport.crossing import cross
from pipetrain.transport.device import fetch
from pipetrain.transport.lanes import Recording, make_lanes
from pipetrain.transport.transport import NCCL, PINNED, carrier_of

_LOG = logging.getLogger(__name__)


class Pipeline:
    """A model cut into stages over the ranks of torch.distributed, trained microbatch by microbatch.

    Args:
        model: an `nn.Sequential`, a list of layers, a list of callables that return a layer each (only this rank's are
            called, each after seeding with (seed, layer index)), a `ModelSpec`, or a causal language model of transformers, whose very
            parameters are trained. Layer i gets what layer i - 1 returned, as one argument.
        loss_fn: `loss_fn(output, target)` of one microbatch, a 0-dim tensor; default: that of a `ModelSpec`, with its `count_fn`. What layers have
            to add to it they give to `add_loss`.
        num_microbatches: slices of a batch.
        schedule: the name of a family, a CSV file, a generator (a function from `Shape` to the ops of each rank), or a
            `Schedule`.
        recompute: a mode or a `RecomputePolicy`.
        balance: the number of layers of each stage, or `"auto"`: what makes the simulated step shortest, R counted; by FLOPs where a
            `ModelSpec` tells them, else each layer takes as long as another.
        num_stages: default: ranks of one replica x stages_per_rank.
        num_replicas: whole pipelines, each of which gets its own rows of a batch (`own_rows`); gradients are summed over them.
        plan: of `make_plan`: which rank holds which layers. It takes the place of `balance`, `num_stages`, `stages_per_rank`
            and `num_microbatches`, and can say more: `placement`, `warmup`.
        mesh: a DeviceMesh of torch.distributed with the dimensions `replica` and `stage`, and perhaps `tensor` of one rank. It takes the place of
            `num_replicas` and `group`, and says which ranks make a replica; default: neighbouring ones.
        group: a process group of torch.distributed; default: all its ranks. Where torch.distributed is not initialised,
            it is from torchrun's variables, and without them the pipeline has one rank.
        device: default: this rank's GPU where there are enough, else the CPU.
        seed: of dropout and, for callables, of the weights.
        count_fn: what of a microbatch's target counts in the loss, a number; default: its rows. One that counts 0 is not run.
        loss_reduction: what `loss_fn` is over the rows of a microbatch: `"mean"`, or `"sum"`, whose losses and gradients are added up as they
            are. The first step of training looks whether it is.
        timeout_seconds: longest wait for another rank.
        on_event: is given every `OpEvent`, after its step; on a GPU when the device has come that far.

    Every rank calls the same methods in the same order. A rank that does not hold the first stage may pass None as inputs, one
    that does not hold the last None as targets.

    Raises:
        ValueError: arguments that do not fit each other; the same on every rank.
        PipelineError: another rank did not come.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: LossFn | None = None,
        *,
        num_microbatches: int = DEFAULT_MICROBATCHES,
        schedule: GivenSchedule = "gpipe",
        recompute: str | RecomputePolicy = "overlap",
        balance: str | Sequence[int] = "auto",
        num_stages: int | None = None,
        stages_per_rank: int = 1,
        num_replicas: int = 1,
        plan: Plan | None = None,
        mesh: DeviceMesh | None = None,
        group: Any = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        count_fn: Callable[[Any], int | float] | None = None,
        loss_reduction: str = "mean",
        timeout_seconds: float = 600.0,
        on_event: Callable[[OpEvent], None] | None = None,
    ) -> None:
        timeout_seconds = checked_timeout(timeout_seconds)  # before this rank waits for another
        replicas = replicas_said(num_replicas, plan)
        spec = spec_of(model).for_loss(loss_fn)
        self._take_batch = spec.take_batch
        # Whoever made a bundle with a count_fn has said what its loss is a mean over.
        checks_loss = loss_fn is not None or spec.count_fn is None
        if loss_fn is None:
            loss_fn, count_fn = spec.loss_fn, count_fn or spec.count_fn
        self.step_index = 0
        self._on_event = on_event
        self._training = True
        self._closed = False
        self._last_report: Callable[[], RankReport] | None = None
        self._unseen: deque[Recording] = deque()  # what on_event was not given yet
        self._meter = ActivationMeter()
        shares = isinstance(plan, Plan) and plan.edges == PINNED
        self._group = join_group(
            group,
            device,
            timeout_seconds=timeout_seconds,
            shares_gpus=shares,
            num_replicas=replicas,
            order=plan.order if isinstance(plan, Plan) else REPLICA_STAGE,
            mesh=mesh,
        )
        self._lanes = make_lanes(self._place, self._group.device)
        with self._group.starting():
            self._clock = align_clocks(self._group.chain, self._group.replicas)
            with introduced(self._group) as own:
                own.seed = self._seed = checked_seed(seed)
                own.loss_reduction = checked_reduction(loss_reduction)
                check_callable("loss_fn", loss_fn, "of an output and its target")
                check_callable("count_fn", count_fn, "of a microbatch's target")
                check_callable("on_event", on_event, "of an OpEvent")
                check_loss_is_plain(loss_fn, spec.modules.values())
                own.model, own.counts = _fingerprint(spec), count_fn is not None
                self.plan = plan_of(
                    plan,
                    spec.num_layers,
                    num_ranks=self._group.grid.stage,
                    num_stages=num_stages,
                    stages_per_rank=stages_per_rank,
                    num_microbatches=num_microbatches,
                    balance=balance,
                    work=spec.size.flops_per_layer,
                    num_replicas=self._group.grid.replica,
                    order=self._group.grid.order,
                )
                self._group.names.tell_stages(self.plan.stage_ranks)
                self._policy = policy = RecomputePolicy.of(recompute)
                policy.check_layers(self.plan.num_layers)
                if plan is None and balance == "auto":
                    self.plan = self._balanced(spec, schedule, policy)
                ties = check_sharing(spec, self.plan.stage_of)
                self._shared = SharedState(spec.modules, self.plan.stage_of)
                self._given_schedule = schedule
                self._make_programs = partial(
                    Programs,
                    rank=self._place,
                    runs_ahead=self._lanes.device.runs_ahead,
                    tied=self.plan.tied_stages(tie.layers for tie in ties),
                    work=spec.size.flops_per_layer,
                )
                self._programs = self._make_programs(schedule, policy, self.plan)
                own.plan, own.schedule = repr(self.plan), self._programs.describe()
                if self._group.size > 1:
                    own.carrier = carrier_of(self.plan.edges, self.device)
                    own.gpu = identity_of(self.device) if own.carrier == NCCL else ""
                self._name_of, self._loss_fn = name_in(spec), loss_fn
                layers = self._build(spec, checked=plan is None and balance == "auto")
                self._stages = self._stages_of(layers, self._programs, policy)
                check_loss_is_local(loss_fn, {**spec.modules, **self._layers()}, self.plan)
                check_no_inference_tensors(self._layers())
                check_built(spec, self._layers(), self.plan.stage_of)
                self._copies = Copies(ties, self._layers())
            self._copies.make_equal(self._group.chain)
            make_replicas_equal(self._tensors(), self._group.replicas, self._fetch)
            self._runner = CallRunner(
                self._group,
                self.plan,
                self._programs,
                self._stages,
                self._lanes,
                self._meter,
                loss_fn,
                count_fn,
                policy.verify,
                self._shared_gradients(self._stages, self._programs),
                self._copies.apart if ties else None,
                Skips({**spec.modules, **self._layers()}, loss_fn, self.plan, self._place),
                loss_reduction=own.loss_reduction,
                checks_loss=checks_loss,
            )

    def _balanced(self, spec: ModelSpec, schedule: GivenSchedule, policy: RecomputePolicy) -> Plan:
        """The plan whose step is shortest, unless its stages have more in common than those of equal work, or one has no parameters."""
        plan, told = with_shortest_step(self.plan, schedule, policy, spec.size.flops_per_layer)
        if not told or _num_shared(spec, plan) > _num_shared(spec, self.plan):
            return self.plan
        if self._place == 0:
            _LOG.info(told)
        return plan

    def _build(self, spec: ModelSpec, *, checked: bool) -> dict[int, list[nn.Module]]:
        """The layers of each stage of this rank."""
        layers = {
            index: build_stage_layers(spec, self.plan, index, self._seed, self.device, checked=checked)
            for index in self.plan.stages_of(self._place)
        }
        numbers = (number for index in layers for number in self.plan.layers_of(index))
        make_one(spec.tied, dict(zip(numbers, itertools.chain(*layers.values()))))
        return layers

    def _stages_of(
        self, layers: Mapping[int, Sequence[nn.Module]], programs: Programs, policy: RecomputePolicy
    ) -> dict[int, AnyStage]:
        """The stages of this rank, which have these layers."""
        parts = programs.whole().schedule.policy
        kept = kept_layers(policy.keep_layers, layers, self.plan)
        return {
            index: make_stage(
                index,
                own,
                parts.parts[index] if parts.in_parts else (),
                first_layer=self.plan.layers_of(index).start,
                cross=cross,
                device=self.device,
                meter=self._meter,
                loss_fn=self._loss_fn if index == self.plan.num_stages - 1 else None,
                name_of=self._name_of,
                selective=() if policy.mode is Mode.NEVER else policy.selective,
                keep_layers=kept,
            )
            for index, own in layers.items()
        }

    def change(
        self,
        *,
        num_microbatches: int | None = None,
        schedule: GivenSchedule | None = None,
        recompute: str | RecomputePolicy | None = None,
    ) -> None:
        """From the next call on, cut a batch into other microbatches, run them by another schedule, or recompute otherwise. Collective.

        What is None stays as it is: and in any case the layers, on their ranks, with their parameters, buffers and gradients, the connections,
        and `step_index`. What is proved of the first microbatch of a kind of step is proved again.

        Raises:
            ValueError: values that do not fit each other or the plan, or other ones than on rank 0; on every rank, and the pipeline is as
                it was.
            PipelineError: another rank failed.
        """
        self._check_open()
        self._runner.check_whole()
        self._emit_events()
        with introduced(self._group) as own:
            given = self._given_schedule if schedule is None else schedule
            if isinstance(given, Schedule) and schedule is None and recompute is not None:
                raise ValueError(
                    f"change(recompute={recompute!r}): the pipeline runs a Schedule that it was given, which says itself what is "
                    "recomputed; give another one, as change(schedule=...)"
                )
            policy = self._policy if recompute is None else RecomputePolicy.of(recompute)
            if isinstance(schedule, Schedule) and recompute is None:
                policy = schedule.policy
            policy.check_layers(self.plan.num_layers)
            m = self.plan.num_microbatches if num_microbatches is None else num_microbatches
            plan = replace(self.plan, num_microbatches=whole_number("num_microbatches", m))
            programs = self._make_programs(given, policy, plan)
            own.seed, own.plan, own.schedule = self._seed, repr(plan), programs.describe()
            stages = self._stages_of({index: one.layers for index, one in self._stages.items()}, programs, policy)
        self.plan, self._given_schedule, self._policy = plan, given, policy
        self._programs, self._stages = programs, stages
        self._runner.change(plan, programs, stages, policy.verify, self._shared_gradients(stages, programs))

    def _shared_gradients(self, stages: Mapping[int, AnyStage], programs: Programs) -> SharedGradients:
        """What the REDUCE_GRAD of this rank add up."""
        of_parts: dict[tuple[int, int | None], list[nn.Parameter]] = {
            (index, part): parameters
            for index, stage in stages.items()
            for part, parameters in enumerate(parameters_of_parts(stage))
        }
        copies = self._copies.buckets(programs.whole().reduces)
        return SharedGradients(copies, of_parts, now=self.named_parameters, runs_ahead=self._lanes.device.runs_ahead)

    # What the pipeline is -----------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self._stages

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.plan.num_stages - 1 in self._stages

    @property
    def schedule(self) -> Schedule:
        """The schedule of `step`, with every stage's gradients."""
        return self._programs.whole().schedule

    @property
    def device(self) -> torch.device:
        return self._group.device

    @property
    def rank(self) -> int:
        """This process among the ranks of all replicas."""
        return self._group.rank

    @property
    def coordinates(self) -> Coordinates:
        """Which replica this rank belongs to, and where it stands in it."""
        return self._group.coordinates

    @property
    def num_replicas(self) -> int:
        return self.plan.num_replicas

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a DeviceMesh with the dimensions `replica` and `stage`, for libraries that want one. It is made when it is first asked
        for, which all ranks have to do.

        Raises:
            RuntimeError: torch.distributed was not initialised, as for a rank alone.
        """
        return self._group.mesh

    def replica_process_group(self) -> ProcessGroup | None:
        """The ranks with this rank's stages in each replica, in the order of the replicas, as torch.distributed knows them; None with one
        replica. Collective the first time. For libraries that share out over replicas, such as `ZeroRedundancyOptimizer`."""
        return self._group.replica_process_group()

    @property
    def _place(self) -> int:
        """This process among the ranks of its replica, as plan and schedule count them."""
        return self._group.chain.rank

    def own_rows(self, batch: Any) -> Any:
        """Of a whole batch, a tensor or a (nested) tuple or dict, the rows of this replica: what `step` wants where each rank has all.

        They are those that `torch.tensor_split` into num_replicas x num_microbatches slices gives it; of fewer rows than that, for
        `evaluate`, into num_replicas slices.

        Raises:
            ValueError: fewer rows than replicas, or tensors that disagree on their number.
        """
        return own_rows(batch, self.coordinates.replica, self.num_replicas, self.plan.num_microbatches)

    # Training -----------------------------------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None, *, scale: float = 1.0) -> Tensor:
        """Forward and backward of a batch: adds to `.grad` as `backward` does; returns the loss, 0-dim, on every rank's host.

        Args:
            inputs: the batch of this replica, a tensor or a (nested) tuple or dict, cut along dimension 0; needed on the rank that holds the first
                stage.
            targets: likewise, on the rank that holds the last stage.
            scale: multiplies what is back-propagated, and not the loss that is returned.

        Raises:
            ValueError: a batch that cannot be cut; a loss that is no scalar; a call under `torch.no_grad()`; a `scale` that is no
            finite number, or 0. The same on every rank that makes the mistake and, where the first stage's does, on all.
            PipelineError: another rank failed.
            LossNotFinite: a PipelineError too, but one after which the pipeline can go on: `.grad` is of no use,
                `find_not_finite` says where it began.
        """
        step = self._new_step(with_graph=True, with_loss=True, scale=scale)
        with self._watching():
            self._run("step", step, inputs, targets, mistake=mistake_in_step(scale))
        # Not the step itself, which holds the batch until the next one has ended.
        index, recording = step.index, self._lanes.recording()
        peak, peak_of_stages, stages = self._meter.peak_bytes, self._meter.peak_stage_bytes, self._stages
        self._last_report = lambda: measure_rank(
            self.rank,
            index,
            recording,
            self._clock,
            stages,
            peak,
            self._lanes.device.memory(),
            self._runner.communicator_bytes,
            peak_of_stages,
            replica=self.coordinates.replica,
            place=self._place,
        )
        self.step_index += 1
        if self._on_event is not None:
            self._unseen.append(recording)
        self._emit_events()
        return self._runner.loss_of(step)

    def _watching(self) -> AbstractContextManager[None]:
        """In the first step on a device that the host should run ahead of: which layers make it wait."""
        is_first = self._last_report is None
        return (
            waits_told(self._stages, self._lanes.device)
            if is_first and self._lanes.device.runs_ahead
            else nullcontext()
        )

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """The loss of a batch of any size, of which each replica gets its own rows, on every rank's host; layers in eval mode, no gradients."""
        with self._in_eval_mode():
            step = self._new_step(with_graph=False, with_loss=True)
            self._run("evaluate", step, inputs, targets)
            return self._runner.loss_of(step)

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for layer in self._layers().values() for module in layer.modules()]
        training, self._training = self._training, False
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            self._training = training
            for module, mode in modes:
                module.training = mode

    def __call__(self, inputs: Any = None) -> Any:
        """The output of the model on the last stage's rank, of the rows of its replica, without a graph; None on the others."""
        step = self._new_step(with_graph=False, with_loss=False)
        self._run("call", step, inputs, None)
        return join([output for _, output in sorted(step.outputs.items())]) if self.is_last else None

    def generate(
        self,
        prompts: Any = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos: int | Sequence[int] | None = None,
        context: int | None = None,
        num_groups: int = 1,
        on_token: Callable[[int, int], None] | None = None,
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """The tokens that a causal language model puts after each prompt: 1-dim, int64, on every rank. Collective.

        Layers keep what they need of the tokens before (`stage/past.py`), are in eval mode, and make no gradients.

        Args:
            prompts: token ids to go on from, on the rank that holds the first stage: a list of lists or tensors, which may differ in
                length, a tensor [prompts, tokens], or a tokenizer's dict of input_ids and attention_mask.
            max_new_tokens: how many tokens each prompt gets at most.
            temperature: 0 takes the likeliest token; else tokens are drawn, by the softmax of the logits divided by it.
            top_k: draws from the so many likeliest alone.
            top_p: draws from the likeliest alone that have this share of the probability together.
            seed: of what is drawn. It does not depend on the stages, the ranks, or the other prompts' lengths.
            eos: token or tokens after which a prompt has ended; it is the last of its tokens.
            context: how many tokens are looked at, at most; where there are more, from the latter half of them on. None: all.
            num_groups: cuts the prompts into so many groups, which follow each other through the stages, so that these work side by side.
            on_token: is given (number of the prompt, token) on every rank, once the token is known there.
            choose: stands in for all of this: is given the logits [prompts of a group, vocabulary] on the last stage's rank, and gives
                token ids [prompts of a group].

        Raises:
            ValueError: what no text can be made from; layers that cannot go on from the tokens before. The same on every rank.
            PipelineError: another rank failed.
        """
        if self._closed:
            raise PipelineError("the pipeline is closed")
        if self.num_replicas > 1:
            raise ValueError(
                f"generate was called with num_replicas={self.num_replicas}: make a Pipeline of one replica for it"
            )
        self._runner.check_whole()
        self._emit_events()

        def own() -> Prompts:
            sampling = Sampling(temperature, top_k, top_p, seed)
            return check_prompts(
                prompts,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                eos=eos,
                context=context,
                num_groups=num_groups,
            )

        agreed = agree_on(own if self.is_first else None, mistake_in_layers(self._layers()), self._group.chain)
        with self._in_eval_mode(), self._runner.failing_together():
            try:
                return self._runner.generation(agreed, choose=choose, on_token=on_token).run()
            finally:
                set_trainable(self._layers().values())

    def find_not_finite(self, inputs: Any = None, targets: Any = None) -> Diagnosis:
        """Repeat the last step on its batch and say where the first value that is not finite appears. Collective.

        Dropout draws the same, buffers stay as they are; the gradients are dropped, before and after. It costs a step.
        """
        replica = self.coordinates.replica
        watch = FiniteWatch(self.rank, self._stages, replica, replica * self.plan.num_microbatches)
        step = self._new_step(with_graph=True, with_loss=True)
        step.index, step.on_layer = self.step_index - 1, watch.on_layer
        self.zero_grad()
        with watch:
            self._run("step", step, inputs, targets, mistake=mistake_in_step(step.scale))
        losses = {number: float(loss) / step.weights[number] for number, loss in step.outputs.items()}
        own = watch.as_json(inputs if self.is_first else None, losses)
        self.zero_grad()
        return Diagnosis.of(self._group.everyone.concatenate(own, "what is not finite"))

    def _new_step(self, *, with_graph: bool, with_loss: bool, scale: float = 1.0) -> Step:
        return Step(
            self.step_index,
            self._seed,
            self.plan.num_layers,
            with_graph=with_graph,
            with_loss=with_loss,
            scale=scale,
        )

    def _run(self, kind: str, step: Step, inputs: Any, targets: Any, *, mistake: str | None = None) -> None:
        self._check_open()
        self._emit_events()
        if self._take_batch is not None:
            try:
                inputs, targets = self._take_batch(inputs, targets)
            except ValueError as error:
                mistake = mistake or str(error)
        self._runner.run(kind, step, inputs, targets, is_training=self._training, mistake=mistake, shared=self._shared)

    def _check_open(self) -> None:
        if self._closed:
            raise PipelineError("the pipeline is closed")

    def _emit_events(self, *, of_all: bool = False) -> None:
        """Hand over the events of the steps that have ended; `of_all`: of the others, too, for which this waits."""
        while self._unseen and (of_all or self._unseen[0].has_ended()):
            assert self._on_event is not None
            for event in self._unseen.popleft().events():
                self._on_event(event)

    # Parameters ---------------------------------------------------------------------------------------------------

    def _layers(self) -> dict[int, nn.Module]:
        return {number: layer for stage in self._stages.values() for number, layer in stage.layers_by_number().items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names of `nn.Sequential(*layers)`. One that two stages share has there one name, the first,
        and so have its two copies."""
        return ((self._copies.name(name), parameter) for name, parameter in weights.named_parameters(self._layers()))

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def train(self, mode: bool = True) -> Pipeline:
        """Put this rank's layers into training mode. Collective in meaning: do it on every rank."""
        if not isinstance(mode, bool):
            raise ValueError(f"train was given mode={mode!r}: True or False is needed")
        self._training = mode
        for layer in self._layers().values():
            layer.train(mode)
        return self

    def eval(self) -> Pipeline:
        return self.train(False)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before, on the host. Collective.

        The norms of single tensors are summed in the whole model's parameter order, so that the result does not depend
        on the split; of a parameter that two stages share one counts.
        """
        parameters_of = weights.parameters_of({s.index: s.layers_by_number() for s in self._stages.values()})
        return clip_grad_norm(
            parameters_of,
            max_norm,
            lambda own: self._group.chain.concatenate(own, "the gradient norms"),
            self.device,
            lambda norms: self._runner.fetch(norms, "the norms of the gradients"),
            uncounted=self._copies.second,
        )

    def check_replicas(self) -> None:
        """Whether all replicas hold the same weights, by a sum over the bits of each. Collective.

        Raises:
            PipelineError: they do not; with the ranks that differ, the same on every rank. The pipeline can go on.
        """
        names = [self._group.names(rank) for rank in self._group.grid.ranks_of_stage(self.rank)]
        own = dict(weights.named_parameters(self._layers()))
        check_replicas_equal(own, self._group.chain, self._group.replicas, names.__getitem__, self._fetch)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's layers, by name."""
        return {
            f"{number}.{name}": tensor
            for number, layer in sorted(self._layers().items())
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
            if tensor.layout is torch.strided
        }

    def _fetch(self, tensor: Tensor, what: str) -> Tensor:
        return fetch(tensor, what, self._lanes.device, self._group.monitor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors, under the whole model's names."""
        return weights.state_dict(self._layers())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's tensors from `state`, which may hold the whole model's. Of a parameter that two stages share one name is enough.

        Raises:
            ValueError: a tensor that is missing or has another shape, or a name that the model does not have.
        """
        numbers = tuple(f"{number}." for number in range(self.plan.num_layers))
        unknown = [name for name in state if not str(name).startswith(numbers)] if isinstance(state, Mapping) else []
        if unknown:
            raise ValueError(
                f"the state has {unknown[0]!r} (and {len(unknown) - 1} more), which the model does not: its tensors are named as in "
                f"nn.Sequential(*layers), 0.* to {self.plan.num_layers - 1}.*"
            )
        weights.load_state_dict(self._layers(), self._copies.in_state(state))

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's tensors on the CPU of rank 0, None on the others; of several replicas, those of the first. Collective.

        Only rank 0 needs room for the whole model: on their way tensors pass the other ranks in pieces of 16 MiB.
        """
        first = self.coordinates.replica == 0
        gathered = weights.gather(self.state_dict(), self._group.chain) if first else None
        if gathered is None:
            return None
        return dict(sorted(gathered.items(), key=lambda item: int(item[0].split(".", 1)[0])))

    # Faults, for tests and drills ----------------------------------------------------------------------------------

    def before_ops(self, before: Callable[[Op, int], None] | None) -> None:
        """Call `before(op, step)` on this rank ahead of each op of a training step, None: no longer.

        An F, R or B is about to run then, a message about to be started. What it raises counts as raised by the op.
        """
        self._runner.executor.before_op = before

    def disconnect(self, op: Op) -> None:
        """Break the connection that carries the message `op` (`0SEND_F1`), or all connections between stages of this rank
        where `op` is no message: as a network does, without a word to the other end."""
        self._runner.transport.disconnect(op)

    # Reports ------------------------------------------------------------------------------------------------------

    @property
    def report(self) -> RankReport:
        """This rank's last step. Does not communicate.

        Raises:
            RuntimeError: there was no step yet.
        """
        if self._last_report is None:
            raise RuntimeError("there is no report before the first step")
        return self._last_report()

    def gather_report(self) -> Report | None:
        """The last step of all ranks on rank 0, None on the others. Collective."""
        parts = self._group.everyone.gather(self.report.to_json(), "the reports")
        return None if parts is None else Report.of(map(RankReport.from_json, parts), self._runner.trained)

    # The end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and connections, and torch.distributed if it was initialised here."""
        if self._closed:
            return
        self._closed = True
        if self._group.monitor.failure is None:
            self._emit_events(of_all=True)
        self._runner.close()
        self._group.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._group.fail(error)
        self.close()


def _num_shared(spec: ModelSpec, plan: Plan) -> float:
    """How much stages have in common; infinity: more than they may, or one has no parameters."""
    try:
        for stage in range(plan.num_stages):
            known = [spec.modules[number] for number in plan.layers_of(stage) if number in spec.modules]
            if len(known) == plan.balance[stage]:
                check_has_parameters(stage, known, plan.layers_of(stage))
        return len(check_sharing(spec, plan.stage_of)) + len(SharedState(spec.modules, plan.stage_of))
    except ValueError:
        return math.inf


def _fingerprint(spec: ModelSpec) -> str:
    """What all ranks must have been given: ties, too, as a rank that knew of none would wait for nobody."""
    tied = {"tied": spec.tied} if spec.tied else {}
    return json.dumps({**spec.fingerprint, **tied}, sort_keys=True)
