"""Ranks as threads of one process, of which one goes on at a time, each with random generators of its own.

A rank keeps the baton until it has to wait for another. Then it takes the generators with it and gets them back with the
baton, so that a layer draws what it would draw in a process of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Baton:
    """`slow` is a rank that goes on only when no other one can."""

    def __init__(self, slow: int | None = None) -> None:
        self._slow = slow
        self._condition = threading.Condition()
        self._holder: int | None = None
        self._waiting: set[int] = set()
        self._own = threading.local()

    @contextmanager
    def held(self, rank: int) -> Iterator[None]:
        """The thread of `rank` runs."""
        self._own.rank = rank
        self._take(rank)
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """The thread waits: another rank may go on. A thread that is no rank's has no baton to pass on."""
        rank = getattr(self._own, "rank", None)
        if rank is None or self._holder != rank:
            yield
            return
        generators = torch.default_generator.get_state(), random.getstate()
        self._give()
        try:
            yield
        finally:
            self._take(rank)
            torch.default_generator.set_state(generators[0])
            random.setstate(generators[1])

    def offer(self) -> None:
        """Between two ops: the slow rank lets the others go first."""
        if getattr(self._own, "rank", None) == self._slow and self._waiting:
            with self.passed_on():
                pass

    def _take(self, rank: int) -> None:
        with self._condition:
            self._waiting.add(rank)
            self._condition.wait_for(
                lambda: self._holder is None and (rank != self._slow or self._waiting == {self._slow})
            )
            self._waiting.discard(rank)
            self._holder = rank

    def _give(self) -> None:
        with self._condition:
            self._holder = None
            self._condition.notify_all()
