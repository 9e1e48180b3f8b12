"""Lines of the package per room, of the tests per folder, and seconds of their last run: `python -m tests.size`.

Fails over the limits of lines. A line of code is one that is not blank, no comment and no docstring. Speed is shown, not judged: machines
differ.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "pipetrain"
SECONDS = TESTS.parent / ".pytest_cache" / "v" / "pipetrain" / "seconds"
MOST_LINES = 500
# Lines that a room of the package may have, all counted. What makes one longer says why in its commit; what makes it shorter takes
# the figure down.
ROOMS = {
    "__init__.py": 78,
    "cli": 2648,
    "comm": 3909,
    "config": 2075,
    "data": 2712,
    "engine": 997,
    "launcher": 1043,
    "models": 3731,
    "monitor": 3344,
    "optim": 304,
    "plan": 3389,
    "runtime": 4902,
    "schedule": 5897,
    "snapshot": 1402,
    "stage": 4785,
    "train.py": 318,
    "trainer": 1494,
    "verify": 1074,
}
# Files of the package that are longer than a file should be, and how long they may be until they are cut.
LONG_FILES: dict[str, int] = {}
# Tables of broken lines, and of layers: data.
NOT_COUNTED = ("mutants", "zoo")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def lines_of_code(text: str) -> int:
    """Lines of Python that hold a token of code."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        holder = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if holder and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            first = node.body[0]  # type: ignore[attr-defined]
            docstrings |= set(range(first.lineno, first.end_lineno + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and token.type != tokenize.ENDMARKER:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def over_limits() -> list[str]:
    """What is longer than it may be, a sentence each: rooms and files of the package, files of the tests."""
    lines: dict[str, int] = defaultdict(int)
    over = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, length = str(path.relative_to(PACKAGE)), path.read_text().count("\n")
        lines[name.split("/")[0]] += length
        if length > (most := LONG_FILES.get(name, MOST_LINES)):
            over.append(f"pipetrain/{name} has {length} lines; it may have {most}")
    over += [
        f"{room} has {lines[room]} lines; it may have {ROOMS.get(room, 0)}"
        for room in lines
        if lines[room] > ROOMS.get(room, 0)
    ]
    for path in sorted(TESTS.rglob("*.py")):
        if (length := path.read_text().count("\n")) > MOST_LINES:
            over.append(f"tests/{path.relative_to(TESTS)} has {length} lines; a file of tests has at most {MOST_LINES}")
    return over


def show_rooms() -> None:
    """Prints the table of rooms."""
    lines: dict[str, int] = defaultdict(int)
    code: dict[str, int] = defaultdict(int)
    for path in PACKAGE.rglob("*.py"):
        room, text = path.relative_to(PACKAGE).parts[0], path.read_text()
        lines[room] += text.count("\n")
        code[room] += lines_of_code(text)
    print(f"{'room':<14} {'lines':>6} {'code':>6} {'limit':>6}")
    for room in sorted(lines):
        print(f"{room:<14} {lines[room]:>6} {code[room]:>6} {ROOMS.get(room, 0):>6}")
    print(f"{'all':<14} {sum(lines.values()):>6} {sum(code.values()):>6} {sum(ROOMS.values()):>6}\n")


def show_tests() -> None:
    """Prints the table of folders of tests, with the seconds of their last run."""
    seconds: dict[str, float] = defaultdict(float)
    if SECONDS.exists():
        for file, spent in json.loads(SECONDS.read_text()).items():
            seconds[_folder(Path(file).relative_to("tests"))] += spent
    lines: dict[str, int] = defaultdict(int)
    files: dict[str, int] = defaultdict(int)
    for path in TESTS.rglob("*.py"):
        folder = _folder(path.relative_to(TESTS))
        lines[folder] += lines_of_code(path.read_text())
        files[folder] += 1
    print(f"{'folder':<14} {'files':>5} {'code':>6} {'seconds':>8}")
    for folder in sorted(lines, key=lambda name: -seconds[name]):
        print(f"{folder:<14} {files[folder]:>5} {lines[folder]:>6} {seconds[folder]:>8.1f}")
    counted = sum(number for folder, number in lines.items() if folder not in NOT_COUNTED)
    print(
        f"{'all':<14} {sum(files.values()):>5} {counted:>6} {sum(seconds.values()):>8.1f}   (code without {', '.join(NOT_COUNTED)})"
    )


def main() -> int:
    show_rooms()
    show_tests()
    for line in (over := over_limits()):
        print(line)
    return 1 if over else 0


def _folder(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "."


if __name__ == "__main__":
    raise SystemExit(main())
