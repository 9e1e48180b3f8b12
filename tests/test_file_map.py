"""The file map of docs/ARCHITECTURE.md names every file of the package, in a few words each, and no file that is not there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
MOST_WORDS = 8


BEFORE, MAP, AFTER = re.split(r"^## File map$(.+?)(?=^## )", PAGE, flags=re.DOTALL | re.MULTILINE)


def mapped() -> list[tuple[str, str]]:
    """The rows of the map, as (path below pipetrain/, words)."""
    rows = []
    for room in re.split(r"^### ", MAP, flags=re.MULTILINE)[1:]:
        folder = room.split("`")[1].removeprefix("pipetrain/")
        rows += [
            (folder + name, words) for name, words in re.findall(r"^\| `(\S+\.py)` \| (.+) \|$", room, re.MULTILINE)
        ]
    return rows


def test_every_file_is_on_the_map() -> None:
    files = {
        str(path.relative_to(ROOT / "pipetrain"))
        for path in (ROOT / "pipetrain").rglob("*.py")
        if path.name != "__init__.py" or path.read_text()
    }
    places = [place for place, _ in mapped()]
    assert sorted(places) == sorted(files)


def test_each_in_a_few_words_of_its_own() -> None:
    rows = mapped()
    assert [place for place, words in rows if len(words.split()) > MOST_WORDS] == []
    assert len({words for _, words in rows}) == len(rows)


def test_files_that_the_page_speaks_of_are_there() -> None:
    """Paths in code type with a folder in front: below the package, or below the repository."""
    spoken = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", BEFORE + AFTER))
    assert spoken
    gone = [path for path in spoken if not (ROOT / "pipetrain" / path).exists() and not (ROOT / path).exists()]
    assert [path for path in gone if "NAME" not in path] == []


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("spelling", "schedule/op.py"),
        ("time-outs", "group/failure.py"),
        ("colours", "timeline/draw/palette.py"),
        ("clip", "parallel/clipping.py"),
        ("requeue", "launcher/slurm/restarts.py"),
    ],
)
def test_a_word_leads_to_one_file(word: str, place: str) -> None:
    assert [found for found, words in mapped() if word in words] == [place]
