"""From `data=...` to batches: the one entry of this package.

stdlib, text as bytes      files ── split ──► bytes in memory ─────────────────────┐
memmap                     a .bin of ids, a folder of tokens ──────────────────────┤
text, jsonl, hf            documents ── tokenized once ──► folder in the cache ────┴─► samples ──► batches of a step
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipetrain.config.problem import choice_error
from pipetrain.config.records import PYTHON, STREAM, DataConfig
from pipetrain.config.schema import check_limits
from pipetrain.data.batches import Batches, Data, HeldoutBatches
from pipetrain.data.corpus import files_at, files_of, find_files, key_of_text, memory_of, read_pieces, split_files
from pipetrain.data.documents import check_installed
from pipetrain.data.own import OwnData, check_own_data, sizes_of
from pipetrain.data.samples import InVocabulary, SampleSets, folder_samples, stream_samples, too_short
from pipetrain.data.token_file import TOKENS_JSON, Ids, check_id_file, read_id_file, read_sheet
from pipetrain.data.tokenizer import BYTE, ByteTokenizer, HfTokenizer, Tokenizer, folder_of_tokenizer
from pipetrain.data.tokenizing import WAIT_SECONDS, Tell, is_bytes, tokenized

_LayOut = Callable[[DataConfig], SampleSets]  # samples of a length, of what was read

_SOURCES = ("stdlib", "text", "jsonl", "hf", "memmap", PYTHON)
# What data.path is to name, and how.
_PATHS = dict.fromkeys(("text", "jsonl"), ("a file or a folder of text", "FILE_OR_FOLDER"))
_PATHS |= {"hf": ("a data set", "FOLDER_OR_NAME"), "memmap": ("token ids", "FILE.bin, or a folder of tokens")}
_IN_MEMORY_BYTES = 2**28  # more text than that is a file in the cache even as bytes


def make_tokenizer(config: DataConfig, own: str | None = None) -> Tokenizer | None:
    """The tokenizer of `data.tokenizer`; for null `own`, that of the model; None: there is none. Raises ValueError: it cannot be had."""
    name = config.tokenizer or own
    if name is None:
        return None
    if name == BYTE:
        return ByteTokenizer()
    date = datetime.date.fromisoformat(config.template_date)
    return HfTokenizer(folder_of_tokenizer(name), name, config.counted, date)


def check_data(config: DataConfig, own_tokenizer: str | None = None) -> None:
    """Raise ValueError where `config` cannot work, without reading a file: for the command line, before a process starts."""
    check_limits(config, "data.")
    if config.name not in _SOURCES:
        raise choice_error("data", config.name, _SOURCES)
    if config.name == PYTHON:
        check_own_data(config)
        return
    _check_length(config)
    if config.name in _PATHS and not config.path:
        what, example = _PATHS[config.name]
        raise ValueError(f"data.path is not set: data={config.name} reads {what}; type data.path={example}")
    tokenizer = make_tokenizer(config, own_tokenizer)
    if config.name == "memmap":
        _check_memmap(config)
    elif tokenizer is None:
        raise ValueError(
            "data.tokenizer=null: the model brings no tokenizer; type data.tokenizer=byte, or a tokenizer's folder or name"
        )
    elif config.name == "hf":
        check_installed("data=hf", "datasets")
    else:
        size = sum(file.stat().st_size for file in find_files(config))
        if config.eval_path is not None:
            files_at("data.eval_path", config.eval_path, config.pattern)
        if size == 0 or (is_bytes(config, tokenizer) and size <= config.sequence_length):
            raise too_short("the text", size, config, "bytes")
    if isinstance(tokenizer, HfTokenizer):
        check_installed(f"data.tokenizer={tokenizer.called}", "transformers")


def make_data(config: DataConfig, seed: int, **how: Any) -> Data:
    """Find, read, tokenize and cut what `config` names, as `OpenData`; `seed` orders the training samples and nothing else."""
    if config.name == PYTHON:
        check_data(config)
        return OwnData(config, seed, sizes_of(config)).cut(config)
    return OpenData(config, seed, **how).cut(config)


class OpenData:
    """What a configuration names: found, read and tokenized once, to be cut into samples of one length or of several."""

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        *,
        own_tokenizer: str | None = None,
        timeout_seconds: float = WAIT_SECONDS,
        tell: Tell = lambda _: None,
    ) -> None:
        """`own_tokenizer` is what data.tokenizer=null means. Of several processes one tokenizes; the others wait while it makes progress.

        Raises ValueError, with the key and what to type next: there are no documents or too few, or one cannot be a sample.
        """
        check_data(config, own_tokenizer)
        self._tokenizer = make_tokenizer(config, own_tokenizer)
        if config.name == "memmap":
            self._lay_out = _of_memmap(config, self._tokenizer)
        else:
            assert self._tokenizer is not None, "it was checked"
            self._lay_out = _of_text(config, self._tokenizer, timeout_seconds, tell)
        self._seed = seed
        self._sets: dict[int, SampleSets] = {}

    def cut(self, config: DataConfig) -> Data:
        """The data of `config`, which may have another length and batch size than at the opening. Raises ValueError: they make no sample."""
        check_limits(config, "data.")
        _check_length(config)
        if config.sequence_length not in self._sets:
            sets, key = self._lay_out(config), key_of_text(config)
            train, heldout = (InVocabulary(one, sets.vocabulary_size, key) for one in (sets.train, sets.heldout))
            self._sets[config.sequence_length] = replace(sets, train=train, heldout=heldout)
        sets = self._sets[config.sequence_length]
        return Data(
            train=Batches(sets.train, config.global_batch_size, self._seed),
            heldout=HeldoutBatches(sets.heldout, config.global_batch_size, config.eval_bytes),
            vocabulary_size=sets.vocabulary_size,
            tokenizer=self._tokenizer,
            fingerprint=sets.fingerprint,
            num_skipped=sets.num_skipped,
            first_skipped=sets.first_skipped,
        )


def _check_length(config: DataConfig) -> None:
    if config.eval_fraction and config.eval_bytes < config.sequence_length:
        raise ValueError(
            f"data.eval_bytes={config.eval_bytes} is less than one sample of data.sequence_length={config.sequence_length}: "
            f"set data.eval_bytes={config.sequence_length} or more"
        )


def _of_text(config: DataConfig, tokenizer: Tokenizer, timeout_seconds: float, tell: Tell) -> _LayOut:
    if is_bytes(config, tokenizer):
        split = split_files(*files_of(config), config.eval_fraction)
        if sum(piece.last - piece.first for piece in (*split.train, *split.heldout)) <= _IN_MEMORY_BYTES:
            train, heldout = read_pieces(split.train), read_pieces(split.heldout)
            rows = np.frombuffer(train, np.uint8), np.frombuffer(heldout, np.uint8)
            # all bytes, in the order in which they are read; where the two parts meet counts too
            digest = hashlib.sha256(len(train).to_bytes(8, "little"))
            digest.update(train)
            digest.update(heldout)
            return _of_rows(rows, "bytes", ByteTokenizer.vocabulary_size, digest.hexdigest())
    folder = tokenized(config, tokenizer, timeout_seconds=timeout_seconds, tell=tell)
    return partial(folder_samples, folder=folder, sheet=read_sheet(folder))


def _of_rows(rows: tuple[Ids, Ids], unit: str, vocabulary_size: int, fingerprint: str) -> _LayOut:
    """Of tokens to train on and tokens held out, which are called `unit` in messages."""
    return lambda config: SampleSets(*stream_samples(config, *rows, unit), vocabulary_size, fingerprint)


# Token ids that are there already --------------------------------------------------------------------------------------


def _check_memmap(config: DataConfig) -> None:
    assert config.path is not None, "it was checked"
    path = Path(config.path).expanduser()
    if not path.is_dir():
        if config.layout not in (None, STREAM):
            raise ValueError(
                f"data.layout={config.layout}: a .bin file does not say where a document ends; use data.layout=stream"
            )
        check_id_file("data.path", path, config.item_type)
        if config.eval_path is not None:
            check_id_file("data.eval_path", Path(config.eval_path).expanduser(), config.item_type)
    elif not (path / TOKENS_JSON).is_file():
        raise ValueError(
            f"data.path={config.path}: there is no {TOKENS_JSON} in this folder; give a .bin file of token ids, or make a folder of "
            f"tokens: pipetrain tokenize {config.path} --out=FOLDER"
        )
    elif config.eval_path is not None:
        raise ValueError(
            f"data.eval_path={config.eval_path}: a folder of tokens has a held-out part of its own; leave it out"
        )


def _of_memmap(config: DataConfig, tokenizer: Tokenizer | None) -> _LayOut:
    assert config.path is not None, "it was checked"
    path = Path(config.path).expanduser()
    if not path.is_dir():
        return _of_id_files(config, path, tokenizer)
    sheet = read_sheet(path)
    if tokenizer is not None and tokenizer.digest != sheet.tokenizer_digest:
        raise ValueError(
            f"data.path={config.path} was made with the tokenizer {sheet.tokenizer}, and data.tokenizer={tokenizer.called} is another one, or "
            f"has changed since (its SHA-256 is {tokenizer.digest[:12]}..., it was {sheet.tokenizer_digest[:12]}...); tokenize again"
        )
    return partial(folder_samples, folder=path, sheet=sheet)


def _of_id_files(config: DataConfig, path: Path, tokenizer: Tokenizer | None) -> _LayOut:
    """The ids of one file or two, with the largest of them as the vocabulary where there is no tokenizer."""
    ids, digest, largest = read_id_file("data.path", path, config.item_type, memory_of(config))
    if config.eval_path is None:
        cut, held_digest = len(ids) - int(config.eval_fraction * len(ids)), None
        train, heldout = ids[:cut], ids[cut:]
    else:
        held = read_id_file("data.eval_path", Path(config.eval_path).expanduser(), config.item_type, memory_of(config))
        train, heldout, held_digest, largest = ids, held.ids, held.digest, max(largest, held.largest)
    if tokenizer is not None and largest >= tokenizer.vocabulary_size:
        raise ValueError(
            f"data.path={path}: it holds the token {largest}, and data.tokenizer={tokenizer.called} has {tokenizer.vocabulary_size}; give "
            f"the tokenizer that it was written with, or another data.item_type (it is {config.item_type})"
        )
    vocabulary_size = largest + 1 if tokenizer is None else tokenizer.vocabulary_size
    # equal for the same ids, cut in the same place
    fingerprint = hashlib.sha256(f"{digest} {held_digest} {config.item_type} {len(heldout)}".encode()).hexdigest()
    return _of_rows((train, heldout), "tokens", vocabulary_size, fingerprint)
