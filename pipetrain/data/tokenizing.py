"""From documents to a folder of tokens, in the cache or ahead by `pipetrain tokenize`: read, encode and write beside each other, in batches.

Whoever comes first makes a folder, while the others wait for it. It holds a lock of the kernel's, which ends with its process, writes a
draft and renames it when it is whole. A thread encodes a batch, on all cores (the tokenizer's own threads), while the next one is read and the last one written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from pipetrain.config.records import STREAM, DataConfig
from pipetrain.config.write_files import open_to_append
from pipetrain.data.chat_template import TooSlow
from pipetrain.data.corpus import cache_root, cut_at_a_line, digest_of, files_of, memory_of, split_files
from pipetrain.data.documents import Corpus, Document, hf_corpus, json_corpus, text_corpus
from pipetrain.data.token_file import FORMAT, HELDOUT, PARTS, TOKENS_JSON, TRAIN, PartWriter, TokenSheet
from pipetrain.data.tokenizer import ByteTokenizer, Encoded, Tokenizer

Tell = Callable[[float], None]
"""Called with the fraction that is done, from 0 to 1."""


WAIT_SECONDS = 600.0  # for another process that tokenizes and makes no progress
_PAUSE_SECONDS = 0.1  # between two checks of its progress


def tokenized(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    out: Path | None = None,
    timeout_seconds: float = WAIT_SECONDS,
    tell: Tell = lambda _: None,
) -> Path:
    """The folder with the tokens: `out`, or one in the cache, made once. Raises ValueError: a document cannot be a sample, or the folder cannot be written."""
    corpus = corpus_of(config, tokenizer)
    folder = folder_in_cache(config, corpus, tokenizer) if out is None else out
    make = partial(write_tokens, corpus, tokenizer, skips=config.on_error == "skip", tell=tell)
    return made_once(folder, make, timeout_seconds=timeout_seconds)


def made_once(folder: Path, make: Callable[[Path], None], *, timeout_seconds: float) -> Path:
    """`folder`, which `make(draft folder)` has filled: now, earlier, or in another process meanwhile.

    Raises ValueError: it cannot be written, its file system has no locks, or nothing has come from its maker for `timeout_seconds`.
    """
    if is_whole(folder):
        return folder
    draft = folder.with_name(f"{folder.name}.draft")
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), mode=0o640, fallback_to_soft=False)
    size, wait = -1, 0.0
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(wait, poll_interval=_PAUSE_SECONDS)
            except Timeout:
                now = _size_of_files(draft)
                if now == size:
                    maker = Path(lock.lock_file).read_text() or "another process"
                    raise ValueError(
                        f"{folder} is being made by {maker}, which has not come on for {timeout_seconds:.0f} s (timeout_seconds); "
                        "end it, or choose another data.cache_dir"
                    ) from None
                size, wait = now, timeout_seconds
        if not is_whole(folder):
            with open_to_append(Path(lock.lock_file)) as file:
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
            draft.mkdir()
            make(draft)
            draft.rename(folder)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={folder.parent}: tokens cannot be kept there ({error.strerror or error}); choose another data.cache_dir"
        ) from error
    finally:
        if lock.is_locked:
            shutil.rmtree(draft, ignore_errors=True)
        lock.release()
    return folder


def _size_of_files(draft: Path) -> int:
    try:
        return sum(file.stat().st_size for file in draft.glob("*/*"))
    except FileNotFoundError:  # the draft was renamed meanwhile
        return 0


def is_whole(folder: Path) -> bool:
    """Whether there are tokens in it."""
    return (folder / TOKENS_JSON).is_file()


def corpus_of(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The documents that `config` names. Raises ValueError: there are none."""
    if config.name == "hf":
        return hf_corpus(config, memory_of(config))
    train, heldout = files_of(config)
    if config.name == "jsonl":
        return json_corpus(train, heldout, config.eval_fraction, config.text_field)
    split = split_files(train, heldout, config.eval_fraction)
    split = split if isinstance(tokenizer, ByteTokenizer) else cut_at_a_line(split)
    return text_corpus(split, digest_of([*train, *heldout]))


def is_cached(config: DataConfig, tokenizer: Tokenizer | None) -> bool:
    """Whether its tokens are kept: all but bytes of files, and what is tokens already."""
    return config.name != "memmap" and tokenizer is not None and not is_bytes(config, tokenizer)


def folder_in_cache(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> Path:
    """The folder in the cache: other text, another tokenizer or another key that tokens depend on is another folder."""
    held = (config.eval_path is not None, config.eval_split is not None, config.eval_fraction)
    chat = (config.text_field, config.counted, config.template_date)
    depends = (FORMAT, config.name, corpus.digest, tokenizer.digest, held, chat)
    return cache_root(config.cache_dir) / hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]


def is_bytes(config: DataConfig, tokenizer: Tokenizer) -> bool:
    return (
        config.name in ("stdlib", "text") and isinstance(tokenizer, ByteTokenizer) and config.layout in (None, STREAM)
    )


