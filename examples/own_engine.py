"""An engine of your own: `pipetrain train engine.name=examples.own_engine:WithAverage`, or an entry point of `pipetrain.engines`."""

from typing import Any

from pipetrain.engine.engine import NativeEngine


class WithAverage(NativeEngine):  # an engine has the methods of pipetrain.engine.engine.Engine
    """Trains as `native` does, with the same losses; the held-out loss is that of a moving average of the weights."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._average = [weight.detach().clone() for weight in self.model.parameters()]

    def step(self, *arguments: Any) -> Any:
        result = super().step(*arguments)
        for average, weight in zip(self._average, self.model.parameters()):
            average.lerp_(weight.detach(), 0.1)
        return result

    def evaluate(self, *arguments: Any) -> Any:
        self._swap()
        loss = super().evaluate(*arguments)
        self._swap()
        return loss

    def _swap(self) -> None:
        for number, weight in enumerate(self.model.parameters()):
            self._average[number], weight.data = weight.data, self._average[number]
