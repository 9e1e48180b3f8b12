"""A Hugging Face model as it lies on this machine: its folder, its config, and which file holds which weight.

Without torch: a login node plans a run with it, and no process has to start to hear that a shard is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipetrain.config.read_files import DamagedFile, check_regular, fitted, opened_tensors, read_object
from pipetrain.config.records import HUGGING_FACE, ModelConfig
from pipetrain.config.terminal import say

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What else belongs to a model and is small: the tokenizer in its many files, the chat template, how to generate.
_BESIDE = re.compile(
    r"tokenizer.*|.*\.jinja|.*\.model|.*\.tiktoken|vocab\..*|merges\.txt|special_tokens_map\.json|added_tokens\.json"
    r"|generation_config\.json|chat_template\.json|LICENSE.*|NOTICE.*"
)
BRING = "bring the whole model there again"
_POLL_SECONDS = 0.5  # between two looks at what another process downloads
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*"]
_NESTED = ["*/*"]  # weights in other formats, which many repositories have in folders


@dataclass(frozen=True)
class HfSource:
    """A model that is here: `name` is what the user called it, `folder` holds its files, `config` is its config.json."""

    name: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def quantization(self) -> str | None:
        """How the weights are quantised (`gptq`, `fp8`, ...); None: they are not."""
        for config in (self.config, self.config.get("text_config") or {}):
            found = config.get("quantization_config")
            if found:
                return str(found.get("quant_method") or "quantised") if isinstance(found, Mapping) else "quantised"
        return None

    @property
    def dtype(self) -> str:
        """What the weights are stored in, as the config has it, else the first of them: `bfloat16`."""
        for config in (self.config, self.config.get("text_config") or {}):
            named = config.get("dtype") or config.get("torch_dtype")
            if named:
                return str(named).removeprefix("torch.")
        for file in dict.fromkeys(self.weight_map.values()):
            with opened_tensors(file, BRING, framework="np") as opened:
                found = {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118, it is no mapping
            if stored := next((_FLOATS[dtype] for dtype in _FLOATS if dtype in found), None):
                return stored
        return "float32"

    @cached_property
    def weight_map(self) -> Mapping[str, Path]:
        """The file of each weight, by its name in the files; with an index none is opened. Raises ValueError: one is missing or cannot be read."""
        index, single = self.folder / INDEX, self.folder / WEIGHTS
        if single.is_file():
            with opened_tensors(single, BRING, framework="np") as opened:
                return dict.fromkeys(opened.keys(), single)
        if not index.is_file():
            raise ValueError(f"model.path={self.name}: {self._no_weights()}")
        if missing := self.missing_files():
            raise ValueError(
                f"model.path={self.name}: {missing[0]} is missing in {self.folder} (and {len(missing) - 1} more that "
                f"{INDEX} names): bring the whole model there"
            )
        return {name: self.folder / file for name, file in self._indexed().items()}

    @property
    def beside_weights(self) -> tuple[Path, ...]:
        """Tokenizer, chat template, generation config and licence: what a saved model needs besides config and weights."""
        return tuple(path for path in sorted(self.folder.iterdir()) if path.is_file() and _BESIDE.fullmatch(path.name))

    def missing_files(self) -> list[str]:
        """The names of weight files that are not here (yet)."""
        names = self._indexed().values() if (self.folder / INDEX).is_file() else [WEIGHTS]
        return [file for file in dict.fromkeys(names) if not (self.folder / file).is_file()]

    def _indexed(self) -> dict[str, str]:
        try:
            return indexed_files(self.folder / INDEX, BRING)
        except DamagedFile as error:
            raise ValueError(f"model.path={self.name}: {error}") from error

    def _no_weights(self) -> str:
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pth")):
            return (
                f"{self.folder} has its weights as pickles (*.bin), which may run code when they are read: only safetensors are; "
                "save it once more with save_pretrained of transformers"
            )
        return f"{self.folder} has neither {WEIGHTS} nor {INDEX}; model.weights=random starts without"


def indexed_files(index: Path, todo: str) -> dict[str, str]:
    """The name of the file of each weight, as an index of safetensors files has it. Raises DamagedFile: it is none, or names a file elsewhere."""
    found = read_object(index, todo).get("weight_map")
    if not found:
        raise DamagedFile(index, "it has no weight_map", todo)
    try:
        names: dict[str, str] = fitted(dict[str, str], found)
    except ValueError as error:
        raise DamagedFile(index, f"its weight_map: {error}", todo) from error
    if outside := next((file for file in names.values() if Path(file).name != file), None):
        raise DamagedFile(index, f"it names {outside!r}, which is not in its folder", todo)
    return names


def find_source(path: str, revision: str | None = None) -> HfSource:
    """The model in this folder, or of this name in the hub's cache. Raises ValueError: it is not here, or its config.json cannot be read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if (cached := cached_folder(path, revision)) is None:
            nor_name = f", and no model of that name in {_home_of(path).parent}" if is_name(path) else ""
            raise ValueError(
                f"model.path={path}: there is no such folder{nor_name}; "
                "save_pretrained of transformers makes such a folder"
            )
        folder = cached
    elif revision is not None:
        raise ValueError(
            f"model.revision={revision}: model.path={path} is a folder, which has one version; leave it out"
        )
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"model.path={path}: {folder} has no {CONFIG}, so it is no model that transformers has saved; name the folder that "
            "save_pretrained wrote"
        )
    for file in folder.iterdir():  # others read them, who would wait for a pipe
        if not file.is_dir():
            check_regular(file, BRING)
    try:
        return HfSource(path, folder.absolute(), read_object(folder / CONFIG, BRING))
    except DamagedFile as error:
        raise ValueError(f"model.path={path}: {error}") from error


