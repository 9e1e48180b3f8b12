"""A run that saves while it trains: what is in a snapshot is of its step, however late the copies are made."""

import pathlib
import threading
from collections.abc import Mapping
from functools import partialmethod

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_SECONDS, run_ranks
from small_text import make_text
from torch import Tensor

from pipetrain import train as rank
from pipetrain.config.load import load_config
from pipetrain.launcher.outcome import Exit
from pipetrain.snapshot import saver as saver_module
from pipetrain.snapshot.files import path_of, steps_in
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.session import Snapshots
from pipetrain.snapshot.state import Part, RunState, Tensors

OPTIONS = "data=text experiment=smoke pipeline.num_stages=1 observe.progress=false steps=4 snapshot.every_steps=1"


def test_weights_do_not_change_before_they_are_copied(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy begins before the run says that it is about to change them."""
    about_to_change = threading.Event()
    given: dict[int, dict[Part, Tensors]] = {}
    save, before_update, copies = Saver.save, Saver.before_update, saver_module._image

    def recorded_save(self: Saver, state: RunState, tensors: Mapping[Part, Mapping[str, Tensor]]) -> None:
        given[state.step] = {part: {n: t.detach().clone() for n, t in of.items()} for part, of in tensors.items()}
        about_to_change.clear()
        save(self, state, tensors)
        if state.step == 4:
            about_to_change.set()  # the last: nothing changes any more

    def announced(self: Saver) -> None:
        about_to_change.set()
        before_update(self)

    def late_copies(tensors: Mapping[str, Tensor], before: Tensors | None) -> Tensors:
        assert about_to_change.wait(PATIENCE_SECONDS), "the run went on to its next save without before_update"
        return copies(tensors, before)

    monkeypatch.setattr(Saver, "save", recorded_save)
    monkeypatch.setattr(Saver, "before_update", announced)
    monkeypatch.setattr(saver_module, "_image", late_copies)
    make_text(tmp_path / "text")
    typed = [f"data.path={tmp_path / 'text'}", f"run_dir={tmp_path / 'run'}", "snapshot.keep_last=9"]
    try:
        assert rank.main([*OPTIONS.split(), *typed]) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

    folder = tmp_path / "run" / "snapshots"
    assert steps_in(folder) == [4, 3, 2, 1]
    for step, parts in given.items():
        snapshot = Snapshot(path_of(folder, step))
        for part, tensors in parts.items():
            read = snapshot.tensors(part)
            assert all(torch.equal(read[name], value) for name, value in tensors.items())


def with_clocks_that_differ(folder: str) -> list[int]:
    """The clock of rank 0 is ten minutes on after step 2, that of rank 1 before each step; returns the steps that were saved."""
    first = iter([0, 1, 601, 601, 602, 603])
    clock = first.__next__ if dist.get_rank() == 0 else iter(range(0, 10**6, 1000)).__next__
    Snapshots.__init__ = partialmethod(Snapshots.__init__, clock=clock)  # type: ignore[assignment]
    options = [*OPTIONS.replace("pipeline.num_stages=1", "pipeline.num_stages=2").split()[:-1], "snapshot=minutes"]
    outcome = rank.train(load_config([*options, f"data.path={folder}/text", f"run_dir={folder}/run"]))
    assert outcome.code == Exit.DONE
    return steps_in(pathlib.Path(folder, "run", "snapshots"))


def test_all_ranks_save_by_the_clock_of_the_first(tmp_path: pathlib.Path) -> None:
    make_text(tmp_path / "text")
    assert run_ranks(2, with_clocks_that_differ, str(tmp_path)) == [[2], [2]]
