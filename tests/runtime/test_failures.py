"""A rank that raises, dies or hangs: every other rank ends soon, not 0, says which rank and op, and nothing is left."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Set
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import mean_square, rows
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, Outcome, run_outcomes, run_ranks, time_out_once
from torch import Tensor, nn

from pipetrain.comm import failure
from pipetrain.comm.failure import FailureBoard, Monitor
from pipetrain.comm.group import Group
from pipetrain.runtime.pipeline import Pipeline

M = 4


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, harm: Callable[[], None]) -> Tensor:
        ctx.harm = harm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.harm()
        return gradient, None


class Harmful(nn.Module):
    """A linear layer that does `harm()` at its n-th forward (F and R count) or backward."""

    def __init__(self, harm: Callable[[], None], *, forward: int = 0, backward: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.harm = harm
        # Not a number of the layer's: R would find it as F did, and leave it so.
        self.left = {kind: ctypes.c_long(count) for kind, count in (("forward", forward), ("backward", backward))}

    def _count(self, kind: str) -> None:
        self.left[kind].value -= 1
        if self.left[kind].value == 0:
            self.harm()

    def forward(self, x: Tensor) -> Tensor:
        self._count("forward")
        return self.linear(_Backward.apply(x, lambda: self._count("backward")))


class BrokenOnPurpose(Exception):
    pass


def raise_it() -> None:
    raise BrokenOnPurpose("the answer is 43")


def kill_it() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def block_it(folder: Path, until: Set[int]) -> None:
    """Says so, and ends the process when all ranks of `until` have ended."""
    (folder / "blocked").touch()
    while not all((folder / f"ended-{rank}").exists() for rank in until):
        time.sleep(0.01)
    os._exit(1)


def train(
    harm: Callable[[], None], at_rank: int, when: dict[str, int], options: dict[str, Any], steps: int = 3
) -> None:
    """Train on; the layers of one rank are harmful."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(8, 8), Harmful(harm, **when) if number == at_rank == rank else nn.Tanh())
        for number in range(ranks)
    ]
    pipeline = Pipeline(layers, mean_square, **{"num_microbatches": M, "timeout_seconds": NEVER_SECONDS, **options})
    for inputs, targets in rows(*[9] * steps):
        pipeline.step(inputs, targets)
    pipeline.close()


