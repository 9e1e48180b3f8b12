"""Whoever looks for something finds one thing: rooms are in docs/ARCHITECTURE.md, a file is short and says what it is about, a name is one thing's."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import size

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipetrain"
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.read_text())


def test_every_folder_is_in_the_table() -> None:
    (rows,) = re.findall(r"^## Rooms$(.+?)(?=^## )", PAGE, flags=re.DOTALL | re.MULTILINE)
    mapped = re.findall(r"^\| `(\S+)/` \| .+ \|$", rows, re.MULTILINE)
    assert sorted(mapped) == sorted({str(path.parent.relative_to(PACKAGE)) for path in FILES} - {"."})


def test_each_file_begins_with_a_sentence_of_its_own() -> None:
    first = {str(path.relative_to(PACKAGE)): ast.get_docstring(ast.parse(path.read_text())) or "" for path in FILES}
    lines = {name: text.partition("\n")[0] for name, text in first.items()}
    assert [name for name, line in lines.items() if len(line.split()) < 3] == []
    assert len(set(lines.values())) == len(lines)


def test_files_that_the_page_speaks_of_are_there() -> None:
    """Paths in code type with a folder in front: below the package, or below the repository."""
    spoken = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", PAGE))
    assert spoken
    gone = [path for path in spoken if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert [path for path in gone if "NAME" not in path] == []


def test_rooms_and_files_keep_within_their_lines() -> None:
    assert size.over_limits() == []


EVERYWHERE = {"main"}  # what `python -m` runs
OF_A_COMMAND = {"add_arguments", "run"}  # what `cli/main.py` calls in each cli/NAME_command.py


def test_no_two_public_classes_or_functions_share_a_name() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                is_of_each = node.name in OF_A_COMMAND and path.name.endswith("_command.py")
                if not is_of_each and node.name not in EVERYWHERE:
                    places[node.name].append(str(path.relative_to(PACKAGE)))
    assert "Pipeline" in places
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
