"""A model whose layers torch.compile compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from pipetrain.model.spec import ModelSpec


def with_compiled_layers(spec: ModelSpec, backend: str = "inductor") -> ModelSpec:
    """The model with each layer compiled when it first runs; names and weights stay.

    Layers of one kind run one code, with their weights as its inputs, so a kind is compiled once for all of a rank's layers: once for
    training, once for evaluation. A whole stage in one piece would be compiled anew for each split, and could not be seeded layer by layer.
    """

    def build(first: int, last: int, *, seed: int, device: torch.device) -> Sequence[nn.Module]:
        layers = spec.build_layers(first, last, seed=seed, device=device)
        for layer in layers:
            layer.compile(backend=backend)
        return layers

    return replace(spec, build_layers=build)
