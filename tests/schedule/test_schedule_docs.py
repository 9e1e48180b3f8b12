"""docs/SCHEDULES.md shows every family; its pictures and those of docs/SCALING.md are fresh and their commands are spelled as the keys are."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipetrain.cli.main import main
from pipetrain.schedule.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SCALING, PLAN = ((DOCS / name).read_text() for name in ("SCHEDULES.md", "SCALING.md", "PLAN.md"))


def script(name: str) -> Any:
    """A script beside the pictures, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FRONTIER = script("frontier")
FACTS = json.loads((DOCS / "pictures" / "frontier.json").read_text())
MAKE = script("make")
PICTURES = {**MAKE.pictures(PAGE), **MAKE.pictures(SCALING), "frontier.svg": FRONTIER.picture(FACTS)}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_fresh(name: str) -> None:
    assert (DOCS / "pictures" / name).read_text() == PICTURES[name], "run: python docs/pictures/make.py and frontier.py"


def test_every_picture_is_shown_and_made() -> None:
    shown = set(re.findall(r"\]\(pictures/(\S+)\)", PAGE + SCALING))
    planned = set(re.findall(r"\]\(pictures/(\S+)\)", PLAN))  # of a profile, which differs from machine to machine
    assert planned == set(re.findall(r"pipetrain plan .+ --out=(\S+)", PLAN))
    assert shown == set(PICTURES)
    assert shown | planned == {path.name for path in (DOCS / "pictures").glob("*.svg")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_section_and_a_picture(family: str) -> None:
    section = re.search(rf"^## {family}$(.+?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert f"pipeline.schedule={family} " in section[1]


def test_the_table_of_time_against_sets_is_that_of_the_picture() -> None:
    rows = [re.split(r"\s{2,}", line.strip()) for line in FRONTIER.table(FACTS).splitlines()]
    in_page = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in PAGE.splitlines()]
    assert all(row in in_page for row in rows if row[0].strip("-"))


QUICK = ("inline", "gpipe, 1f1b", "auto", "bound", "auto, split", "bound, split")  # with two sets


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        *((name, ["2"]) for name in QUICK),
        *(pytest.param(name, [*FACTS["seconds"][name]], marks=pytest.mark.slow) for name in FACTS["seconds"]),
    ],
    ids=str,
)
def test_the_frontier_is_what_is_simulated(name: str, sets: list[str]) -> None:
    assert [FRONTIER.lines()[name](int(one)) for one in sets] == [FACTS["seconds"][name][one] for one in sets]


DRAWN = re.findall(r"^    pipetrain (show .+)\n\n((?:    (?!pipetrain).*\n|\n)+)", SCALING, re.MULTILINE)


@pytest.mark.parametrize(("command", "block"), DRAWN, ids=[command for command, _ in DRAWN])
def test_what_the_page_of_replicas_shows_is_what_is_printed(
    command: str, block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    wanted = [line.strip() for line in block.splitlines() if line.strip()]
    assert wanted
    assert all(line in map(str.strip, printed) for line in wanted)


def test_the_page_of_replicas_shows_something() -> None:
    assert len(DRAWN) >= 2
