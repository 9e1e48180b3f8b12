"""Runs over machines of their own (network namespaces with their own addresses): the same numbers, and links that fail."""

import pathlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from machines import (
    RUN,
    STEPS,
    end,
    environment,
    losses_of,
    start,
    start_command,
    start_run,
    wait_until,
)
from resumed import metrics_of
from small_text import make_text

from benchmarks.links.hosts import Hosts, separate_hosts
from benchmarks.unavailable import Unavailable
from pipetrain.snapshot.files import steps_in

pytestmark = [pytest.mark.slow, pytest.mark.root]

TIMEOUT_SECONDS = 15
SLOW_MEGABITS = 4.0
# 1 MB per boundary and step: two seconds at SLOW_MEGABITS, so that a step is mostly transfer. It is four times what the link's bucket
# lets through at once, which a busy machine, whose link often rests, has full at each step's begin.
SEQUENCE_LENGTH = 256
WIDE = ["data.global_batch_size=16", f"data.sequence_length={SEQUENCE_LENGTH}", "model.hidden_size=64"]


@contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    try:
        with separate_hosts(number) as network:
            yield network
    except Unavailable as reason:
        pytest.skip(str(reason))


def train_here(folder: pathlib.Path, *options: str) -> None:
    words = [sys.executable, "-m", "pipetrain.cli", "train", *RUN, "pipeline.num_stages=2", *options]
    variables = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}
    code, stderr = end(start(words, folder, variables))
    assert code == 0, stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the text is, and two runs on one host that nobody disturbed."""
    folder = tmp_path_factory.mktemp("hosts")
    make_text(folder / "text")
    train_here(folder, "run_dir=one-host")
    train_here(folder, "run_dir=one-host-wide", *WIDE)
    return folder


def test_several_machines_compute_what_one_does(folder: pathlib.Path) -> None:
    with hosts(3) as network:
        for code, stderr in [end(process) for process in start_run(network, folder, "run_dir=three")]:
            assert code == 0, stderr
    assert losses_of(folder / "three") == losses_of(folder / "one-host")
    assert len(losses_of(folder / "one-host")) == STEPS


def test_a_link_that_is_cut_in_a_step(folder: pathlib.Path) -> None:
    """Every process ends in time and says what it waited for; after the repair the run goes on as if nothing had been.

    The link is slow besides: that shows as waits for activations.
    """
    options = ["run_dir=cut", "snapshot.every_steps=1", "resume=auto", *WIDE]
    with hosts(2) as network:
        network.hosts[1].slow(SLOW_MEGABITS)
        processes = start_command(network, folder, f"timeout_seconds={TIMEOUT_SECONDS}", *options)
        wait_until(lambda: len(steps_in(folder / "cut" / "snapshots")) > 0, processes)
        network.hosts[1].cut()
        ended = [end(process) for process in processes]
        for rank, (code, stderr) in enumerate(ended):
            assert code != 0
            told = [line for line in stderr.splitlines() if line.startswith(f"pipetrain: rank {rank} ")]
            assert len(told) == 1, stderr
            assert f" from rank {1 - rank}, and nothing came for {TIMEOUT_SECONDS} s (timeout_seconds)" in told[0]
        assert len(metrics_of(folder / "cut")) < STEPS
        network.hosts[1].repair()
        resumed = [end(process) for process in start_command(network, folder, *options)]
        assert [code for code, _ in resumed] == [0, 0], resumed
        assert "pipetrain: going on from " in resumed[0][1] + resumed[1][1]
    assert losses_of(folder / "cut") == losses_of(folder / "one-host-wide")
    slow, fast = (
        sum(line["wait_activation_seconds"][1] for line in metrics_of(folder / name))
        for name in ("cut", "one-host-wide")
    )
    hop_seconds = 16 * SEQUENCE_LENGTH * 64 * 4 * 8 / (SLOW_MEGABITS * 1e6)
    assert slow > fast + 0.3 * STEPS * hop_seconds


def test_a_machine_without_a_free_port(folder: pathlib.Path) -> None:
    """All ports that a program gets without asking for one are taken."""
    take = (
        "import socket, sys, time; taken = [socket.socket() for _ in range(2)];"
        "[one.bind(('127.0.0.1', 50000 + at)) for at, one in enumerate(taken)]; print('taken', flush=True); sys.stdin.read()"
    )
    with hosts(1) as network:
        (host,) = network.hosts
        only = ["sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=50000 50001"]
        if subprocess.run(host.command(only), check=False).returncode != 0:
            pytest.skip("this kernel does not let a namespace have its own range of ports")
        with subprocess.Popen(
            host.command([sys.executable, "-c", take]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as taking:
            assert taking.stdout is not None
            assert taking.stdout.readline() == b"taken\n"
            words = [sys.executable, "-m", "pipetrain.cli", "train", *RUN, "run_dir=no-port"]
            code, stderr = end(start(host.command(words), folder, environment()))
            taking.communicate()
    assert code == 2, stderr
    assert stderr.splitlines()[-1].startswith("pipetrain: no free port on 127.0.0.1 (Address already in use): ")
    assert "all of net.ipv4.ip_local_port_range are taken" in stderr
