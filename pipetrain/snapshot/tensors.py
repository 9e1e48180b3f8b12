"""Tensors to a safetensors file, hashed on the way.

The file is written here and not by the safetensors library, because each tensor then goes from its memory to the disk in
pieces: no second copy, the interpreter lock free during every piece, and the SHA-256 is of the memory, so that a fault
of the disk cannot enter into it. It is read with the library. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipetrain.snapshot.folder import create_file
from pipetrain.snapshot.manifest import FileRecord

_CHUNK_BYTES = 1 << 22
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


def write_tensors(folder: Path, path: str, tensors: Mapping[str, Tensor]) -> FileRecord:
    """A new file with dense CPU tensors, on the disk when this returns.

    Raises:
        OSError: it cannot be written.
        ValueError: a dtype that the format has not.
    """
    # The largest elements first: then each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, num_bytes = hashlib.sha256(), 0
    with os.fdopen(create_file(folder / path), "wb", buffering=0) as file:
        for piece in (_header(ordered), *(_bytes_of(tensor) for _, tensor in ordered)):
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                num_bytes += _write_all(file.fileno(), chunk)
        os.fsync(file.fileno())
    return FileRecord(path, num_bytes, digest.hexdigest())


def _header(ordered: list[tuple[str, Tensor]]) -> memoryview:
    """Its length in 8 bytes and the JSON header, padded so that the data begins at a multiple of 8."""
    entries, offset = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a snapshot cannot hold")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.device.type == "cpu"
    data: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def _write_all(descriptor: int, chunk: memoryview) -> int:
    """A disk that is nearly full takes part of a chunk first and refuses the rest."""
    written = 0
    while written < len(chunk):
        written += os.write(descriptor, chunk[written:])
    return written
