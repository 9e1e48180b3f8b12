"""A candidate of `pipetrain plan`: one way to train a model on the ranks there are, with its time and its bytes per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, whatever the timing; a line per use. On a CPU the last three are 0.

    `masters` are float32 copies of weights of fewer bits. `inputs` are the stage inputs of microbatches between F and B, `sets` their
    activations, `weight_queue` those that W still needs after I. `message_buffers` are tensors received before their use or not sent yet,
    `backward_transients` what B makes for a moment (a peer's R too). `allocator_slack` is what CUDA's allocator holds
    without use, `allocator_slack_expandable` the same with `expandable_segments`; `cuda_runtime` are the context and the libraries.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    sets: int = 0
    weight_queue: int = 0
    message_buffers: int = 0
    backward_transients: int = 0
    allocator_slack: int = 0
    allocator_slack_expandable: int = 0
    cuda_runtime: int = 0

    @property
    def total(self) -> int:
        """Bytes that the device must have, without `expandable_segments`."""
        return int(sum(getattr(self, one.name) for one in fields(self))) - self.allocator_slack_expandable


@dataclass(frozen=True)
class Candidate:
    """One way to train. `balance` and `stash` (microbatches in flight) have an entry per stage; `memory` and the lists of numbers one per
    rank of a replica.

    `step_seconds` and `peak_activation_bytes` are those of the simulated step, `host_bytes` what offloaded sets take of the host's memory. `keys` are the overrides to type for it, without those
    that the user typed. Seconds of R are of all microbatches of a step.
    """

    num_stages: int
    balance: tuple[int, ...]
    schedule: str
    num_microbatches: int
    sets: float | tuple[float, ...] | None
    segments: int | str
    selective: tuple[str, ...]
    mode: str
    stash: tuple[int, ...] | None
    stages_per_rank: int
    split_backward: bool
    num_replicas: int
    offload: str
    step_seconds: float
    memory: tuple[RankMemory, ...]
    peak_activation_bytes: tuple[int, ...] = ()
    host_bytes: tuple[int, ...] = ()
    bubble_fraction: float | None = None
    recompute_hidden_seconds: tuple[float, ...] = ()
    recompute_exposed_seconds: tuple[float, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return len(self.memory)

    @property
    def peak_bytes(self) -> int:
        """The fullest rank's."""
        return max(rank.total for rank in self.memory)

    @property
    def overrides(self) -> list[str]:
        """`keys` as they are typed."""
        return [f"{key}={value}" for key, value in self.keys.items()]

    def as_json(self) -> dict[str, Any]:
        """A record of `plans` in `pipetrain plan --json`."""
        return {**asdict(self), "peak_bytes": self.peak_bytes, "keys": self.overrides}
