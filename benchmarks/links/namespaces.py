"""Links of a chosen speed on one machine: a network namespace per rank, all on one bridge, each port shaped by `tc tbf`.

namespace 0      namespace 1      ...           a token bucket on both ends of each cable: what a rank sends
   eth0             eth0                        and what it receives passes at `megabits` per second
    |                |
----+----------------+----- bridge, 10.77.0.254: the store of the ranks, outside
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..ranks import Place
from ..trial import Network
from ..unavailable import Unavailable

# What leaves at once must hold one offloaded packet: 64 kB and its headers. From a smaller bucket the kernel sends 45 frames instead,
# and on few cores their cost, which no network card would charge the processor, delays everything.
BUCKET = "burst 256kb latency 50ms"
_BRIDGE = "ptbench"
_SUBNET = "10.77.0"


def check_available() -> None:
    """Raises Unavailable: not root, or no iproute2."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root: run it again with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is missing: apt-get install iproute2")


@contextmanager
def shaped_network(num_ranks: int, *, megabits: int) -> Iterator[Network]:
    """A network of `num_ranks` namespaces while it is entered; nothing of it is left afterwards.

    Raises:
        Unavailable: the kernel refuses namespaces, bridges or the token bucket.
    """
    names = [f"{_BRIDGE}{rank}" for rank in range(num_ranks)]
    _remove(names)
    try:
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip addr add {_SUBNET}.254/24 dev {_BRIDGE}")
        _run(f"ip link set {_BRIDGE} up")
        for rank, name in enumerate(names):
            _attach(rank, name, megabits)
        yield Network(tuple(Place(name, "eth0") for name in names), f"{_SUBNET}.254")
    finally:
        _remove(names)


def _attach(rank: int, name: str, megabits: int) -> None:
    bucket = f"root tbf rate {megabits}mbit {BUCKET}"
    _run(f"ip netns add {name}")
    _run(f"ip link add {name} type veth peer name eth0 netns {name}")
    _run(f"ip link set {name} master {_BRIDGE} up")
    _run(f"ip -n {name} addr add {_SUBNET}.{rank + 1}/24 dev eth0")
    _run(f"ip -n {name} link set lo up")
    _run(f"ip -n {name} link set eth0 up")
    _run(f"tc qdisc add dev {name} {bucket}")
    _run(f"ip netns exec {name} tc qdisc add dev eth0 {bucket}")


def _remove(names: list[str]) -> None:
    for name in names:
        with suppress(Unavailable):
            _run(f"ip netns del {name}")
        with suppress(Unavailable):
            _run(f"ip link del {name}")
    with suppress(Unavailable):
        _run(f"ip link del {_BRIDGE}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"`{command}` failed: {done.stderr.strip() or done.returncode}")
