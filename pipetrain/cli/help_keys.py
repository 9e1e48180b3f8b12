"""The keys of a configuration for the terminal: the groups, the keys that people change most, and all keys."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap

from pipetrain.config.load import choices
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import keys

_MOST_CHANGED = [
    "steps",
    "epochs",
    "seed",
    "precision",
    "run_dir",
    "resume",
    "model.target",
    "model.path",
    "data.path",
    "data.target",
    "data.global_batch_size",
    "data.sequence_length",
    "pipeline.num_stages",
    "pipeline.num_microbatches",
    "pipeline.schedule",
    "pipeline.balance",
    "recompute.mode",
    "recompute.sets",
    "parallel.num_replicas",
    "optim.learning_rate",
    "snapshot.every_steps",
]
_WIDTH = 116


def sentences(record: type) -> dict[str, str]:
    """The comment of each field of a record."""
    source = inspect.getsource(record)
    lines = source.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            comments = [line.partition("# ")[2] for line in lines[first : node.end_lineno] if "# " in line]
            found[node.target.id] = " ".join(comments).strip()
    return found


def few_keys() -> str:
    """The groups with their choices, and the keys that people change most."""
    rows = [("groups", "")]
    rows += [(f"  {group}=", ", ".join(names)) for group, names in choices().items()]
    rows += [("keys (--help-keys lists all)", ""), *map(_row, _MOST_CHANGED)]
    return _lines(rows)


def all_keys() -> str:
    """All keys, each with its sentence."""
    return _lines([_row(path) for path, kind in keys().items() if not dataclasses.is_dataclass(kind)])


def _row(path: str) -> tuple[str, str]:
    *groups, name = path.split(".")
    record = functools.reduce(lambda above, group: keys(above)[group], groups, RunConfig)
    return f"  {path}", sentences(record)[name].replace("None:", "null:")


def _lines(rows: list[tuple[str, str]]) -> str:
    most = max(len(left) for left, right in rows if right) + 2
    texts = []
    for left, right in rows:
        first, *rest = textwrap.wrap(right, _WIDTH - most) or [""]
        texts += [f"{left:<{most}}{first}".rstrip(), *(" " * most + line for line in rest)]
    return "\n".join(texts) + "\n"
