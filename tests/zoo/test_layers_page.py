"""docs/LAYERS.md names entries of the zoo and tests that there are, and each entry that does not just come out equal."""

import pathlib
import re

from layer_zoo import ENTRIES

from pipetrain.verify.beside_loop import Verdict

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "LAYERS.md").read_text()


def named(section: str) -> set[str]:
    """The zoo's names in the tables of a section of the page; of all where it is empty."""
    text = PAGE.split(f"## {section}", 1)[1].split("\n## ", 1)[0] if section else PAGE
    lists = re.findall(r"zoo: ([^|]+?)(?:\. `test_[^|]*)? \|", text)
    return {name for listed in lists for name in listed.split("; ")}


def expected(*results: Verdict) -> set[str]:
    return {entry.name for entry in ENTRIES if entry.expected in results}


def test_each_named_entry_is_in_the_zoo_and_under_its_heading() -> None:
    assert named("") <= {entry.name for entry in ENTRIES}
    assert named("Kept") == expected(Verdict.KEPT)
    assert named("Refused") == expected(Verdict.REFUSED)
    assert named("What the proof of the first step cannot see") == expected(Verdict.DIFFERS)


def test_each_named_test_is_there() -> None:
    there = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"`(test_\w+)`", PAGE))
    assert tests
    assert {name for name in tests if f"def {name}(" not in there} == set()
