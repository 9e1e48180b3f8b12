"""Products of parameters, of which `make test` runs a part in which any two values meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def pairwise(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Rows for `parametrize`: every combination of a value of each axis. Those that `quick_rows` does not choose are slow."""
    rows = list(product(*(range(len(axis)) for axis in axes)))
    quick = quick_rows([len(axis) for axis in axes])
    return [
        pytest.param(*(axis[index] for axis, index in zip(axes, row)), marks=() if row in quick else pytest.mark.slow)
        for row in rows
    ]


def quick_rows(lengths: Sequence[int]) -> set[tuple[int, ...]]:
    """Rows of indices in which every pair of values of two axes stands at least once: the row with most new pairs first."""
    rows = list(product(*map(range, lengths)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen: set[tuple[int, ...]] = set()
    while missing:
        row = max(rows, key=lambda row: len(missing & _pairs(row)))
        chosen.add(row)
        missing -= _pairs(row)
    return chosen


def _pairs(row: tuple[int, ...]) -> set[tuple[Any, ...]]:
    return set(combinations(enumerate(row), min(2, len(row))))
