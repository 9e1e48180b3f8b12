"""SECURITY.md names a test for each promise, and each is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_each_promise_names_a_test_that_is_there() -> None:
    promises = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert promises
    for promise in promises:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", promise)
        assert named, promise
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], (path, name)
