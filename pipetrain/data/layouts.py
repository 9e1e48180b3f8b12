"""From tokens to samples: which documents, and how they are laid out (data.layout)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipetrain.config.records import PACKED, PADDED, STREAM, DataConfig
from pipetrain.data.corpus import key_of_text
from pipetrain.data.samples import Documents, Samples, Windows, pack_documents
from pipetrain.data.token_file import HELDOUT, PARTS, TRAIN, Ids, TokenPart, TokenSheet, read_part
from pipetrain.data.tokenizing import place_named, refusal_of


@dataclass(frozen=True)
class SampleSets:
    """The samples of both parts; `heldout` is empty where nothing is held out. `fingerprint`: equal for the same samples."""

    train: Samples
    heldout: Samples
    vocabulary_size: int
    fingerprint: str
    num_skipped: int = 0  # documents that are no samples, with data.on_error=skip
    first_skipped: str | None = None  # why the first of them is none


def stream_samples(config: DataConfig, train: Ids, heldout: Ids, unit: str) -> tuple[Windows, Windows]:
    """Windows of two long rows of tokens, which are called `unit` in messages.

    Raises:
        ValueError: one is too short for a sample.
    """
    if len(train) <= config.sequence_length:
        raise too_short("the training part of the text", len(train), config, unit)
    if _holds_out(config) and len(heldout) <= config.sequence_length:
        raise too_short("the held-out part of the text", len(heldout), config, unit)
    return Windows(train, config.sequence_length), Windows(heldout, config.sequence_length)


def folder_samples(config: DataConfig, folder: Path, sheet: TokenSheet) -> SampleSets:
    """The samples of a folder of tokens.

    Raises:
        ValueError: it holds none, or a document that is none, which data.on_error=stop does not pass over.
    """
    if sheet.num_skipped and config.on_error == "stop":
        raise ValueError(refusal_of(str(sheet.first_problem)))
    layout = config.layout or (PACKED if sheet.is_chat else STREAM)
    parts = {name: read_part(folder, sheet, name) for name in PARTS}
    if layout != STREAM:
        return _whole_documents(config, sheet, parts, layout)
    if sheet.is_chat:
        raise ValueError(
            f"data.layout=stream: {key_of_text(config)} holds chats, of which a piece is no sample; use data.layout=packed or padded"
        )
    train, heldout = stream_samples(config, parts[TRAIN].tokens, parts[HELDOUT].tokens, "tokens")
    return SampleSets(train, heldout, sheet.vocabulary_size, sheet.fingerprint, sheet.num_skipped, sheet.first_problem)


def too_short(what: str, size: int, config: DataConfig, unit: str) -> ValueError:
    """The error for text that does not make one sample."""
    where = key_of_text(config)
    need = f"a sample of data.sequence_length={config.sequence_length} needs {config.sequence_length + 1}"
    if size < 2:
        return ValueError(f"{where}: {what} has {size} {unit} and {need}; give more text, or data.heldout_fraction=0")
    return ValueError(
        f"{where}: {what} has {size} {unit} and {need}; give more text, or data.sequence_length={size - 1}"
    )


def _holds_out(config: DataConfig) -> bool:
    return bool(config.heldout_fraction or config.heldout_path or config.heldout_split)


def _whole_documents(config: DataConfig, sheet: TokenSheet, parts: dict[str, TokenPart], layout: str) -> SampleSets:
    chosen = {name: _choose(config, sheet, part) for name, part in parts.items()}
    samples = {name: _laid_out(config, sheet, part, chosen[name].documents, layout) for name, part in parts.items()}
    for name in PARTS if _holds_out(config) else [TRAIN]:
        if not len(samples[name]):
            raise ValueError(
                f"{key_of_text(config)}: the part {name} has no document that is a sample; give more, or data.heldout_fraction=0"
            )
    digest = hashlib.sha256(f"{sheet.fingerprint} {layout}".encode())
    for one in chosen.values():
        digest.update(one.documents.tobytes())
    return SampleSets(
        train=samples[TRAIN],
        heldout=samples[HELDOUT],
        vocabulary_size=sheet.vocabulary_size,
        fingerprint=digest.hexdigest(),
        num_skipped=sheet.num_skipped + sum(one.num_left_out for one in chosen.values()),
        first_skipped=sheet.first_problem or next((one.problem for one in chosen.values() if one.problem), None),
    )


@dataclass(frozen=True)
class _Choice:
    """The documents of a part that are samples, by number; what is wrong with the first that is none."""

    documents: NDArray[np.int64]
    num_left_out: int
    problem: str | None


def _choose(config: DataConfig, sheet: TokenSheet, part: TokenPart) -> _Choice:
    """Those that are not too long, and have a token to predict.

    Raises:
        ValueError: one is not, and data.on_error=stop.
    """
    lengths = part.lengths
    fits = (lengths <= config.sequence_length) & (lengths > 1)
    if fits.all():
        return _Choice(np.arange(len(lengths)), 0, None)
    number = int(np.flatnonzero(~fits)[0])
    source, line = map(int, part.places[number])
    problem = f"{place_named(sheet.sources, source, line)}: it has {lengths[number]} tokens, " + (
        f"more than data.sequence_length={config.sequence_length}; data.sequence_length={lengths.max()} takes all"
        if lengths[number] > 1
        else "and none of them is predicted"
    )
    if config.on_error == "stop":
        raise ValueError(refusal_of(problem))
    return _Choice(np.flatnonzero(fits), int((~fits).sum()), problem)


def _laid_out(
    config: DataConfig, sheet: TokenSheet, part: TokenPart, documents: NDArray[np.int64], layout: str
) -> Documents:
    packed = None if layout == PADDED else pack_documents(part.lengths[documents], config.sequence_length)
    return Documents(part, documents, packed, room=config.sequence_length, pad=sheet.pad_token)
