"""Lines of the tests per folder and seconds of their last run: `python -m tests.size`. Fails over the limits of lines.

A line of code is one that is not blank, no comment and no docstring. Speed is shown, not judged: machines differ.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SECONDS = TESTS.parent / ".pytest_cache" / "v" / "pipetrain" / "seconds"
MOST_LINES = 500
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


def main() -> int:
    seconds: dict[str, float] = defaultdict(float)
    if SECONDS.exists():
        for file, spent in json.loads(SECONDS.read_text()).items():
            seconds[_folder(Path(file).relative_to("tests"))] += spent
    lines: dict[str, int] = defaultdict(int)
    files: dict[str, int] = defaultdict(int)
    too_long = []
    for path in sorted(TESTS.rglob("*.py")):
        text, folder = path.read_text(), _folder(path.relative_to(TESTS))
        lines[folder] += lines_of_code(text)
        files[folder] += 1
        if (length := text.count("\n")) > MOST_LINES:
            too_long.append(
                f"tests/{path.relative_to(TESTS)} has {length} lines; a file of tests has at most {MOST_LINES}"
            )
    print(f"{'folder':<14} {'files':>5} {'code':>6} {'seconds':>8}")
    for folder in sorted(lines, key=lambda name: -seconds[name]):
        print(f"{folder:<14} {files[folder]:>5} {lines[folder]:>6} {seconds[folder]:>8.1f}")
    counted = sum(number for folder, number in lines.items() if folder not in NOT_COUNTED)
    print(
        f"{'all':<14} {sum(files.values()):>5} {counted:>6} {sum(seconds.values()):>8.1f}   (code without {', '.join(NOT_COUNTED)})"
    )
    for line in too_long:
        print(line)
    return 1 if too_long else 0


def _folder(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "."


if __name__ == "__main__":
    raise SystemExit(main())
