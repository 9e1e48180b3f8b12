"""The trained weights as one safetensors file, under the names that the model's spec has for files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pipetrain.model.spec import ModelSpec
from pipetrain.model.trained import Model
from pipetrain.snapshot.reader import TensorFiles


def save_weights(path: Path, weights: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Writes the whole model's tensors; the file is there whole or not at all."""
    draft = path.with_suffix(".draft")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in spec.to_file(weights).items()}, draft)
    draft.replace(path)


def check_weights(path: Path) -> None:
    """Raises:
    ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there are no weights; the run is still going on, or it failed")


def load_weights(path: Path, model: Model, spec: ModelSpec) -> None:
    """Fills `model`, the whole of it or one rank's part, from a file that `save_weights` wrote: of it, what is needed is read.

    Raises:
        ValueError: there is no such file, or it is of another model.
    """
    check_weights(path)
    try:
        model.load_state_dict(spec.from_file(TensorFiles([path])))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: these weights are of another model ({error})") from error