def assert_gone(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert not Path(f"/proc/{outcome.pid}").exists(), f"rank {outcome.rank} is still there"


def last_line(outcome: Outcome, kind: str) -> str:
    """What the rank ended with: the line of the exception of this kind."""
    lines = [line for line in (outcome.error or "").splitlines() if re.match(rf"(\w+\.)*{kind}\b", line)]
    assert lines, f"rank {outcome.rank} ended with {outcome.error}"
    return lines[-1]


@pytest.mark.parametrize(
    ("at_rank", "when", "op", "lane", "mode"),
    [
        (1, {"forward": 2}, "1F1", "compute", "never"),  # with R 1R0 may come before it
        (0, {"forward": M + 1}, "0R0", "recompute", "overlap"),
        (2, {"forward": M + 2}, "2R1", "compute", "inline"),
        (3, {"backward": 4}, "3B3", "compute", "never"),
    ],
)
def test_a_rank_that_raises(at_rank: int, when: dict[str, int], op: str, lane: str, mode: str) -> None:
    """Its own error on its own rank, with the grid; on the others the rank and the op."""
    outcomes = run_outcomes(4, train, raise_it, at_rank, when, {"recompute": mode})
    assert_gone(outcomes)
    place = rf"rank {at_rank} failed in {op} \({lane} lane, step \d\)"
    for outcome in outcomes:
        assert outcome.exit_code == 1
        if outcome.rank == at_rank:
            assert "the answer is 43" in last_line(outcome, "BrokenOnPurpose")
            assert outcome.error is not None
            assert re.search(place, outcome.error)
            assert re.search(rf"\[{op}\]", outcome.error), "the grid with the op marked"
        else:
            assert re.search(rf"{place}: BrokenOnPurpose: the answer is 43", last_line(outcome, "PipelineError"))


@pytest.mark.parametrize(
    ("at_rank", "when", "options"),
    [(1, {"forward": 6}, {"schedule": "gpipe"}), (3, {"backward": 2}, {"schedule": "1f1b", "recompute": "never"})],
    ids=str,
)
def test_a_rank_that_is_killed(at_rank: int, when: dict[str, int], options: dict[str, Any]) -> None:
    check_killed(run_outcomes(4, train, kill_it, at_rank, when, options), at_rank)


def check_killed(outcomes: list[Outcome], killed: int) -> None:
    assert_gone(outcomes)
    for outcome in outcomes:
        if outcome.rank == killed:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.exit_code == 1
        message = last_line(outcome, "PipelineError")
        assert f"rank {killed} is gone" in message
        waits = rf"rank {outcome.rank} waits (in \d(RECV|SEND)_[FB]\d (from|to)|for .* from) rank \d"
        assert re.search(waits, message), message


def train_and_tell(path: str, at_rank: int) -> None:
    """Train for ever; after two steps one rank writes its process id."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        [nn.Linear(8, 8) for _ in range(3)], mean_square, num_microbatches=M, timeout_seconds=NEVER_SECONDS
    )
    ((inputs, targets),) = rows(9)
    while True:
        pipeline.step(inputs, targets)
        if pipeline.step_index == 2 and dist.get_rank() == at_rank:
            Path(path).write_text(str(os.getpid()))


@pytest.mark.parametrize("at_rank", [0, 1])
def test_a_rank_that_is_killed_from_outside(at_rank: int, tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    killer = threading.Thread(target=lambda: os.kill(int(fifo.read_text()), signal.SIGKILL), daemon=True)
    killer.start()
    outcomes = run_outcomes(3, train_and_tell, str(fifo), at_rank)
    killer.join(PATIENCE_SECONDS)
    check_killed(outcomes, at_rank)


def beside_one_that_hangs(path: str, at_rank: int, when: dict[str, int]) -> None:
    folder, rank = Path(path), dist.get_rank()
    time_out_once((folder / "blocked").exists)
    try:
        train(partial(block_it, folder, {0, 1, 2} - {at_rank}), at_rank, when, {"timeout_seconds": 30.0})
    finally:
        (folder / f"ended-{rank}").touch()


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    outcomes = run_outcomes(3, beside_one_that_hangs, str(tmp_path), 1, {"forward": 3})
    assert_gone(outcomes)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exit_code == 1
        message = last_line(outcome, "PipelineError")
        # F1 has left rank 1 where rank 2 had taken F0 by then.
        assert re.search(r"rank [02] waits in (2RECV_F[12]|0RECV_B0) from rank 1, and nothing came for 30 s", message)
        # On a busy machine another rank may be late with its word, too.
        assert re.search(r"no word from rank (\d, )*1[,;]", message)
        for rank in (0, 2):
            assert re.search(rf"rank {rank} waits (in {rank}RECV|for )", message), "what each rank waits in"


def with_a_store_on_rank_0(port: int, harm: Callable[[], None], at_rank: int, when: dict[str, int]) -> None:
    """As under torchrun without an agent: the store goes down with rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that left now would close the connections that a slower one is still making
    dist.destroy_process_group()
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_SECONDS)
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_SECONDS)
    )
    train(harm, at_rank, when, {})


def while_others_connect(port: int, path: str) -> None:
    """Rank 0 is killed where it waits for ranks 1 and 2, which still connect."""
    from pipetrain.comm import gloo

    rank = dist.get_rank()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    make_pair, first = gloo.make_pair, os.pidfd_open(int(pids[0]))

    def make_late(store: Any, name: str, *rest: Any) -> Any:
        if name == "edge/1/B":
            (Path(path) / f"rank-{rank}").touch()
            if rank == 1:
                wait_for_file(Path(path) / "rank-2", PATIENCE_SECONDS)
                os.kill(int(pids[0]), signal.SIGKILL)
            assert select.select([first], [], [], PATIENCE_SECONDS)[0], "rank 0 lives"
        return make_pair(store, name, *rest)

    gloo.make_pair = make_late
    with_a_store_on_rank_0(port, kill_it, 0, {"forward": 1})
    raise AssertionError(f"rank {rank} trained")


def with_one_that_connects_late(path: str) -> None:
    """Rank 2 waits a second for rank 0 to begin, which does not wait for it."""
    from pipetrain.comm import gloo

    make_pair, begun = gloo.make_pair, Path(path) / "begun"

    def make_late(store: Any, name: str, *rest: Any) -> Any:
        if dist.get_rank() == 2:
            wait_for_file(begun, 1.0)
        assert not begun.exists(), "rank 0 trains while rank 2 connects"
        return make_pair(store, name, *rest)

    gloo.make_pair = make_late
    train(begun.touch, 0, {"forward": 1}, {}, steps=1)
    assert dist.get_rank() != 0 or begun.exists()


def test_nobody_trains_before_all_are_connected(tmp_path: Path) -> None:
    """So that a rank that dies in a step is gone for its neighbours, and not one that did not come."""
    run_ranks(3, with_one_that_connects_late, str(tmp_path))


