"""Makes a `RunConfig` from `conf/` and overrides, and YAML from a `RunConfig`. The only file of this room that imports omegaconf and Hydra.

The defaults are those of the records. Hydra gets them as a configuration named `records`, the first entry of the defaults list of
`conf/config.yaml`. A file in `conf/` has only the keys whose values differ.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipetrain.config.problem import ConfigError, nearest
from pipetrain.config.read_files import read_yaml_text
from pipetrain.config.records import RunConfig
from pipetrain.config.renamed import current_overrides, current_values
from pipetrain.config.schema import build, check_key
from pipetrain.config.secrets import check_override, check_values


def conf_dir() -> Path:
    """`conf/`: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


def choices() -> dict[str, list[str]]:
    """The groups of `conf/`, each with the names that may be chosen."""
    return {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in sorted(conf_dir().iterdir())
        if group.is_dir()
    }


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of `conf/config.yaml` with `overrides` (`data=text`, `optim.learning_rate=1e-3`) applied.

    Keys, choices and types are checked here; `together.py` checks whether the values fit together.

    Raises:
        ConfigError: an override that cannot be read, an unknown key or choice, a wrong type.
    """
    for text in overrides:
        check_override(text)
    overrides = current_overrides(overrides, lambda line: warnings.warn(line, stacklevel=3))
    groups = choices()
    chosen: list[Override] = []
    given: list[Override] = []
    for text in overrides:
        override = _parse(text, groups)
        is_value = override.key_or_group not in groups and override.package is None
        (given if is_value else chosen).append(override)
    try:
        composed = copy.deepcopy(_composed(*(str(choice.input_line) for choice in chosen)))
        for value in given:
            OmegaConf.update(composed, value.key_or_group, value.value(), merge=True)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: {_first_line(error)}") from error
    return _from_values(values)


def read(path: Path) -> RunConfig:
    """The configuration that a run wrote into its folder.

    Raises:
        ConfigError: the file does not exist, or is not a configuration of this version; DamagedFile: it cannot be read within the limits.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; a run folder holds config.yaml")
    text = read_yaml_text(path, "name a run of this version")
    try:
        # What looks like ${...} stays text: a file has no say in what of this machine is read.
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    return _from_values(values)


def as_yaml(config: RunConfig) -> str:
    """The configuration as text that `read` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(dataclasses.asdict(config))))


@functools.cache
def _composed(*chosen: str) -> DictConfig:
    """The configuration that files of `conf/` make together. Values are set later, so a sweep composes only once for all its jobs."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="pipetrain"):
        return compose("config", overrides=list(chosen))


def _from_values(values: Any) -> RunConfig:
    if not isinstance(values, dict):
        raise ConfigError(f"a configuration is a mapping from keys to values, but this is {type(values).__name__}")
    check_values(values)
    return build(RunConfig, current_values(values))


def _parse(text: str, groups: Mapping[str, Sequence[str]]) -> Override:
    """One override, checked: it can be read, its key or group exists, and it has one value."""
    if "=" not in text or text.startswith("="):
        raise ConfigError(f"{text}: an override is key=value, as in steps=50{nearest(text, ['steps', *groups])}")
    try:
        override = OverridesParser.create().parse_override(text)
    except (OverrideParseException, HydraException) as error:
        key, _, value = text.partition("=")
        raise ConfigError(
            f"{text}: cannot be read ({_first_line(error)}); quote text with spaces or signs: {key}=\"'{value}'\""
        ) from error
    if override.is_add() or override.is_delete():
        raise ConfigError(f"{text}: keys are neither added nor removed; write key=value, as in steps=50")
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: a key has one value; write a list as {override.key_or_group}=[...], as in pipeline.balance=[3,3]"
        )
    if (allowed := groups.get(override.key_or_group)) is None:
        check_key(override.key_or_group)
    elif override.value() not in allowed:
        raise ConfigError(
            f"{override.key_or_group}={override.value()}: allowed are {', '.join(allowed)}{nearest(str(override.value()), allowed)}"
        )
    return override


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _plain(value: Any) -> Any:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


ConfigStore.instance().store("records", _plain(dataclasses.asdict(RunConfig())))  # the first entry of conf/config.yaml
