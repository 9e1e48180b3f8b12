"""Nothing that a stranger on the machine sends is executed, and no connection of theirs holds up a run."""

import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
from commands import PIPETRAIN, begin, children_of, end, free_port, is_alive, wait_until
from ranks import PATIENCE_SECONDS
from resumed import metrics_of, num_steps_of
from small_text import make_text
from strangers import another_user, disturb, forge, num_descriptors, ports_of, run_of

from pipetrain.launcher.nodes import read_key
from pipetrain.launcher.outcome import hold, own_folder

RUN = [*PIPETRAIN, "experiment=smoke"]
NUM_CONNECTIONS = 10_000
MOST_MORE = 20  # descriptors of a process


def test_a_forged_pickle_is_not_executed(tmp_path: pathlib.Path) -> None:
    """Under every key of every store that answers, from the start of the processes to their end."""
    process = begin(tmp_path, [*RUN, "run_dir=run", *make_text(tmp_path / "text"), "steps=10"])
    answers = 0
    while process.poll() is None:
        answers += sum(forge(port, f"touch {tmp_path}/executed") for port in ports_of(run_of(process.pid)))
    code, stderr = end(process)
    assert not (tmp_path / "executed").exists()
    assert code == 0, stderr
    assert answers == 0, "a store of the run is open to others"


@pytest.fixture
def files() -> Iterator[pathlib.Path]:
    """For temporary files, at a short path: those of sockets cannot be long."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_finds_no_way_in(tmp_path: pathlib.Path, files: pathlib.Path) -> None:
    """Neither a store that answers nor the folder with the file at which ranks meet; a folder that is open is found."""
    tmp_path.chmod(0o711)
    files.chmod(0o711)
    (files / "open").mkdir(mode=0o755)
    (files / "open" / "file").touch()
    found = []
    process = begin(tmp_path, [*RUN, "run_dir=run", *make_text(tmp_path / "text"), "steps=150"], TMPDIR=str(files))
    with another_user() as attack:
        while process.poll() is None:
            folder = next(files.glob("pipetrain-run-*"), files / "open")
            found.append((folder.name, *attack(folder, f"touch {tmp_path}/executed", ports_of(run_of(process.pid)))))
    code, stderr = end(process)
    assert code == 0, stderr
    assert not (tmp_path / "executed").exists()
    assert {result[1:] for result in found if result[0] == "open"} == {(0, True)}
    assert {result[1:] for result in found if result[0] != "open"} == {(0, False)}


@pytest.mark.slow
@pytest.mark.parametrize(("rendezvous", "moment"), [("signed", "start"), ("static", "middle"), ("signed", "end")])
def test_a_forged_pickle_is_not_executed_over_machines(tmp_path: pathlib.Path, rendezvous: str, moment: str) -> None:
    """Under every key of the stores of both; that may end the run, as docs/OPERATIONS.md says."""
    where = ["cluster.num_nodes=2", "cluster.ranks_per_node=1", f"cluster.rendezvous=127.0.0.1:{free_port()}"]
    command = [*RUN, "run_dir=run", *make_text(tmp_path / "text"), *where, "steps=30", "timeout_seconds=30"]
    tasks: list[dict[str, str]] = [{}, {}]
    if rendezvous == "static":
        tasks = [{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(task)} for task in range(2)]
    machines = [begin(tmp_path, command, **task) for task in tasks]
    first_step = {"start": 0, "middle": 10, "end": 30}[moment]
    wait_until(lambda: num_steps_of(tmp_path / "run") >= first_step, machines[0])
    answers = 0
    while any(machine.poll() is None for machine in machines):
        ports = {port for machine in machines for port in ports_of(run_of(machine.pid))}
        answers += sum(forge(port, f"touch {tmp_path}/executed") for port in ports)
    for machine in machines:
        end(machine)
    assert not (tmp_path / "executed").exists()
    assert answers > 0 or moment == "end"


def test_a_forged_pickle_is_not_executed_where_machines_meet(tmp_path: pathlib.Path) -> None:
    """torch's own rendezvous runs it within five seconds; here the machine that waits for another says that it was not signed."""
    port = free_port()
    where = ["cluster.num_nodes=2", "cluster.ranks_per_node=1", f"cluster.rendezvous=127.0.0.1:{port}"]
    process = begin(tmp_path, [*RUN, "run_dir=run", *make_text(tmp_path / "text"), *where])
    wait_until(lambda: port in ports_of([process.pid]) and forge(port, f"touch {tmp_path}/executed") > 0, process)
    code, stderr = end(process)
    assert not (tmp_path / "executed").exists()
    assert code == 1
    assert "is not signed with the key of this machine" in stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("key", "mode", "says"),
    [
        (None, 0, "there is no key: set PIPETRAIN_RENDEZVOUS_KEY"),
        ("k" * 32, 0o644, "others can read this key"),
        ("short", 0o600, "has 5 bytes"),
    ],
)
def test_a_key_that_is_none_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, key: str | None, mode: int, says: str
) -> None:
    monkeypatch.delenv("PIPETRAIN_RENDEZVOUS_KEY", raising=False)
    monkeypatch.setenv("PIPETRAIN_RENDEZVOUS_KEY_FILE", str(tmp_path / "key"))
    if key is not None:
        (tmp_path / "key").write_text(key)
        (tmp_path / "key").chmod(mode)
    with pytest.raises(ValueError, match=says):
        read_key()


