"""What ops cost, from what they took in the steps before: the costs that a step is predicted with.

A run leaves them in its folder as profile.json, from which the next is planned.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.kinds import Direction
from pipetrain.timeline.residuals import op_seconds

MEASURED_STEPS = range(2, 5)  # step 1 warms up: shapes are announced, memory is taken
FIRST_COMPARED_STEP = 5  # costs are never fitted to the steps that they are compared with


def measure_costs(num_stages: int, timelines: Iterable[Timeline]) -> Costs:
    """The median time of each kind of op per stage, and of a hop per edge and direction, over all microbatches and steps.

    A stage without R is given its F's time: its schedule has no R to charge it for. A backward that was only ever split
    is charged as its two halves, and one that never was, as half and half. Stages that share no parameters have no time to add them up.
    """
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for op, seconds in op_seconds(timeline).items():
            row = op.kind.row
            if row.cost is not None:
                place = op.stage if row.direction is not Direction.FORWARD or op.kind.computes else op.stage - 1
                spent[row.cost, place].append(seconds)  # a hop is measured where it is received: its edge

    def median(cost: str, places: int, instead: Sequence[float] = ()) -> tuple[float, ...]:
        otherwise = instead or (0.0,) * places
        return tuple(statistics.median(spent.get((cost, place), [otherwise[place]])) for place in range(places))

    def halves(cost: str) -> tuple[float, ...]:
        return median(cost, num_stages, tuple(one / 2 for one in whole)) if any(key == cost for key, _ in spent) else ()

    forward = median("forward", num_stages)
    split = [sum(pair) for pair in zip(median("input_gradient", num_stages), median("weight_gradient", num_stages))]
    whole = median("backward", num_stages, split)
    return Costs(
        forward=forward,
        backward=whole,
        recompute=median("recompute", num_stages, forward),
        hop_forward=median("hop_forward", num_stages - 1),
        hop_backward=median("hop_backward", num_stages - 1),
        input_gradient=halves("input_gradient"),
        weight_gradient=halves("weight_gradient"),
        reduce=median("reduce", num_stages) if any(key == "reduce" for key, _ in spent) else (),
    )


PROFILE = "profile.json"
_FORMAT_VERSION = 1
_LATEST = Path("runs") / "latest"


@dataclass(frozen=True)
class Profile:
    """What the ops of a run took, whose batch was cut into `num_microbatches`."""

    costs: Costs
    num_microbatches: int

    def as_json(self) -> str:
        """The text of profile.json."""
        return json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"


def read_profile(given: str) -> Profile:
    """The profile that `plan.profile` names: a run folder, `latest`, or the file itself.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = _LATEST if given == "latest" else Path(given)
    path = folder if folder.is_file() else folder / PROFILE
    if not path.is_file():
        raise ValueError(
            f"plan.profile={given}: {path} is not there; a run writes it when it ends and its engine told of its ops: name such a run, "
            "or leave plan.profile out"
        )
    try:
        found = json.loads(path.read_text())
        if found["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"format_version {found['format_version']}, known is {_FORMAT_VERSION}")
        names = {field.name for field in fields(Costs)}
        costs = Costs(**{name: tuple(map(float, times)) for name, times in found["costs"].items() if name in names})
        return Profile(costs, int(found["num_microbatches"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"plan.profile={given}: {path} cannot be read ({error}); name another run") from None


def check_profile(given: str, profile: Profile, num_stages: int, num_microbatches: int) -> None:
    """Raises:
    ValueError: what the run's ops took says nothing of other stages, or of other microbatches.
    """
    for key, there, wanted in (
        ("pipeline.num_stages", profile.costs.num_stages, num_stages),
        ("pipeline.num_microbatches", profile.num_microbatches, num_microbatches),
    ):
        if there != wanted:
            raise ValueError(
                f"plan.profile={given}: a run with {key}={there}, and this has {wanted}; set {key}={there}, or name another run"
            )