def check_loadable(source: HfSource) -> None:
    """Whether the weights are here and such that they can be trained. Raises ValueError: quantised, pickled, or a file is missing."""
    if source.quantization is not None:
        raise ValueError(
            f"model.path={source.name}: its weights are quantised ({source.quantization}), and no gradient moves such; name the "
            "model that they were made from"
        )
    assert source.weight_map


def is_name(path: str) -> bool:
    """Whether `path` can be a name of the hub: `Qwen/Qwen2.5-7B-Instruct`."""
    return bool(_NAME.fullmatch(path)) and not path.startswith((".", "/", "~"))


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Where the hub's cache of this user has a version of a model; None: it has not."""
    if not is_name(name):
        return None
    config = _hub(name).try_to_load_from_cache(name, CONFIG, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _hub(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"model.path={name}: there is no such folder, and names are found by huggingface_hub, which is not installed; "
            "pip install 'pipetrain[hf]', or give a folder"
        ) from error
    return huggingface_hub


def _home_of(name: str) -> Path:
    """The folder in which huggingface_hub keeps all versions of a model."""
    return Path(_hub(name).constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def bring_model(config: ModelConfig, *, timeout_seconds: float = 600.0) -> None:
    """Download the model that `model.path` names, where it is a name and not in this machine's cache yet; without its weights for
    model.weights=random. Of several processes one downloads, and the others wait for it: for `timeout_seconds` at most while nothing
    more arrives.

    Raises ValueError: it cannot be had: no network, no such name, no right to it.
    """
    path = config.path
    if config.name != HUGGING_FACE or path is None or Path(path).expanduser().is_dir() or not is_name(path):
        return
    if _missing(config, path):
        with _alone(path, timeout_seconds):
            if cached_folder(path, config.revision) is None:
                _download(path, config.revision, _SMALL_FILES, [*_NESTED, CONFIG])
                _download(path, config.revision, [CONFIG], _NESTED)  # last: it marks the small files as complete
            if files := _missing(config, path):
                _download(path, config.revision, files, _NESTED)


def _missing(config: ModelConfig, name: str) -> list[str]:
    """The files to download that are known so far: config.json, then those of the weights."""
    if cached_folder(name, config.revision) is None:
        return [CONFIG]
    return find_source(name, config.revision).missing_files() if config.weights == "pretrained" else []


@contextmanager
def _alone(name: str, timeout_seconds: float) -> Iterator[None]:
    """Within it no other process with the same cache downloads this model. Raises ValueError: another one does, and makes no progress."""
    home = _home_of(name)
    lock, size, wait = FileLock(home / ".pipetrain.lock"), -1, 0.0
    try:
        home.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(wait, poll_interval=_POLL_SECONDS)
            except Timeout:
                now = sum(_size_of(path) for path in home.rglob("*"))
                if now == size:
                    raise ValueError(
                        f"model.path={name}: another process downloads it to {home}, and for timeout_seconds={timeout_seconds:g} nothing "
                        "more has arrived; end that process, or give the folder of a model that is here"
                    ) from None
                if size == -1:
                    say(f"another process downloads {name}; waiting for it")
                size, wait = now, timeout_seconds
    except OSError as error:
        raise ValueError(f"model.path={name}: {home} cannot be written ({error.strerror}); set HF_HOME") from error
    try:
        yield
    finally:
        lock.release()


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # renamed meanwhile
        return 0


def _download(name: str, revision: str | None, files: list[str], ignored: list[str]) -> None:
    try:
        _hub(name).snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=ignored)
    except Exception as error:  # of the hub, of its HTTP library, of the disk: each says what it is in its first line
        raise ValueError(
            f"model.path={name}: there is no such folder, and the model cannot be downloaded ({type(error).__name__}: {reason_of(error)}); check "
            "the name and the network, or download it elsewhere and give its folder"
        ) from error


def reason_of(error: BaseException) -> str:
    """What an error of a library says, or its kind where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
