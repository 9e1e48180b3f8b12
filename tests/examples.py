"""Properties: some examples in `make test`, many in the slow circle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

LONG_SECONDS = 1800


def examples(
    few: int, many: int, *strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated property, tried on `few` examples and, as a slow test, on `many`; each time the same ones."""

    def decorate(holds: Callable[..., None]) -> Callable[..., None]:
        rows = [few, pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(LONG_SECONDS)])]

        @pytest.mark.parametrize("num_examples", rows)
        def test(num_examples: int) -> None:
            some = settings(
                max_examples=num_examples,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            some(given(*strategies)(holds))()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        return test

    return decorate
