"""The pages stay short, pages and code in the field's words, and links lead somewhere."""

import re
from pathlib import Path

import words


def anchors_of(page: Path) -> set[str]:
    """The headings of a page, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_and_code_are_within_their_limits_and_plain() -> None:
    assert words.problems() == []


def test_a_phrase_of_code_is_found_in_comments_and_strings_alone() -> None:
    source = 'file.seek(0)  # it seeks\nsought = f"""one\n{two} goes back"""\n'
    found = list(words.phrases_in(words.ROOT / "pipetrain" / "file.py", words.prose_of(source)))
    assert [line.partition(":")[2] for line in found] == ["1: 'seeks'", "3: 'goes back'"]


def test_a_phrase_is_found_outside_of_code_alone() -> None:
    page = words.ROOT / "docs" / "PAGE.md"
    text = words.without_code("It seeks.\n`it seeks`\n\n    it seeks\n```\nseeks\n```\nThe run goes back.")
    assert [line.partition(":")[2] for line in words.phrases_in(page, text)] == ["1: 'seeks'", "8: 'goes back'"]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [*words.pages(), words.ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not link.startswith("http"):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                if not target.exists() or (anchor and anchor not in anchors_of(target)):
                    broken.append(f"{page.name}: {link}")
    assert broken == []
