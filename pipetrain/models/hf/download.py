"""Brings a model of the hub to this machine, once, whoever of its processes asks first.

    process 1  lock ── looks: not whole ── downloads ── unlock
    process 2  lock ..................................... looks: whole ── unlock

So there is no need to know which processes share a machine, and none to agree: a lock of the cache's folder decides, also between two
runs, and between machines that share the folder. What is in the cache already is used without a word to the hub.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pipetrain.config.records import HUGGING_FACE, ModelConfig
from pipetrain.models.hf.source import cached_folder, find_source, hub_cache, is_name, missing_files

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*"]
_NESTED = ["*/*"]  # weights in other formats, which many repositories have in folders
_PATIENCE_SECONDS = 0.5  # between two looks at what another process downloads


def bring_model(config: ModelConfig, *, timeout_seconds: float = 600.0) -> None:
    """Download the model that `model.path` names, where it is a name and not in this machine's cache yet.

    Without its weights for model.weights=random. `timeout_seconds`: the longest wait for another process that downloads it and of
    which nothing more arrives.

    Raises:
        ValueError: it cannot be had: no network, no such name, no right to it.
    """
    path = config.path
    if config.name != HUGGING_FACE or path is None or Path(path).expanduser().is_dir() or not is_name(path):
        return
    wants_weights = config.weights == "pretrained"
    if _is_whole(path, config.revision, wants_weights=wants_weights):
        return
    with _alone(path, timeout_seconds):
        if not _is_whole(path, config.revision, wants_weights=wants_weights):
            _download(path, config.revision, _SMALL_FILES)
            if wants_weights:
                _download(path, config.revision, list(missing_files(find_source(path, config.revision))))


def _is_whole(name: str, revision: str | None, *, wants_weights: bool) -> bool:
    folder = cached_folder(name, revision)
    if folder is None or not (folder / "config.json").is_file():
        return False
    return not (wants_weights and list(missing_files(find_source(name, revision))))


def _download(name: str, revision: str | None, files: list[str]) -> None:
    if not files:
        return
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"model.path={name}: it is downloaded by huggingface_hub, which is not installed; pip install 'pipetrain[hf]', or give "
            "a folder"
        ) from error
    try:
        snapshot_download(name, revision=revision, cache_dir=hub_cache(), allow_patterns=files, ignore_patterns=_NESTED)
    except Exception as error:  # of the hub, of its HTTP library, of the disk: each says what it is in its first line
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"model.path={name}: there is no such folder, and the model cannot be downloaded ({type(error).__name__}: {reason}); check "
            "the name and the network, or download it elsewhere and give its folder"
        ) from error


@contextmanager
def _alone(name: str, timeout_seconds: float) -> Iterator[None]:
    """Within it no other process of who shares the cache downloads this model.

    Raises:
        ValueError: another one does, and nothing more arrives.
    """
    home = hub_cache() / f"models--{name.replace('/', '--')}"
    last_change, size = time.monotonic(), -1

    def stands_still() -> bool:
        nonlocal last_change, size
        if size == -1:
            print(f"pipetrain: another process downloads {name}; waiting for it", file=sys.stderr, flush=True)
        if (now := _bytes_in(home)) != size:
            last_change, size = time.monotonic(), now
        return time.monotonic() - last_change > timeout_seconds

    lock = FileLock(home / ".pipetrain.lock")
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=_PATIENCE_SECONDS, cancel_check=stands_still)
    except Timeout:
        raise ValueError(
            f"model.path={name}: another process downloads it to {home}, and for timeout_seconds={timeout_seconds:g} nothing "
            "more has arrived; end that process, or give the folder of a model that is here"
        ) from None
    except OSError as error:
        raise ValueError(f"model.path={name}: {home} cannot be written ({error.strerror}); set HF_HOME") from error
    try:
        yield
    finally:
        lock.release()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total
