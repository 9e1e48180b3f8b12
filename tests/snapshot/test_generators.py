"""The random generators that a user's own code may draw from: they go on where they were, each rank its own."""

from __future__ import annotations

import pathlib
import random

import numpy as np
import torch
from saved import CPU, save, saver_of, state_of, trained

from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.state import Part, restore_generators, tensors_of


def draw() -> tuple[float, ...]:
    """One from each, normal ones too: their second half is part of the state."""
    normal = float(np.random.standard_normal())
    return random.random(), random.gauss(0, 1), float(np.random.rand()), normal, float(torch.rand(()))


def test_python_numpy_and_torch_go_on_where_they_were(tmp_path: pathlib.Path) -> None:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    draw()
    model, optimizer = trained()
    saver = saver_of(tmp_path)
    saver.save(state_of(1), tensors_of(model, optimizer, CPU))
    saver.wait()
    expected = [draw() for _ in range(700)]  # past the end of a block of 624 numbers
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    Snapshot(path_of(tmp_path, 1)).restore(model, optimizer, 0, CPU)
    assert [draw() for _ in range(700)] == expected


def test_their_state_is_json_and_nothing_that_could_run(tmp_path: pathlib.Path) -> None:
    files = Snapshot(save(tmp_path, 1)).tensors(Part.GENERATORS)
    assert set(files) == {"cpu", "python", "numpy"}
    for name in ("python", "numpy"):
        assert bytes(files[name].tolist()).startswith(b"[")


def test_a_snapshot_without_them_leaves_them_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = (random.random(), float(np.random.rand()))
    random.seed(3)
    np.random.seed(3)
    restore_generators({"cpu": torch.get_rng_state()}, CPU)
    assert (random.random(), float(np.random.rand())) == expected
