"""The keys of `plan`: measurements, and what a plan has to fit into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pipetrain.config.limits import at_least


@dataclass(frozen=True)
class PlanConfig:
    """Measurements from which a run is planned."""

    # A finished run (its folder, `latest`, or its profile.json), or a file of `pipetrain profile`. A schedule or balance of `auto` is
    # searched for these times, `show` draws with them, and `recompute.segments` cuts stages into parts by the bytes of layers.
    profile: str | None = None
    # Most bytes that each device may hold, for `pipetrain plan` and plan=auto; on a CPU bytes of tensors. None: no limit.
    memory_budget_bytes: Annotated[int | None, at_least(1, most=2**63 - 1)] = None
    # Machines that are not here, for `pipetrain plan` alone: 8xh100-80gb+nvlink, or 16x8xh100-80gb+nvlink+ib400 with Gbit/s per device
    # between machines. Times and bytes are then estimates; no weights are read, and a device's memory is the default budget.
    cluster: str | None = None
    # Tensor ranks in each stage, for plan.cluster alone: nothing trains with them.
    tensor: Annotated[int, at_least(1, most=1024)] = 1
    auto: bool = False  # whether the run takes the first plan of `pipetrain plan`; plan=auto sets it