def wait_for_file(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def test_the_rank_that_hosts_the_store_is_killed_while_others_connect(tmp_path: Path) -> None:
    outcomes = run_outcomes(3, while_others_connect, free_port(), str(tmp_path))
    assert_gone(outcomes)
    assert outcomes[0].exit_code == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert re.search(r"rank 0 is gone: rank [12] lost .* for edge/1/B", last_line(outcome, "PipelineError"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("[a/b.cc:9] Connection reset by peer"),
            r"rank 1 is gone: rank 2 lost its connection in edge/0/F \(",
        ),
        (
            dist.DistNetworkError("Broken pipe\nframe #0"),
            r"rank 0 is gone: rank 2 lost .* store .* for edge/0/F \(Broken pipe\)",
        ),
        (
            dist.DistStoreError("wait timeout after 5ms"),
            "no connection for edge/0/F within 5 s .*: rank 1 did not start",
        ),
    ],
    ids=repr,
)
def test_who_is_named_where_a_connection_cannot_be_made(error: RuntimeError, says: str) -> None:
    """The rank that holds the store, the one at the other end, or whoever has failed before."""
    assert re.match(says, str(Monitor(2, FailureBoard(None), 5.0).unmet("edge/0/F", "rank 1", error)))
    board = FailureBoard(None)
    board.post("rank 3 failed")
    told = str(Monitor(2, board, 5.0).unmet("edge/0/F", "rank 1", error))
    assert told == "rank 3 failed (rank 2 ends; rank 2 connects edge/0/F with rank 1)"


def test_a_message_that_comes_during_a_slow_look_at_the_store_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes longer than the time from one to the next: whoever brings the message gets its turn between them."""
    monkeypatch.setattr(failure, "_POLL_SECONDS", 0.01)
    board, looks = FailureBoard(None), threading.Event()

    def slow_read() -> None:
        looks.set()
        time.sleep(0.05)  # an answer of the store that takes so long

    def bring() -> None:
        assert looks.wait(PATIENCE_SECONDS)
        monitor.done(lambda: come.append(1))

    monkeypatch.setattr(board, "read", slow_read)
    monitor, come = Monitor(0, board, 20.0), list[int]()
    courier = threading.Thread(target=bring)
    courier.start()
    monitor.wait(lambda: bool(come), lambda: "rank 0 waits in 0RECV_F0")
    courier.join()


def test_the_rank_that_hosts_the_store_is_killed() -> None:
    outcomes = run_outcomes(3, with_a_store_on_rank_0, free_port(), kill_it, 0, {"forward": 3})
    assert_gone(outcomes)
    assert outcomes[0].exit_code == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert outcome.exit_code not in (0, None)
    # Rank 1 lost its own connection to rank 0; what rank 2 can know without a store is that rank 1 ended.
    assert "rank 0 is gone" in last_line(outcomes[1], "PipelineError")
    assert re.search(r"rank [01] is gone", last_line(outcomes[2], "PipelineError"))


def fails_and_goes_on() -> None:
    pipeline = Pipeline(
        [nn.Linear(8, 8), nn.Linear(8, 8)], mean_square, num_microbatches=M, timeout_seconds=NEVER_SECONDS
    )
    if pipeline.is_last:
        pipeline._stages[1].layers[0].register_forward_pre_hook(lambda *_: raise_it())
    kind: Any = BrokenOnPurpose if pipeline.is_last else RuntimeError
    with pytest.raises(kind):
        pipeline.step(*rows(9)[0])
    assert not any(stage._held for stage in pipeline._stages.values()), "a failed step holds activations"
    with pytest.raises(RuntimeError, match=r"failed before and cannot go on: rank 1 failed in 1F0"):
        pipeline.step(*rows(9)[0])
    pipeline.close()


def test_after_a_failure_nothing_is_held_and_every_call_says_why() -> None:
    outcomes = run_outcomes(2, fails_and_goes_on)
    assert [(outcome.exit_code, outcome.error) for outcome in outcomes] == [(0, None)] * 2


def fails_in_one_of_two() -> float:
    """The pipeline that failed does not stop another one of the same ranks."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    broken = Pipeline([*layers, Harmful(raise_it, forward=1)], mean_square, num_microbatches=M)
    with pytest.raises((BrokenOnPurpose, RuntimeError)):
        broken.step(*rows(9)[0])
    with Pipeline(layers, mean_square, num_microbatches=M) as pipeline:
        return pipeline.step(*rows(9)[0]).item()


def test_a_new_pipeline_after_a_failure() -> None:
    outcomes = run_outcomes(2, fails_in_one_of_two)
    assert [outcome.error for outcome in outcomes] == [None, None]


def test_torch_distributed_is_ended_only_by_who_started_it() -> None:
    Group(0, 1, torch.device("cpu"), None, 1.0).close()
    assert not dist.is_initialized()
