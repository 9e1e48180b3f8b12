"""A little text for runs whose data must not change while tests run."""

from __future__ import annotations

import pathlib

_SENTENCE = "the pipeline runs while the stage waits and the stage waits while the pipeline runs"


def make_text(folder: pathlib.Path) -> list[str]:
    """Writes twenty files into a new folder; returns the overrides that read them."""
    folder.mkdir()
    sentence = _SENTENCE.split()
    for number in range(20):
        words = (sentence[(number + place) % len(sentence)] for place in range(2000))
        (folder / f"{number}.txt").write_text(" ".join(words))
    return ["data=text", f"data.path={folder}"]
