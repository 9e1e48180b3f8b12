"""How text becomes tokens: as bytes, or by a tokenizer of Hugging Face, from a folder or by name.

transformers is loaded where one encodes or decodes, and not to look at it. Both have `called`, what the user knows it by; `digest`, which
changes with what it does; `vocabulary_size`; and `pad_token`, which fills samples up and never counts.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipetrain.config.problem import nearest
from pipetrain.data.chat_template import ChatTemplate, SampleRefused, TooSlow
from pipetrain.data.documents import Document, check_installed

BYTE = "byte"


class Encoded(NamedTuple):
    """The tokens of several documents, one after the other, and how many each has.

    counted: per token, whether it counts in the loss; None: all do. problems: of documents that became no sample, by their number;
    such a document has no tokens.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    counted: NDArray[np.bool_] | None
    problems: dict[int, str]


class ByteTokenizer:
    """A token is a byte, so loss per token is loss per byte and no file is unreadable."""

    called = BYTE
    digest = hashlib.sha256(BYTE.encode()).hexdigest()
    vocabulary_size = 256
    pad_token = 0

    def encode(self, text: bytes) -> Tensor:
        # frombuffer refuses an empty buffer, and warns about one that must not be written to: hence the copy
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")

    def encode_documents(self, documents: Sequence[Document]) -> Encoded:
        """Files as they are; texts of records end with a line, as bytes have no token that ends one. Raises ValueError: there is a chat."""
        texts = [_bytes_of(document) for document in documents]
        lengths = np.array([len(text) for text in texts], np.int64)
        return Encoded(np.frombuffer(b"".join(texts), np.uint8), lengths, None, {})


def _bytes_of(document: Document) -> bytes:
    if isinstance(document.content, bytes):
        return document.content
    if isinstance(document.content, str):
        return document.content.encode(errors="surrogatepass") + b"\n"
    raise ValueError(
        "data.tokenizer=byte: these are chats, which need a tokenizer with a chat template; type data.tokenizer=FOLDER_OR_NAME"
    )


# What a tokenizer is made of, in a folder that may hold much else.
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)
_MAIN_FILES = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}


