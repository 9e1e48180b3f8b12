"""Words per page of the documents: `python -m tests.words`. Fails over the limits, and on phrases that a reader had to read twice.

A word has a letter or a digit: bars and rules of tables do not count. `docs/KEYS.md` is generated and not limited. Phrases are also
searched for in comments, docstrings and messages of `pipetrain/`, `conf/`, `launch/`, `docker/` and `benchmarks/`.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, DOCS, DECISIONS = ROOT / "README.md", ROOT / "docs", ROOT / "docs" / "decisions"
SECURITY = ROOT / "SECURITY.md"
GENERATED = DOCS / "KEYS.md"
MOST_OF_PAGE = {README: 1000, SECURITY: 300, DOCS / "ARCHITECTURE.md": 4000, DOCS / "LAYERS.md": 900}
MOST_OF_DECISION = 150
MOST_OF_DOCS = 20_000
# Words of our own where the field has others, and sentences that begin with a clause.
PHRASES = (
    r"\b(go(es)?|went|there and) back\b",
    r"\bat home with\b",
    r"\bgives? to a bucket\b",
    r"\bwhat nobody (reads|else)\b",
    r"\bwhom? the user was told\b",
    r"\b(seeks?|sought)\b",
    r"\bst(and|ood)s? beside\b",
    r"\b(is given|gives? (it|them|memory|one)|gives?|stay(s|ed)?) away\b",
    r"\bfor who has\b",
    r"\bwho has to\b",
    r"\bis told\b(?! of)",
    r"\bno second beginning\b",
    r"\b(a|the|that) run that goes on\b",
    r"\bgo(es)? on (from|learning)\b",
    r"\b(run|call|step)s? to come\b",
    r"\b(is|are) no (sample|JSON|UTF-8|mean|terminal|padding|tensor)\b",
    r"\b((an|with|needs?) own|(to|of|by) who|of (whose|before)|shared? out|stands? twice|passed over)\b",
    r"\bor a list of such\b(?! numbers)",
    r"\b(is|are|be) as none\b",
    r"\bsays? of no(ne)?\b",
    r"\bfor `?\w+\.py`? to say\b",
    r"\b(can|could|cannot) hear\b",
    r"\b(is the judge|foretells?|so many-th)\b",
    r"\b((brings?|brought) the run|the way on and back)\b",
)


def words_of(text: str) -> int:
    """Words of a page."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


def without_code(text: str) -> str:
    """A page without its blocks and spans of code, which quote commands and messages; lines stay where they are."""
    text = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`|^ {4}.*$", "", text, flags=re.MULTILINE)


def prose_of(text: str) -> str:
    """The comments and strings of a Python file; lines stay where they are."""
    lines = [""] * (text.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, part in enumerate(token.string.splitlines(), token.start[0] - 1):
                lines[number] += f" {part}"
    return "\n".join(lines)


def phrases_in(path: Path, text: str) -> Iterator[str]:
    """Where a phrase stands, a line each."""
    for number, line in enumerate(text.splitlines(), 1):
        for phrase in PHRASES:
            for found in re.finditer(phrase, line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: {found[0]!r}"


def pages() -> list[Path]:
    """README, SECURITY, and all pages of `docs/`."""
    return [README, SECURITY, *sorted(DOCS.glob("*.md")), *sorted(DECISIONS.glob("*.md"))]


def phrases_of_code() -> Iterator[str]:
    """Phrases in what programs say and in what their readers read."""
    for folder in ("pipetrain", "conf", "launch", "docker", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py":
                yield from phrases_in(path, prose_of(path.read_text()))
            elif path.suffix == ".md":
                yield from phrases_in(path, without_code(path.read_text()))
            elif path.suffix in (".sh", ".sbatch", ".yaml") or path.name.startswith("Dockerfile"):
                yield from phrases_in(path, path.read_text())


def problems() -> list[str]:
    """What is over its limit, and phrases in pages and code."""
    words = {page: words_of(page.read_text()) for page in pages()}
    limits = {page: MOST_OF_DECISION for page in words if page.parent == DECISIONS and page.name != "README.md"}
    found = [
        f"{page.relative_to(ROOT)} has {words[page]} words; at most {most}"
        for page, most in (MOST_OF_PAGE | limits).items()
        if words[page] > most
    ]
    docs = sum(number for page, number in words.items() if page not in (README, SECURITY, GENERATED))
    if docs > MOST_OF_DOCS:
        found.append(f"docs/ has {docs} words; at most {MOST_OF_DOCS}")
    for page in words:
        if page != GENERATED:
            found += phrases_in(page, without_code(page.read_text()))
    return [*found, *phrases_of_code()]


def main() -> int:
    words = {page: words_of(page.read_text()) for page in pages()}
    for page, number in words.items():
        if page.parent != DECISIONS:
            print(f"{number:>6}  {page.relative_to(ROOT)}")
    print(f"{sum(number for page, number in words.items() if page.parent == DECISIONS):>6}  docs/decisions/")
    print(
        f"{sum(number for page, number in words.items() if page not in (README, SECURITY, GENERATED)):>6}  docs/ without KEYS.md"
    )

    found = problems()
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
