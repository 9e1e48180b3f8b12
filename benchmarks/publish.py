"""Takes results over into the repository: the JSON, the plots, and the tables in the pages that show them.

    python -m benchmarks.publish bench-results

A page says where a benchmark's tables belong by a pair of lines, `<!-- overlap -->` and `<!-- /overlap -->`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .result import Table, Target

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "benchmarks").glob("*/README.md"))


def publish(folder: Path) -> list[str]:
    """Copy what is in `folder` and write its tables into the pages; returns the names of the benchmarks."""
    RESULTS.mkdir(exist_ok=True)
    names = sorted(path.stem for path in folder.glob("*.json"))
    for name in names:
        for path in folder.glob(f"{name}.*"):
            shutil.copy(path, RESULTS / path.name)
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    return names


def with_tables(text: str) -> str:
    """A page with the tables of the published results."""

    def block(found: re.Match[str]) -> str:
        path = RESULTS / f"{found[1]}.json"
        return (
            f"<!-- {found[1]} -->\n{as_markdown(json.loads(path.read_text()))}\n<!-- /{found[1]} -->"
            if path.exists()
            else found[0]
        )

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", block, text, flags=re.DOTALL)


def as_markdown(record: Mapping[str, Any]) -> str:
    """When, where, tables, targets and notes of one result."""
    machine, versions = record["machine"], record["versions"]
    head = (
        f"Measured {record['date']} on {machine['cores']} cores of {machine['cpu']}, {machine.get('gpu') or 'no GPU'}, {machine['system']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; load average when it ended {machine['load_average'][0]:g}, nice {machine.get('nice', 0)}."
    )
    tables = [
        Table(table["title"], tuple(table["headers"]), tuple(map(tuple, table["rows"]))).as_text()
        for table in record["tables"]
    ]
    targets = [str(Target(target["what"], target["value"], target["limit"])) for target in record["targets"]]
    parts = [*tables, *(["\n".join(targets)] if targets else []), *(f"note: {note}" for note in record["notes"])]
    return f"{head}\n\n```\n" + "\n\n".join(parts) + "\n```"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m benchmarks.publish FOLDER (of `pipetrain bench --out=FOLDER`)", file=sys.stderr)
        return 2
    print(f"published: {', '.join(publish(Path(argv[0])))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
