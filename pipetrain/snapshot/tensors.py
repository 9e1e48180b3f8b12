"""Tensors as a safetensors file: first in host memory, then on the disk, hashed on the way.

The file is made here and not by the safetensors library, because the copy of the tensors that a save has to make anyway can be
the file, byte for byte: no second copy, the interpreter lock free while it is written, and the SHA-256 is of the memory,
so that a fault of the disk cannot enter into it. It is read with the library. Format: https://huggingface.co/docs/safetensors.

It goes past the page cache (O_DIRECT) where the file system can do that: a snapshot is seldom read again, its pages would push
other data out of memory, and to fill them takes memory bandwidth from the training.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipetrain.snapshot.files import create_file
from pipetrain.snapshot.manifest import FileRecord

_CHUNK_BYTES = 1 << 20  # stays in a core's cache between the hash and the write
_BLOCK_BYTES = 1 << 12  # O_DIRECT wants addresses, offsets and lengths in such blocks
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Image:
    """A safetensors file in host memory; its memory serves again for tensors of the same names, dtypes and shapes.

    Args:
        pinned: whether copies from a GPU are to arrive without a stop on the way.

    Raises:
        ValueError: a dtype that the format has not.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, pinned: bool = False) -> None:
        self._header, data_bytes = _header(tensors)
        size = len(self._header) + data_bytes
        memory = torch.empty(size + _BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        start = -memory.data_ptr() % _BLOCK_BYTES
        self._bytes = memory[start : start + size]
        self._bytes[: len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether `copy` can take them."""
        return _header(tensors)[0] == self._header

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any device; those of a GPU have arrived when the current stream has done what it was given."""
        start = len(self._header)
        for tensor in _ordered(tensors).values():
            end = start + tensor.numel() * tensor.element_size()
            place = self._bytes[start:end].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=True)
            start = end

    def write(self, folder: Path, path: str) -> FileRecord:
        """A new file, on the disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        digest, data = hashlib.sha256(), self._bytes.numpy().data
        descriptor = create_file(folder / path)
        try:
            whole = len(data) - len(data) % _BLOCK_BYTES
            _set_direct(descriptor, True)
            for start, end in _pieces(whole, len(data)):
                if start == whole:
                    _set_direct(descriptor, False)
                digest.update(data[start:end])
                _write_all(descriptor, data[start:end])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return FileRecord(path, len(data), digest.hexdigest())


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The largest elements first: then each tensor begins at a multiple of its element's size."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Its length in 8 bytes and the JSON header, padded so that the data begins at a multiple of 8; and the size of the data."""
    entries, offset = {}, 0
    for name, tensor in _ordered(tensors).items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a snapshot cannot hold")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


def _pieces(whole: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each write: chunks of the part that is blocks, and the rest."""
    for start in range(0, whole, _CHUNK_BYTES):
        yield start, min(start + _CHUNK_BYTES, whole)
    if whole < size:
        yield whole, size


def _write_all(descriptor: int, chunk: memoryview) -> None:
    """A disk that is nearly full takes part of a chunk first and refuses the rest."""
    while chunk:
        try:
            chunk = chunk[os.write(descriptor, chunk) :]
        except OSError as error:
            # It took a part that is no whole number of blocks, or its blocks are larger than ours.
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & _O_DIRECT:
                raise
            _set_direct(descriptor, False)


def _set_direct(descriptor: int, wanted: bool) -> None:
    """Whether what is written from now on goes past the page cache; it never does where the file system cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT if wanted else flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
