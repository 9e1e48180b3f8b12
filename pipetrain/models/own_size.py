"""The size of model=python: its layers are counted in another process, once per target, arguments and file. Without torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipetrain.config.problem import ConfigError
from pipetrain.config.read_files import fitted, parse_json
from pipetrain.config.records import ModelConfig
from pipetrain.config.write_files import replace_file, user_cache
from pipetrain.models.size import ModelSize

_COUNT_SECONDS = 300.0  # it loads torch and the user's modules, perhaps on a busy machine
_FORMAT = 1  # of a file in the cache


def own_size(config: ModelConfig, _vocabulary_size: int | None, _sequence_length: int) -> ModelSize:
    """The layers that `model.target` gives, in numbers; parameters are None where it gives factories.

    Raises:
        ConfigError: it cannot be called, or gives no model; there is no torch to count with.
    """
    return _counted(_question(config))


def forget_count(config: ModelConfig) -> None:
    """What was counted does not hold: a module that the target imports has changed."""
    _file_in_cache(_question(config)).unlink(missing_ok=True)
    _counted.cache_clear()


def _question(config: ModelConfig) -> str:
    asked = {"target": config.target, "args": dict(config.args), "file_sha256": config.file_sha256, "format": _FORMAT}
    return json.dumps(asked, sort_keys=True)


def _file_in_cache(question: str) -> Path:
    return user_cache("layers") / f"{sha256(question.encode()).hexdigest()}.json"


@functools.lru_cache(maxsize=16)
def _counted(question: str) -> ModelSize:
    file = _file_in_cache(question)
    try:
        size: ModelSize = fitted(ModelSize, parse_json(file.read_bytes()))
    except (OSError, ValueError):  # not there, or damaged: it is counted again
        size = fitted(ModelSize, answer := _asked_of_a_child(question))
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, json.dumps(answer))
    return size


def _asked_of_a_child(question: str) -> dict[str, Any]:
    target = json.loads(question)["target"]
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"model.target={target}: its layers are counted with torch, which is not installed here; count them once where torch is, "
            "with the same cache folder (XDG_CACHE_HOME)"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pipetrain.models.own"],
            input=question,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_COUNT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"model.target={target}: its layers were not counted within {_COUNT_SECONDS:g} s; let the function return factories, which are "
            "counted and not called"
        ) from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise ConfigError(
            f"model.target={target}: the process that counts its layers ended with exit code {done.returncode}; its messages stand above"
        ) from error
    if "problem" in answer:
        raise ConfigError(answer["problem"])
    return answer
