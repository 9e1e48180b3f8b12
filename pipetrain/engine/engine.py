"""What a training loop asks of an engine, whichever runtime is behind it; pipetrain's own; and the one that the configuration names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.config.records import CPU_ADAM, DEEPSPEED, NATIVE, WEIGHTS_IN, OptimConfig, RunConfig
from pipetrain.config.target import ENGINES, OP_HANDLERS, load_extension
from pipetrain.data.batch import Batch
from pipetrain.engine.available import check_engine
from pipetrain.models.sharing import ties_of
from pipetrain.models.spec import ModelSpec, with_compiled_layers, with_weights_in
from pipetrain.models.trained import Model, Optimizer
from pipetrain.monitor.step_report import StepFigures, StepResult
from pipetrain.optim.optimizer import MakeAdamW, Updates, learning_rate, make_optimizer
from pipetrain.plan.plan import Plan
from pipetrain.runtime.cut import num_rows
from pipetrain.runtime.diagnosis import Diagnosis
from pipetrain.runtime.faults import faults_of_environment, inject
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.schedule import Schedule

# Given step, loss and global gradient norm (None: the loss is not finite): whether they may change the weights.
Accepts = Callable[[int, float, float | None], bool]


@dataclass(frozen=True)
class Precision:
    """weights: the dtype of parameters, and of layers where there is no autocast. autocast: matrix products in bfloat16."""

    weights: torch.dtype
    autocast: bool

    def context(self, device: torch.device) -> torch.autocast:
        """Within it forwards, backwards and losses run as this precision says."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast)


def precision_of(word: str, device: torch.device) -> Precision:
    """That of the key `precision` on `device`; `auto` is bfloat16 by autocast on a GPU, and float32 on the CPU."""
    if word == "auto":
        word = "bf16-mixed" if device.type == "cuda" else "fp32"
    return Precision(getattr(torch, WEIGHTS_IN[word]), autocast=word == "bf16-mixed")


