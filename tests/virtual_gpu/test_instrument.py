"""What the virtual GPU finds, on programs so small that the answer is plain: each rule finds its fault, and not its mend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipetrain.schedule.op import Op
from virtual_gpu.hangs import find_hangs, find_hangs_of_all, folded
from virtual_gpu.kernels import Blocks
from virtual_gpu.races import find_races
from virtual_gpu.recorded import Free, HostWait, Kernel, RankRecording
from virtual_gpu.reserved import reserved_bytes
from virtual_gpu.virtual_device import VirtualDevice, VirtualStream
from virtual_gpu.virtual_ranks import VirtualRanks

Program = Callable[[VirtualDevice, VirtualStream, VirtualStream], object]


def races_of(program: Program) -> list[str]:
    """Of one rank's program on two streams."""
    device = VirtualDevice(0)
    one, other = device.stream(), device.stream()
    device.name(one, "one")
    device.name(other, "other")
    with device.kernels():
        kept = program(device, one, other)
    found = find_races([device.recording])
    del kept
    return [str(race).removeprefix("rank 0: ").replace(" of the caller", "") for race in found]


@pytest.mark.parametrize(
    "waits", ["not at all", "for its event", "before it is recorded", "for one of before the write"]
)
def test_a_read_waits_for_an_event_that_was_recorded_after_the_write(waits: str) -> None:
    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        event = device.record(other if waits == "before it is recorded" else one)
        if waits == "before it is recorded":
            device.recording.entries.pop()
            device.wait(other, event)
        with device.on(one):
            value = torch.ones(4)
        if waits in ("for its event", "before it is recorded"):
            device.record(one, event)
        if waits in ("for its event", "for one of before the write"):
            device.wait(other, event)
        with device.on(other):
            return value, value + 1

    race = "add on other does not wait for ones on one"
    assert races_of(program) == ([] if waits == "for its event" else [race])


def test_a_write_waits_for_the_reads_before_it() -> None:
    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        with device.on(one):
            value = torch.ones(4)
        device.follow(other, one)
        with device.on(other):
            read = value + 1
        with device.on(one):
            value.zero_()
        return value, read

    assert races_of(program) == ["zero_ on one does not wait for add on other"]


def test_what_a_schema_does_not_say_is_written_is_known() -> None:
    """The running mean of a batch norm."""

    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        layer = torch.nn.BatchNorm1d(4)
        assert layer.running_mean is not None
        device.follow(one, device.current())
        with device.on(one):
            output = layer(torch.ones(3, 4))
        device.follow(other, device.current())
        with device.on(other):
            return layer, output, layer.running_mean + 1

    assert races_of(program) == ["add on other does not wait for native_batch_norm on one"]


@pytest.mark.parametrize("mend", ["", "record_stream", "wait", "host"])
def test_memory_that_is_freed_under_another_stream_may_be_taken_again(mend: str) -> None:
    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        with device.on(one):
            value = torch.ones(4)
        device.follow(other, one)
        with device.on(other):
            read = value + 1
        if mend == "record_stream":
            device.keep(value, other)
        del value
        if mend == "wait":
            device.follow(one, other)
        if mend == "host":
            device.finish(other)
        with device.on(one):
            return read, torch.zeros(1024)  # of any size

    assert races_of(program) == ([] if mend else ["zeros on one took over memory that was freed under add on other"])


def test_record_stream_covers_what_its_stream_has_waited_for() -> None:
    """As NCCL's own stream is, on which a transfer reads what a message stream was given."""

    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        third = device.stream()
        with device.on(one):
            value = torch.ones(4)
        device.follow(third, one)
        with device.on(third):
            read = value + 1
        device.follow(other, third)
        device.keep(value, other)
        del value
        with device.on(one):
            return read, torch.zeros(4)

    assert races_of(program) == []


def test_new_memory_is_used_elsewhere_only_after_its_own_stream() -> None:
    """It may be memory that its own stream still works on."""

    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        with device.on(one):
            old = torch.ones(4)
            del old
            new = torch.empty(4)
        with device.on(other):
            return new.zero_()

    assert races_of(program) == ["zero_ on other took over memory that was freed under ones on one"]


def test_lent_memory_is_the_same_memory() -> None:
    def program(device: VirtualDevice, one: VirtualStream, other: VirtualStream) -> object:
        with device.on(one):
            value = torch.ones(4)
        lent = device.lent(value)
        with device.on(other):
            return value, lent + 1

    assert races_of(program) == ["add on other does not wait for ones on one"]


def test_what_the_host_computes_is_no_kernel() -> None:
    device = VirtualDevice(0)
    with device.kernels():
        value = torch.ones(4)
        memory = device.host_memory(16).view(torch.float32)
        device.copy(memory, value)
        assert float(memory.sum()) == 4.0
    kernels = [entry.name for entry in device.recording.entries if isinstance(entry, Kernel)]
    assert kernels == ["ones", "copy_"]
    assert not any(isinstance(entry, HostWait) for entry in device.recording.entries)


def test_autograd_is_seen_and_memory_is_freed_in_its_place() -> None:
    device = VirtualDevice(0)
    with device.kernels():
        weight = torch.ones(4, requires_grad=True)
        (weight.exp() * 2).sum().backward()
        entries = device.recording.entries
        names = [
            entry.name if isinstance(entry, Kernel) else "free"
            for entry in entries
            if isinstance(entry, (Kernel, Free))
        ]
    assert names.index("exp") < names.index("sum") < names.index("ones_like") < len(names) - 1
    last = len(names) - 1 - names[::-1].index("mul")
    assert "free" in names[last:], "the result of exp is freed when its node has run"


# Messages and hosts -----------------------------------------------------------------------------------------------


