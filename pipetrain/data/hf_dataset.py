"""Data sets of Hugging Face: saved in a folder, or by name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetrain.config.problem import nearest
from pipetrain.config.records import DataConfig
from pipetrain.data.documents import Document, OneKind, Place, choose_heldout
from pipetrain.data.scan import digest_of, scan


@dataclass(frozen=True)
class HfCorpus:
    """Rows of a data set; those of `heldout` are held out, or a fraction of `train`, where there is none."""

    train: Any  # datasets.Dataset
    heldout: Any
    heldout_fraction: float
    text_field: str
    digest: str
    sources: Sequence[str]

    @property
    def num_bytes(self) -> int:
        """Rows: nobody knows how many bytes they have."""
        return len(self.train) + (0 if self.heldout is None else len(self.heldout))

    def documents(self) -> Iterator[Document]:
        is_heldout = None
        if self.heldout is None:
            is_heldout = choose_heldout(lambda: map(_as_bytes, self.train), self.heldout_fraction)
        one_kind = OneKind(self.text_field)
        for number, part in enumerate((self.train, self.heldout)):
            for line, row in enumerate(() if part is None else part, 1):
                held = bool(number) if is_heldout is None else is_heldout(_as_bytes(row))
                try:
                    yield Document(one_kind.content_of(row), Place(number, line), 1, held)
                except ValueError as error:
                    yield Document("", Place(number, line), 1, held, problem=str(error))


def check_datasets_installed(config: DataConfig) -> None:
    """Raises:
    ValueError: datasets is not installed, or data.path names nothing.
    """
    if not config.path:
        raise ValueError("data.path is not set: data=hf reads a data set; type data.path=FOLDER_OR_NAME")
    if importlib.util.find_spec("datasets") is None:
        raise ValueError('data=hf: datasets is not installed; pip install "pipetrain[hf]" brings it')


def hf_corpus(config: DataConfig, memory: Path) -> HfCorpus:
    """The data set that `config` names, downloaded if need be; digests of large files are kept in the folder `memory`.

    Raises:
        ValueError: there is none, or no such split.
    """
    check_datasets_installed(config)
    assert config.path is not None, "it was checked"
    train = _load("data.path", config.path, config.subset, "data.split", config.split)
    heldout = None
    if config.heldout_path is not None:
        split = config.heldout_split or config.split
        heldout = _load("data.heldout_path", config.heldout_path, config.subset, "data.heldout_split", split)
    elif config.heldout_split is not None:
        heldout = _load("data.path", config.path, config.subset, "data.heldout_split", config.heldout_split)
    parts = [part for part in (train, heldout) if part is not None]
    names = [
        f"{config.path}[{config.split}]",
        f"{config.heldout_path or config.path}[{config.heldout_split or config.split}]",
    ]
    digests = [_digest(part, memory) for part in parts]
    return HfCorpus(train, heldout, config.heldout_fraction, config.text_field, json.dumps(digests), names)


def _load(key: str, path: str, subset: str | None, split_key: str, split: str) -> Any:
    from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()
    folder = Path(path).expanduser()
    is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        found = load_from_disk(str(folder)) if is_saved else load_dataset(path, subset)
    except Exception as error:  # whatever its readers, the hub or the network raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{key}={path}: this is no saved data set here, and no name that can be loaded ({reason})"
        ) from error
    if isinstance(found, Dataset):
        return found
    assert isinstance(found, DatasetDict), "datasets are not streamed"
    if split not in found:
        raise ValueError(f"{split_key}={split}: {path} has the splits {', '.join(found)}{nearest(split, list(found))}")
    return found[split]


def _digest(part: Any, memory: Path) -> str:
    """Of its files, where it has some: its rows follow from them. What was made in memory has a fingerprint of the library's."""
    files = [Path(file["filename"]) for file in part.cache_files]
    return digest_of(scan(files, memory)) if files else str(part._fingerprint)


def _as_bytes(row: Any) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode()
