"""Buffers of received messages: used again when nobody on the host or on the device reads them any more, and bounded."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pipetrain.comm.device import CpuDevice
from pipetrain.comm.forms import TensorForm
from pipetrain.comm.lanes import Lanes, Ring
from pipetrain.schedule.op import Kind, Lane, Op, queue_of

CPU = torch.device("cpu")
FORM = TensorForm((2, 3), (3, 1), torch.float32, needs_gradient=True)


class RunsAhead(CpuDevice):
    runs_ahead = True


class Rank:
    """A rank whose F and B read messages; `held` is what the host holds of them."""

    def __init__(self) -> None:
        self.lanes = Lanes(1, RunsAhead())
        self.ring = Ring(self.lanes.ahead, queue_of(Lane.RECV, Op(1, Kind.RECV_F, 0)), CPU)
        self.held: dict[int, Tensor] = {}
        self.lanes.start_step()

    def receive(self, number: int, *waits: Op, form: TensorForm = FORM) -> int:
        """Post the receive of a message; returns where its memory is."""
        op = Op(1, Kind.RECV_F, number)
        with self.lanes.on(Lane.RECV, waits, op), self.lanes.timed(Lane.RECV, op):
            buffer = self.held[number] = self.ring.take(form)
        return buffer.data_ptr()

    def compute(self, kind: Kind, number: int, *waits: Op, last: bool = False) -> Op:
        """F or B of a message, which the host holds no longer after the `last` one."""
        op = Op(1, kind, number)
        with self.lanes.on(Lane.COMPUTE, waits, op):
            with self.lanes.timed(Lane.COMPUTE, op):
                pass
            if last:
                del self.held[number]
        return op


def test_not_while_the_host_holds_it() -> None:
    rank = Rank()
    first = rank.receive(0)
    forward = rank.compute(Kind.F, 0)
    second = rank.receive(1, forward)
    assert second != first
    view = rank.held[1][:, 1:]  # a view holds the memory too
    rank.compute(Kind.B, 0, last=True)
    last = rank.compute(Kind.B, 1, last=True)
    assert rank.receive(2, last) == first
    assert rank.receive(3, last) not in (first, second)
    del view


def test_not_before_the_queue_comes_after_the_reader_on_the_device() -> None:
    rank = Rank()
    first = rank.receive(0)
    forward = rank.compute(Kind.F, 0)
    backward = rank.compute(Kind.B, 0, last=True)
    second = rank.receive(1, forward)  # its stream waits for F alone, and B may still read
    assert second != first
    assert rank.receive(2, backward) == first


def test_a_reader_that_nobody_knew_of_counts_too() -> None:
    """A layer that keeps its input and reads it with the next microbatch: B has long been launched."""
    rank = Rank()
    first = rank.receive(0)
    backward = rank.compute(Kind.B, 0)
    rank.compute(Kind.F, 1)
    assert rank.receive(2, backward) != first
    late = rank.compute(Kind.F, 3)
    del rank.held[0]  # only now
    assert rank.receive(4, backward) != first
    assert rank.receive(5, late) == first


@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_as_are_needed_at_once(depth: int) -> None:
    """1F1B with so many microbatches between F and B, two steps: each buffer is used again behind its last reader, in the next step too."""
    rank = Rank()
    places = set()
    for _ in range(2):
        backwards: list[Op] = []
        for number in range(20):
            places.add(rank.receive(number, *backwards[-1:]))
            rank.compute(Kind.F, number)
            if number >= depth:
                backwards.append(rank.compute(Kind.B, number - depth, last=True))
        for number in range(20 - depth, 20):
            rank.compute(Kind.B, number, last=True)
        rank.lanes.end_step()
        rank.lanes.start_step()
    assert len(places) == depth + 1


def test_lengths_that_change_do_not_pile_up() -> None:
    rank = Rank()
    for length, step in itertools.product((3, 50, 7, 200, 1), range(2)):
        form = TensorForm((2, length), (length, 1), torch.bfloat16, needs_gradient=False)
        for number in range(2):
            rank.receive(number, form=form)
            assert rank.held[number].shape == (2, length), step
            assert rank.held[number].dtype == torch.bfloat16
        for number in range(2):
            rank.compute(Kind.B, number, last=True)
        rank.lanes.end_step()
        rank.lanes.start_step()
        rank.compute(Kind.F, 9)  # what was let go of is seen before the next launch
        assert len(rank.ring._free) == 2
        assert not rank.ring._taken


def test_strides_and_expanded_dimensions_are_those_of_the_form() -> None:
    rank = Rank()
    form = TensorForm((4, 3, 5), (3, 1, 0), torch.float64, needs_gradient=False)
    rank.receive(0, form=form)
    assert (rank.held[0].shape, rank.held[0].stride()) == ((4, 3, 1), (3, 1, 0))
    assert rank.held[0].untyped_storage().nbytes() == form.num_bytes == 4 * 3 * 8


def test_a_message_without_entries_has_no_buffer() -> None:
    rank = Rank()
    rank.receive(0, form=TensorForm((0, 3), (3, 1), torch.float32, needs_gradient=False))
    assert rank.held[0].shape == (0, 3)
    assert not rank.ring._taken