def ranks_of(*parts: Callable[[VirtualDevice, _Ends], object]) -> list[RankRecording]:
    """A rank for each part, with two communicators between rank 0 and rank 1."""
    from torch.distributed import HashStore, PrefixStore

    ranks, store = VirtualRanks(len(parts)), HashStore()

    def main() -> object:
        device = ranks.device
        place = device.recording.rank
        ends = [ranks.communicator(PrefixStore(name, store), place, None) for name in ("a", "b")]
        return parts[place](device, _Ends(device, ends, 1 - place))

    return ranks.run(main)[0]


class _Ends:
    """Two communicators with the other rank, each used on a stream of its own."""

    def __init__(self, device: VirtualDevice, groups: list, peer: int) -> None:  # type: ignore[type-arg]
        self.device = device
        self.groups = groups
        self.peer = peer
        self.streams = [device.stream() for _ in groups]

    def send(self, text: str, tensor: Tensor, which: int) -> None:
        op = Op.parse(text)
        with self.device.launching(op), self.device.on(self.streams[which]):
            self.groups[which].send([tensor], self.peer, 0).wait()

    def receive(self, text: str, tensor: Tensor, which: int) -> None:
        op = Op.parse(text)
        with self.device.launching(op), self.device.on(self.streams[which]):
            self.groups[which].recv([tensor], self.peer, 0).wait()

    def join(self, which: int) -> None:
        self.device.follow(self.device.current(), self.streams[which])


def _sends_two(device: VirtualDevice, ends: _Ends) -> object:
    value, reply = torch.full((4,), 3.0), torch.empty(4)
    for stream in ends.streams:
        device.follow(stream, device.current())
    ends.send("0SEND_F0", value, 0)
    ends.receive("0RECV_B0", reply, 1)
    return value, reply


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_message_brings_is_read_after_it(waits: bool) -> None:
    def receives(device: VirtualDevice, ends: _Ends) -> object:
        buffer = torch.empty(4)
        ends.receive("1RECV_F0", buffer, 0)
        if waits:
            ends.join(0)
        result = buffer * 2
        assert float(result.sum()) == 24.0, "whatever the order, the value is there"
        ends.send("1SEND_B0", torch.ones(4), 1)
        return result

    races = [str(race) for race in find_races(ranks_of(_sends_two, receives)) if "1SEND" not in str(race)]
    if waits:
        assert races == []
    else:
        assert len(races) == 1
        assert "mul of the caller on caller does not wait for receive of 1RECV_F0" in races[0]


def test_a_posted_receive_hangs_where_the_host_then_waits_for_its_device() -> None:
    """The other rank sends only what depends on a later op of this one."""

    def ahead(_: VirtualDevice, ends: _Ends) -> object:
        ends.receive("0RECV_B0", torch.empty(4), 1)
        ends.send("0SEND_F0", torch.ones(4), 0)
        return None

    def answers(device: VirtualDevice, ends: _Ends) -> object:
        buffer = torch.empty(4)
        ends.receive("1RECV_F0", buffer, 0)
        device.follow(ends.streams[1], ends.streams[0])
        ends.send("1SEND_B0", buffer, 1)
        return buffer

    recording = ranks_of(ahead, answers)
    assert [(hang.rank, str(hang.before)) for hang in find_hangs(recording)] == [(0, "0SEND_F0")]
    assert [hang.rank for hang in find_hangs_of_all(recording)] == [0, 1]
    # One hardware queue for all streams: the receive is ahead of the send, without any wait of the host.
    assert [(hang.rank, hang.before) for hang in find_hangs(recording, folded(1))] == [(0, None), (1, None)]


def test_two_that_send_before_they_receive_do_not_hang_on_streams_of_their_own() -> None:
    def part(first: str, second: str, which: int) -> Callable[[VirtualDevice, _Ends], object]:
        def run(_: VirtualDevice, ends: _Ends) -> object:
            ends.send(first, torch.ones(4), which)
            ends.receive(second, torch.empty(4), 1 - which)
            return None

        return run

    recording = ranks_of(part("0SEND_F0", "0RECV_B0", 0), part("1SEND_B0", "1RECV_F0", 1))
    assert find_hangs(recording, folded(64)) == []
    assert find_hangs(recording) == [], "while one host waits, the other posts its receive"
    assert [str(hang.before) for hang in find_hangs_of_all(recording)] == ["0RECV_B0", "1RECV_F0"]
    assert len(find_hangs(recording, folded(1))) == 2


def test_a_send_that_nobody_receives_hangs() -> None:
    def sends(_: VirtualDevice, ends: _Ends) -> object:
        ends.send("0SEND_F0", torch.ones(4), 0)
        return None

    recording = ranks_of(sends, lambda _, __: None)
    assert [(hang.rank, hang.before) for hang in find_hangs(recording)] == [(0, None)]
    assert "sends in 0SEND_F0" in str(find_hangs(recording)[0])


# Bytes and waits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "expected"), [(False, 64), (True, 128)])
def test_a_block_under_record_stream_does_not_come_back_within_the_call(kept: bool, expected: int) -> None:
    device = VirtualDevice(0)
    stream = device.stream()
    device.name(stream, "own")
    with device.kernels(), device.call("step"), device.on(stream):
        for _ in range(2):
            value = torch.ones(16)
            if kept:
                device.keep(value, device.stream())
            del value
    assert reserved_bytes(device.recording) == {"own": expected}


def test_a_storage_that_takes_the_place_of_a_freed_one_is_another_block() -> None:
    blocks = Blocks(RankRecording(0))
    numbers = [blocks.of(torch.ones(4), 0) for _ in range(3)]
    assert numbers == [0, 1, 2]
