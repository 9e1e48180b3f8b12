"""Makes a `RunConfig` from `conf/` and overrides, and YAML from a `RunConfig`. The only file of this room that imports omegaconf.

The defaults are those of the records. Hydra gets them as a configuration named `records`, the first entry of the defaults list of
`conf/config.yaml`. A file in `conf/` has only the keys whose values differ.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipetrain.config.own_code import with_own_code
from pipetrain.config.problem import ConfigError, choice_error, nearest, opening_line
from pipetrain.config.read_files import read_yaml_text, shipped
from pipetrain.config.records import RunConfig
from pipetrain.config.renamed import current_overrides, current_values
from pipetrain.config.schema import build, check_key, is_free
from pipetrain.config.secrets import check_override, check_values


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a configuration begins: the user's folder of configuration files, if there is one, and the name of the first file."""

    folder: str | None = None
    name: str = "config"

    @classmethod
    def of(cls, words: Sequence[str]) -> tuple[Source, list[str]]:
        """The source that `--config-dir=DIR` and `--config-name=NAME` among the words name, and the other words.

        Raises:
            ConfigError: there is no such folder.
        """
        given = dict(word.split("=", 1) for word in words if word.startswith(_SOURCE_WORDS))
        folder = given.get(_SOURCE_WORDS[0])
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"--config-dir={folder}: there is no such folder")
        name = given.get(_SOURCE_WORDS[1], "config").removesuffix(".yaml")
        return cls(folder and str(Path(folder).resolve()), name), [w for w in words if not w.startswith(_SOURCE_WORDS)]

    @property
    def words(self) -> list[str]:
        """As they are typed."""
        return [f"--config-dir={self.folder}"] * (self.folder is not None) + [f"--config-name={self.name}"]


_SOURCE_WORDS = ("--config-dir", "--config-name")


class UserFolder(SearchPathPlugin):
    """Lets Hydra search the user's folder after `conf/`, for files and for groups."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: Any) -> None:
        """Called by Hydra."""
        if self.folder is not None:
            search_path.append("user", f"file://{self.folder}")


def choices(source: Source | None = None) -> dict[str, list[str]]:
    """The groups of `conf/` and of the user's folder, each with the names that may be chosen."""
    folders = [shipped("conf")] + ([Path(source.folder)] if source is not None and source.folder is not None else [])
    found: dict[str, set[str]] = {}
    for group in sorted(group for folder in folders for group in folder.iterdir() if group.is_dir()):
        if names := {file.stem for file in group.glob("*.yaml")}:
            found.setdefault(group.name, set()).update(names)
    return {group: sorted(names) for group, names in sorted(found.items())}


def load_config(overrides: Sequence[str] = (), tell: Callable[[str], object] = str) -> RunConfig:
    """The configuration of `conf/config.yaml` with `overrides` (`data=text`, `optim.learning_rate=1e-3`) applied.

    Words such as `--config-dir=mine --config-name=first` name the user's own files (`Source`).
    `tell` gets a line about keys of the experiment that do not apply to the user's own code.

    Keys, choices and types are checked here; `together.py` checks whether the values fit together.

    Raises:
        ConfigError: an override that cannot be read, an unknown key or choice, a wrong type.
    """
    composed, typed = _applied(overrides)
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {opening_line(error)}") from error
    return with_own_code(_from_values(values), typed, tell)


def composed_yaml(overrides: Sequence[str], what: str, *, resolve: bool) -> str:
    """The configuration as Hydra's `--cfg` shows it, as YAML: `what` is `job`, `hydra` or `all`; `resolve`: interpolations are replaced.

    Raises:
        ConfigError: as `load_config`; an interpolation that needs a run.
    """
    composed, _ = _applied(overrides)
    source, rest = Source.of(overrides)
    try:
        with _hydra(source):
            chosen = [text for text in rest if text.partition("=")[0] in choices(source)]
            hydras = compose(source.name, overrides=chosen, return_hydra_config=True).hydra
        every = {"job": composed, "hydra": {"hydra": hydras}, "all": {"hydra": hydras, **composed}}
        return OmegaConf.to_yaml(every[what], resolve=resolve)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"--cfg={what}: {opening_line(error)}") from error


def _applied(words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """What the files and the overrides make, and the keys that were typed."""
    source, overrides = Source.of(words)
    for text in overrides:
        check_override(text)
    overrides = current_overrides(overrides, lambda line: warnings.warn(line, stacklevel=4))
    groups = choices(source)
    chosen: list[Override] = []
    given: list[Override] = []
    for text in overrides:
        override = _parse(text, groups)
        is_value = override.key_or_group not in groups and override.package is None
        (given if is_value else chosen).append(override)
    try:
        composed = copy.deepcopy(_composed(source, *(str(choice.input_line) for choice in chosen)))
        for value in given:
            key = value.key_or_group
            OmegaConf.update(composed, key, value.value(), merge=True, force_add=is_free(key) or is_free(f"{key}."))
        lengths = {value.key_or_group for value in given if value.value() is not None} & {"steps", "epochs"}
        if len(lengths) == 1:  # what is typed replaces what an experiment says
            OmegaConf.update(composed, "epochs" if "steps" in lengths else "steps", None)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(words)}: {opening_line(error)}") from error
    return composed, [value.key_or_group for value in given]


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
        raise ConfigError(f"{path}: {opening_line(error)}") from error
    return _from_values(values)


def as_yaml(config: RunConfig) -> str:
    """The configuration as text that `read` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


@functools.cache
def _composed(source: Source, *chosen: str) -> DictConfig:
    """The configuration that files of `conf/` make together. Values are set later, so a sweep composes only once for all its jobs."""
    with _hydra(source):
        return compose(source.name, overrides=list(chosen))


def _hydra(source: Source) -> Any:
    UserFolder.folder = source.folder
    return initialize_config_dir(str(shipped("conf")), version_base="1.3", job_name="pipetrain")


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
            f"{text}: cannot be read ({opening_line(error)}); quote text with spaces or signs: {key}=\"'{value}'\""
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
        raise choice_error(override.key_or_group, override.value(), allowed)
    return override


Plugins.instance().register(UserFolder)
ConfigStore.instance().store("records", dataclasses.asdict(RunConfig()))  # the first entry of conf/config.yaml
