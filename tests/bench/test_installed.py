"""The wheel has the benchmarks of README's figures with all that they import, and no other; of those it says where they are."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import command

ROOT = Path(__file__).parent.parent.parent
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
FIGURES = set(re.findall(r"`(?:sudo )?pipetrain bench (\w+)`", (ROOT / "README.md").read_text()))


def installed() -> set[Path]:
    """The files of Python of benchmarks/ that pyproject's list puts into the wheel; each goes where it is in the repository."""
    paths = {Path(source) for source in BUILD["force-include"] if source.startswith("benchmarks")}
    assert all(BUILD["force-include"][str(path)] == f"pipetrain/{path}" for path in paths)
    files = {file for path in paths for file in ([ROOT / path] if path.suffix else (ROOT / path).rglob("*.py"))}
    return {file.relative_to(ROOT) for file in files}


def imported(path: Path) -> set[Path]:
    """What a file of benchmarks/ imports from there: by `from .. import`, as the package has another name in the wheel."""
    nodes = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ImportFrom)]
    assert not any((node.module or "").startswith("benchmarks") for node in nodes), path
    return {
        path.parents[node.level - 1] / f"{name.replace('.', '/')}.py"
        for node in nodes
        if node.level
        for name in ([node.module] if node.module else [alias.name for alias in node.names])
    }


def needed() -> set[Path]:
    found: set[Path] = set()
    new = {Path("benchmarks/command.py"), *(Path(f"benchmarks/{name}/run.py") for name in FIGURES)}
    while new:
        found |= new
        new = {one for path in new for one in imported(path)} - found
    return found | {path.parent / "__init__.py" for path in found}


def test_what_readme_types_is_installed_and_nothing_else() -> None:
    assert set(command.NAMES) >= FIGURES >= {"overlap", "cost", "links", "sets"}
    assert installed() == needed()


def test_a_name_that_is_not_installed_is_said_to_be_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost").mkdir()
    monkeypatch.setattr(command, "__file__", str(tmp_path / "command.py"))
    run: list[str] = []
    monkeypatch.setattr(command, "run", lambda name, _: run.append(name))
    assert command.main(["cost", "split", "replay"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "pipetrain bench: split, replay: not installed, but in the benchmarks/ folder of the repository"
    )
    assert "`python -m benchmarks.command split replay` in a checkout" in line
    assert run == []
    assert command.main([]) == 0
    assert run == ["cost"]
