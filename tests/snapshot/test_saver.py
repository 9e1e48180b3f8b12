"""Saves on one rank: what is in them, what is kept, and what happens when one fails."""

import errno
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ranks import PATIENCE_SECONDS
from saved import CPU, save, saver_of, state_of, trained

from pipetrain.comm.device import CpuDevice
from pipetrain.snapshot import saver as saver_module
from pipetrain.snapshot.files import path_of, steps_in
from pipetrain.snapshot.manifest import check_whole
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.saver import Saver, write_tensors
from pipetrain.snapshot.start import newest_whole
from pipetrain.snapshot.state import Part, Tensors, restore_generators, tensors_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> tuple[float, ...]:
    """One from each, normal ones too: their second half is part of the state."""
    normal = float(np.random.standard_normal())
    return random.random(), random.gauss(0, 1), float(np.random.rand()), normal, float(torch.rand(()))


def test_everything_comes_back(tmp_path: pathlib.Path) -> None:
    """And so do the generators that a user's own code may draw from, as JSON, which could not run."""
    model, optimizer = trained(1)
    saver = saver_of(tmp_path)
    seed(7)
    draw()
    saver.save(state_of(12), tensors_of(model, optimizer, CPU))
    drawn = [draw() for _ in range(700)]  # past the end of a block of 624 numbers
    saver.wait()

    other, its_optimizer = trained(2)
    seed(1)
    snapshot = Snapshot(path_of(tmp_path, 12))
    snapshot.restore(other, its_optimizer, 0, CPU)
    assert snapshot.state == state_of(12)
    assert [draw() for _ in range(700)] == drawn
    files = snapshot.tensors(Part.GENERATORS)
    assert set(files) == {"cpu", "python", "numpy"}
    assert all(bytes(files[name].tolist()).startswith(b"[") for name in ("python", "numpy"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert optimizer.state[ours].keys() == its_optimizer.state[theirs].keys()
        for key, value in optimizer.state[ours].items():
            assert torch.equal(value, its_optimizer.state[theirs][key])


def test_a_snapshot_without_generators_leaves_them_alone() -> None:
    seed(3)
    expected = draw()
    seed(3)
    restore_generators({"cpu": torch.get_rng_state()}, CPU)
    assert draw() == expected


def test_every_dtype_and_shape_comes_back(tmp_path: pathlib.Path) -> None:
    tensors = {
        f"{dtype}-{shape}": torch.ones(shape).to(dtype) for dtype in DTYPES for shape in [(), (3,), (2, 5), (0,)]
    }
    tensors["not contiguous"] = torch.arange(6.0).reshape(2, 3).T
    saver = saver_of(tmp_path)
    saver.save(state_of(1), {Part.WEIGHTS: tensors, Part.OPTIMIZER: {}})
    saver.wait()
    assert not set(Snapshot(path_of(tmp_path, 1)).tensors(Part.OPTIMIZER)), "a rank may hold nothing of a part"
    read = Snapshot(path_of(tmp_path, 1)).tensors(Part.WEIGHTS)
    assert set(read) == set(tensors)
    for name, value in tensors.items():
        assert read[name].dtype is value.dtype
        assert torch.equal(read[name], value)


def test_what_a_step_changes_meanwhile_is_not_in_the_snapshot(tmp_path: pathlib.Path) -> None:
    weight = torch.zeros(1 << 20)
    saver = saver_of(tmp_path)
    for step in (1, 2):  # the second save uses the buffers of the first
        weight.fill_(step)
        saver.save(state_of(step), {Part.WEIGHTS: {"w": weight}})
        saver.before_update()
        weight.fill_(-1)
    saver.wait()
    for step in (1, 2):
        read = Snapshot(path_of(tmp_path, step)).tensors(Part.WEIGHTS)["w"]
        assert torch.equal(read, torch.full((1 << 20,), float(step)))


def test_copies_that_fail_do_not_stop_training(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> Tensors:
        raise MemoryError("no room for a copy")

    said: list[str] = []
    saver = saver_of(tmp_path, say=said.append)
    with monkeypatch.context() as patched:
        patched.setattr(saver_module, "_image", no_memory)
        saver.save(state_of(4), tensors_of(*trained(), CPU))
        saver.before_update()
        saver.wait()
    (text,) = said
    assert "step 4 (no room for a copy): training goes on" in text
    saver.save(state_of(5), tensors_of(*trained(), CPU))
    saver.wait()
    assert steps_in(tmp_path) == [5]


def test_ranks_agree_less_often_the_longer_a_save_takes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is early waits for the others in each agreement; in 16 steps there are four."""
    agreed: list[int] = []

    def agree(value: int) -> int:
        agreed.append(value)
        return value

    write, may_write = saver_module._write_files, threading.Event()
    monkeypatch.setattr(saver_module, "_write_files", lambda *args: (may_write.wait(PATIENCE_SECONDS), write(*args)))
    saver = Saver(tmp_path, rank=0, agree=agree, keep_last=2, say=print)
    saver.save(state_of(5), tensors_of(*trained(), CPU))
    agreed.clear()

    def polls_that_agree(count: int) -> list[int]:
        found = []
        for number in range(1, count + 1):
            before = len(agreed)
            saver.poll()
            found += [number] * (len(agreed) - before)
        return found

    assert polls_that_agree(16) == [1, 3, 7, 15]
    may_write.set()
    saver.wait()
    assert check_whole(path_of(tmp_path, 5)).step == 5
    saver.save(state_of(6), tensors_of(*trained(), CPU))
    assert saver._save is not None
    saver._save.job.result(PATIENCE_SECONDS)  # written before any poll, which the saver does not expect
    assert polls_that_agree(8) == [8]
    saver._save.job.result(PATIENCE_SECONDS)
    assert check_whole(path_of(tmp_path, 6)).step == 6
    assert polls_that_agree(32) == [32]
    assert saver.last_step == 6


def test_a_snapshot_of_the_same_step_takes_the_place_of_the_old_one(tmp_path: pathlib.Path) -> None:
    (save(tmp_path, 10) / "manifest.json").write_text("damaged")
    check_whole(save(tmp_path, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_others_may_not_write(tmp_path: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        snapshot = save(tmp_path / "snapshots", 10)
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o022 == 0 for path in [snapshot.parent, snapshot, *snapshot.rglob("*")])


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_file_that_does_not_reach_the_disk_is_not_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        write_tensors({"w": torch.ones(1)}, tmp_path, "w.safetensors")


@pytest.mark.root
def test_a_full_disk_does_not_stop_training(small_disk: pathlib.Path) -> None:
    said: list[str] = []
    saver = saver_of(small_disk, say=said.append)
    saver.save(state_of(4), {Part.WEIGHTS: {"w": torch.ones(1 << 17)}})
    saver.save(state_of(8), {Part.WEIGHTS: {"w": torch.ones(1 << 20)}})
    saver.wait()
    assert saver.last_step == 4
    (text,) = said
    assert text == (
        "rank 0 could not write the snapshot of step 8 (No space left on device): training goes on; "
        f"the newest snapshot is {path_of(small_disk, 4)}"
    )
    assert [path.name for path in small_disk.iterdir()] == ["step-00000004"]
    check_whole(path_of(small_disk, 4))
    saver.save(state_of(12), {Part.WEIGHTS: {"w": torch.ones(1)}})
    saver.wait()
    assert steps_in(small_disk) == [12, 4]


def test_lines_of_steps_reach_the_disk_before_a_snapshot_of_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume goes on after the snapshot: lines before it that a machine without power has lost would stay away."""
    done: list[str] = []
    sync, rename = os.fsync, pathlib.Path.rename

    def noted(descriptor: int) -> None:
        done.append(pathlib.Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def renamed(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        done.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.mkfifo(tmp_path / "other.jsonl")
    saver = Saver(tmp_path / "all", rank=0, agree=lambda value: value, keep_last=2, say=print, run=tmp_path)
    saver.save(state_of(4), tensors_of(*trained(), CPU))
    saver.wait()
    assert done.count("metrics.jsonl") == done.count(tmp_path.name) == 1
    assert done.index("metrics.jsonl") < done.index(tmp_path.name) < done.index("step-00000004")


SAVES_FOR_EVER = """
import sys, torch, pathlib
from saved import saver_of, state_of
from pipetrain.snapshot.state import Part
saver = saver_of(pathlib.Path(sys.argv[1]))
for step in range(int(sys.argv[2]) + 1, 10**6):
    saver.save(state_of(step), {Part.WEIGHTS: {"w": torch.full((1 << 18,), float(step))}})
    if step > int(sys.argv[2]) + 1:
        print(saver.last_step, flush=True)
"""


def test_a_process_killed_while_it_saves_leaves_a_whole_snapshot(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1)
    paths = [str(pathlib.Path(__file__).parent), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path), "1"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert process.stdout is not None
    lines = [int(process.stdout.readline()) for _ in range(2)]  # a save is on its way after each
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    said: list[str] = []
    newest = newest_whole(tmp_path, said.append)
    assert said == []
    assert newest is not None
    step = Snapshot(newest).state.step
    assert step >= lines[-1]
    assert torch.equal(Snapshot(newest).tensors(Part.WEIGHTS)["w"], torch.full((1 << 18,), float(step)))
    saver_of(tmp_path)
    assert all(path.name in {f"step-{number:08d}" for number in steps_in(tmp_path)} for path in tmp_path.iterdir())


def test_all_saves_copy_on_one_stream(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has few streams, and hands out the same ones again: one that a save took could be that of the messages."""

    class Streams(CpuDevice):
        made = 0

        def stream(self, *, priority: int = 0) -> object:  # noqa: ARG002
            Streams.made += 1
            return None

    monkeypatch.setattr(saver_module, "device_of", lambda _: Streams())
    saver = saver_of(tmp_path)
    for step in (1, 2, 3):
        saver.save(state_of(step), {Part.WEIGHTS: {"w": torch.ones(3)}})
        saver.wait()
    assert saver.last_step == 3
    assert Streams.made == 1
