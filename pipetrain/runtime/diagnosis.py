"""Finds the first value that is not finite: a step is repeated, and each layer's outputs and gradients are checked.

An ordinary step runs none of this code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.stage.segments import AnyStage


class Where(StrEnum):
    """Which value of a layer is the first that is not finite. The members are in the order in which a step computes them."""

    OUTPUT = "output"  # of its forward
    GRADIENT = "gradient"  # of its input, or of a parameter, in one microbatch
    SUM = "sum of gradients"  # of a parameter over the microbatches; the gradient of each microbatch is finite


# (kind of value, microbatch or -1 for none, layer in the whole model); the loss counts as one more layer, after the last.
_Seen = tuple[Where, int, int]


def _order(seen: _Seen) -> tuple[int, int, int]:
    """A key for sorting: forward before backward, then by microbatch, then by layer; B runs from the last layer to the first."""
    where, microbatch, layer = seen
    return list(Where).index(where), microbatch, layer if where is Where.OUTPUT else -layer


@dataclass(frozen=True)
class Finding:
    """The first value that is not finite, and what is known of its cause."""

    where: Where
    microbatch: int | None  # None: the value belongs to no single microbatch
    layer: int
    layer_name: str  # its type, or `loss_fn`
    stage: int
    rank: int
    cause: str

    @property
    def text(self) -> str:
        """For a message: the value, the layer, the microbatch and the cause."""
        layer = "the loss" if self.layer_name == "loss_fn" else f"layer {self.layer} ({self.layer_name})"
        what = "output" if self.where is Where.OUTPUT else "gradient"
        where = "" if self.microbatch is None else f" in microbatch {self.microbatch}"
        return f"{layer} of stage {self.stage} on rank {self.rank} gives the first {what} that is not finite{where}; {self.cause}"


@dataclass(frozen=True)
class Diagnosis:
    """The result of a repeated step, the same on every rank. `losses` has the loss of each microbatch, None if it is not finite."""

    finding: Finding | None  # None: everything is finite
    losses: Mapping[int, float | None]

    @staticmethod
    def of(parts: Iterable[bytes]) -> Diagnosis:
        """Make the diagnosis from what `FiniteWatch.as_json` returned on each rank."""
        records = [json.loads(part) for part in parts]
        losses = {int(number): loss for record in records for number, loss in record["losses"].items()}
        found = [
            (_order((Where(where), microbatch, layer)), record["replica"], where)
            for record in records
            for where, microbatch, layer in record["seen"]
        ]
        if not found:
            return Diagnosis(None, losses)
        (_, microbatch, signed), replica, where = min(found)
        layer = abs(signed)
        # A rank sees the gradient of its stage's output, which the next stage's first layer computed: look for the layer on all ranks.
        name, stage, rank, bad_weights = next(
            record["layers"][str(layer)]
            for record in records
            if record["replica"] == replica and str(layer) in record["layers"]
        )
        if bad_weights:
            cause = f"its own weights are not finite ({', '.join(bad_weights[:3])})"
        elif where == Where.SUM:
            cause = "the gradient of each microbatch is finite, but their sum overflows"
        elif layer == 0 and where == Where.OUTPUT and not all(record["inputs_are_finite"] for record in records):
            cause = "the inputs of the batch are not finite"
        else:
            cause = "its inputs and its weights are finite: the value overflows there"
        finding = Finding(Where(where), None if microbatch < 0 else microbatch, layer, name, stage, rank, cause)
        return Diagnosis(finding, losses)


class FiniteWatch:
    """Checks each layer's output and gradients on one rank, in a step within `over`. Each check waits for the device, so an ordinary step
    has none. `replica` is the rank's replica; `first_microbatch` is the number of its first microbatch among those of all replicas."""

    def __init__(self, rank: int, stages: Mapping[int, AnyStage], replica: int, first_microbatch: int) -> None:
        self._rank, self._replica, self._first, self._stages = rank, replica, first_microbatch, stages
        self._layers = dict(pair for stage in stages.values() for pair in enumerate(stage.layers, stage.first_layer))
        self._seen: list[_Seen] = []
        self._microbatch = 0  # the one whose B runs; a rank runs one B after the other

    @contextmanager
    def over(self) -> Iterator[None]:
        """Check a step that runs in the block; restores buffers at its end."""
        buffers = [(one, one.detach().clone()) for layer in self._layers.values() for one in layer.buffers()]
        handles = [
            parameter.register_hook(partial(self._on_gradient, None, number))  # type: ignore[no-untyped-call]
            for number, layer in self._layers.items()
            for parameter in layer.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def on_layer(self, microbatch: int, layer: int, output: Any) -> None:
        """Check `output` of layer number `layer` in F of `microbatch`, and in B the gradient of `output`."""
        for tensor in _floats(output):
            if not _is_finite(tensor):
                self._seen.append((Where.OUTPUT, microbatch, layer))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, microbatch, layer + 1))  # type: ignore[no-untyped-call]

    def _on_gradient(self, microbatch: int | None, layer: int, gradient: Tensor) -> None:
        """Check a gradient of the input of `layer`, or, if `microbatch` is None, of one of its parameters."""
        self._microbatch = self._microbatch if microbatch is None else microbatch
        if not _is_finite(gradient):
            self._seen.append((Where.GRADIENT, self._microbatch, layer))

    def as_json(self, inputs: Any, losses: Mapping[int, float]) -> bytes:
        """Return what this rank saw: its part of a `Diagnosis`. `inputs` is the batch on the first stage's rank."""
        seen = self._seen or [
            (Where.SUM, -1, number)
            for number, layer in self._layers.items()
            if any(one.grad is not None and not _is_finite(one.grad) for one in layer.parameters())
        ]
        layers: dict[int, tuple[str, int, int, list[str]]] = {}
        for index, stage in self._stages.items():
            for number, layer in enumerate(stage.layers, stage.first_layer):
                # Not buffers: if a running mean is not finite, the bad batch may be the cause of it.
                bad_weights = [name for name, value in layer.named_parameters() if not _is_finite(value)]
                layers[number] = type(layer).__name__, index, self._rank, bad_weights
            if stage.loss_fn is not None:
                layers[stage.first_layer + len(stage.layers)] = "loss_fn", index, self._rank, []
        record = {
            "replica": self._replica,
            "seen": [
                (where, microbatch if microbatch < 0 else self._first + microbatch, layer)
                for where, microbatch, layer in sorted(seen, key=_order)[:1]
            ],
            "layers": layers,
            "losses": {self._first + number: loss if math.isfinite(loss) else None for number, loss in losses.items()},
            "inputs_are_finite": all(map(_is_finite, _floats(inputs))),
        }
        return json.dumps(record).encode()


def _floats(tree: Any) -> list[Tensor]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
