"""Reads what wandb wrote: a LevelDB log (blocks of 32 KiB, records of one or more pieces) of its own messages."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

_BLOCK, _HEADER = 32_768, 7  # checksum 4, length 2, kind 1
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: pathlib.Path) -> Iterator[Any]:
    """The records of a `run-*.wandb` file, as far as they are whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, message = _HEADER, b""
    while at + _HEADER <= len(data):
        rest_of_block = _BLOCK - at % _BLOCK
        if rest_of_block < _HEADER:
            at += rest_of_block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece = data[at + _HEADER : at + _HEADER + length]
        if not kind or len(piece) < length:
            return
        message = piece if kind in (_FULL, _FIRST) else message + piece
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(message)
            yield record
        at += _HEADER + length


def newest(run: pathlib.Path) -> pathlib.Path:
    """The file of the newest wandb run in a run folder."""
    return max((run / "wandb").glob("*run-*/run-*.wandb"), key=lambda file: file.parent.name.partition("run-")[2])


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows that were logged, in the order of the file."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def steps(path: pathlib.Path) -> list[int]:
    return [row["_step"] for row in rows(path)]
