"""What a training loop asks of an engine, whichever runtime is behind it, and the engine that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.config.records import DEEPSPEED, NATIVE, WEIGHTS_IN, RunConfig
from pipetrain.config.target import ENGINES, load_extension
from pipetrain.data.batch import Batch
from pipetrain.engine.available import check_engine
from pipetrain.models.sharing import ties_of
from pipetrain.models.spec import ModelSpec, with_compiled_layers, with_weights_in
from pipetrain.models.trained import Model, Optimizer
from pipetrain.monitor.step_report import StepFigures, StepResult
from pipetrain.plan.plan import Plan
from pipetrain.runtime.diagnosis import Diagnosis
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
        ...

    @property
    def optimizer(self) -> Optimizer:
        """What updates it."""
        ...

    def start_at(self, step: int) -> None:
        """The next step is number `step` (from 1): a run goes on."""
        ...

    def change(self, plan: Plan, schedule: Schedule) -> None:
        """The next steps are run by these: another phase of the run begins, with every layer where it is."""
        ...

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        """Forward, backward and, if that is accepted, optimizer step number `step` (from 1).

        `batch` has this replica's rows: what `torch.tensor_split` of a whole batch into replicas x microbatches gives it. The result is
        that of the whole batch, on every rank; `accepts` is asked about it by all.
        """
        ...

    def diagnose(self, batch: Batch) -> Diagnosis | None:
        """Repeats the last step, which was refused, on its batch, to see where it goes wrong; None: it cannot tell."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        """The mean loss over `batches`, which are whole, in nats per token, each token counted once; None where there are none."""
        ...

    def check_replicas(self) -> None:
        """Compares the weights of the replicas, which are to be the same. Collective.

        Raises:
            PipelineError: they are not; with the ranks that differ.
        """
        ...

    def gather_report(self) -> StepFigures | None:
        """What the last step did on all ranks; on rank 0."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's tensors of the model, under the whole model's names."""
        ...

    def close(self) -> None:
        """Gives back what the engine holds."""
        ...


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

    Raises:
        ValueError: a model without a loss, or one that the engine cannot cut so.
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
    from pipetrain.engine.native import NativeEngine

    is_native = config.engine.name == NATIVE
    make: type[NativeEngine] = NativeEngine if is_native else load_extension("engine.name", config.engine.name, ENGINES)
    return make(config, spec, plan, schedule, device=device, precision=precision, on_event=on_event)
