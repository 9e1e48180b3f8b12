"""Tensors as a safetensors file: first in host memory, so that training may change them, then on the disk."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipetrain.snapshot.files import FILE_MODE
from pipetrain.snapshot.manifest import FileRecord, record_of


class Image:
    """Copies of tensors in host memory, which serves again for tensors of the same names, dtypes and shapes.

    Args:
        pinned: whether copies from a GPU are to arrive without a stop on the way.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, pinned: bool = False) -> None:
        self._copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for name, tensor in tensors.items()
        }

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether `copy` can take them."""
        return self._copies.keys() == tensors.keys() and all(
            (copy.shape, copy.dtype) == (tensors[name].shape, tensors[name].dtype)
            for name, copy in self._copies.items()
        )

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any device; those of a GPU have arrived when the current stream has done what it was given."""
        for name, copy in self._copies.items():
            copy.copy_(tensors[name].detach(), non_blocking=True)

    def write(self, folder: Path, path: str) -> FileRecord:
        """A new file, on the disk when this returns. Raises OSError: it cannot be written; ValueError: a dtype that the format has not."""
        try:
            save_file(self._copies, folder / path)
        except KeyError as error:  # of a dtype that the format has not
            (dtype,) = error.args
            name = next(name for name, copy in self._copies.items() if copy.dtype == dtype)
            raise ValueError(f"{name} has dtype {dtype}, which a snapshot cannot hold") from error
        except SafetensorError as error:
            found = re.search(r"os error (\d+)", str(error))
            code = int(found[1]) if found else errno.EIO
            raise OSError(code, os.strerror(code) if found else str(error)) from error
        (folder / path).chmod(FILE_MODE)
        # The disk is waited for while the checksum is made, which reads what is still in memory.
        with (folder / path).open("rb") as file, ThreadPoolExecutor(1, "sync") as thread:
            synced = thread.submit(os.fsync, file.fileno())
            record = record_of(folder, path)
            synced.result()
        return record
