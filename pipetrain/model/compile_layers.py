"""A model whose layers torch.compile compiles."""

from __future__ import annotations

from torch import nn

from pipetrain.model.spec import ModelSpec


def with_compiled_layers(spec: ModelSpec, backend: str = "inductor") -> ModelSpec:
    """The model with each layer compiled when it first runs; names and weights stay.

    Layers of one kind run one code, with their weights as its inputs, so a kind is compiled once for all of a rank's layers: once for
    training, once for evaluation. A whole stage in one piece would be compiled anew for each split, and could not be seeded layer by layer.
    A layer of which only parts can be compiled has a method `parts_to_compile` that returns these modules.
    """

    def compile_layer(layer: nn.Module) -> None:
        own = getattr(layer, "parts_to_compile", None)
        parts = (layer,) if own is None else own()
        for part in parts:
            part.compile(backend=backend)

    return spec.with_each_layer(compile_layer)
