"""How large a model is, as far as its config tells. Without torch, for whoever plans a run before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.config.records import ModelConfig
from pipetrain.model.registry import family_of, load_function
from pipetrain.model.style import check_model


@dataclass(frozen=True)
class ModelSize:
    """The layers of a model in numbers, an entry per layer, in order. What is not known is None.

    kinds: layers of one kind (`block`) do the same work; a layer like no other has a kind of its own.
    tied: pairs of layers (lower, higher) that share a parameter, as a head its embedding's.
    flops_per_layer: floating-point operations of one token's forward; a multiplication with its addition are two.
    shapes_per_layer: of each parameter of the layer. width: numbers of a token that go from one layer to the next.
    """

    num_layers: int
    kinds: tuple[str, ...] | None = None
    flops_per_layer: tuple[float, ...] | None = None
    parameters_per_layer: tuple[int, ...] | None = None
    tied: tuple[tuple[int, int], ...] = ()
    shapes_per_layer: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    width: int | None = None

    @property
    def flops_per_token(self) -> float | None:
        """Floating-point operations of forward and backward, per token.

        A backward takes two forwards (`6 N + 12 L H Q T` of PaLM, Chowdhery et al., 2022, appendix B). What is recomputed is not added:
        what is divided by this is model FLOPs utilisation.
        """
        return None if self.flops_per_layer is None else 3.0 * sum(self.flops_per_layer)

    def __post_init__(self) -> None:
        for name in ("kinds", "flops_per_layer", "parameters_per_layer", "shapes_per_layer"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_layers:
                raise ValueError(f"{name} has {len(entries)} entries for {self.num_layers} layers: give one per layer")


def size_of(
    config: ModelConfig, *, vocabulary_size: int | None = None, sequence_length: int | None = None
) -> ModelSize:
    """The size of the model that `config` describes.

    `vocabulary_size` is the tokenizer's; `model.vocabulary_size` wins where it is set, and where neither is, operations and parameters
    are not known. `sequence_length`: tokens of a sample, on which attention depends; None: the longest that the model takes.

    Raises:
        ValueError: `config` describes no model, or none that takes samples so long.
    """
    check_model(config, sequence_length=sequence_length)
    family = family_of(config)
    length = sequence_length or load_function(family.longest)(config) or config.max_sequence_length
    size: ModelSize = load_function(family.size)(config, config.vocabulary_size or vocabulary_size, length)
    return size
