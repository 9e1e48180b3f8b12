"""Messages between neighbouring stages on the CPU, over gloo.

Each stage edge and direction has a communicator of its own and a waiting thread on each end: a gloo send blocks until its
receive is posted, and a gloo transfer counts as complete only for who waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from pipetrain.runtime.courier import Courier, finish
from pipetrain.runtime.failure import Monitor, PipelineError
from pipetrain.runtime.forms import Form, TensorForm, flat_bytes

CPU = torch.device("cpu")
_TAG = 0


class Pair(Protocol):
    """A communicator of two ranks, 0 and 1."""

    def send(self, tensors: list[Tensor], target: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work: ...


def make_pair(store: Store, name: str, place: int, timeout_seconds: float) -> Pair:
    """A communicator of two ranks. `name` is unique and the same on both; `place` is 0 on one and 1 on the other.

    Raises:
        PipelineError: the other rank did not come.
    """
    try:
        pair: Pair = ProcessGroupGloo(PrefixStore(name, store), place, 2, timedelta(seconds=timeout_seconds))  # type: ignore[assignment]
    except RuntimeError as error:
        raise PipelineError(
            f"no connection for {name} within {timeout_seconds:g} s (timeout_seconds): the other rank did not start, or its "
            f"address cannot be reached from here (GLOO_SOCKET_IFNAME chooses the interface): {error}"
        ) from error
    return pair


class GlooInbound:
    """The receiving end of one stage edge and direction."""

    def __init__(self, pair: Pair, source: int, name: str, peer: str, monitor: Monitor) -> None:
        self._pair = pair
        self._source = source
        self._courier = Courier(f"{name} receive", peer, monitor)
        self.storages: set[int] = set()  # of the messages of this step

    @property
    def peer(self) -> str:
        return self._courier.peer

    def post(self, what: str, form: Form | None, publish: Callable[[Form, list[Tensor], float, float], None]) -> None:
        """Receive the next message: of a known `form`, or with its form in front.

        `publish(form, tensors, start, end)` is called when it has arrived; the times are when it was posted and came.
        """

        def job() -> Callable[[], None]:
            start = time.perf_counter()
            known = self._receive_form() if form is None else form
            tensors = [leaf.empty(CPU) for leaf in known.leaves if isinstance(leaf, TensorForm)]
            self.storages.update(tensor.untyped_storage()._cdata for tensor in tensors)
            for tensor in tensors:
                finish(self._pair.recv([flat_bytes(tensor)], self._source, _TAG))
            end = time.perf_counter()
            return lambda: publish(known, tensors, start, end)

        self._courier.submit(what, job)

    def _receive_form(self) -> Form:
        size = torch.empty(1, dtype=torch.int64)
        finish(self._pair.recv([size], self._source, _TAG))
        text = torch.empty(int(size), dtype=torch.uint8)
        finish(self._pair.recv([text], self._source, _TAG))
        return Form.from_json(bytes(text.tolist()))

    def close(self) -> None:
        self._courier.close()


class GlooOutbound:
    """The sending end of one stage edge and direction."""

    def __init__(self, pair: Pair, target: int, name: str, peer: str, monitor: Monitor) -> None:
        self._pair = pair
        self._target = target
        self._courier = Courier(f"{name} send", peer, monitor)

    @property
    def peer(self) -> str:
        return self._courier.peer

    def send(self, what: str, form: Form | None, tensors: Sequence[Tensor], publish: Callable[[float], None]) -> None:
        """Send one message, with its form in front if given. `publish(end)` is called when it has left."""

        def job() -> Callable[[], None]:
            if form is not None:
                self._send_form(form)
            for tensor in tensors:
                finish(self._pair.send([flat_bytes(tensor)], self._target, _TAG))
            end = time.perf_counter()
            return lambda: publish(end)

        self._courier.submit(what, job)

    def _send_form(self, form: Form) -> None:
        text = torch.frombuffer(bytearray(form.to_json()), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()]), text):
            finish(self._pair.send([tensor], self._target, _TAG))

    def close(self) -> None:
        self._courier.close()
