"""docs/KEYS.md is what docs/keys.py makes of the records: every key, its default and a sentence."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_the_records() -> None:
    spec = importlib.util.spec_from_file_location("keys_page", DOCS / "keys.py")
    assert spec is not None
    assert spec.loader is not None
    keys_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keys_page)
    text = keys_page.page()
    assert (DOCS / "KEYS.md").read_text() == text, "run: python docs/keys.py"
    without = [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert without == []
