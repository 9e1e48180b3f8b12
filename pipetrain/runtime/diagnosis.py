"""Where the first value that is not finite comes from: each layer's outputs and gradients are watched while a step is repeated.

Nothing of this runs in an ordinary step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from pipetrain.stage.segments import AnyStage


class Where(StrEnum):
    """In which of a layer's values it appears first; in the order in which a step makes them."""

    OUTPUT = "output"  # of its forward
    GRADIENT = "gradient"  # that its backward gives: of its input, or of its parameters
    SUM = "sum of gradients"  # of its parameters over the microbatches, each of which is finite


@dataclass(frozen=True)
class Sighting:
    """A value that is not finite. Layers count over the whole model; the loss comes after the last one."""

    where: Where
    microbatch: int  # -1: of no single one
    layer: int
    replica: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Smallest first: forward before backward, microbatch by microbatch; B runs from the last layer to the first."""
        layer = self.layer if self.where is Where.OUTPUT else -self.layer
        return list(Where).index(self.where), self.microbatch, layer


@dataclass(frozen=True)
class LayerPlace:
    """Which layer it is, where it lives, and which of its weights are not finite."""

    name: str  # its type, or `loss_fn`
    stage: int
    rank: int
    bad_weights: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """The first value that is not finite, and what is known of how it came there."""

    where: Where
    microbatch: int | None  # None: of no single one
    layer: int
    layer_name: str
    stage: int
    rank: int
    cause: str

    @property
    def text(self) -> str:
        """For a message: the value, the layer, the microbatch and the cause."""
        layer = "the loss" if self.layer_name == "loss_fn" else f"layer {self.layer} ({self.layer_name})"
        value = "output" if self.where is Where.OUTPUT else "gradient"
        microbatch = "" if self.microbatch is None else f" in microbatch {self.microbatch}"
        return (
            f"{layer} of stage {self.stage} on rank {self.rank} gives the first such {value}{microbatch}; {self.cause}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """What a repeated step showed; the same on every rank. `losses` per microbatch; None where one is not finite."""

    finding: Finding | None  # None: everything is finite
    losses: Mapping[int, float | None]

    @staticmethod
    def of(parts: Iterable[bytes]) -> Diagnosis:
        """From what `FiniteWatch.as_json` gave on each rank."""
        seen: list[Sighting] = []
        places: dict[tuple[int, int], LayerPlace] = {}  # by replica and layer
        losses: dict[int, float | None] = {}
        inputs_are_finite = True
        for record in map(json.loads, parts):
            replica = record["replica"]
            seen += [Sighting(Where(where), number, layer, replica) for where, number, layer in record["seen"]]
            places |= {(replica, int(number)): LayerPlace(**place) for number, place in record["places"].items()}
            losses |= {int(number): loss for number, loss in record["losses"].items()}
            inputs_are_finite &= record["inputs_are_finite"]
        if not seen:
            return Diagnosis(None, losses)
        first = min(seen, key=lambda sighting: sighting.order)
        place = places[first.replica, first.layer]
        finding = Finding(
            where=first.where,
            microbatch=first.microbatch if first.microbatch >= 0 else None,
            layer=first.layer,
            layer_name=place.name,
            stage=place.stage,
            rank=place.rank,
            cause=_cause(first, place, inputs_are_finite),
        )
        return Diagnosis(finding, losses)


class FiniteWatch:
    """Sees every layer of one rank while a step runs in its `with` block. Waits for the device at each: not for the hot path.

    `replica` is the rank's; its microbatches count from `first_microbatch` among those of all.
    """

    def __init__(self, rank: int, stages: Mapping[int, AnyStage], replica: int = 0, first_microbatch: int = 0) -> None:
        self._rank = rank
        self._replica = replica
        self._first = first_microbatch
        self._stages = stages
        self._layers = {
            number: layer for stage in stages.values() for number, layer in stage.layers_by_number().items()
        }
        self._seen: list[Sighting] = []
        self._microbatch = 0  # whose B runs; those of one rank run one after the other
        self._handles: list[RemovableHandle] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        for number, layer in self._layers.items():
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in layer.buffers()]
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(partial(self._on_parameter, number)))  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def on_layer(self, microbatch: int, layer: int, output: Any) -> None:
        """Layer number `layer` has given `output` in F of `microbatch`."""
        for tensor in _floats(output):
            if not _is_finite(tensor):
                self._seen.append(Sighting(Where.OUTPUT, microbatch, layer))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_output_gradient, microbatch, layer))  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, microbatch: int, layer: int, gradient: Tensor) -> None:
        self._microbatch = microbatch
        if not _is_finite(gradient):
            self._seen.append(Sighting(Where.GRADIENT, microbatch, layer + 1))  # which sent it

    def _on_parameter(self, layer: int, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            self._seen.append(Sighting(Where.GRADIENT, self._microbatch, layer))

    def as_json(self, inputs: Any, losses: Mapping[int, float]) -> bytes:
        """What this rank saw: its part of a `Diagnosis`. `inputs` are the batch, on the first stage's rank."""
        seen = self._seen or self._sums()
        first = min(seen, key=lambda sighting: sighting.order, default=None)
        record = {
            "replica": self._replica,
            "seen": [] if first is None else [(first.where, self._number(first.microbatch), first.layer)],
            "places": {number: asdict(place) for number, place in self._places().items()},
            "losses": {self._number(number): loss if math.isfinite(loss) else None for number, loss in losses.items()},
            "inputs_are_finite": all(map(_is_finite, _floats(inputs))),
        }
        return json.dumps(record).encode()

    def _number(self, microbatch: int) -> int:
        return microbatch if microbatch < 0 else self._first + microbatch

    def _sums(self) -> list[Sighting]:
        return [
            Sighting(Where.SUM, -1, number)
            for number, layer in self._layers.items()
            if any(parameter.grad is not None and not _is_finite(parameter.grad) for parameter in layer.parameters())
        ]

    def _places(self) -> dict[int, LayerPlace]:
        places = {}
        for index, stage in self._stages.items():
            for number, layer in stage.layers_by_number().items():
                places[number] = LayerPlace(type(layer).__name__, index, self._rank, _bad_weights(layer))
            if stage.loss_fn is not None:
                places[stage.first_layer + len(stage.layers)] = LayerPlace("loss_fn", index, self._rank, ())
        return places


def _cause(first: Sighting, place: LayerPlace, inputs_are_finite: bool) -> str:
    if place.bad_weights:
        return f"its own weights are not finite ({', '.join(place.bad_weights[:3])})"
    if first.where is Where.SUM:
        return "that of each microbatch is finite: their sum overflows"
    if first.layer == 0 and first.where is Where.OUTPUT and not inputs_are_finite:
        return "the inputs of the batch are not finite"
    return "what goes into it is finite, and so are its weights: the value overflows there"


def _bad_weights(layer: nn.Module) -> tuple[str, ...]:
    """Parameters only: a running mean that is not finite may be what the bad batch left behind, and not the cause."""
    return tuple(name for name, value in layer.named_parameters() if not _is_finite(value))


def _floats(tree: Any) -> list[Tensor]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
