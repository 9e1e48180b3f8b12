"""How large a model is, as far as its config tells. Without torch, for whoever plans a run before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipetrain.config.records import ModelConfig
from pipetrain.model.arithmetic import forward_flops_per_layer, parameters_per_layer
from pipetrain.model.style import check_model


@dataclass(frozen=True)
class ModelSize:
    """The layers of a model in numbers, an entry per layer, in order. What is not known is None.

    Layers of one kind (`block`) do the same work; a layer like no other has a kind of its own.
    """

    num_layers: int
    kinds: tuple[str, ...] | None = None
    flops_per_layer: tuple[float, ...] | None = (
        None  # of one token's forward, a multiplication and an addition being two
    )
    parameters_per_layer: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("kinds", "flops_per_layer", "parameters_per_layer"):
            entries = getattr(self, name)
            assert entries is None or len(entries) == self.num_layers, f"{name} has {len(entries)} entries"

    def work_of(self, layers: Iterable[int]) -> tuple[str, ...] | None:
        """What these layers do: parts of a model with equal values take equally long. None: not known."""
        return None if self.kinds is None else tuple(self.kinds[layer] for layer in layers)


def size_of(
    config: ModelConfig, *, vocabulary_size: int | None = None, sequence_length: int | None = None
) -> ModelSize:
    """The size of the model that `config` describes.

    `vocabulary_size` is the tokenizer's; `model.vocabulary_size` wins where it is set. Operations and parameters are known where one of
    them is. `sequence_length`: tokens of a sample, which attention depends on; None: the longest that the model takes.

    Raises:
        ValueError: operations are asked for, and the config describes no model.
    """
    kinds = ("embedding", *["block"] * config.num_blocks, "head")
    vocabulary = config.vocabulary_size or vocabulary_size
    if vocabulary is None:
        return ModelSize(len(kinds), kinds)
    check_model(config)
    length = config.max_sequence_length if sequence_length is None else sequence_length
    return ModelSize(
        len(kinds),
        kinds,
        flops_per_layer=tuple(forward_flops_per_layer(config, vocabulary, length)),
        parameters_per_layer=tuple(parameters_per_layer(config, vocabulary)),
    )
