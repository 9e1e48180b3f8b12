"""Faults on purpose: a line of the product is broken, and the virtual GPU says what goes wrong.

Each is a line of a function, replaced while the case runs; so the suite needs no second copy of the tree.
"""

from __future__ import annotations

import gc
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from pipetrain.comm.lanes import Lanes
from pipetrain.comm.transport import Transport
from pipetrain.runtime.executor import _TABLE, Executor
from pipetrain.runtime.runner import CallRunner
from pipetrain.schedule import check, launches
from pipetrain.snapshot import saver
from pipetrain.stage.stage import Stage
from virtual_gpu.cases import Case, bridges, differences, dropout, gaps, plain, play
from virtual_gpu.hangs import find_hangs
from virtual_gpu.races import find_races
from virtual_gpu.recorded import Recording
from virtual_gpu.reserved import reserved_bytes


def broken(owner: Any, name: str, old: str, new: str) -> Callable[[], Any]:
    """`owner.name` with `old` replaced by `new` in its source."""

    @contextmanager
    def patch() -> Iterator[None]:
        function = inspect.unwrap(vars(owner)[name])
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}"
        made: dict[str, Any] = {}
        exec(compile(source.replace(old, new), name, "exec"), function.__globals__, made)
        in_table = {kind: made[name] for kind, entry in _TABLE.items() if entry is function}
        with mock.patch.object(owner, name, made[name]), mock.patch.dict(_TABLE, in_table):
            yield

    return patch


def recompute_late(run_order: Callable[..., Any]) -> Callable[..., Any]:
    """R behind all that has its turn, and not right behind what it waits for."""
    return lambda graph, turns: run_order(graph, [(1e9, 0) if turn == (-1.0, 0) else turn for turn in turns])


@contextmanager
def sets_of_all_stages_in_one_pool() -> Iterator[None]:
    """Fault: R waits for the last B of its own stage, and the memory is that of all stages of the rank."""
    nothing = mock.Mock(return_value=())
    with (
        mock.patch.object(launches, "recomputed_too_early", nothing),
        mock.patch.object(check, "recomputed_too_early", nothing),
        mock.patch.object(launches, "run_order", recompute_late(launches.run_order)),
    ):
        yield


# From the second step on, in which forms are known: each host launches what has its turn in its own queues.
LAUNCHED = "program = self._programs.training(call.first_backward)"
LAUNCHED_AHEAD = f"""\
{LAUNCHED}
        if step.index > 0:
            from dataclasses import replace
            from pipetrain.runtime.program import Program
            from pipetrain.schedule.make import make
            program = Program.of(make(replace(self._programs._spec, first_backward=call.first_backward)), self._group.rank)
"""

GIVEN_INSIDE = """\
        if entry.writes is not None:  # before the op ends, because this may copy the output
            self._given[entry.writes] = _crossed(stage, output, given)  # [3]
"""
# The copy is made where the producer runs, but after its end was recorded: the wrong mend.
GIVEN_DENSE_OUTSIDE = """\
    if entry.writes is not None:
        from pipetrain.comm.forms import compact
        crossed = _crossed(stage, output, given)
        self._given[entry.writes] = crossed._replace(leaves=[compact(leaf) for leaf in crossed.leaves])
"""


@dataclass(frozen=True)
class Planted:
    """A fault, a case in which it shows, and what is found: `race`, `hang`, `bytes` (that grow with the microbatches), or other
    `values` than the plain loop's."""

    name: str
    fault: Callable[[], Any]
    case: Case
    found: str = "race"


PLAIN = Case("1f1b", ranks=3, microbatches=6)


