"""Several hosts on one machine: network namespaces with addresses of their own on one bridge. Links can be slowed and cut.

host 0           host 1           ...        each in a namespace, with the device eth0
   eth0             eth0
    |                |
----+----------------+----- bridge: this process is there as well, at `.254`

Names and subnet contain this process's number, so that several may have hosts at the same time.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..unavailable import Unavailable

DEVICE = "eth0"
# What leaves at once must hold one offloaded packet: 64 kB and its headers. From a smaller bucket the kernel sends 45 frames instead,
# and on few cores their cost, which no network card would charge the processor, delays everything.
BUCKET = "burst 256kb latency 50ms"


@dataclass(frozen=True)
class Host:
    """One host. `name` is its namespace, and its cable's end at the bridge."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` there, as the same process."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Pull the cable."""
        _run(f"ip link set {self.name} down")

    def repair(self) -> None:
        _run(f"ip link set {self.name} up")

    def slow(self, megabits: float) -> None:
        """A token bucket on both ends of the cable: what the host sends and what it receives passes at `megabits` per second."""
        bucket = f"root tbf rate {megabits * 1000:.0f}kbit {BUCKET}"
        _run(f"tc qdisc add dev {self.name} {bucket}")
        _run(f"ip netns exec {self.name} tc qdisc add dev {DEVICE} {bucket}")


@dataclass(frozen=True)
class Hosts:
    """All of them, and the address of this process on their network."""

    hosts: tuple[Host, ...]
    own_address: str

    def unused_address(self) -> str:
        """An address of the network that no host has."""
        return self.own_address.rsplit(".", 1)[0] + ".99"


def check_available() -> None:
    """Raises Unavailable: not root, or no iproute2."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root: run it again with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is missing: apt-get install iproute2")


@contextmanager
def separate_hosts(num_hosts: int) -> Iterator[Hosts]:
    """The hosts while it is entered; nothing of them is left afterwards.

    Raises:
        Unavailable: not root, no iproute2, or the kernel refuses namespaces or bridges.
    """
    check_available()
    number = os.getpid()
    bridge, subnet = f"pt{number}b", f"10.{64 + number // 250 % 128}.{number % 250}"
    hosts = tuple(Host(f"pt{number}h{at}", f"{subnet}.{at + 1}") for at in range(num_hosts))
    _remove(bridge, hosts)
    atexit.register(_remove, bridge, hosts)
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip addr add {subnet}.254/24 dev {bridge}")
        _run(f"ip link set {bridge} up")
        for host in hosts:
            _attach(host, bridge)
        yield Hosts(hosts, f"{subnet}.254")
    finally:
        _remove(bridge, hosts)
        atexit.unregister(_remove)


def _attach(host: Host, bridge: str) -> None:
    name = host.name
    _run(f"ip netns add {name}")
    _run(f"ip link add {name} type veth peer name {DEVICE} netns {name}")
    _run(f"ip link set {name} master {bridge} up")
    _run(f"ip -n {name} addr add {host.address}/24 dev {DEVICE}")
    _run(f"ip -n {name} link set lo up")
    _run(f"ip -n {name} link set {DEVICE} up")


def _remove(bridge: str, hosts: Sequence[Host]) -> None:
    for command in [f"ip {kind} del {host.name}" for host in hosts for kind in ("netns", "link")]:
        with suppress(Unavailable):
            _run(command)
    with suppress(Unavailable):
        _run(f"ip link del {bridge}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"`{command}` failed: {done.stderr.strip() or done.returncode}")
