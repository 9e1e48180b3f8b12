"""What commands write where the user says: files that may not be writable, and JSON alone on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STDOUT = "-"


def write_text(path: Path, text: str) -> None:
    """Raises:
    ValueError: the file cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error


def write_json(value: Any, target: str) -> None:
    """To the file `target`, or to stdout where it is `-`.

    Raises:
        ValueError: the file cannot be written.
    """
    text = json.dumps(value, indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
    else:
        write_text(Path(target), text)
