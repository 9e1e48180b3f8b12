"""How text becomes tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipetrain.data.documents import Document

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


class Tokenizer(Protocol):
    """Bytes to token ids and back. `called` is what the user knows it by; `digest` changes with what it does."""

    @property
    def called(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def pad_token(self) -> int:
        """Fills samples up; it never counts."""
        ...

    def encode(self, text: bytes) -> Tensor:
        """Token ids `[tokens]` in the smallest integer type that holds the vocabulary."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; what is no valid text shows as U+FFFD."""
        ...

    def encode_documents(self, documents: Sequence[Document]) -> Encoded:
        """Texts with what begins and ends one, or chats as their template has them; none of them has a problem."""
        ...


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
        """Files as they are; texts of records end with a line, as bytes have no token that ends one.

        Raises ValueError: there is a chat among them.
        """
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
