"""The trackers that a configuration asks for."""

from __future__ import annotations

import importlib.util

from pipetrain.config.records import ObserveConfig
from pipetrain.observe.folder import RunFolder
from pipetrain.observe.trackers.jsonl import JsonLines
from pipetrain.observe.trackers.tensorboard import TensorBoardTracker
from pipetrain.observe.trackers.tracker import Tracker
from pipetrain.observe.trackers.wandb import WandbTracker


def check_trackers(config: ObserveConfig) -> None:
    """Raises:
    ValueError: a tracker is asked for whose package is not installed.
    """
    for key, value, is_off, package in (
        ("observe.wandb.mode", config.wandb.mode, "disabled", "wandb"),
        ("observe.tensorboard", str(config.tensorboard).lower(), "false", "tensorboard"),
    ):
        if value != is_off and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{key}={value}: the package {package} is not installed; pip install 'pipetrain[train]' brings it, "
                f"and {key}={is_off} does without"
            )


def make_trackers(config: ObserveConfig, folder: RunFolder, first_step: int) -> dict[str, Tracker]:
    """By the name that a message gives them. Files of steps that will be repeated lose those lines now."""
    evaluates = config.evaluate_every_steps is not None
    trackers: dict[str, Tracker] = {"metrics.jsonl": JsonLines(folder, first_step, evaluates=evaluates)}
    if config.wandb.mode != "disabled":
        trackers["wandb"] = WandbTracker(folder, config.wandb, first_step)
    if config.tensorboard:
        trackers["tensorboard"] = TensorBoardTracker(folder, first_step)
    return trackers
