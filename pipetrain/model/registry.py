"""The families of models that `model.name` chooses from, a row each. Without torch."""

from __future__ import annotations

import difflib
import pkgutil
from dataclasses import dataclass
from typing import Any

from pipetrain.config.records import ModelConfig


@dataclass(frozen=True)
class ModelFamily:
    """Where a family's functions are, each as `module:function`: a login node plans and has no torch, so each is loaded when it is used.

    check: `(ModelConfig) -> None` raises ValueError where the config describes no model of the family; without torch.
    size: `(ModelConfig, vocabulary_size or None, sequence_length) -> ModelSize`; without torch, of a config that was checked.
    spec: `(ModelConfig, vocabulary_size) -> ModelSpec`.
    longest: `(ModelConfig) -> tokens of the longest sample`, or None where it is not known; without torch, of a config that was checked.
    """

    check: str
    size: str
    spec: str
    longest: str = "pipetrain.model.style:longest_sample"


_TRANSFORMER = ModelFamily(
    check="pipetrain.model.style:check_heads",
    size="pipetrain.model.arithmetic:transformer_size",
    spec="pipetrain.model.transformer:transformer_spec",
)
_HUGGING_FACE = ModelFamily(
    check="pipetrain.model.hf.hf_size:check_hf",
    size="pipetrain.model.hf.hf_size:hf_size",
    spec="pipetrain.model.hf.hf_spec:hf_spec",
    longest="pipetrain.model.hf.hf_size:longest_hf_sample",
)
MODEL_FAMILIES = {"llama": _TRANSFORMER, "gpt2": _TRANSFORMER, "hf": _HUGGING_FACE}


def family_of(config: ModelConfig) -> ModelFamily:
    """The row of `model.name`.

    Raises:
        ValueError: there is none.
    """
    if config.name not in MODEL_FAMILIES:
        (nearest,) = difflib.get_close_matches(config.name, MODEL_FAMILIES, n=1, cutoff=0.0)
        raise ValueError(
            f"model.name={config.name!r}: allowed are {', '.join(MODEL_FAMILIES)}; did you mean {nearest!r}?"
        )
    return MODEL_FAMILIES[config.name]


def load_function(place: str) -> Any:
    """The function at `module:function`."""
    return pkgutil.resolve_name(place)
