"""`plan.cluster`: machines that are not here, as one word.

8xh100-80gb+nvlink               one machine: 8 devices with 80 GB each, connected by NVLink
16x8xh100-80gb+nvlink+ib400      16 of them; between machines 400 Gbit/s per device
2xcpu-4gb                        2 processes of one core and 4 GB each
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from pipetrain.plan.devices import CPU, DEVICES, Device

_FORM = re.compile(
    r"(?:(?P<nodes>[1-9]\d{0,5})x)?(?P<count>[1-9]\d{0,3})x(?P<device>[a-z]+\d*[a-z]*)(?:-(?P<memory>[1-9]\d{0,4})gb)?"
    r"(?:\+(?P<link>[a-z]+\d?))?(?:\+(?:ib|roce|eth)(?P<gigabits>[1-9]\d{0,4}))?"
)
_EXAMPLES = "8xh100-80gb+nvlink, or 16x8xh100-80gb+nvlink+ib400 for 16 machines"


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` machines of `devices_per_node` devices. `link` is the peak in bytes/s of one device in one direction within its machine,
    `network` between machines. `text` is what the user typed.
    """

    text: str
    num_nodes: int
    devices_per_node: int
    device: Device
    link: float
    network: float

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def bandwidth(self, *, within_node: bool) -> float:
        """Bytes/s that a message of one device gets in one direction."""
        return (self.link if within_node else self.network) * self.device.efficiency.link


def parse_cluster(text: str) -> Cluster:
    """The cluster that `plan.cluster` names.

    Raises:
        ValueError: it does not parse, or names a device, a memory size or a link that is not known; with the nearest device.
    """
    found = _FORM.fullmatch(text.lower())
    if found is None:
        words = re.split(r"[^a-z0-9]+|(?<=\d)x", text.lower())
        raise ValueError(
            f"plan.cluster={text}: cannot be read; write DEVICESxDEVICE-MEMORYgb+LINK, as in {_EXAMPLES}{_nearest(words)}"
        )
    device = _device(text, found["device"], found["memory"])
    speeds = dict(device.links)
    link = found["link"] or next(iter(speeds))
    if link not in speeds:
        raise ValueError(f"plan.cluster={text}: the links of {device.name} are {', '.join(speeds)}; none is {link}")
    nodes = int(found["nodes"] or 1)
    if nodes > 1 and found["gigabits"] is None:
        raise ValueError(
            f"plan.cluster={text}: the network between its {nodes} machines is missing; append the Gbit/s per device, as in {text}+ib400"
        )
    return Cluster(text, nodes, int(found["count"]), device, speeds[link], int(found["gigabits"] or 0) * 1e9 / 8)


def _device(text: str, name: str, gigabytes: str | None) -> Device:
    """The row of a device with so much memory; a CPU has as much as is asked for."""
    versions = [known for known in DEVICES if known.split("-")[0] == name]
    if not versions and name != CPU.name:
        names = ", ".join(dict.fromkeys(known.split("-")[0] for known in DEVICES))
        raise ValueError(
            f"plan.cluster={text}: {name} is not in the table of devices: {names}, {CPU.name}{_nearest([name])}"
        )
    allowed = " or ".join(versions) or f"as many as a process may use, as in {name}-16gb"
    if gigabytes is None:
        raise ValueError(f"plan.cluster={text}: the memory of {name} is missing; write {allowed}")
    full = f"{name}-{gigabytes}gb"
    if name == CPU.name:
        return replace(CPU, name=full, memory_bytes=int(gigabytes) * 2**30)
    if full not in DEVICES:
        raise ValueError(f"plan.cluster={text}: there is no {full}; write {allowed}")
    return DEVICES[full]


def _nearest(words: list[str]) -> str:
    """The device whose name is most like one of the words; nothing where none is."""
    short = {known.split("-")[0]: known for known in [f"{CPU.name}-16gb", *reversed(DEVICES)]}  # the first version
    found = [
        (difflib.SequenceMatcher(None, word, name).ratio(), known) for word in words for name, known in short.items()
    ]
    likeness, known = max(found, key=lambda one: one[0])
    return f"; the nearest device is {known}" if likeness > 0.5 else ""
