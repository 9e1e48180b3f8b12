"""An engine of your own: `pipetrain train engine.name=examples.own_engine:WithAverage` evaluates a moving average of the weights.

An engine has the methods of `pipetrain.engine.engine.Engine` and is made with the arguments of `NativeEngine`. A package gives it a name
with an entry point of `pipetrain.engines`.
"""

from collections.abc import Iterable
from typing import Any

from pipetrain.data.batch import Batch
from pipetrain.engine.engine import Accepts
from pipetrain.engine.native import NativeEngine
from pipetrain.monitor.step_report import StepResult


class WithAverage(NativeEngine):
    """Trains as `native` does, with the same losses; the held-out loss is that of the average."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._average = [weight.detach().clone() for weight in self.model.parameters()]

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        result = super().step(step, batch, accepts)
        for average, weight in zip(self._average, self.model.parameters()):
            average.lerp_(weight.detach(), 0.1)
        return result

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        self._swap()
        loss = super().evaluate(batches)
        self._swap()
        return loss

    def _swap(self) -> None:
        for number, weight in enumerate(self.model.parameters()):
            self._average[number], weight.data = weight.data, self._average[number]
