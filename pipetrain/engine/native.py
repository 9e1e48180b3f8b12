"""pipetrain's own runtime as an engine: a `Pipeline` and an optimizer on its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pipetrain.config.records import RunConfig
from pipetrain.engine.engine import Accepts, Batch, StepFigures, StepResult
from pipetrain.engine.optimizer import learning_rate, make_optimizer
from pipetrain.model.loss import count_tokens, next_token_loss
from pipetrain.model.transformer import transformer_layers
from pipetrain.plan.plan import Plan
from pipetrain.runtime.diagnosis import Diagnosis
from pipetrain.runtime.faults import faults_of_environment, inject
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.events import OpEvent
from pipetrain.schedule.schedule import Schedule


class NativeEngine:
    """Trains the transformer of `config.model` over the ranks of torch.distributed."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        schedule: Schedule,
        *,
        vocabulary_size: int,
        device: torch.device,
        on_event: Callable[[OpEvent], None] | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._pipeline = Pipeline(
            transformer_layers(config.model, vocabulary_size),
            next_token_loss,
            num_microbatches=plan.num_microbatches,
            schedule=schedule,
            recompute=schedule.policy,
            balance=list(plan.balance),
            num_stages=plan.num_stages,
            stages_per_rank=config.pipeline.stages_per_rank,
            device=device,
            seed=config.seed,
            count_fn=count_tokens,
            timeout_seconds=config.timeout_seconds,
            on_event=on_event,
        )
        inject(self._pipeline, faults_of_environment())
        self._optimizer = make_optimizer(config.optim, self._pipeline.parameters())

    @property
    def model(self) -> Pipeline:
        return self._pipeline

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def start_at(self, step: int) -> None:
        self._pipeline.step_index = step - 1

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        rate = learning_rate(self._config.optim, step, self._config.steps)
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
        clip_norm = self._config.optim.clip_norm
        try:
            with self._autocast():
                loss = self._pipeline.step(*self._here(batch))
        except LossNotFinite as error:
            return error.loss, None
        norm = self._pipeline.clip_grad_norm_(math.inf if clip_norm is None else clip_norm)
        return float(loss), float(norm)

    def diagnose(self, batch: Batch) -> Diagnosis:
        with self._autocast():
            return self._pipeline.find_not_finite(*self._here(batch))

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        total, num_tokens = 0.0, 0
        for inputs, targets in batches:
            with self._autocast():
                loss = self._pipeline.evaluate(*self._here((inputs, targets)))
            tokens = count_tokens(targets)
            total += float(loss) * tokens
            num_tokens += tokens
        return total / num_tokens if num_tokens else None

    def gather_report(self) -> StepFigures | None:
        report = self._pipeline.gather_report()
        return None if report is None else StepFigures(report.step_seconds, report.peak_memory_bytes, report)

    def weights(self) -> dict[str, Tensor] | None:
        return self._pipeline.full_state_dict()

    def close(self) -> None:
        self._pipeline.close()

    def _here(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Inputs where the first stage needs them and targets where the last does, on this rank's device."""
        inputs, targets = batch
        return (
            inputs.to(self._device, non_blocking=True) if self._pipeline.is_first else None,
            targets.to(self._device, non_blocking=True) if self._pipeline.is_last else None,
        )

    def _autocast(self) -> torch.autocast:
        """bfloat16 on a GPU, full precision on the CPU."""
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda")
