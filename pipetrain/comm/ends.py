"""What the ends of a stage edge promise, whichever library carries its messages, and what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pipetrain.comm.forms import Form
from pipetrain.schedule.op import Op

MakeBuffers = Callable[[Form], list[Tensor]]
Collect = Callable[[], list[Tensor]]
Ended = Callable[[], None]


class Arrived(Protocol):
    """What a receiving end calls, perhaps on another thread, when an op has ended: so that what waits for it may be launched.

    `form` is that of the message; `collect()` gives the tensors, on the lane that uses them. `land()` is called before that by the
    thread that launches: it gives the device what is still to be done.
    """

    def __call__(self, form: Form, collect: Collect, land: Callable[[], None] = ..., /) -> None: ...


class End(Protocol):
    """One end of a connection with `peer`. On a device with streams its ops are given to the current stream, which is that of its queue."""

    peer: str

    def close(self) -> None:
        """Everything has been sent, received and added up."""

    def abort(self) -> None:
        """The step has failed: break the connection, so that nobody waits on it."""


class MessageEnd(End, Protocol):
    """Either end of one stage edge and direction: a queue of messages, which arrive in the order in which they were sent."""

    reads_later: bool  # whether the device may still read the tensors when `left` is called

    def post(self, op: Op, form: Form | None, make_buffers: MakeBuffers, arrived: Arrived) -> None:
        """Receive the next message: of a known `form`, or with its form in front; into `make_buffers(form)`."""

    def send(self, op: Op, form: Form | None, tensors: list[Tensor], left: Ended) -> None:
        """Send one message, with its form if given. `left()` is called, perhaps on another thread, when `op` has ended: where
        the end does not `reads_later` the tensors need no longer be held."""


class Reducer(End, Protocol):
    """One end of several ranks that add up gradients."""

    def reduce(self, op: Op, tensors: list[Tensor], settle: Callable[[], None], ended: Callable[..., None]) -> None:
        """Make each of `tensors`, which are dense, the sum of what all ends give, then `settle()`: on that stream, or on
        another thread. `ended()` is called, perhaps on another thread, when `op` has ended; `ended(land)`, where the thread that launches
        still has to give the device something, by `land()`."""


class Edges(Protocol):
    """Makes the ends of stage edges, and those of ranks that hold the same parameters. `place` is 0 on the rank of the edge's first stage
    and 1 on the other's; of a reducer, the place among `ranks`, which ascend."""

    def end(self, edge: int, direction: str, place: int, peer: str) -> MessageEnd: ...
    def reducer(self, ranks: tuple[int, ...], place: int, peer: str) -> Reducer: ...
