"""Pinned memory is taken by a thread on the cores near its GPU, which then runs where it ran."""

import os
from pathlib import Path

import pytest

from pipetrain.comm.device import cores_of_node, on_cores

ADDRESS = "0000:1b:00.0"


def machine(folder: Path, cores: str) -> Path:
    (folder / "bus/pci/devices" / ADDRESS).mkdir(parents=True)
    (folder / "bus/pci/devices" / ADDRESS / "local_cpulist").write_text(cores)
    return folder


def test_the_cores_are_those_of_the_node_of_the_device(tmp_path: Path) -> None:
    assert cores_of_node(ADDRESS, machine(tmp_path, "0-2,8,10-11\n")) == {0, 1, 2, 8, 10, 11}


@pytest.mark.parametrize("cores", ["", "\n", "a-b"])
def test_a_machine_that_does_not_tell_has_none(tmp_path: Path, cores: str) -> None:
    assert cores_of_node(ADDRESS, machine(tmp_path, cores)) == set()
    assert cores_of_node("0000:ff:00.0", tmp_path) == set()


def test_a_thread_is_on_the_cores_and_then_on_its_own() -> None:
    own = os.sched_getaffinity(0)
    one = min(own)
    with on_cores({one, 10**6}):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == own
    with on_cores({10**6}):
        assert os.sched_getaffinity(0) == own
    with pytest.raises(ValueError, match="inside"), on_cores({one}):
        raise ValueError("inside")
    assert os.sched_getaffinity(0) == own
