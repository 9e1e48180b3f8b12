"""Machines on a network with others: where ranks listen, and the firewall rule of docs/OPERATIONS.md, tried as it stands there."""

import pathlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from commands import children_of, listening
from machines import PORT, ROOT, RUN, STEPS, end, environment, losses_of, start, start_command, wait_until
from small_text import make_text

from benchmarks.links.hosts import Host, Hosts, separate_hosts
from benchmarks.unavailable import Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.root]

RULE = re.search(
    r"^( *)table inet pipetrain \{\n.*?^\1\}\n", (ROOT / "docs" / "OPERATIONS.md").read_text(), re.M | re.S
)


@pytest.fixture
def network() -> Iterator[Hosts]:
    """Two machines of a run, and one of somebody else."""
    try:
        with separate_hosts(3) as network:
            yield network
    except Unavailable as reason:
        pytest.skip(str(reason))


def addresses_of(pid: int) -> set[str]:
    """The IPv4 addresses at which a process listens."""
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address, _ in listening(pid) if len(address) == 8}


def can_connect(host: Host, address: str, port: int) -> bool:
    """Whether a program on `host` reaches the address."""
    words = [sys.executable, "-c", f"import socket; socket.create_connection(({address!r}, {port}), timeout=2)"]
    return subprocess.run(host.command(words), capture_output=True, check=False).returncode == 0


def two(network: Hosts) -> Hosts:
    return Hosts(network.hosts[:2], network.own_address)


def test_ranks_listen_where_the_machines_meet(network: Hosts, tmp_path: pathlib.Path) -> None:
    """Nobody names the interface, and the machines' own names lead to the loopback, so ranks met on it. And rank 0's store does, where
    ranks have no torchrun: here it waits for rank 1, which does not come."""
    make_text(tmp_path / "text")
    assert "GLOO_SOCKET_IFNAME" not in environment(interface=None)
    processes = start_command(two(network), tmp_path, "run_dir=run", interface=None)
    heard = set[str]()
    while all(process.poll() is None for process in processes):
        heard |= {
            address for process in processes for rank in children_of(process.pid) for address in addresses_of(rank)
        }
    assert [code for code, _ in map(end, processes)] == [0, 0]
    assert heard <= {host.address for host in network.hosts[:2]}

    first = network.hosts[0]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": first.address, "MASTER_PORT": str(PORT)}
    words = [sys.executable, "-m", "pipetrain.train", *RUN, "timeout_seconds=30", "pipeline.num_stages=2"]
    rank = start(first.command(words), tmp_path, environment(interface=None) | place)
    wait_until(lambda: bool(addresses_of(rank.pid)), [rank])
    assert addresses_of(rank.pid) == {first.address}
    assert len(listening(rank.pid)) == 1
    rank.kill()
    end(rank)


@pytest.mark.skipif(shutil.which("nft") is None, reason="the rule needs nft: apt-get install nftables")
def test_the_firewall_rule_keeps_others_out_and_the_run_in(network: Hosts, tmp_path: pathlib.Path) -> None:
    make_text(tmp_path / "text")
    assert RULE is not None
    first, second, stranger = network.hosts
    rule = RULE[0].replace("10.0.0.1", first.address).replace("10.0.0.2", second.address)

    def run(name: str) -> list[bool]:
        """Whether the stranger, and the other machine, reach torchrun's store in the middle of a run."""
        processes = start_command(two(network), tmp_path, f"run_dir={name}", "steps=300")
        wait_until(lambda: (tmp_path / name / "metrics.jsonl").is_file(), processes)
        reached = [can_connect(host, first.address, PORT) for host in (stranger, second)]
        assert [code for code, _ in map(end, processes)] == [0, 0]
        return reached

    assert run("open") == [True, True]
    for host in (first, second):
        subprocess.run(host.command(["nft", "-f", "-"]), input=rule, text=True, check=True)
    assert run("closed") == [False, True]
    assert losses_of(tmp_path / "closed") == losses_of(tmp_path / "open")
    assert len(losses_of(tmp_path / "open")) > STEPS
