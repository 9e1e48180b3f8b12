"""The configuration of a run that is there, for commands that build its model again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipetrain.config.load import read
from pipetrain.config.records import HUGGING_FACE, WEIGHTS_IN, RunConfig

if TYPE_CHECKING:
    from pipetrain.observe.folder import RunFolder


def config_of_run(folder: RunFolder) -> RunConfig:
    """As it was, but for where a Hugging Face model comes from: the run folder has what is needed of it besides weights.

    Those are not read there: they are the run's own.
    """
    config = read(folder.config)
    if config.model.name != HUGGING_FACE:
        return config
    dtype = config.model.dtype or WEIGHTS_IN[config.precision]
    model = replace(config.model, path=str(folder.model), revision=None, weights="random", dtype=dtype)
    return replace(config, model=model)