class Engine(Protocol):
    """A model that is being trained. Every rank calls the same methods in the same order."""

    @property
    def model(self) -> Model:
        """This rank's part of the model, under the whole model's names."""

    @property
    def optimizer(self) -> Optimizer:
        """What updates it."""

    def start_at(self, step: int) -> None:
        """The next step is number `step` (from 1): a run goes on."""

    def change(self, plan: Plan, schedule: Schedule) -> None:
        """The next steps are run by these: another phase of the run begins, with every layer where it is."""

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        """Forward, backward and, if that is accepted, optimizer step number `step` (from 1).

        `batch` has this replica's rows: what `torch.tensor_split` of a whole batch into replicas x microbatches gives it. The result is
        that of the whole batch, on every rank; `accepts` is asked about it by all.
        """

    def diagnose(self, batch: Batch) -> Diagnosis | None:
        """Repeats the last step, which was refused, on its batch, to see where it goes wrong; None: it cannot tell."""

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        """The mean loss over `batches`, which are whole, in nats per token, each token counted once; None where there are none."""

    def check_replicas(self) -> None:
        """Compares the weights of the replicas, which are to be the same. Collective.

        Raises PipelineError: they are not; with the ranks that differ.
        """

    def gather_report(self) -> StepFigures | None:
        """What the last step did on all ranks; on rank 0."""

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's tensors of the model, under the whole model's names."""

    def close(self) -> None:
        """Gives back what the engine holds."""


class NativeEngine:
    """pipetrain's own runtime: trains the model of `spec` over the ranks of torch.distributed, by the optimizer, seed and time-out of `config`.

    The weights of `spec` are in the dtype of `precision` already. `on_event` is given every `OpEvent`, after its step.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: ModelSpec,
        plan: Plan,
        schedule: Schedule,
        *,
        device: torch.device,
        precision: Precision,
        on_event: Callable[[OpEvent], None] | None = None,
    ) -> None:
        handler = config.pipeline.on_call
        self._spec = spec
        self._config = config
        self._device = device
        self._precision = precision
        self.model = Pipeline(
            spec,
            plan=plan,
            schedule=schedule,
            recompute=schedule.policy,
            device=device,
            seed=config.seed,
            timeout_seconds=config.timeout_seconds,
            on_event=on_event,
            on_call=None if handler is None else load_extension("pipeline.on_call", handler, OP_HANDLERS),
        )
        inject(self.model, faults_of_environment())
        replicas = self.model.replica_process_group() if config.parallel.zero_stage else None
        self.optimizer: Updates = make_optimizer(
            config.optim, self.model.parameters(), replicas, _adamw_of(config.optim, device)
        )

    def start_at(self, step: int) -> None:
        self.model.step_index = step - 1

    def change(self, plan: Plan, schedule: Schedule) -> None:
        self.model.change(num_microbatches=plan.num_microbatches, schedule=schedule)

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        rate = learning_rate(self._config.optim, step, self._config.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, norm = self._backward(batch)
        is_accepted = accepts(step, loss, norm)
        if is_accepted:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss, rate, norm, is_accepted)

    def _backward(self, batch: Batch) -> tuple[float, float | None]:
        """Loss and gradient norm; clips. The norm is taken where nothing is clipped, too: it shows whether a gradient is finite."""
        clip_norm = self._config.optim.max_grad_norm
        try:
            with self._precision.context(self._device):
                loss = self.model.step(batch.inputs, batch.targets)
        except LossNotFinite as error:
            return error.loss, None
        norm = self.model.clip_grad_norm_(math.inf if clip_norm is None else clip_norm)
        return float(loss), float(norm)

    def diagnose(self, batch: Batch) -> Diagnosis:
        with self._precision.context(self._device):
            return self.model.find_not_finite(batch.inputs, batch.targets)

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        total = num_counted = 0.0
        for batch in batches:
            # of a rank that reads no targets the sum is not asked for
            count = 0 if batch.targets is None else self._spec.count(batch.targets)
            # of fewer rows than replicas each evaluates all: the mean over what all of them counted is the same
            rows = num_rows(batch, "a batch")
            own = batch if rows is None or rows < self.model.num_replicas else self.model.own_rows(batch)
            with self._precision.context(self._device):
                loss = self.model.evaluate(*own)
            total += float(loss) * count if count else 0.0
            num_counted += count
        return total / num_counted if num_counted else None

    def check_replicas(self) -> None:
        self.model.check_replicas()

    def gather_report(self) -> StepFigures | None:
        report = self.model.gather_report()
        return None if report is None else StepFigures.of(report)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def close(self) -> None:
        self.model.close()


def _adamw_of(config: OptimConfig, device: torch.device) -> MakeAdamW | None:
    """None: torch's."""
    if config.name != CPU_ADAM:
        return None
    # Imported here: it takes seconds, and may not be installed.
    from pipetrain.engine.deepspeed.environment import import_deepspeed

    import_deepspeed(device)
    from pipetrain.engine.deepspeed.adam import host_adam

    return host_adam


def make_engine(
    config: RunConfig,
    spec: ModelSpec,
    plan: Plan,
    schedule: Schedule,
    *,
    device: torch.device,
    on_event: Callable[[OpEvent], None],
) -> Engine:
    """An engine that trains the model of `spec` by this plan, with the weights of `config.seed`, in `config.precision`.

    DeepSpeed's tells of no ops, so `on_event` hears nothing from it, and takes the policy of the schedule, not its order.

    Raises ValueError: a model without a loss, or one that the engine cannot cut so.
    """
    if spec.loss_fn is None:
        raise ValueError("a model without a loss cannot be trained: its ModelSpec needs a loss_fn")
    check_engine(config, plan.num_replicas, plan.tied_stages(tie.layers for tie in ties_of(spec.tied, plan.stage_of)))
    precision = precision_of(config.precision, device)
    spec = with_weights_in(spec, precision.weights)
    if config.model.compile:
        spec = with_compiled_layers(spec)
    if config.engine.name == DEEPSPEED:
        # Imported here: it takes seconds, and may not be installed.
        from pipetrain.engine.deepspeed.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, spec, plan, schedule, device=device, precision=precision)
    is_native = config.engine.name == NATIVE
    make: type[NativeEngine] = NativeEngine if is_native else load_extension("engine.name", config.engine.name, ENGINES)
    return make(config, spec, plan, schedule, device=device, precision=precision, on_event=on_event)
