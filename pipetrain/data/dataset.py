"""From `data=...` to batches: the one entry of this package."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from pipetrain.config.records import DataConfig
from pipetrain.config.schema import check_limits
from pipetrain.data.batches import Batches, HeldoutBatches
from pipetrain.data.corpus import find_files, key_of_text
from pipetrain.data.split import fingerprint_of, split_files
from pipetrain.data.tokenizer import Tokenizer, make_tokenizer


@dataclass(frozen=True)
class Data:
    """What a run reads. All of it is in memory, a byte per byte of text (12 MB for the standard library)."""

    train: Batches
    heldout: HeldoutBatches  # empty where data.heldout_fraction=0
    tokenizer: Tokenizer
    train_files: tuple[pathlib.Path, ...]
    heldout_files: tuple[pathlib.Path, ...]
    fingerprint: str  # SHA-256 over the bytes of both parts: the same text gives the same batches

    @property
    def vocabulary_size(self) -> int:
        return self.tokenizer.vocabulary_size


def check_data(config: DataConfig) -> None:
    """Raise ValueError where `config` cannot work, without reading a file: for the command line, before a process starts."""
    make_tokenizer(config.tokenizer)
    check_limits(config, "data.")
    check_text(config)


def check_text(config: DataConfig) -> None:
    """Raise ValueError where there is no text that makes a sample; the values of `config` were checked, each for itself."""
    if config.heldout_fraction and config.heldout_bytes < config.sequence_length:
        raise ValueError(
            f"data.heldout_bytes={config.heldout_bytes} is less than one sample of data.sequence_length={config.sequence_length}: "
            f"set data.heldout_bytes={config.sequence_length} or more"
        )
    size = sum(file.stat().st_size for file in find_files(config))
    if size <= config.sequence_length:
        raise _too_short("the text", size, config)


def make_data(config: DataConfig, seed: int) -> Data:
    """Find, read, split and cut the text that `config` names; `seed` orders the training samples and nothing else.

    Raises ValueError, with the key and what to type next, where there is no text, or not enough of it.
    """
    check_data(config)
    split = split_files(find_files(config), config.heldout_fraction)
    tokenizer = make_tokenizer(config.tokenizer)
    train, heldout = tokenizer.encode(split.train), tokenizer.encode(split.heldout)
    if len(train) <= config.sequence_length:
        raise _too_short("the training part of the text", len(train), config)
    if config.heldout_fraction and len(heldout) <= config.sequence_length:
        raise _too_short("the held-out part of the text", len(heldout), config)
    return Data(
        train=Batches(train, config.batch_size, config.sequence_length, seed),
        heldout=HeldoutBatches(heldout, config.batch_size, config.sequence_length, config.heldout_bytes),
        tokenizer=tokenizer,
        train_files=split.train_files,
        heldout_files=split.heldout_files,
        fingerprint=fingerprint_of(split),
    )


def _too_short(what: str, size: int, config: DataConfig) -> ValueError:
    where = key_of_text(config)
    need = f"a sample of data.sequence_length={config.sequence_length} needs {config.sequence_length + 1}"
    if size < 2:
        return ValueError(f"{where}: {what} has {size} bytes and {need}; give more text, or data.heldout_fraction=0")
    return ValueError(
        f"{where}: {what} has {size} bytes and {need}; give more text, or data.sequence_length={size - 1}"
    )
