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
from numpy.typing import NDArray

from pipetrain.config.problem import nearest
from pipetrain.data.chat_template import ChatTemplate, SampleRefused, Span, TooSlow
from pipetrain.data.documents import Document, Row, check_installed

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

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")

    def encode_documents(self, documents: Sequence[Document]) -> Encoded:
        """Files as they are; texts of records end with a line, as bytes have no token that ends one. Raises ValueError: there is a chat."""
        texts: list[bytes] = []
        for content in (document.content for document in documents):
            if isinstance(content, Mapping):
                raise ValueError(
                    "data.tokenizer=byte: these are chats, which need a tokenizer with a chat template; type data.tokenizer=FOLDER_OR_NAME"
                )
            texts.append(content if isinstance(content, bytes) else content.encode(errors="surrogatepass") + b"\n")
        lengths = np.array([len(text) for text in texts], np.int64)
        return Encoded(np.frombuffer(b"".join(texts), np.uint8), lengths, None, {})


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

    def encode(self, text: bytes) -> list[int]:
        return [*self._begin, *self.encode_prompt(text.decode(errors="replace"))]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._loaded.decode([int(token) for token in tokens], skip_special_tokens=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a chat that goes on with an answer; it begins with all that a text begins with."""
        return self._template.render({"messages": messages}, answers=True)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of what `render` gives: nothing is put before it."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, documents: Sequence[Document]) -> Encoded:
        """The documents are all texts, or all chats."""
        texts, spans, problems = [], [], dict[int, str]()
        for number, document in enumerate(documents):
            try:
                text, counted = self._text_of(document.content)
            except SampleRefused as error:
                text, counted, problems[number] = "", [], str(error)
            except TooSlow as error:
                error.number = number
                raise
            texts.append(text)
            spans.append(counted)
        if isinstance(documents[0].content, Mapping):
            return self._encode_chats(texts, spans, problems)
        rows = [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        for number, (document, row) in enumerate(zip(documents, rows, strict=True)):
            if number not in problems:
                rows[number] = self._with_ends(row, document)
        return Encoded(*_joined(rows), None, problems)

    def _text_of(self, content: bytes | str | Row) -> tuple[str, list[Span]]:
        """The text of a document, and which characters of a chat count. Raises SampleRefused: it is none."""
        spans: list[Span] = []
        try:
            if isinstance(content, Mapping):
                content, spans = self._template.render_marked(content)
            elif isinstance(content, bytes):
                content = content.decode()
            content.encode()
        except UnicodeDecodeError as error:
            raise SampleRefused(
                f"it is not UTF-8 ({error.reason}: {error.object[error.start : error.start + 1]!r})"
            ) from None
        except UnicodeEncodeError as error:  # JSON can write it
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise SampleRefused(f"it has half a character ({half}, a surrogate alone), which is no text") from None
        return content, spans

    def _with_ends(self, row: list[int], document: Document) -> list[int]:
        """With the token that begins a text, where the tokenizer has one, and the one that ends it; neither twice."""
        begin, end = self._begin, self.end_tokens
        if document.begins and begin and row[: len(begin)] != begin:
            row = begin + row
        if document.ends and end and row[-1:] != list(end):
            row = [*row, *end]
        return row

    def _encode_chats(self, texts: list[str], spans: list[list[Span]], problems: dict[int, str]) -> Encoded:
        """The tokens of chats, and which of them count; adds to `problems` those without any."""
        rows, counted = list[list[int]](), list[NDArray[np.bool_]]()
        for number, encoding in enumerate(self.backend.encode_batch(texts, add_special_tokens=False)):
            counts = self._template.counted_tokens(np.array(encoding.offsets), spans[number])
            if number not in problems and not counts.any():
                problems[number] = "it has no token that counts in the loss: no answer of an assistant"
            is_sample = number not in problems
            rows.append(encoding.ids if is_sample else [])
            counted.append(counts if is_sample else counts[:0])
        return Encoded(*_joined(rows), np.concatenate(counted), problems)

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


def _joined(rows: Sequence[Sequence[int]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), np.uint32, int(lengths.sum())), lengths


Tokenizer = ByteTokenizer | HfTokenizer
