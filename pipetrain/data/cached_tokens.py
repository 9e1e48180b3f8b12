"""The tokens of a corpus, in a folder of the cache: made at the first use, or ahead by `pipetrain tokenize`."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

from pipetrain.config.records import STREAM, DataConfig
from pipetrain.data.corpus import files_at, find_files
from pipetrain.data.documents import Corpus, JsonCorpus, TextCorpus
from pipetrain.data.hf_dataset import hf_corpus
from pipetrain.data.scan import Scanned, digest_of, scan
from pipetrain.data.split import Split, cut_at_a_line, in_order, split_files
from pipetrain.data.token_cache import Tell, cache_root, made_once
from pipetrain.data.token_file import FORMAT
from pipetrain.data.tokenizer import ByteTokenizer, Tokenizer
from pipetrain.data.tokenizing import write_tokens

WAIT_SECONDS = 600.0  # for a process that tokenizes and does not come on


def tokenized(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    out: Path | None = None,
    timeout_seconds: float = WAIT_SECONDS,
    tell: Tell | None = None,
) -> Path:
    """The folder with the tokens of what `config` names: `out`, or one in the cache, where it is made once.

    Raises:
        ValueError: a document is no sample, or the folder cannot be written.
    """
    corpus = corpus_of(config, tokenizer)
    make = functools.partial(_make_tokens, corpus, tokenizer, config.on_error == "skip")
    folder = cache_root(config.cache_dir) / _name_of(config, corpus, tokenizer) if out is None else out
    return made_once(folder, make, timeout_seconds=timeout_seconds, tell=tell)


def corpus_of(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The documents that `config` names.

    Raises:
        ValueError: there are none.
    """
    memory = memory_of(config)
    if config.name == "hf":
        return hf_corpus(config, memory)
    if config.name == "jsonl":
        train, heldout = _files_of(config)
        return JsonCorpus(train, heldout, config.heldout_fraction, config.text_field)
    split = split_of(config)
    if not isinstance(tokenizer, ByteTokenizer):
        split = cut_at_a_line(split)
    train, heldout = _files_of(config)
    return TextCorpus(split, digest_of([*train, *heldout]))


def is_cached(config: DataConfig, tokenizer: Tokenizer | None) -> bool:
    """Whether its tokens are kept: all but bytes of files, and what is tokens already."""
    return config.name != "memmap" and tokenizer is not None and not is_bytes(config, tokenizer)


def _make_tokens(corpus: Corpus, tokenizer: Tokenizer, skips: bool, folder: Path, tell: Tell) -> None:
    write_tokens(corpus, tokenizer, folder, skips=skips, tell=tell)


def _name_of(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Of a folder in the cache: other text, another tokenizer or another key that tokens depend on is another folder."""
    held = (config.heldout_path is not None, config.heldout_split is not None, config.heldout_fraction)
    chat = (config.text_field, config.counted, config.template_date)
    depends = (FORMAT, config.name, corpus.digest, tokenizer.digest, held, chat)
    return hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]


def is_bytes(config: DataConfig, tokenizer: Tokenizer) -> bool:
    return (
        config.name in ("stdlib", "text") and isinstance(tokenizer, ByteTokenizer) and config.layout in (None, STREAM)
    )


def memory_of(config: DataConfig) -> Path:
    return cache_root(config.cache_dir) / "files"


def _files_of(config: DataConfig) -> tuple[list[Scanned], list[Scanned]]:
    """The files that are read, and those that are held out as a whole; of these no copy is trained on."""
    train = scan(find_files(config), memory_of(config))
    if config.heldout_path is None:
        return train, []
    heldout = scan(files_at("data.heldout_path", config.heldout_path, config.pattern), memory_of(config))
    held = {file.digest for file in heldout}
    return [file for file in train if file.digest not in held], heldout


def split_of(config: DataConfig) -> Split:
    train, heldout = _files_of(config)
    return Split(in_order(train), in_order(heldout)) if heldout else split_files(train, config.heldout_fraction)
