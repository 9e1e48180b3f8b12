"""What a training loop asks of an engine, whichever runtime is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.config.records import WEIGHTS_IN
from pipetrain.data.batch import Batch
from pipetrain.models.trained import Model, Optimizer
from pipetrain.monitor.step_report import StepFigures, StepResult
from pipetrain.plan.plan import Plan
from pipetrain.runtime.diagnosis import Diagnosis
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
