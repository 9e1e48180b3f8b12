"""DeepSpeed's extensions: compiled once, into the environment's own folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from pipetrain.engine.deepspeed.environment import quiet_stdout

_T = TypeVar("_T")
_FOLDER = "TORCH_EXTENSIONS_DIR"


def with_extension(name: str, make: Callable[[], _T]) -> _T:
    """What `make` gives, which loads the extension `name`, and compiles it where nobody has.

    Raises:
        OSError: it cannot be compiled.
    """
    folder = _folder()
    with _alone(folder), quiet_stdout():
        # torch waits for this file without an end, and a compilation that was killed leaves it behind.
        (folder / name / "lock").unlink(missing_ok=True)
        if not (folder / name / f"{name}.so").is_file():
            print(
                f"pipetrain: compiling DeepSpeed's {name} for this machine, once, about a minute: {folder / name}",
                file=sys.stderr,
                flush=True,
            )
        try:
            return make()
        except (RuntimeError, ImportError) as error:
            raise OSError(
                f"DeepSpeed's {name} cannot be compiled ({_last_line(error)}); see above, or use optim=adamw"
            ) from error


def _folder() -> Path:
    """`TORCH_EXTENSIONS_DIR`; by default a folder of the Python environment, or torch's own where that cannot be written."""
    if _FOLDER not in os.environ:
        own = Path(sys.prefix) / "share" / "torch_extensions" / f"torch-{torch.__version__}"
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError:
            own = Path.home() / ".cache" / "torch_extensions" / f"torch-{torch.__version__}"
        os.environ[_FOLDER] = str(own)
    folder = Path(os.environ[_FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its process, however that ends."""
    with (folder / "pipetrain.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(error: BaseException) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[-1][:160] if lines else type(error).__name__