def folder_of_tokenizer(name: str) -> Path:
    """The folder itself, or where the hub's cache has the tokenizer of this name (downloaded if need be). Raises ValueError: there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).is_file() for file in _MAIN_FILES):
            raise ValueError(
                f"data.tokenizer={name}: there is no tokenizer in this folder (no tokenizer.json); give one that has"
            )
        return folder
    check_installed(f"data.tokenizer={name}", "transformers")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        try:
            return Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (OSError, ValueError, HFValidationError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data.tokenizer={name}: this is no folder here, and the hub does not give it ({reason}); give `{BYTE}`, a folder with a "
            f"tokenizer.json, or a name on the hub{nearest(name, [BYTE])}"
        ) from None


@dataclass(frozen=True)
class HfTokenizer:
    """A tokenizer in a folder. `counted` and `template_date` are for chats: what counts in the loss, and today's date."""

    folder: Path
    called: str
    counted: str
    template_date: datetime.date

    @functools.cached_property
    def digest(self) -> str:
        """Of its files: so it is known without loading them."""
        digest = hashlib.sha256()
        for path in (self.folder / name for name in _FILES):
            if path.is_file():
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()

    @functools.cached_property
    def vocabulary_size(self) -> int:
        return 1 + max(self._loaded.get_vocab().values(), default=-1)

    @functools.cached_property
    def pad_token(self) -> int:
        ids = (self._loaded.pad_token_id, self._loaded.eos_token_id, 0)
        return next(token for token in ids if token is not None)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Those that end a text."""
        end = self._loaded.eos_token_id
        return () if end is None else (int(end),)

    @property
    def has_chats(self) -> bool:
        """Whether it has a template that chats are written with."""
        return self._loaded.chat_template is not None

    def encode(self, text: bytes) -> Tensor:
        ids = self.backend.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return torch.tensor([*self._begin, *ids], dtype=torch.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._loaded.decode([int(token) for token in tokens], skip_special_tokens=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a chat that goes on with an answer; it begins with all that a text begins with."""
        return self._template.render({"messages": messages}, answers=True)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of what `render` gives: nothing is put before it."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, documents: Sequence[Document]) -> Encoded:
        if isinstance(documents[0].content, Mapping):
            return self._encode_chats(documents)
        return self._encode_texts(documents)

    # Texts ---------------------------------------------------------------------------------------------------------

    def _encode_texts(self, documents: Sequence[Document]) -> Encoded:
        problems: dict[int, str] = {}
        texts = [_text_of(document, number, problems) for number, document in enumerate(documents)]
        rows = [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        for number, (document, row) in enumerate(zip(documents, rows, strict=True)):
            if number not in problems:
                rows[number] = self._with_ends(row, document)
        return Encoded(*_joined(rows), None, problems)

    def _with_ends(self, row: list[int], document: Document) -> list[int]:
        """With the token that begins a text, where the tokenizer has one, and the one that ends it; neither twice."""
        begin, end = self._begin, self.end_tokens
        if document.begins and begin and row[: len(begin)] != begin:
            row = begin + row
        if document.ends and end and row[-1:] != list(end):
            row = [*row, *end]
        return row

    # Chats ---------------------------------------------------------------------------------------------------------

    def _encode_chats(self, documents: Sequence[Document]) -> Encoded:
        problems: dict[int, str] = {}
        chats = [self._marked(document.content, number, problems) for number, document in enumerate(documents)]
        encodings = self.backend.encode_batch([text for text, _ in chats], add_special_tokens=False)
        ids, lengths = _joined([encoding.ids for encoding in encodings])
        counted = np.zeros(len(ids), np.bool_)
        ends = np.cumsum(lengths)
        for number, (encoding, (_, spans)) in enumerate(zip(encodings, chats, strict=True)):
            if number not in problems:
                first, last = ends[number] - lengths[number], ends[number]
                counted[first:last] = self._template.counted_tokens(np.array(encoding.offsets), spans)
                if not counted[first:last].any():
                    problems[number] = "it has no token that counts in the loss: no answer of an assistant"
        is_sample = np.ones(len(lengths), np.bool_)
        is_sample[list(problems)] = False
        kept = np.repeat(is_sample, lengths)
        return Encoded(ids[kept], lengths * is_sample, counted[kept], problems)

    def _marked(self, row: Any, number: int, problems: dict[int, str]) -> tuple[str, list[tuple[int, int]]]:
        try:
            text, spans = self._template.render_marked(row)
            if half := half_of_a_character(text):
                raise SampleRefused(half)
            return text, spans
        except SampleRefused as error:
            problems[number] = str(error)
            return "", []
        except TooSlow as error:
            error.number = number
            raise

    # The tokenizer itself ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        template = self._loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            raise ValueError(
                f"data.tokenizer={self.called}: it has no chat template, which chats are written with; give the tokenizer of a chat model, "
                "or records with a text (data.text_field)"
            )
        return ChatTemplate(template, self._loaded.special_tokens_map, self.called, self.counted, self.template_date)

    @functools.cached_property
    def _begin(self) -> list[int]:
        """What the tokenizer puts before a text by itself: the token that begins one, in most."""
        plain = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        before = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return list(whole[:before])

    @property
    def backend(self) -> Any:
        """The tokenizer of `tokenizers`, without what transformers adds around it."""
        return self._loaded.backend_tokenizer

    @functools.cached_property
    def _loaded(self) -> Any:
        check_installed(f"data.tokenizer={self.called}", "transformers")
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(self.folder), trust_remote_code=False)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"data.tokenizer={self.called}: {self.folder} cannot be loaded ({reason}); give another"
            ) from error
        if getattr(loaded, "backend_tokenizer", None) is None:
            raise ValueError(
                f"data.tokenizer={self.called}: it is written in Python alone; give one that has a tokenizer.json"
            )
        loaded.backend_tokenizer.no_truncation()
        loaded.backend_tokenizer.no_padding()
        return loaded


def _text_of(document: Document, number: int, problems: dict[int, str]) -> str:
    if isinstance(document.content, str):
        if half := half_of_a_character(document.content):
            problems[number] = half
            return ""
        return document.content
    assert isinstance(document.content, bytes), "a corpus is of texts or of chats"
    try:
        return document.content.decode()
    except UnicodeDecodeError as error:
        problems[number] = f"it is not UTF-8 ({error.reason}: {document.content[error.start : error.start + 1]!r})"
        return ""


def half_of_a_character(text: str) -> str:
    """What is wrong with a text that JSON can write and no tokenizer takes; empty: nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"it has half a character (\\u{ord(text[error.start]):04x}, a surrogate alone), which is no text"
    return ""


def _joined(rows: Sequence[Sequence[int]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), np.uint32, int(lengths.sum())), lengths


Tokenizer = ByteTokenizer | HfTokenizer