class Shift(nn.Module):
    """Saves nothing, so that R alone reads what a stage gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def shifted(num_layers: int) -> list[nn.Module]:
    return [nn.Sequential(Shift(), layer) for layer in plain(num_layers)]


SEVERAL = Case("interleaved", stages_per_rank=2)
GAPS = Case("1f1b", ranks=3, layers=bridges(gaps))
PLANTED = (
    Planted(
        "the end of an op is recorded before it",
        broken(Lanes, "timed", "self._ended[op] = end", "self._ended[op] = start"),
        PLAIN,
    ),
    Planted(
        "an event is used again while others wait for it",
        broken(Lanes, "timed", "self._spans.append((lane, op, start, end))", "self._spare += (start, end)"),
        PLAIN,
    ),
    Planted("fault 1: one pool, waits per stage", sets_of_all_stages_in_one_pool, SEVERAL),
    Planted(
        "fault 2: a copy on the caller's stream",
        broken(
            Transport,
            "send",
            "    form, tensors = pack(leaves, wants_gradient, spec, fixed)",
            "    with self._lanes.device.on(self._lanes.device._caller):\n"
            "        form, tensors = pack(leaves, wants_gradient, spec, fixed)",
        ),
        GAPS,
    ),
    Planted("fault 2: the wrong mend", broken(Executor, "_forward", GIVEN_INSIDE, GIVEN_DENSE_OUTSIDE), GAPS),
    Planted(
        "what a copy is made of is let go of at once",
        broken(Transport, "send", "given = list(leaves) if self._lanes.device.runs_ahead else []", "given = []"),
        GAPS,
    ),
    Planted(
        "a stash goes when R is launched",
        broken(
            Stage,
            "recompute",
            "again.end(frozenset() if seen is None else seen.storages(self.state.normal), held.kind.size)",
            "again.end(frozenset() if seen is None else seen.storages(self.state.normal), held.kind.size); self._release(held); held.given = None",
        ),
        replace(PLAIN, layers=shifted, segments=2),
    ),
    Planted(
        "R takes the output of a kept layer before F has made it",
        broken(
            Lanes,
            "on",
            "event = self._ended.get(before)",
            "event = None if str(before) == str(op).replace('R', 'F') else self._ended.get(before)",
        ),
        replace(PLAIN, layers_per_part=2, keep_layers=(0, 2, 4)),
    ),
    Planted(
        "fault 4: receives ahead",
        broken(CallRunner, "_execute", LAUNCHED, LAUNCHED_AHEAD),
        PLAIN,
        "hang",
    ),
    Planted(
        "fault 6: a new buffer for every message",
        broken(Transport, "_make_buffers", "if self._lanes.device.runs_ahead:", "if False:"),
        PLAIN,
        "bytes",
    ),
    Planted(
        "a save does not wait for the optimizer",
        broken(saver.Saver, "_copy_stream", "device.follow(stream, device.current())", "pass"),
        Case("1f1b", saves=True),
    ),
    Planted(
        "the optimizer does not wait for a save",
        broken(saver.Saver, "_copy", "device.finish(stream)", "pass"),
        Case("1f1b", saves=True),
    ),
    # Each rank's thread has generators of its own (`baton`): a process per rank would show nothing more.
    Planted(
        "a layer goes on with what its generator has",
        broken(Stage, "_run_forward", "self.state.seeders[number](held.seeds[number])", "pass"),
        replace(PLAIN, mode="never", layers=dropout),
        "values",
    ),
    Planted(
        "each rank seeds its layers from 0",
        broken(Stage, "forward", "given.seeds_of(self.indices)", "given.seeds_of(range(len(self.indices)))"),
        replace(PLAIN, layers=dropout),
        "values",
    ),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted, request: pytest.FixtureRequest) -> None:
    gc.collect()
    gc.disable()  # bytes are compared: what a cycle holds must not go in the one run and stay in the other
    request.addfinalizer(gc.enable)
    with planted.fault():
        played = play(planted.case)
        recording = played.recording
        more = play(replace(planted.case, microbatches=12)).recording if planted.found == "bytes" else recording
    assert {
        "race": lambda: find_races(recording),
        "hang": lambda: find_hangs(recording),
        "bytes": lambda: all_reserved(more) > all_reserved(recording),
        "values": lambda: differences(planted.case, played),
    }[planted.found]()


def all_reserved(recording: Recording) -> int:
    """But for the losses, of which there is one for each microbatch."""
    return sum(sum(reserved_bytes(rank, 9).values()) for rank in recording)
