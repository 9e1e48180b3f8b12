"""The zoo of layers with every backward in two halves: what comes out equal, kept or refused does so then, too."""

from __future__ import annotations

import pytest
from layer_zoo import ENTRIES, Entry
from random_schedules import split

from pipetrain.verify.beside_loop import Verdict, Way, beside, plain


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what layers and compilers of others warn of is theirs
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.slow], ids=lambda entry: entry.name)
def test_as_with_a_whole_backward(entry: Entry) -> None:
    if why := entry.lacks():
        pytest.skip(why)
    way = Way("overlap", entry.stages[0], schedule=split("gpipe", 1), policy={"sets": 2, "keep": "none"})
    found = beside(entry.subject, plain(entry.subject), way)
    # What the proof of the first step cannot see, the witness may name.
    is_named = entry.is_documented and found.result is Verdict.REFUSED
    assert found.result is entry.expected or is_named, found.detail
