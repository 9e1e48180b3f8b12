"""Seeing where the host waits for its GPU, by what torch says about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# How torch begins to say so, in its mode of debugging synchronisation (torch.cuda.set_sync_debug_mode).
_TOLD = "called a synchronizing"

OnWait = Callable[[str, int], None]


@contextmanager
def waits_seen(on_wait: OnWait) -> Iterator[None]:
    """Within it torch's warning of a wait becomes a call of `on_wait(file, line)`, on the stack of who waits.

    Other warnings go where they always go. As with every change of filters, one thread at a time may do this.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_TOLD)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not see all of them
        show = warnings.showwarning

        def look(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if str(message).startswith(_TOLD):
                on_wait(filename, lineno)
            else:
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = look  # type: ignore[assignment]
        yield
