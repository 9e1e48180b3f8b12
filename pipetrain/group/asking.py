"""What each rank waits in, once one of them has waited too long: the message of a hang names them all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from torch.distributed import Store

# A rank that waits looks once a second whether another has failed, and then says what it waits in. One that has said
# nothing by then computes, is stopped, or hangs.
_ANSWER_SECONDS = 2.5
_ASK_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_ASKED = "waits/asked"
_MOST_NAMED = 16  # ranks; a message is read by a human


class Waits:
    """The part of the ranks' store in which they tell each other. Who asks does so before the failure is posted."""

    def __init__(
        self, store: Store | None, rank: int, num_ranks: int, named: Callable[[int], str] = "rank {}".format
    ) -> None:
        """`named` says what a rank is called."""
        self._named = named
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks

    def ask(self) -> None:
        """This rank has waited too long: whoever ends because of it should say what it waits in."""
        store = self._store
        if store is not None:
            _within(_ASK_SECONDS, lambda: store.set(_ASKED, "1"))

    def exchange(self, what: str) -> str:
        """Say that this rank waits in `what`; returns what every rank said, or "" where nobody has asked."""
        store, found = self._store, dict[int, str]()
        if store is not None:
            _within(_ANSWER_SECONDS + _ASK_SECONDS, lambda: self._exchange(store, what, found))
        return _listed(found, self._num_ranks, self._named) if found else ""

    def _exchange(self, store: Store, what: str, found: dict[int, str]) -> None:
        if not store.check([_ASKED]):
            return
        store.set(_key(self._rank), what)
        deadline = time.monotonic() + _ANSWER_SECONDS
        missing = set(range(self._num_ranks))
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if store.check([_key(rank)]):
                    found[rank] = store.get(_key(rank)).decode()
                    missing.discard(rank)
            if missing:
                time.sleep(_LOOK_SECONDS)


def _key(rank: int) -> str:
    return f"waits/{rank}"


def _listed(found: Mapping[int, str], num_ranks: int, named: Callable[[int], str]) -> str:
    """Ranks without a word first: the fault is most likely theirs."""
    silent = [rank for rank in range(num_ranks) if rank not in found]
    names = ", ".join(named(rank).removeprefix("rank ") for rank in silent[:_MOST_NAMED])
    parts = [f"no word from rank {names}"] if silent else []
    parts += [found[rank] for rank in sorted(found)[:_MOST_NAMED]]
    left = max(len(silent) - _MOST_NAMED, 0) + max(len(found) - _MOST_NAMED, 0)
    return "; ".join([*parts, *([f"and {left} ranks more"] if left else [])])


def _within(seconds: float, job: Callable[[], None]) -> None:
    """Runs `job`, but does not wait for it any longer: over a link that is cut the store may not answer at all."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone down with its host
            job()

    thread = threading.Thread(target=run, name="waits", daemon=True)
    thread.start()
    thread.join(seconds)
