"""What a mutant is: one line, broken, and the tests that must turn red."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in `file`; `tests` are arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
