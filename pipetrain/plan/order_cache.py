"""What searches for orders have found, a file per problem in the user's cache folder: $XDG_CACHE_HOME or ~/.cache, pipetrain/orders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import csv_of_order, order_of_csv
from pipetrain.schedule.families import ComputeLanes
from pipetrain.schedule.schedule_spec import ScheduleSpec

_FORMAT = 1  # of the files, and of what the model of a problem is: another number finds none of the old


@dataclass(frozen=True)
class CachedOrder:
    """An order, seconds below which no order is, and how long it was sought."""

    order: ComputeLanes
    least_seconds: float
    searched_seconds: float


def cache_folder() -> Path:
    """Where the orders of this user are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetrain" / "orders"


def read_order(folder: Path, spec: ScheduleSpec, costs: Costs) -> CachedOrder | None:
    """What was found for this problem; None where nothing was, or where the file cannot be read."""
    path = _path(folder, spec, costs)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        order = order_of_csv(found["order"], str(path), spec.shape)
        return CachedOrder(order, float(found["least_seconds"]), float(found["searched_seconds"]))
    return None


def write_order(folder: Path, spec: ScheduleSpec, costs: Costs, found: CachedOrder) -> None:
    """Keeps what was found, where the folder may be written."""
    path = _path(folder, spec, costs)
    text = json.dumps({**asdict(found), "order": csv_of_order(found.order)}, indent=2)
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(text + "\n")
        draft.replace(path)


def _path(folder: Path, spec: ScheduleSpec, costs: Costs) -> Path:
    policy = spec.policy
    problem = (
        _FORMAT,
        asdict(costs),
        spec.stage_ranks,
        spec.num_microbatches,
        (policy.mode, policy.sets, policy.stash, policy.segments, policy.parts, policy.shares),
        spec.first_backward,
        spec.transport_ahead,
        spec.split_backward,
    )
    return folder / f"{hashlib.sha256(json.dumps(problem).encode()).hexdigest()[:32]}.json"
