"""Refuses secrets in a configuration, because it is written to config.yaml and into every snapshot.

It also refuses keys that name code, such as Hydra's `_target_`, except in the arguments of the user's own code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipetrain.config.problem import ConfigError

# Last words of the names of secrets, as in WANDB_API_KEY or hub.token. (`tokenizer` is another word.)
_SECRET_WORDS = frozenset({"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"})
_SHORTEST_SECRET = 8  # a shorter value of an environment variable may be part of a path by chance
_INNER_KEY = re.compile(r"[{,]\s*['\"]?([\w.]+)['\"]?\s*:")  # of `{mode: offline, project: x}`
# Hydra makes objects from mappings with these keys: pipetrain does so in `model.args` and its like alone.
_CODE_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_", "_self_", "_call_"})
_ARGUMENTS = re.compile(r"(model|data)\.(\w+_)?args(\.|$)")


def looks_secret(name: str) -> bool:
    """Whether a key or an environment variable of this name holds a secret, by its last word."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((word for word in reversed(words) if word), "") in _SECRET_WORDS


def check_name(path: str, *, within: str = "") -> None:
    """Checks a dotted key that a user wrote, before it is looked up. `within`: the key in whose value it stands.

    Raises:
        ConfigError: the key names code to run, or a secret. The message does not have the value.
    """
    if _CODE_KEYS & set(re.split(r"[./@:]", path)) and not _ARGUMENTS.match(within or path):
        raise ConfigError(
            f"{path}: a configuration names no code to run; write a layer or a loop in Python, with Pipeline"
        )
    if looks_secret(path):
        raise ConfigError(
            f"{path}: a secret does not belong in the configuration, which is written to config.yaml and to snapshots; set "
            "it in the environment, as in WANDB_API_KEY=..."
        )


def check_override(text: str) -> None:
    """Checks an override as it was typed: its key, and the keys of a mapping in its value.

    Raises:
        ConfigError: as `check_name`.
    """
    key, _, value = text.partition("=")
    key = key.lstrip("+~").strip()
    for name in (key, *_INNER_KEY.findall(value)):
        check_name(name, within=key)


def check_values(values: Any) -> None:
    """Checks that no value contains the value of an environment variable that is a secret (`${oc.env:WANDB_API_KEY}`, or pasted).

    Raises:
        ConfigError: the message has the key and the variable, not the value.
    """
    secrets = {
        value: name for name, value in os.environ.items() if looks_secret(name) and len(value) >= _SHORTEST_SECRET
    }
    for path, text in _texts(values):
        for secret, name in secrets.items():
            if secret in text:
                raise ConfigError(
                    f"{path}: holds the value of {name}, and would be written to config.yaml and to snapshots; leave it in "
                    "the environment"
                )


def _texts(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, (list, tuple)):
        for number, value in enumerate(values):
            yield from _texts(value, f"{path}[{number}]")
    elif isinstance(values, str):
        yield path, values
