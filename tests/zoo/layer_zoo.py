"""The zoo: layers and blocks of every kind, in every mode and over one to four stages, beside the plain loop.

`python tests/zoo/layer_zoo.py` tries all of it, which takes a while; with `--quick` every third entry in fewer ways. It ends with 1
where something did not come out as the zoo says. The tests beside it try all entries in fewer ways.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from apart import try_apart, worst_of
from entries import own_boundaries, own_functions, own_state, torch_layers
from entries.entry import Entry

from pipetrain.monitor.draw.table import Table
from pipetrain.schedule.families import Shape, generator_of
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.policy import Mode
from pipetrain.verify.beside_loop import Found, Trace, Verdict, Way, beside, plain

ENTRIES: tuple[Entry, ...] = (
    *torch_layers.ENTRIES,
    *own_functions.ENTRIES,
    *own_state.ENTRIES,
    *own_boundaries.ENTRIES,
)
ON_RANKS = 2
_MOST_TEXT = 110  # of a refusal in the table


@dataclass(frozen=True)
class ZooTrial:
    """An entry in one way."""

    subject: str  # the entry's name
    way: Way

    def __str__(self) -> str:
        return f"{self.subject} ({self.way})"


@dataclass(frozen=True)
class EntryRow:
    """An entry and what came of all ways; `skipped` says why it was not tried."""

    entry: Entry
    found: tuple[tuple[Way, Found], ...]
    skipped: str = ""

    @property
    def worst(self) -> Found:
        return worst_of([found for _, found in self.found])

    @property
    def is_expected(self) -> bool:
        """Whether it came out as the zoo says: no better either, as docs/LAYERS.md would then say too little."""
        if self.skipped:
            return True
        worst = self.worst
        return worst.result is self.entry.expected and self.entry.says in worst.detail


def every_third() -> tuple[Entry, ...]:
    """The entries that a quick look tries: every third, without those that take seconds."""
    return tuple(entry for entry in ENTRIES[::3] if not entry.slow)


def run_zoo(
    entries: Sequence[Entry] = ENTRIES, *, quick: bool = False, say: Callable[[str], None] = lambda _: None
) -> list[EntryRow]:
    """Tries all `entries` in all ways, or in fewer; `say` is told each name when it begins."""
    here = [entry for entry in entries if not entry.lacks()]
    trials = [ZooTrial(entry.name, way) for entry in here for way in ways_of(entry, quick=quick)]
    spread = [ZooTrial(entry.name, Way("overlap", ON_RANKS, ON_RANKS)) for entry in here if entry.on_ranks]
    found: dict[str, list[tuple[Way, Found]]] = {entry.name: [] for entry in entries}
    for trial, came in _all_of(trials, spread):
        if not found[trial.subject]:
            say(trial.subject)
        found[trial.subject].append((trial.way, came))
    return [EntryRow(entry, tuple(found[entry.name]), entry.lacks()) for entry in entries]


def _all_of(trials: Sequence[ZooTrial], spread: Sequence[ZooTrial]) -> Iterator[tuple[ZooTrial, Found]]:
    yield from try_apart(attempt, trials)
    yield from try_apart(attempt, spread, num_ranks=ON_RANKS)


def ways_of(entry: Entry, *, quick: bool = False) -> Iterator[Way]:
    """Every mode over every number of stages, all stages on one rank; `quick`: `never` and `overlap` over the least, and `overlap`
    over the most. And with each backward in two halves."""
    for num_stages in entry.stages:
        for mode in Mode:
            is_least, is_most = num_stages == entry.stages[0], num_stages == entry.stages[-1]
            is_quick = (mode is Mode.OVERLAP and (is_least or is_most)) or (mode is Mode.NEVER and is_least)
            if not quick or is_quick:
                yield Way(mode.value, num_stages)
    if not entry.slow:
        yield Way("overlap", entry.stages[0], schedule=halves, policy={"sets": 2, "keep": "none"})


def halves(shape: Shape) -> list[list[Op]]:
    """GPipe with I in the place of each B, and W behind the I of the next microbatch."""
    lanes = []
    for lane in generator_of("gpipe")(shape):
        halved: list[Op] = []
        late: dict[int, Op] = {}  # stage -> its W
        for op in lane:
            halved.append(op._replace(kind=Kind.I) if op.kind is Kind.B else op)
            if op.kind is Kind.B:
                halved += [late.pop(op.stage)] if op.stage in late else []
                late[op.stage] = op._replace(kind=Kind.W)
        lanes.append([*halved, *late.values()])
    return lanes


def attempt(trial: ZooTrial) -> Found:
    """One way beside the plain loop, which runs once for all ways of an entry that follow each other."""
    entry = entry_named(trial.subject)
    try:
        expected = _plain(trial.subject)
    except Exception as error:
        return Found(Verdict.FAILED, f"the plain loop fails itself: {type(error).__name__}: {error}")
    return beside(entry.subject, expected, trial.way)


@functools.lru_cache(maxsize=1)
def _plain(name: str) -> Trace:
    return plain(entry_named(name).subject)


def entry_named(name: str) -> Entry:
    """Raises:
    StopIteration: there is none.
    """
    return next(entry for entry in ENTRIES if entry.name == name)


# Said -----------------------------------------------------------------------------------------------------------------


def zoo_table(rows: Sequence[EntryRow]) -> str:
    """A line per entry and a verdict; what did not come out as expected is said in full below."""
    cells = [(row.entry.name, _said(row), "" if row.is_expected else "not as expected") for row in rows]
    table = Table(("layer", "result", ""), cells, left=frozenset({0, 1, 2}))
    wrong = [row for row in rows if not row.is_expected]
    tried = [found for row in rows for _, found in row.found]
    verdict = f"{len(rows)} entries in {len(tried)} runs, {_counted(rows)}"
    lines = [table.as_text(), "", verdict]
    for row in wrong:
        lines += ["", f"{row.entry.name}: expected {_wanted(row.entry)}", *(f"  {text}" for text in _by_ways(row))]
    return "\n".join(lines)


def _counted(rows: Sequence[EntryRow]) -> str:
    wrong = sum(not row.is_expected for row in rows)
    counts = {result: sum(row.entry.expected is result for row in rows if not row.skipped) for result in Verdict}
    known = f"{counts[Verdict.EQUAL]} equal, {counts[Verdict.KEPT]} kept, {counts[Verdict.REFUSED]} refused by name, {counts[Verdict.DIFFERS]} known to differ"
    skipped = sum(bool(row.skipped) for row in rows)
    left_out = f", {skipped} left out" if skipped else ""
    return f"{known}{left_out}" + (f": {wrong} did not come out so" if wrong else ": all came out so")


def _wanted(entry: Entry) -> str:
    return f"{entry.expected}{f', saying {entry.says!r}' if entry.says else ''}"


def _said(row: EntryRow) -> str:
    if row.skipped:
        return f"left out: {row.skipped}"
    worst = row.worst
    if worst.result in (Verdict.EQUAL, Verdict.KEPT):
        return worst.result.value
    known = "known to differ" if row.entry.is_documented and worst.result is Verdict.DIFFERS else worst.result.value
    return f"{known}: {_short(worst.detail)}"


def _by_ways(row: EntryRow) -> list[str]:
    """What came of each way, ways with the same in one line."""
    same: dict[tuple[Verdict, str], list[str]] = {}
    for way, found in row.found:
        same.setdefault((found.result, found.detail), []).append(str(way))
    return [
        f"{result}{f': {detail}' if detail else ''}  [{'; '.join(ways)}]" for (result, detail), ways in same.items()
    ]


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


def main(words: Sequence[str]) -> int:
    """The exit code of this file as a command."""
    quick = "--quick" in words
    rows = run_zoo(every_third() if quick else ENTRIES, quick=quick, say=functools.partial(print, file=sys.stderr))
    print(zoo_table(rows))
    return 0 if all(row.is_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
