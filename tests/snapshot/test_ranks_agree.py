"""A snapshot is there when every rank has written its part, and not before; one rank's failure is everybody's."""

from __future__ import annotations

import pathlib
import threading
from unittest import mock

import torch
import torch.distributed as dist
from ranks import PATIENCE_SECONDS, run_ranks

from pipetrain.snapshot import saver as saver_module
from pipetrain.snapshot.files import steps_in
from pipetrain.snapshot.manifest import check_whole
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import Part, RunState


def largest(value: int) -> int:
    shared = torch.tensor(value)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def saver_here(folder: str, said: list[str]) -> Saver:
    return Saver(pathlib.Path(folder), rank=dist.get_rank(), agree=largest, keep_last=5, say=said.append)


def save(saver: Saver, step: int, dtype: torch.dtype = torch.float32) -> None:
    name = f"of rank {dist.get_rank()}"
    saver.save(RunState(step, 2, {}, {}), {Part.WEIGHTS: {name: torch.ones(3, dtype=dtype)}})


def one_fails(folder: str) -> tuple[list[str], int | None]:
    said: list[str] = []
    saver = saver_here(folder, said)
    save(saver, 1)
    save(saver, 2, torch.complex128 if dist.get_rank() == 1 else torch.float32)
    save(saver, 3)
    saver.wait()
    return said, saver.last_step


def test_one_rank_that_cannot_write_costs_one_snapshot(tmp_path: pathlib.Path) -> None:
    (said_first, last), (said, same) = run_ranks(2, one_fails, str(tmp_path))
    assert last == same == 3
    assert said_first == []
    (text,) = said
    assert text == (
        "rank 1 could not write the snapshot of step 2 (of rank 1 has dtype torch.complex128, which a snapshot cannot hold): "
        f"training goes on; the newest snapshot is {tmp_path}/step-00000001"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    assert len(check_whole(tmp_path / "step-00000003").files) == 1 + 3 * 2


def one_is_slow(folder: str) -> list[int]:
    """Rank 1 writes when it has been asked often enough."""
    saver = saver_here(folder, [])
    write, may_write = saver_module._write_files, threading.Event()

    def wait_and_write(*args: object) -> None:
        if dist.get_rank() == 1:
            assert may_write.wait(PATIENCE_SECONDS)
        write(*args)

    seen = []
    with mock.patch.object(saver_module, "_write_files", wait_and_write):
        save(saver, 1)
        for _ in range(5):
            saver.poll()
            seen += steps_in(pathlib.Path(folder))
        may_write.set()
        saver.wait()
    assert steps_in(pathlib.Path(folder)) == [1] or dist.get_rank() == 1
    return seen


def test_a_snapshot_waits_for_the_slowest_rank(tmp_path: pathlib.Path) -> None:
    assert run_ranks(2, one_is_slow, str(tmp_path)) == [[], []]


def no_folder(folder: str) -> tuple[list[str], int | None]:
    said: list[str] = []
    saver = saver_here(folder, said)
    save(saver, 1)
    saver.wait()
    return said, saver.last_step


def test_no_folder_is_no_snapshot_on_any_rank(tmp_path: pathlib.Path) -> None:
    (tmp_path / "snapshots").write_text("in the way")
    outcomes = run_ranks(2, no_folder, str(tmp_path / "snapshots"))
    assert [last for _, last in outcomes] == [None, None]
    text = "could not write the snapshot of step 1 (File exists): training goes on; there is no snapshot yet"
    assert [said for said, _ in outcomes] == [[f"rank 0 {text}"], []]
