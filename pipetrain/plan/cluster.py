"""`plan.cluster`: machines that are not here, as one word.

8xh100-80gb+nvlink               one machine: 8 devices with 80 GB each, connected by NVLink
16x8xh100-80gb+nvlink+ib400      16 of them; between machines 400 Gbit/s per device
2xcpu-4gb                        2 processes of one core and 4 GB each

Devices have peak speeds as their makers print them, and how much of a peak a step reaches.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

_FORM = re.compile(
    r"(?:(?P<nodes>[1-9]\d{0,5})x)?(?P<count>[1-9]\d{0,3})x(?P<device>[a-z]+\d*[a-z]*)(?:-(?P<memory>[1-9]\d{0,4})gb)?"
    r"(?:\+(?P<link>[a-z]+\d?))?(?:\+(?:ib|roce|eth)(?P<gigabits>[1-9]\d{0,4}))?"
)
_EXAMPLES = "8xh100-80gb+nvlink, or 16x8xh100-80gb+nvlink+ib400 for 16 machines"
_TERA, _GIGA, _MIB = 1e12, 1e9, 2**20


@dataclass(frozen=True)
class Efficiency:
    """The share of its peak that each kind of op reaches: fitted, published or assumed (see `GPU`)."""

    matmul: float
    attention: float
    memory: float
    link: float


# matmul: fitted so that `estimate` gives 6,667 tokens/s per GPU, what torchtitan measured for Llama 3.1 8B on 8 H100
# (benchmarks/llama3_h100_202412_torchtitan.md, table 1: FSDP, torch.compile, selective recomputation). tests/plan/test_estimate.py repeats the fit.
# attention: FlashAttention-2 reaches 35 % of an H100's peak (Shah et al., "FlashAttention-3", arXiv 2407.08608, abstract).
# memory and link: assumed, 80 % of the peak. Other GPUs are taken to be like an H100.
GPU = Efficiency(matmul=0.46, attention=0.35, memory=0.8, link=0.8)


@dataclass(frozen=True)
class Device:
    """One device. Speeds are peaks: FLOP/s without sparsity per dtype of the operands (0: it has none), bytes/s of its memory, and
    bytes/s in one direction of each kind of link that it has within a machine, the usual one first.
    """

    name: str
    fp32: float
    bf16: float
    memory_bytes: int
    memory_bandwidth: float
    links: tuple[tuple[str, float], ...]
    efficiency: Efficiency = GPU
    latency_seconds: float = 20e-6  # of a message between stages; assumed
    # How many times as long messages take beside copies to host memory: 8 to 11 % longer, over NVLink too (NVIDIA/nccl, issue 2218).
    copy_contention: float = 1.1

    @property
    def host_bandwidth(self) -> float | None:
        """Bytes/s to and from the host's memory, both at once: those of PCIe. None: the memory of a CPU is the host's."""
        speeds = [speed for link, speed in self.links if link.startswith("pcie")]
        return speeds[0] * self.efficiency.link if speeds else None


def _gpu(
    name: str, teraflops: tuple[float, float], mebibytes: int, terabytes: float, **links: float
) -> tuple[str, Device]:
    fp32, bf16 = (one * _TERA for one in teraflops)
    speeds = tuple((link, gigabytes * _GIGA) for link, gigabytes in links.items())
    return name, Device(name, fp32, bf16, mebibytes * _MIB, terabytes * _TERA, speeds)


# TFLOP/s of fp32 (no TF32) and bf16, dense; MiB as nvidia-smi or rocm-smi print them; TB/s of memory; GB/s in one direction.
DEVICES = dict(
    (
        # NVIDIA H100 Tensor Core GPU datasheet, SXM5: half of its figures "with sparsity"; NVLink 900 GB/s in both directions.
        _gpu("h100-80gb", (66.9, 989.4), 81_559, 3.35, nvlink=450, pcie5=64),
        # torchtitan's benchmarks (above): HBM2e with 2.4 TB/s, 500 W. Their peak is not published; that of the SXM5 is taken.
        _gpu("h100-96gb", (66.9, 989.4), 97_871, 2.4, nvlink=450, pcie5=64),
        # NVIDIA H200 Tensor Core GPU datasheet, SXM: the H100's compute with 141 GB of HBM3e.
        _gpu("h200-141gb", (66.9, 989.4), 143_771, 4.8, nvlink=450, pcie5=64),
        # NVIDIA HGX B200, per GPU at 1,000 W: dense 2.25 PFLOP/s; NVLink 5 1.8 TB/s in both directions.
        _gpu("b200-180gb", (75.0, 2250.0), 183_359, 8.0, nvlink=900, pcie5=64),
        # NVIDIA A100 Tensor Core GPU datasheet, SXM4: NVLink 600 GB/s in both directions.
        _gpu("a100-40gb", (19.5, 312.0), 40_960, 1.555, nvlink=300, pcie4=32),
        _gpu("a100-80gb", (19.5, 312.0), 81_920, 2.039, nvlink=300, pcie4=32),
        # NVIDIA L40S datasheet: no NVLink; PCIe Gen4 x16 has 64 GB/s in both directions.
        _gpu("l40s-48gb", (91.6, 362.05), 46_068, 0.864, pcie4=32),
        # AMD Instinct MI300X data sheet: 7 links of Infinity Fabric, 64 GB/s each in one direction.
        _gpu("mi300x-192gb", (163.4, 1307.4), 196_592, 5.3, xgmi=448, pcie5=64),
    )
)
# One core of a Xeon with AVX-512, measured with torch 2.13.0 by the thread's CPU time, least of 6, 25 November 2026: a product of two 768 x 768
# matrices 120 GFLOP/s, torch.add of 32 MiB 9.1 GB/s, causal attention of 8 heads x 512 tokens x 64 numbers 52 GFLOP/s. Kernels alone: layers
# take longer. The link between two processes is assumed.
CPU = Device("cpu", 120e9, 0.0, 0, 9.1e9, (("shm", 1.6e9),), Efficiency(1.0, 0.43, 1.0, 1.0))


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