_BATCH_BYTES = 2**22
BATCH_DOCUMENTS = 4096


def write_tokens(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, skips: bool, tell: Tell = lambda _: None
) -> None:
    """Tokenizes all documents of `corpus` into the empty `folder`. `skips`: documents that cannot be samples are counted, not refused.

    Raises ValueError: a document cannot be a sample (its file and line are named), or no document can; OSError: `folder` cannot be written.
    """
    item_type = np.min_scalar_type(max(tokenizer.vocabulary_size - 1, 0))  # that holds every token id
    problems = _Problems(corpus, skips)
    batches = _batches(corpus.documents(), problems)
    first = next(batches, [])
    is_chat = bool(first) and not isinstance(first[0].content, (str, bytes))
    with ExitStack() as stack:
        writers = {part: PartWriter(folder / part, item_type, stack, is_chat=is_chat) for part in PARTS}
        thread = stack.enter_context(ThreadPoolExecutor(1, "pipetrain-tokenize"))
        done, batches = 0, itertools.chain(filter(None, [first]), batches)
        for batch, encoded in _ahead(batches, tokenizer, thread, corpus.sources):
            done += _write(batch, encoded, writers, problems)
            tell(min(done / max(corpus.num_bytes, 1), 1.0))
    numbers = {part: writers[part].numbers for part in PARTS}
    if problems.first is not None and not any(part.tokens for part in numbers.values()):
        raise ValueError(f"no document can be a sample; first of {problems.num_skipped}: {problems.first}; fix them")
    sheet = TokenSheet(
        format=FORMAT,
        item_type=item_type.name,
        vocabulary_size=tokenizer.vocabulary_size,
        pad_token=tokenizer.pad_token,
        tokenizer=tokenizer.called,
        tokenizer_digest=tokenizer.digest,
        is_chat=is_chat,
        sources=list(corpus.sources),
        parts=numbers,
        num_skipped=problems.num_skipped,
        first_problem=problems.first,
    )
    (folder / TOKENS_JSON).write_text(json.dumps(asdict(sheet), indent=2) + "\n")
    tell(1.0)


@dataclass
class _Problems:
    """Documents that cannot be samples: the first one raises, or all are counted."""

    corpus: Corpus
    skips: bool
    num_skipped: int = 0
    first: str | None = None

    def add(self, document: Document, problem: str) -> None:
        said = f"{place_named(self.corpus.sources, *document.place)}: {problem}"
        if not self.skips:
            raise ValueError(refusal_of(said))
        self.num_skipped += 1
        if self.first is None:
            self.first = said


def place_named(sources: Sequence[str], source: int, line: int) -> str:
    """`chat.jsonl:17`, or the file alone where the document is all of it."""
    return f"{sources[source]}:{line}" if line else sources[source]


def refusal_of(problem: str) -> str:
    """The error for a document that cannot be a sample, where data.on_error=stop."""
    return f"{problem}; fix it, or skip all such documents: data.on_error=skip"


def _batches(documents: Iterator[Document], problems: _Problems) -> Iterator[list[Document]]:
    """Those without a problem, some megabytes at once."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if document.problem is not None:
            problems.add(document, document.problem)
            continue
        batch.append(document)
        size += len(document.content) if isinstance(document.content, (bytes, str)) else 0
        if size >= _BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ahead(
    batches: Iterable[list[Document]], tokenizer: Tokenizer, thread: Executor, sources: Sequence[str]
) -> Iterator[tuple[list[Document], Encoded]]:
    """Each batch with its tokens, while the next one is encoded."""
    started = ((batch, thread.submit(tokenizer.encode_documents, batch)) for batch in batches)
    for now, _ in itertools.pairwise(itertools.chain(started, [None])):
        assert now is not None
        batch, encoding = now
        try:
            yield batch, encoding.result()
        except TooSlow as error:
            raise ValueError(f"{place_named(sources, *batch[error.number].place)}: {error}; leave it out") from None


def _write(batch: list[Document], encoded: Encoded, writers: dict[str, PartWriter], problems: _Problems) -> int:
    """Writes what became of a batch, each document to its part; returns how many bytes of the corpus that was."""
    for number in sorted(encoded.problems):
        problems.add(batch[number], encoded.problems[number])
    held = np.array([document.is_heldout for document in batch])
    # of a long text a piece is left out, and what is around it is one document
    kept = [number not in encoded.problems or not (it.begins and it.ends) for number, it in enumerate(batch)]
    for part, wanted in ((TRAIN, ~held & kept), (HELDOUT, held & kept)):
        if wanted.any():
            tokens = slice(None) if wanted.all() else np.repeat(wanted, encoded.lengths)
            writers[part].add(
                encoded.ids[tokens],
                None if encoded.counted is None else encoded.counted[tokens],
                encoded.lengths[wanted],
                list(itertools.compress(batch, wanted)),
            )
    return sum(document.size for document in batch)
