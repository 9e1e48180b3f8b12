"""How text becomes tokens."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Tokenizer(Protocol):
    """Bytes to token ids and back."""

    vocabulary_size: int

    def encode(self, text: bytes) -> Tensor:
        """Token ids `[tokens]` in the smallest integer type that holds the vocabulary."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; what is no valid text shows as U+FFFD."""
        ...


class ByteTokenizer:
    """A token is a byte, so loss per token is loss per byte and no file is unreadable."""

    vocabulary_size = 256

    def encode(self, text: bytes) -> Tensor:
        # frombuffer refuses an empty buffer, and warns about one that must not be written to: hence the copy
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


_TOKENIZERS: dict[str, type[ByteTokenizer]] = {"byte": ByteTokenizer}


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    if name not in _TOKENIZERS:
        nearest = difflib.get_close_matches(name, _TOKENIZERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"data.tokenizer={name!r}: allowed are {', '.join(_TOKENIZERS)}; did you mean {nearest!r}?")
    return _TOKENIZERS[name]()
