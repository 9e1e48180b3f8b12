"""Refuses `.backward()` inside a forward: in a pipeline the forwards of a step stand in another order than in the plain loop.

It adds to `.grad`, and sums of floats depend on their order; R would add a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pipetrain.stage.slots import LayerRefused

_Seen = list[tuple[Tensor | None, int]]


class GradWatch:
    """Compares `.grad` of a stage's parameters around a layer, where `start` was called before or inside of it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._before: _Seen | None = None

    def start(self) -> None:
        if self._before is None:
            self._before = self._now()

    def clear(self) -> None:
        self._before = None

    def check(self, layer: str) -> None:
        """`layer` has ended.

        Raises:
            LayerRefused: a gradient has changed since `start`.
        """
        before, self._before = self._before, None
        if before is None:
            return
        if any(new is not old or version != was for (new, version), (old, was) in zip(self._now(), before)):
            raise LayerRefused(
                f"{layer} calls backward() in its forward, which adds to .grad: gradients come from the loss alone. Return the "
                "local loss with the output and add it in loss_fn, or take its gradient with torch.autograd.grad"
            )

    def _now(self) -> _Seen:
        gradients = [parameter.grad for layer in self._layers for parameter in layer.parameters()]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
