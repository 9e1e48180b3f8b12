"""A model whose weights are in another dtype than its family draws or reads them in."""

from __future__ import annotations

import torch
from torch import nn

from pipetrain.model.spec import ModelSpec


def with_weights_in(spec: ModelSpec, dtype: torch.dtype) -> ModelSpec:
    """The model with its floating-point weights in `dtype`, which are the same whatever the split: each is rounded after it is made.

    Buffers stay: a layer knows what its statistics and tables need, and tables of positions need float32.
    """

    def cast(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    return spec.with_each_layer(cast)
