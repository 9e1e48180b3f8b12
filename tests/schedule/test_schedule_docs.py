"""docs/SCHEDULES.md shows every family, its pictures are fresh and its commands are spelled as the keys are."""

import importlib.util
import re
from pathlib import Path

import pytest

from pipetrain.schedule.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "SCHEDULES.md").read_text()


def drawn() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "pictures" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pictures(PAGE)


PICTURES = drawn()


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_fresh(name: str) -> None:
    assert (DOCS / "pictures" / name).read_text() == PICTURES[name], "run: python docs/pictures/make.py"


def test_every_picture_is_shown_and_made() -> None:
    shown = set(re.findall(r"\]\(pictures/(\S+)\)", PAGE))
    assert shown == set(PICTURES) == {path.name for path in (DOCS / "pictures").glob("*.svg")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_section_and_a_picture(family: str) -> None:
    section = re.search(rf"^## {family}$(.+?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert f"pipeline.schedule={family} " in section[1]