def test_a_folder_that_nobody_holds_is_swept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launcher that was killed leaves it; one in which a rank still is stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held = tmp_path / "pipetrain-run-left", tmp_path / "pipetrain-run-held"
    for folder in (left, held):
        folder.mkdir(0o700)
    descriptor = hold(held)
    with own_folder() as own:
        assert sorted(tmp_path.iterdir()) == sorted([held, own])
        assert own.stat().st_mode & 0o777 == 0o700
    os.close(descriptor)
    assert list(tmp_path.iterdir()) == [held]


WORKERS = """
import torch
from torch import nn

def make_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.ones(8) * index, index % 4
"""


def ours(folder: pathlib.Path) -> list[str]:
    """What pipetrain and multiprocessing have in it; torch has a folder of its own there."""
    return [path.name for path in folder.iterdir() if path.name.startswith(("pipetrain-", "pymp-"))]


@pytest.mark.slow
def test_nothing_is_left_among_temporary_files(tmp_path: pathlib.Path, files: pathlib.Path) -> None:
    """With workers, whose sockets are files. Of a launcher that was killed the next run removes the folder."""
    (tmp_path / "pairs.py").write_text(WORKERS)
    own = ["model=python", "model.target=pairs:make_layers", "data=python", "data.target=pairs:Pairs"]
    run = [*RUN, *own, "data.num_workers=1", "steps=1000000", "run_dir=run", "observe.progress=false"]
    process = begin(tmp_path, run, TMPDIR=str(files))
    wait_until(lambda: num_steps_of(tmp_path / "run") > 1, process)
    ranks = children_of(process.pid)
    assert {name.split("-")[0] for name in ours(files)} == {"pipetrain"}
    os.kill(process.pid, signal.SIGKILL)
    end(process)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ours(files)) == 1
    code, stderr = end(begin(tmp_path, [*RUN, *own, "steps=1", "run_dir=next"], TMPDIR=str(files)))
    assert code == 0, stderr
    assert ours(files) == []


def most_descriptors(pid: int, before: dict[int, int]) -> dict[int, int]:
    """The most that each process of the run has had, by its place in it."""
    now = {at: num_descriptors(one) for at, one in enumerate(run_of(pid))}
    return {at: max(now.get(at, 0), before.get(at, 0)) for at in now | before}


@pytest.mark.slow
def test_strangers_who_connect_change_nothing(tmp_path: pathlib.Path) -> None:
    """At each port that the run has had, from the start of its processes; and once the steps have begun it has none."""
    text = [*make_text(tmp_path / "text"), "steps=150"]
    alone, most = begin(tmp_path, [*RUN, "run_dir=alone", *text]), dict[int, int]()
    while alone.poll() is None:
        most = most_descriptors(alone.pid, most)
    code, stderr = end(alone)
    assert code == 0, stderr

    process, ports, refused, disturbed = begin(tmp_path, [*RUN, "run_dir=run", *text]), set[int](), 0, dict[int, int]()
    num = 0
    while process.poll() is None and num < NUM_CONNECTIONS:
        open_now = ports_of(run_of(process.pid))
        ports |= open_now
        assert not (open_now and num_steps_of(tmp_path / "run"))
        for port in ports:
            for _ in range(4 if port in open_now else 100):
                refused += not disturb(port, num)
                num += 1
        disturbed = most_descriptors(process.pid, disturbed)
    code, stderr = end(process)
    assert code == 0, stderr
    assert num >= NUM_CONNECTIONS
    assert ports
    assert refused > NUM_CONNECTIONS / 2
    assert {at: number - most[at] for at, number in disturbed.items() if number > most[at] + MOST_MORE} == {}
    losses = [[line["loss"] for line in metrics_of(tmp_path / run)] for run in ("alone", "run")]
    assert losses[0] == losses[1]
