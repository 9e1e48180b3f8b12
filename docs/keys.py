"""Writes docs/KEYS.md, the reference of all keys, from pipetrain/config/records.py: `python docs/keys.py`.

The sentence of a key is the comment beside its field, or the comment lines above it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipetrain.cli.main import sentences
from pipetrain.config import records
from pipetrain.config.schema import guarded_keys, keys, limits, phase_keys

PAGE = Path(__file__).parent / "KEYS.md"
_MOST = 120  # characters of a row's list of allowed values
_HEAD = """# Keys

Every key of a configuration. This page is generated: `python docs/keys.py` writes it from `pipetrain/config/records.py`.

`KEY=VALUE` on the command line sets a key; `null` means None. *May change*: a resumed run (*resume*), or also a [phase](USAGE.md#phases)
(*phase*), may have another value; all other keys keep theirs. A group or an experiment of `conf/` may set other defaults.
"""


def page() -> str:
    """The text of docs/KEYS.md."""
    text = [_HEAD, "## The run", "", *_table(records.RunConfig, ""), ""]
    for path, kind in keys().items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            what = (kind.__doc__ or "").strip().partition("\n")[0]
            text += [f"## {path}", "", what, "", *_table(kind, f"{path}."), ""]
    return "\n".join(text).rstrip() + "\n"


def _table(record: type, prefix: str) -> list[str]:
    rows = ["| key | default | allowed | may change | meaning |", "|---|---|---|---|---|"]
    said = sentences(record)
    for field in dataclasses.fields(record):
        path = prefix + field.name
        if not dataclasses.is_dataclass(keys()[path]):
            cells = (
                f"`{path}`",
                f"`{_shown(field.default)}`",
                _allowed(path),
                _changes(path),
                _sentence(said[field.name]),
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _sentence(text: str) -> str:
    """The comment as a sentence, with `null` for None. A word before a colon is a value, so its case stays."""
    text = re.sub(r"\bNone\b", "null", text)
    first = text[:1] if re.match(r"[\w ]{1,12}:|\d", text) else text[:1].upper()
    return first + text[1:] + ("" if text.endswith(".") or not text else ".")


def _allowed(path: str) -> str:
    limit = limits().get(path)
    if limit is None:
        return _kind(keys()[path])
    if limit.choices:
        return ", ".join(limit.choices)
    told = re.sub(r"^[:\s]*((allowed (is|are)|must be|is|not supported,) )?", "", limit.told.strip()).partition("; ")[0]
    told = re.sub(r"^(only .+) is$", r"\1", told)
    return told if len(told) <= _MOST else told[:_MOST].rsplit(" ", 1)[0] + " ..."


def _changes(path: str) -> str:
    if path in phase_keys():
        return "phase"
    return "" if path in guarded_keys() else "resume"


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is Mapping:
        return "a group of keys"
    names = {bool: "true, false", int: "an integer", float: "a number", str: "text"}
    one = typing.get_origin(kind) in (tuple, None)
    options = [option for option in ((kind,) if one else typing.get_args(kind)) if option is not type(None)]
    return " or ".join(dict.fromkeys(names.get(option, "a list") for option in options))


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if value is dataclasses.MISSING:
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(_shown, value))}]"
    return str(value) or "''"


if __name__ == "__main__":
    PAGE.write_text(page())
