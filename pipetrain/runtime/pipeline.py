"""The pipeline as a user's training loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.group.asking import Waits
from pipetrain.group.chain import Chain
from pipetrain.group.failure import FailureBoard, Monitor, PipelineError
from pipetrain.group.world import join as join_world
from pipetrain.model.spec import ModelSpec, check_sharing, spec_of
from pipetrain.parallel.clipping import clip_grad_norm
from pipetrain.plan.plan import make_plan
from pipetrain.runtime import losses
from pipetrain.runtime import whole_state as weights
from pipetrain.runtime.agreement import Call, Introduction, Programs, Signatures, introduce
from pipetrain.runtime.build import build_stage_layers
from pipetrain.runtime.cut import cut, cut_targets, join
from pipetrain.runtime.diagnosis import Diagnosis, FiniteWatch
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.measure import measure_rank
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.op import Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.seeding import generators_restored
from pipetrain.stage.stage import LossFn, Stage
from pipetrain.timeline.step_report import RankReport, Report
from pipetrain.transport.ends import make_edges
from pipetrain.transport.lanes import Recording, make_lanes, sharing
from pipetrain.transport.transport import Transport


class Pipeline:
    """A model cut into stages over the ranks of torch.distributed, trained microbatch by microbatch.

    Args:
        model: an `nn.Sequential`, a list of layers, a list of callables that return a layer each (only this rank's are
            called, each after seeding with (seed, layer index)), or a `ModelSpec`. Layer i gets what layer i - 1 returned, as one
            argument.
        loss_fn: `loss_fn(output, target)` of one microbatch, a 0-dim tensor; default: that of a `ModelSpec`, with its `count_fn`.
        num_microbatches: slices of a batch.
        schedule: the name of a family, a CSV file, or a `Schedule`.
        recompute: a mode or a `RecomputePolicy`.
        balance: `"auto"` or the number of layers of each stage.
        num_stages: default: ranks x stages_per_rank.
        group: a process group of torch.distributed; default: all its ranks. Where torch.distributed is not initialised,
            it is from torchrun's variables, and without them the pipeline has one rank.
        device: default: this rank's GPU where there are enough, else the CPU.
        seed: of dropout and, for callables, of the weights.
        count_fn: what of a microbatch's target counts in the loss; default: its rows.
        timeout_seconds: longest wait for another rank.
        on_event: is given every `OpEvent`, after its step.

    Every rank calls the same methods in the same order. A rank that is not the first may pass None as inputs, one that
    is not the last None as targets.

    Raises:
        ValueError: arguments that do not fit each other; the same on every rank.
        PipelineError: another rank did not come.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: LossFn | None = None,
        *,
        num_microbatches: int = 8,
        schedule: str | Schedule = "gpipe",
        recompute: str | RecomputePolicy = "overlap",
        balance: str | Sequence[int] = "auto",
        num_stages: int | None = None,
        stages_per_rank: int = 1,
        num_replicas: int = 1,
        group: Any = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        count_fn: Callable[[Any], int | float] | None = None,
        timeout_seconds: float = 600.0,
        on_event: Callable[[OpEvent], None] | None = None,
    ) -> None:
        if num_replicas != 1:
            raise ValueError(f"parallel.num_replicas={num_replicas}: only one replica is supported so far")
        spec = spec_of(model)
        self._world = world = join_world(group, device, timeout_seconds)
        self.plan = make_plan(
            spec.num_layers,
            num_ranks=world.num_ranks,
            num_stages=num_stages,
            stages_per_rank=stages_per_rank,
            num_microbatches=num_microbatches,
            balance=balance,
        )
        check_sharing(spec, [self.plan.layers_of(stage) for stage in range(self.plan.num_stages)])
        self._policy = RecomputePolicy.of(recompute)
        self._programs = Programs(schedule, self._policy, self.plan, world.rank)
        self.step_index = 0
        if loss_fn is None:
            loss_fn, count_fn = spec.loss_fn, count_fn or spec.count_fn
        self._loss_fn = loss_fn
        self._seed = seed
        self._count_fn = count_fn
        self._on_event = on_event
        self._training = True
        self._closed = False
        self._last_report: Callable[[], RankReport] | None = None
        self._unseen: Recording | None = None  # what on_event was not given yet
        self._meter = ActivationMeter()
        self._board = FailureBoard(world.store)
        waits = Waits(world.store, world.rank, world.num_ranks)
        self._monitor = Monitor(world.rank, self._board, timeout_seconds, waits)
        self._chain = Chain(world.store, world.rank, world.num_ranks, self._monitor)
        self._clock = self._chain.align_clocks()
        self._lanes = make_lanes(world.rank, world.device)
        self._signatures = Signatures()
        self._stages = self._build(spec, checked=balance == "auto")
        edges = None if world.store is None else make_edges(world.store, self._lanes, self._monitor, world.device)
        self._transport = Transport(self.plan.stage_ranks, world.rank, edges, self._monitor, self._meter, world.device)
        self._gatherer = weights.Gatherer(world.store, world.rank, world.num_ranks, self._monitor)
        self._executor = Executor(world.rank, self._stages, self._transport, self._lanes, self._monitor, self._board)
        self._monitor.on_failure = self._abort

    def _build(self, spec: ModelSpec, *, checked: bool) -> dict[int, Stage]:
        """This rank's stages. What is wrong on one rank is raised on all."""
        stages: dict[int, Stage] = {}
        problem = None
        try:
            for index in self.plan.stages_of(self._world.rank):
                built = build_stage_layers(spec, self.plan, index, self._seed, self._world.device, checked=checked)
                stages[index] = Stage(
                    index,
                    built,
                    first_layer=self.plan.layers_of(index).start,
                    device=self._world.device,
                    meter=self._meter,
                    loss_fn=self._loss_fn if index == self.plan.num_stages - 1 else None,
                    foreign=lambda: self._transport.storages(),
                    share=sharing(self._lanes, self._policy.ahead),
                )
        except (ValueError, TypeError) as error:
            problem = str(error)
        own = Introduction(
            plan=repr(self.plan),
            schedule=self._programs.describe(),
            seed=self._seed,
            problem=problem,
        )
        introduce(own, self._chain)
        return stages

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
        return self._world.device

    @property
    def rank(self) -> int:
        """This process among the ranks of the pipeline."""
        return self._world.rank

    # Training -----------------------------------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None, *, scale: float = 1.0) -> Tensor:
        """Forward and backward of a batch: adds to `.grad` as `backward` does; returns the loss, 0-dim, on every rank.

        Args:
            inputs: the batch, a tensor or a (nested) tuple or dict, cut along dimension 0; needed on the first rank.
            targets: likewise, on the last rank.
            scale: multiplies what is back-propagated, and not the loss that is returned.

        Raises:
            ValueError: a batch that cannot be cut; a loss that is no scalar.
            PipelineError: another rank failed.
            LossNotFinite: a PipelineError too, but one after which the pipeline can go on: `.grad` is of no use,
                `find_not_finite` says where it began.
        """
        call = self._start_call("step", inputs)
        step = Step(self.step_index, self._seed, self.plan.num_layers, with_graph=True, with_loss=True, scale=scale)
        if call.error is None and call.first_backward >= self.plan.num_stages and self.is_last:
            raise self._fail(ValueError("nothing in the model needs a gradient: no parameter has requires_grad=True"))
        self._execute(call, step, inputs, targets)
        recording, peak, index = self._lanes.recording(), self._meter.peak_bytes, self.step_index
        self._last_report = lambda: measure_rank(
            self._world.rank, index, recording(), self._clock, self._stages, peak, self._world.device
        )
        self.step_index += 1
        self._unseen = recording
        if self._world.device.type == "cpu":
            self._emit_events()
        return self._loss_of(step)

    def _emit_events(self) -> None:
        """Hand over the events of the last step; on a GPU, when the next one starts, so that nothing waits for them."""
        recording, self._unseen = self._unseen, None
        if recording is not None and self._on_event is not None:
            for event in recording():
                self._on_event(event)

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """The loss of a batch of any size, on every rank; layers in eval mode, no gradients."""
        modes = [(module, module.training) for layer in self._layers().values() for module in layer.modules()]
        training, self._training = self._training, False
        try:
            for module, _ in modes:
                module.training = False
            call = self._start_call("evaluate", inputs)
            step = Step(self.step_index, self._seed, self.plan.num_layers, with_graph=False, with_loss=True)
            self._execute(call, step, inputs, targets)
            return self._loss_of(step)
        finally:
            self._training = training
            for module, mode in modes:
                module.training = mode

    def __call__(self, inputs: Any = None) -> Any:
        """The output of the model on the last stage's rank, without a graph; None on the others."""
        call = self._start_call("call", inputs)
        step = Step(self.step_index, self._seed, self.plan.num_layers, with_graph=False, with_loss=False)
        self._execute(call, step, inputs, None)
        return join([step.outputs[number] for number in range(call.num_microbatches)]) if self.is_last else None

    def find_not_finite(self, inputs: Any = None, targets: Any = None) -> Diagnosis:
        """Repeat the last step on its batch and say where the first value that is not finite appears. Collective.

        Dropout draws the same, buffers stay as they are; the gradients are dropped, before and after. It costs a step.
        """
        call = self._start_call("step", inputs)
        watch = FiniteWatch(self._world.rank, self._stages)
        step = Step(
            self.step_index - 1,
            self._seed,
            self.plan.num_layers,
            with_graph=True,
            with_loss=True,
            on_layer=watch.on_layer,
        )
        self.zero_grad()
        with watch:
            self._execute(call, step, inputs, targets)
        losses_of = {number: float(loss) / step.weights[number] for number, loss in step.outputs.items()}
        own = watch.as_json(inputs if self.is_first else None, losses_of)
        self.zero_grad()
        return Diagnosis.of(self._chain.concatenate(own, "what is not finite"))

    def _start_call(self, kind: str, inputs: Any) -> Call:
        """Agree on what is called: rank 0 says so down the chain."""
        if self._closed:
            raise PipelineError("the pipeline is closed")
        if self._monitor.failure is not None:
            raise PipelineError(f"the pipeline failed before and cannot go on: {self._monitor.failure}")
        self._emit_events()
        asked = None
        if self.is_first:
            most = self.plan.num_microbatches
            asked = {
                "first_backward": self.plan.num_stages,
                **self._signatures.ask(kind, inputs, most, self._training),
            }
        what = f"{kind} {self.step_index}"
        received: dict[str, Any] = {}

        def amend(header: dict[str, Any]) -> None:
            received.update(header)
            self._signatures.amend(header, self._stages, self.plan)

        amended = self._chain.relay(asked, amend, what)
        if amended["error"]:
            raise ValueError(amended["error"])
        if self.plan.num_stages > self.plan.num_ranks:
            # Ranks are neighbours in a ring then, and a later one holds an earlier stage: only the last has heard of all.
            heard = torch.tensor([amended["first_backward"], amended["described"]], dtype=torch.int64)
            amended["first_backward"], amended["described"] = self._chain.from_last(heard, what).tolist()
            received["described"] = amended["described"] = bool(amended["described"])
        return Call.of(received, amended)

    def _execute(self, call: Call, step: Step, inputs: Any, targets: Any) -> None:
        m = call.num_microbatches
        try:
            if self.is_first:
                step.microbatches = cut(_to(inputs, self._world.device), m)
            if self.is_last and step.with_loss:
                if self._loss_fn is None:
                    raise ValueError("this Pipeline has no loss_fn, which step and evaluate need")
                targets = _to(targets, self._world.device)
                step.targets, step.weights = cut_targets(targets, call.rows, m, self._count_fn)
            self._meter.exclude(self._weights())
            if step.with_graph:
                self._meter.start_step()
            program = self._programs.training(call.first_backward) if step.with_graph else self._programs.inference(m)
            self._executor.done.clear()
            self._transport.start_step(
                self._signatures.forms(call.signature),
                described=(call.described_before, call.described_after),
                done=self._executor.done,
            )
            with generators_restored(self._world.device):
                self._executor.run(program, step)
        except BaseException as error:
            self._fail(error)
            raise

    def _loss_of(self, step: Step) -> Tensor:
        """The sum of the last rank's microbatch losses, in order, on every rank."""
        own = losses.summed(step.outputs) if self.is_last else losses.nothing()
        values = self._chain.from_last(own, f"the loss of step {step.index}")
        return losses.checked(values, step.index).to(self._world.device)

    def _fail(self, error: BaseException) -> BaseException:
        """A call failed on this rank: the pipeline cannot go on, and the other ranks are told."""
        line = (str(error).strip().splitlines() or [""])[0]
        self._monitor.fail(f"rank {self._world.rank} failed: {type(error).__name__}: {line}")
        return error

    def _abort(self) -> None:
        """Let go of everything that is held or waited for."""
        self._executor.drop()
        self._transport.abort()
        self._chain.abort()

    def _weights(self) -> Iterator[Tensor]:
        for stage in self._stages.values():
            for layer in stage.layers:
                yield from layer.parameters()
                yield from layer.buffers()

    # Parameters ---------------------------------------------------------------------------------------------------

    def _layers(self) -> dict[int, nn.Module]:
        return {number: layer for stage in self._stages.values() for number, layer in stage.layers_by_number().items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names of `nn.Sequential(*layers)`."""
        return weights.named_parameters(self._layers())

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
        self._training = mode
        for layer in self._layers().values():
            layer.train(mode)
        return self

    def eval(self) -> Pipeline:
        return self.train(False)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before. Collective.

        The norms of single tensors are summed in the whole model's parameter order, so that the result does not depend
        on the split.
        """
        parameters_of = {
            stage.index: [parameter for _, parameter in weights.named_parameters(stage.layers_by_number())]
            for stage in self._stages.values()
        }
        return clip_grad_norm(
            parameters_of, max_norm, lambda own: self._chain.concatenate(own, "the gradient norms"), self._world.device
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors, under the whole model's names."""
        return weights.state_dict(self._layers())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's tensors from `state`, which may hold the whole model's."""
        weights.load_state_dict(self._layers(), state)

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's tensors on the CPU of rank 0, None on the others. Collective."""
        gathered = self._gatherer.gather(self.state_dict())
        if gathered is None:
            return None
        return dict(sorted(gathered.items(), key=lambda item: int(item[0].split(".", 1)[0])))

    # Faults, for tests and drills ----------------------------------------------------------------------------------

    def before_ops(self, before: Callable[[Op, int], None] | None) -> None:
        """Call `before(op, step)` on this rank ahead of each op of a training step, None: no longer.

        An F, R or B is about to run then, a message about to be started. What it raises counts as raised by the op.
        """
        self._executor.before_op = before

    def disconnect(self, op: Op) -> None:
        """Break the connection that carries the message `op` (`0SEND_F1`), or all connections between stages of this rank
        where `op` is no message: as a network does, without a word to the other end."""
        self._transport.disconnect(op)

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
        parts = self._chain.gather(self.report.to_json(), "the reports")
        return None if parts is None else Report.of(map(RankReport.from_json, parts), self.schedule)

    # The end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and connections, and torch.distributed if it was initialised here."""
        if self._closed:
            return
        self._closed = True
        if self._monitor.failure is None:
            self._emit_events()
        self._transport.close()
        self._chain.close()
        self._world.leave()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        self.close()


def _to(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
