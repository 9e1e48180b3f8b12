"""The pipeline as a user's training loop sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.comm.clocks import align_clocks
from pipetrain.comm.coordinates import Coordinates
from pipetrain.comm.group import Group, join_group
from pipetrain.comm.lanes import Recording, make_lanes
from pipetrain.comm.transport import PINNED
from pipetrain.models.spec import spec_of
from pipetrain.models.trained import Beside
from pipetrain.monitor.step_report import RankReport, Report
from pipetrain.plan.plan import DEFAULT_MICROBATCHES, Plan, replicas_said, whole_number
from pipetrain.runtime.agreement import introduced
from pipetrain.runtime.arguments import (
    check_functions,
    checked_reduction,
    checked_seed,
    checked_timeout,
)
from pipetrain.runtime.assembly import Assembly
from pipetrain.runtime.call_programs import GivenSchedule, Programs
from pipetrain.runtime.copies import make_replicas_equal
from pipetrain.runtime.cut import join, own_rows
from pipetrain.runtime.diagnosis import Diagnosis, FiniteWatch
from pipetrain.runtime.executor import OnCall, Step
from pipetrain.runtime.generation import Request, Sampling, agree
from pipetrain.runtime.measure import measure_rank, waits_told
from pipetrain.runtime.runner import CallRunner
from pipetrain.runtime.weights import StageWeights
from pipetrain.schedule.check import check_calls
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.stage import LossFn


class Pipeline(StageWeights):
    """A model cut into stages over the ranks of torch.distributed, trained microbatch by microbatch.

    Args:
        model: an `nn.Sequential`, a list of layers, a list of callables that return a layer each (only this rank's are
            called, each after seeding with (seed, layer index)), a `ModelSpec`, or a causal language model of transformers. Modules
            are not copied: their own parameters are trained. Layer i gets what layer i - 1 returned, as one argument.
        loss_fn: `loss_fn(output, target)` returns the loss of one microbatch, a 0-dim tensor; default: `loss_fn` and `count_fn` of
            the `ModelSpec`. Layers add to the loss by `add_loss`.
        num_microbatches: the number of slices into which the batch of a replica is cut.
        schedule: the name of a family, a CSV file, a generator (a function from `Shape` to the ops of each rank), or a
            `Schedule`.
        recompute: a mode or a `RecomputePolicy`.
        balance: the number of layers of each stage, or `"auto"`: the numbers with the shortest simulated step, R included. A layer's
            simulated time is proportional to the FLOPs that a `ModelSpec` states for it, or to the number of its weights in matrix
            products. If these are not known (callables, convolutions), all layers take the same time.
        num_stages: default: ranks of one replica x stages_per_rank.
        num_replicas: whole pipelines, each of which gets its own rows of a batch (`own_rows`); gradients are summed over them.
        plan: what `make_plan` returned: which rank holds which layers. It replaces `balance`, `num_stages`, `stages_per_rank` and
            `num_microbatches`, and can set more: `placement`, `warmup`.
        mesh: a DeviceMesh of torch.distributed with the dimensions `replica` and `stage`, and optionally `tensor` of size 1. It
            replaces `num_replicas` and `group`, and says which ranks form a replica; default: neighbouring ranks.
        group: a process group of torch.distributed; default: all its ranks. If torch.distributed is not initialised, the pipeline
            initialises it from torchrun's variables. Without these variables the pipeline has one rank.
        device: default: this rank's GPU if there are enough, else the CPU.
        seed: the seed of dropout and, if callables make the layers, of the weights.
        count_fn: `count_fn(target)` returns how much of a microbatch's target counts in the loss; default: its number of rows. A
            microbatch with the count 0 is not run.
        loss_reduction: `"mean"` if `loss_fn` is a mean over rows, or `"sum"`: losses and gradients of microbatches are then added without
            weights. The first training step checks it, except for a `ModelSpec` with a `count_fn` and its own loss.
        timeout_seconds: the longest wait for another rank.
        on_event: is called with every `OpEvent`, after its step; on a GPU, once the device has run the step.
        on_call: `on_call(op, layers)` runs at each CALL op of the schedule, without autograd; `layers` are those of the op's stage.

    Every rank calls the same methods in the same order. A rank without the first stage may pass None as inputs; a rank without the last
    stage may pass None as targets.

    Raises:
        ValueError: arguments that do not fit each other; the same error on every rank.
        PipelineError: another rank did not connect.
    """

    beside: list[Beside]  # background work, such as a save: polled before each step, waited for in `close`
    _last_report: Callable[[], RankReport] | None = None

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
        on_call: OnCall | None = None,
    ) -> None:
        spec = spec_of(model).for_loss(loss_fn)
        checks_loss = loss_fn is not None or spec.count_fn is None  # the count_fn of a ModelSpec fits its loss
        if loss_fn is None:
            loss_fn, count_fn = spec.loss_fn, count_fn or spec.count_fn
        self.step_index, self._training, self.beside = 0, True, []
        self._take_batch, self._on_event, self._on_call = spec.take_batch, on_event, on_call
        self._unseen: deque[Recording] = deque()  # steps whose events were not given to on_event yet
        of_plan: dict[str, Any] = {}
        if isinstance(plan, Plan):
            of_plan = {"shares_gpus": plan.edges == PINNED, "order": plan.order}
        replicas = replicas_said(num_replicas, plan)
        self._group = join_group(
            group, device, timeout_seconds=checked_timeout(timeout_seconds), num_replicas=replicas, mesh=mesh, **of_plan
        )
        self._lanes = make_lanes(self._group.chain.rank, self._group.device)
        with self._group.starting():
            self._clock = align_clocks(self._group.chain, self._group.replicas)
            with introduced(self._group) as own:
                own.seed, own.loss_reduction = checked_seed(seed), checked_reduction(loss_reduction)
                check_functions(loss_fn, count_fn, on_event, on_call, spec.modules.values())
                self._parts = parts = Assembly(spec, loss_fn, own.seed, self._group, self._lanes)
                own.model, own.counts = parts.fingerprint, count_fn is not None
                self._given_schedule, self._policy = schedule, RecomputePolicy.of(recompute)
                numbers = {"num_stages": num_stages, "stages_per_rank": stages_per_rank}
                numbers["num_microbatches"] = num_microbatches
                self.plan = parts.make_plan(plan, schedule, self._policy, balance, **numbers)
                parts.build(self.plan, is_balanced=plan is None and balance == "auto")
                self._programs = self._make_programs(schedule, self._policy, self.plan)
                own.tell(self.plan, self._programs.describe(), self._group)
                self._stages = parts.stages(self._programs, self._policy, self.plan)
                parts.check(self.plan)
            parts.copies.make_equal(self._group.chain)
            make_replicas_equal(self._tensors(), self._group.replicas, parts.fetch)
            self._runner = CallRunner(
                parts, self.plan, self._programs, self._stages, self._policy, count_fn, loss_reduction, checks_loss
            )
            self._runner.executor.on_call = on_call

    def change(
        self,
        *,
        num_microbatches: int | None = None,
        schedule: GivenSchedule | None = None,
        recompute: str | RecomputePolicy | None = None,
    ) -> None:
        """Change, from the next call on, the number of microbatches, the schedule, or what is recomputed. Collective.

        Arguments that are None keep their values; everything else stays. R is compared with F again in the first microbatch of each kind of
        step.

        Raises:
            ValueError: values that do not fit each other or the plan, or differ from those on rank 0; the pipeline stays as it was.
            PipelineError: another rank failed.
        """
        self._runner.check_usable()
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
            own.tell(plan, programs.describe(), self._group)
            stages = self._parts.stages(programs, policy, plan)
        self.plan, self._given_schedule, self._policy = plan, given, policy
        self._programs, self._stages = programs, stages
        self._runner.adopt(plan, programs, stages, policy)

    def _make_programs(self, given: GivenSchedule, policy: RecomputePolicy, plan: Plan) -> Programs:
        programs = self._parts.programs(given, policy, plan)
        check_calls(programs.whole().schedule, self._on_call)
        return programs

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
        """The schedule that `step` runs if every stage needs gradients. If the first stages are frozen, it runs without their backwards."""
        return self._programs.whole().schedule

    @property
    def device(self) -> torch.device:
        return self._group.device

    @property
    def rank(self) -> int:
        """The number of this rank among the ranks of all replicas."""
        return self._group.rank

    @property
    def coordinates(self) -> Coordinates:
        """The replica of this rank, and its place in that replica."""
        return self._group.coordinates

    @property
    def ranks(self) -> Group:
        """The `Group` of all ranks: their coordinates, and collective calls between two steps."""
        return self._group

    @property
    def seed(self) -> int:
        """The seed of dropout. A new one applies from the next step on, and must be the same on every rank."""
        return self._parts.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._parts.seed = checked_seed(seed)

    @property
    def num_replicas(self) -> int:
        return self.plan.num_replicas

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a DeviceMesh with the dimensions `replica` and `stage`, for libraries that need one. The first access makes it and
        is collective. Raises RuntimeError: torch.distributed was not initialised, as in a run of one rank."""
        return self._group.mesh

    def replica_process_group(self) -> ProcessGroup | None:
        """The torch.distributed group of the ranks with this rank's stages, in the order of the replicas; None with one replica. The first
        call is collective. For libraries that distribute work over replicas, such as `ZeroRedundancyOptimizer`."""
        return self._group.replica_process_group()

    def own_rows(self, batch: Any) -> Any:
        """Return this replica's rows of a whole batch (a tensor, or a (nested) tuple or dict). `torch.tensor_split` cuts num_replicas x
        num_microbatches slices, of which each replica gets num_microbatches. A batch with fewer rows than slices (for `evaluate`) is
        cut into num_replicas slices, one for each replica.

        Raises ValueError: fewer rows than replicas, or tensors that disagree on the number of rows.
        """
        return own_rows(batch, self.coordinates.replica, self.num_replicas, self.plan.num_microbatches)

    # Training -----------------------------------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None, *, scale: float = 1.0) -> Tensor:
        """Run forward and backward of a batch: adds to `.grad` as `backward` does; returns the loss, 0-dim, on every rank's host.

        Args:
            inputs: the batch of this replica, a tensor or a (nested) tuple or dict, cut along dimension 0; for the first stage's rank.
            targets: likewise, for the last stage's rank.
            scale: a factor of the gradients, but not of the returned loss.

        Raises:
            ValueError: a batch that cannot be cut; a loss that is no scalar; a call under `torch.no_grad()`; a `scale` that is 0 or not
                finite. All ranks raise it for a mistake of the first stage's rank, or in targets that `count_fn` counts; else only ranks that make it.
            PipelineError: another rank failed, or made a mistake.
            LossNotFinite: a PipelineError after which the pipeline can go on; `find_not_finite` finds the first value that is not finite.
        """
        for one in self.beside:
            one.poll()
        step = Step(self.step_index, self._parts.seed, with_graph=True, with_loss=True, scale=scale)
        # In the first step on a GPU, note the layers that make the host wait for the device.
        watches = self._last_report is None and self._lanes.device.runs_ahead
        with waits_told(self._stages, self._lanes.device) if watches else nullcontext():
            inputs, targets, mistake = self._taken(inputs, targets)
            self._runner.run("step", step, inputs, targets, is_training=self._training, mistake=mistake)
        # The report must not refer to `step`: the batch would stay in memory until the next step has ended.
        recording, stages, meter = self._lanes.recording(), self._stages, self._parts.meter
        peak, peak_of_stages, index = meter.peak_bytes, meter.peak_stage_bytes, step.index
        copies = self._runner.executor.copies
        host_bytes = 0 if copies is None else copies.pool.num_bytes
        self._last_report = lambda: measure_rank(
            recording,
            self._clock,
            stages,
            self._lanes.device.memory(),
            rank=self.rank,
            replica=self.coordinates.replica,
            place=self._group.chain.rank,
            step=index,
            communicator_bytes=self._runner.communicator_bytes,
            peak_activation_bytes=peak,
            peak_stage_bytes=peak_of_stages,
            host_bytes=host_bytes,
        )
        self.step_index += 1
        if self._on_event is not None:
            self._unseen.append(recording)
            self._emit_events()
        return self._runner.loss_of(step)

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Return the loss of a batch of any size, on every rank's host. Give each replica its own rows. Layers are in eval mode, and
        compute no gradients."""
        with self._in_eval_mode():
            step = Step(self.step_index, self._parts.seed, with_graph=False, with_loss=True)
            self._run("evaluate", step, inputs, targets)
            return self._runner.loss_of(step)

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for layer in self._parts.layers.values() for module in layer.modules()]
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
        """Return, on the last stage's rank, the model's output for its replica's rows, without a graph; None on other ranks."""
        step = Step(self.step_index, self._parts.seed, with_graph=False, with_loss=False)
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
        on_token: Callable[[int, int], bool | None] | None = None,
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """Return the tokens with which a causal language model continues each prompt: 1-dim, int64, on every rank. Collective.

        Layers keep what they need of earlier tokens (`stage/past.py`). They are in eval mode, and compute no gradients.

        Args:
            prompts: token ids to continue, on the first stage's rank: a list of lists or tensors, which may differ in length, a tensor
                [prompts, tokens], or a tokenizer's dict of input_ids and attention_mask.
            max_new_tokens: the largest number of new tokens of a prompt.
            temperature: 0 takes the likeliest token; else tokens are drawn by softmax(logits / temperature).
            top_k: draws only from the k likeliest tokens.
            top_p: draws only from the likeliest tokens that together have this share of the probability.
            seed: the seed of the draws, which do not depend on the stages, the ranks, or the other prompts' lengths.
            eos: token or tokens that end a text; the text includes the one that ended it.
            context: the most tokens that layers see; None: no limit. Of a longer prompt they see the last `context` tokens. A text that
                reaches the limit continues from its last `context // 2` tokens.
            on_token: called on every rank with (number of the prompt, token). True ends the text; return the same on every rank.
            choose: replaces temperature, top_k, top_p and seed. It gets logits [prompts, vocabulary] on the last stage's rank, and returns
                ids [prompts].

        Raises:
            ValueError: prompts that are no token ids or are empty; layers that cannot continue from earlier tokens. The same on every rank.
                Or on this rank only: `on_token` ended other texts here than on the last stage's rank.
            PipelineError: another rank failed.
        """
        self._runner.check_usable()
        if self.num_replicas > 1:
            raise ValueError(
                f"generate was called with num_replicas={self.num_replicas}: make a Pipeline of one replica for it"
            )
        self._emit_events()

        def make() -> Request:
            sampling = Sampling(temperature, top_k, top_p, seed)
            return Request.of(prompts, max_new_tokens, sampling, eos, context)

        request = agree(make if self.is_first else None, self._parts.layers, self._group.chain)
        with self._in_eval_mode():
            return self._runner.generate(request, choose, on_token)

    def find_not_finite(self, inputs: Any = None, targets: Any = None) -> Diagnosis:
        """Repeat the last step and find the first value that is not finite. Give the batch of that step. Collective. Dropout masks are
        the same as in that step, and buffers keep their values. All gradients are dropped, before the step and after it."""
        replica = self.coordinates.replica
        watch = FiniteWatch(self.rank, self._stages, replica, replica * self.plan.num_microbatches)
        step = Step(self.step_index - 1, self._parts.seed, with_graph=True, with_loss=True, on_layer=watch.on_layer)
        self.zero_grad()
        with watch.over():
            self._run("step", step, inputs, targets)
        losses = {number: float(loss) / step.weights[number] for number, loss in step.outputs.items()}
        own = watch.as_json(inputs if self.is_first else None, losses)
        self.zero_grad()
        return Diagnosis.of(self._group.everyone.concatenate(own, "what is not finite"))

    def _run(self, kind: str, step: Step, inputs: Any, targets: Any) -> None:
        inputs, targets, mistake = self._taken(inputs, targets)
        self._runner.run(kind, step, inputs, targets, is_training=self._training, mistake=mistake)

    def _taken(self, inputs: Any, targets: Any) -> tuple[Any, Any, str | None]:
        """Return inputs and targets as the stages get them, and the mistake in them or None."""
        if self._unseen:
            self._emit_events()
        if self._take_batch is not None:
            try:
                inputs, targets = self._take_batch(inputs, targets)
            except ValueError as error:
                return inputs, targets, str(error)
        return inputs, targets, None

    def _emit_events(self, *, of_all: bool = False) -> None:
        """Call `on_event` with the events of the steps that have ended. `of_all`: wait for all steps, and include their events."""
        while self._unseen and (of_all or self._unseen[0].has_ended()):
            assert self._on_event is not None
            for event in self._unseen.popleft().events():
                self._on_event(event)

    # Faults, for tests and drills ----------------------------------------------------------------------------------

    def before_ops(self, before: Callable[[Op, int], None] | None) -> None:
        """Call `before(op, step)` on this rank just before it starts an op of a training step, a transfer included. `step` counts
        from 0. If `before` raises, the op has failed. None stops the calls."""
        self._runner.executor.before_op = before

    def disconnect(self, op: Op) -> None:
        """Break the connection of `op`, a message (`0SEND_F1`) or a REDUCE_GRAD, as a failing network would, without notice to its other
        end. For any other op, break all connections of this rank that carry tensors."""
        self._runner.transport.disconnect(op)

    # Reports ------------------------------------------------------------------------------------------------------

    @property
    def report(self) -> RankReport:
        """The report of this rank's last step. Does not communicate. Raises RuntimeError: there was no step yet."""
        if self._last_report is None:
            raise RuntimeError("there is no report before the first step")
        return self._last_report()

    def gather_report(self) -> Report | None:
        """Return the report of all ranks' last step on rank 0, None on other ranks. Collective."""
        parts = self._group.everyone.gather(self.report.to_json(), "the reports")
        return None if parts is None else Report.of(map(RankReport.from_json, parts), self._runner.trained)

    # The end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and connections, and torch.distributed if this pipeline initialised it."""
        if self._runner.is_closed:
            return
        self._runner.is_closed = True
        if self._group.monitor.failure is None:
            for one in self.beside:
                one.wait()
            self._emit_events(of_all=True)
        self._runner.close()
        self._group.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._group.fail(error)
        self.close()
