"""pipetrain's own runtime as an engine: a `Pipeline` and an optimizer on its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from pipetrain.config.records import CPU_ADAM, OptimConfig, RunConfig
from pipetrain.config.target import OP_HANDLERS, load_extension
from pipetrain.data.batch import Batch
from pipetrain.engine.engine import Accepts, Precision
from pipetrain.models.spec import ModelSpec
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


class NativeEngine:
    """Trains the model of `spec` over the ranks of torch.distributed, by the optimizer, seed and time-out of `config`.

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
        self._pipeline = Pipeline(
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
        inject(self._pipeline, faults_of_environment())
        replicas = self._pipeline.replica_process_group() if config.parallel.zero_stage else None
        self._optimizer = make_optimizer(
            config.optim, self._pipeline.parameters(), replicas, _adamw_of(config.optim, device)
        )

    @property
    def model(self) -> Pipeline:
        return self._pipeline

    @property
    def optimizer(self) -> Updates:
        return self._optimizer

    def start_at(self, step: int) -> None:
        self._pipeline.step_index = step - 1

    def change(self, plan: Plan, schedule: Schedule) -> None:
        self._pipeline.change(num_microbatches=plan.num_microbatches, schedule=schedule)

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        rate = learning_rate(self._config.optim, step, self._config.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, norm = self._backward(batch)
        is_accepted = accepts(step, loss, norm)
        if is_accepted:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return StepResult(loss, rate, norm, is_accepted)

    def _backward(self, batch: Batch) -> tuple[float, float | None]:
        """Loss and gradient norm; clips. The norm is taken where nothing is clipped, too: it shows whether a gradient is finite."""
        clip_norm = self._config.optim.max_grad_norm
        try:
            with self._precision.context(self._device):
                loss = self._pipeline.step(batch.inputs, batch.targets)
        except LossNotFinite as error:
            return error.loss, None
        norm = self._pipeline.clip_grad_norm_(math.inf if clip_norm is None else clip_norm)
        return float(loss), float(norm)

    def diagnose(self, batch: Batch) -> Diagnosis:
        with self._precision.context(self._device):
            return self._pipeline.find_not_finite(batch.inputs, batch.targets)

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        total = num_counted = 0.0
        for batch in batches:
            # of a rank that reads no targets the sum is not asked for
            count = 0 if batch.targets is None else self._spec.count(batch.targets)
            # of fewer rows than replicas each evaluates all: the mean over what all of them counted is the same
            rows = num_rows(batch, "a batch")
            own = batch if rows is None or rows < self._pipeline.num_replicas else self._pipeline.own_rows(batch)
            with self._precision.context(self._device):
                loss = self._pipeline.evaluate(*own)
            total += float(loss) * count if count else 0.0
            num_counted += count
        return total / num_counted if num_counted else None

    def check_replicas(self) -> None:
        self._pipeline.check_replicas()

    def gather_report(self) -> StepFigures | None:
        report = self._pipeline.gather_report()
        return None if report is None else StepFigures(report.step_seconds, report.peak_memory_bytes, report)

    def weights(self) -> Mapping[str, Tensor]:
        return self._pipeline.state_dict()

    def close(self) -> None:
        self._pipeline.close()


def _adamw_of(config: OptimConfig, device: torch.device) -> MakeAdamW | None:
    """None: torch's."""
    if config.name != CPU_ADAM:
        return None
    # Imported here: it takes seconds, and may not be installed.
    from pipetrain.engine.deepspeed.environment import import_deepspeed

    import_deepspeed(device)
    from pipetrain.engine.deepspeed.adam import host_adam

    return host_adam
