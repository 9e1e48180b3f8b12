"""A model whose layers torch.compile compiles."""

from __future__ import annotations

from pipetrain.model.spec import ModelSpec


def with_compiled_layers(spec: ModelSpec, backend: str = "inductor") -> ModelSpec:
    """The model with each layer compiled when it first runs; names and weights stay.

    Layers of one kind run one code, with their weights as its inputs, so a kind is compiled once for all of a rank's layers: once for
    training, once for evaluation. A whole stage in one piece would be compiled anew for each split, and could not be seeded layer by layer.
    """
    return spec.with_each_layer(lambda layer: layer.compile(backend=backend))
