"""Nothing hangs: every wait has a time-out, knows what it waits for, and ends when another rank has failed.

The first failure of a pipeline is written to the store that all ranks share. Whoever then waits reads it there, so each
rank can name the rank and the op at which it began, however many ranks lie between.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import DistNetworkError, Store

# How often a rank that waits looks whether another has failed.
_POLL_SECONDS = 1.0
# A store that has not answered by then is given up until it does: its host may be cut off.
_ANSWER_SECONDS = 3.0
# A rank that waits looks once a second whether another has failed, and then says what it waits in. One that has said nothing by
# then computes, is stopped, or hangs.
_WORD_SECONDS = 2.5
_LOOK_SECONDS = 0.05
_ASKED = "waits/asked"
_MOST_NAMED = 16  # ranks; a message is read by a human
# How long a rank that waits for its device pauses before it asks again: short at first, as most waits are; then the last of these.
_PAUSES_SECONDS = (1e-4, 2e-4, 4e-4, 8e-4, 1e-3)
_BROKEN = re.compile("reset by peer|closed by peer|Broken pipe")  # what gloo says of a rank that was there and is gone
_RANK_HANGS = "that rank hangs, is stopped, or needs longer for a step than that"
_DEVICE_HANGS = (
    "it waits for a message of a rank that hangs or is gone, or needs longer for a step than that; a rank of which there is no "
    "word is the first to look at"
)


class PipelineError(RuntimeError):
    """The pipeline cannot go on; the message names the rank, the op and what to do."""


class FailureBoard:
    """The first failure of the pipeline, as all ranks see it, and what each rank waits in once one has waited too long. For any thread.

    Without a store (one rank) it stays on this rank. `named` says what a rank is called.
    """

    def __init__(
        self, store: Store | None, rank: int = 0, num_ranks: int = 1, named: Callable[[int], str] = "rank {}".format
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._named = named
        self._text: str | None = None
        self._asking: threading.Thread | None = None
        self._lock = threading.Lock()  # one question at a time

    def post(self, text: str, *, asks: bool = False) -> str:
        """Report a failure; returns the first one, which may be another rank's. `asks`: whoever ends because of it shall say what
        it waits in."""

        def tell(store: Store) -> str:
            if asks:
                store.set(_ASKED, "1")
            return store.compare_set("failure", "", text).decode()

        with self._lock:
            if self._text is None:
                # The store may have gone down with its host: then what this rank knows must do.
                self._text = self._ask(tell) or text
            return self._text

    def read(self) -> str | None:
        """The first failure, if there is one."""
        with self._lock:
            if self._text is None:
                self._text = self._ask(
                    lambda store: store.get("failure").decode() if store.check(["failure"]) else None
                )
            return self._text

    def exchange_waits(self, what: str) -> str:
        """Say that this rank waits in `what`; returns what every rank said, or "" where nobody has asked."""
        found: dict[int, str] = {}

        def exchange(store: Store) -> None:
            if not store.check([_ASKED]):
                return
            store.set(f"waits/{self._rank}", what)
            deadline = time.monotonic() + _WORD_SECONDS
            while len(found) < self._num_ranks and time.monotonic() < deadline:
                for rank in range(self._num_ranks):
                    if rank not in found and store.check([f"waits/{rank}"]):
                        found[rank] = store.get(f"waits/{rank}").decode()
                time.sleep(_LOOK_SECONDS)

        with self._lock:
            self._ask(exchange)
        return self._listed(dict(found)) if found else ""

    def _listed(self, found: Mapping[int, str]) -> str:
        """Ranks without a word first: the fault is most likely theirs."""
        silent = [rank for rank in range(self._num_ranks) if rank not in found]
        names = ", ".join(self._named(rank).removeprefix("rank ") for rank in silent[:_MOST_NAMED])
        parts = [f"no word from rank {names}"] if silent else []
        parts += [found[rank] for rank in sorted(found)[:_MOST_NAMED]]
        left = max(len(silent) - _MOST_NAMED, 0) + max(len(found) - _MOST_NAMED, 0)
        return "; ".join([*parts, *([f"and {left} ranks more"] if left else [])])

    def _ask(self, question: Callable[[Store], str | None]) -> str | None:
        """What the store says, or None where it does not: over a link that is cut a question may wait for ever."""
        store = self._store
        if store is None or (self._asking is not None and self._asking.is_alive()):
            return None
        answers: list[str | None] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, MemoryError):
                answers.append(question(store))

        asking = threading.Thread(target=ask, name="failure board", daemon=True)
        # There may be no memory for a thread: then this rank's own error says why it ends.
        with contextlib.suppress(RuntimeError):
            asking.start()
            self._asking = asking
            asking.join(_ANSWER_SECONDS)
        return answers[0] if answers else None


class Monitor:
    """Where the thread that computes waits for the threads that transfer.

    `failure` is why the pipeline cannot go on, once it cannot; `on_failure` is called then, on any thread, and breaks off what
    any thread waits in. `named` says what a rank is called in messages; `name` is this one's.
    `doing` is the op that the computing thread is in, for the watchdog; `is_waiting`, whether it waits in here.
    """

    def __init__(
        self, rank: int, board: FailureBoard, timeout_seconds: float, named: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.rank = rank
        self.named = named
        self.board = board
        self.timeout_seconds = timeout_seconds
        self._condition = threading.Condition()
        self._failing = threading.Lock()
        self.doing: object | None = None
        self.is_waiting = False
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._lost: tuple[str, str] | None = None  # the other rank, and what was waited for when it was lost

    @property
    def name(self) -> str:
        return self.named(self.rank)

    def done(self, finish: Callable[[], None]) -> None:
        """A transfer ended: run `finish`, which publishes its result, and wake who waits."""
        with self._condition:
            finish()
            self._condition.notify_all()

    def lost(self, what: str, peer: str, error: BaseException) -> None:
        """A transfer failed: the rank at its other end is gone."""
        with self._condition:
            if self._lost is None:
                self._lost = (peer, f"{what} ({_first_line(error)})")
            self._condition.notify_all()

    def unmet(self, name: str, peer: str, error: RuntimeError) -> PipelineError:
        """Why the connection `name` was not made: the first failure of the pipeline, as everywhere. A rank may die while others still
        connect; who then loses the store can only name its holder."""
        if isinstance(error, DistNetworkError):
            holder = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else self.named(0)
            self.lost(f"the store of the ranks, which {holder} or its launcher holds, for {name}", holder, error)
        elif _BROKEN.search(str(error)):
            self.lost(name, peer, error)
        what = f"{self.name} connects {name} with {peer}"
        if self._lost is not None:
            return self._explain_loss(what)
        missing = (
            f"no connection for {name} within {self.timeout_seconds:g} s (timeout_seconds): {peer} did not start, or its "
            f"address cannot be reached from here (GLOO_SOCKET_IFNAME chooses the interface): {_first_line(error)}"
        )
        return self._ending(self.board.post(missing), what)

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `ready()`; `what()` says what for, as in `rank 2 waits in 2RECV_B3 from rank 3`.

        Raises PipelineError: another rank failed or is gone, or `timeout_seconds` passed.
        """
        self._wait(ready, what, (_POLL_SECONDS,), _RANK_HANGS)

    def wait_polling(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """As `wait`, for what nobody tells of, such as an event of a device: `ready` is asked again and again.

        Raises PipelineError: as `wait`, and where the pipeline has failed before: what the device has then is worth nothing.
        """
        self._wait(ready, what, _PAUSES_SECONDS, _DEVICE_HANGS)
        if self.failure is not None:
            raise self._ending(self.failure, what())

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str], pauses: Sequence[float], advice: str) -> None:
        looked_at = time.monotonic()
        deadline, number = looked_at + self.timeout_seconds, 0
        error: PipelineError | None = None
        with self._condition:
            try:
                while error is None and not ready():
                    self.is_waiting, now = True, time.monotonic()
                    if self._lost is not None:
                        error = self._explain_loss(what())
                    elif now >= deadline:
                        hangs = f"{what()}, and nothing came for {self.timeout_seconds:g} s (timeout_seconds): {advice}"
                        error = self._ending(self.board.post(hangs, asks=True), what())
                    elif now >= looked_at + _POLL_SECONDS:
                        failure, looked_at = self.failure or self.board.read(), time.monotonic()
                        error = None if failure is None else self._ending(failure, what())
                    else:
                        pause = pauses[min(number, len(pauses) - 1)]
                        self._condition.wait(min(deadline - now, looked_at + _POLL_SECONDS - now, pause))
                        number += 1
            finally:
                self.is_waiting = False
        if error is not None:
            self.fail(str(error))
            raise error

    def look(self) -> None:
        """Fail here, too, where another rank has failed. For a thread that does not wait."""
        failure = self.board.read()
        if failure is not None:
            self.fail(failure)

    def fail(self, text: str) -> None:
        """The pipeline cannot go on: tell the other ranks, and break off whatever they or this rank may wait for."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = text
        self.failure = self.board.post(text)
        self.on_failure()

    def _explain_loss(self, what: str) -> PipelineError:
        assert self._lost is not None
        peer, where = self._lost
        first = self.board.post(
            f"{peer} is gone: {self.name} lost its connection in {where}. It was killed, ran out of memory, or its "
            "machine or the network between them is down: see its own output"
        )
        return self._ending(first, what)

    def _ending(self, first: str, what: str) -> PipelineError:
        """The first failure, and what this rank waits in; after a time-out what each rank waits in."""
        return PipelineError(f"{first} (rank {self.rank} ends; {self.board.exchange_waits(what) or what})")


class Watchdog:
    """Looks after a rank whose computing thread cannot: it may sit in a launch, or in a layer that waits for the device, which waits
    without a time-out for a message of a rank that is gone. What ends that is to break the connections, from another thread.

    That thread fails the pipeline on this rank when another rank has failed, or when this rank has been in one op
    (`monitor.doing`) for longer than `monitor.timeout_seconds`. Waits in `monitor` have their own time-out."""

    def __init__(self, monitor: Monitor, look_seconds: float = _POLL_SECONDS) -> None:
        self._monitor = monitor
        self._look_seconds = look_seconds
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen, since = None, time.monotonic()
        while not self._is_closed.wait(self._look_seconds):
            self._monitor.look()
            doing = self._monitor.doing
            if doing is not seen or doing is None or self._monitor.is_waiting:
                seen, since = doing, time.monotonic()
            elif time.monotonic() - since > self._monitor.timeout_seconds:
                self._monitor.fail(
                    f"{self._monitor.name} is in {doing} and came no further for {self._monitor.timeout_seconds:g} s "
                    "(timeout_seconds): its host waits for its device, which waits for a message, or a layer hangs"
                )
            if self._monitor.failure is not None:
                return

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._monitor.timeout_seconds)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    # gloo begins with the place in its own source and ends with advice that does not fit here.
    return text[0].rsplit("] ", 1)[-1].split(". This is typically")[0][:160] if text else type(error).__name__
