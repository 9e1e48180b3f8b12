"""What timeline.js draws, as plain values: a panel per step or schedule, figures over steps, and the page's own words.

Times are seconds from the start of the panel's step, rounded to 0.1 microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipetrain.monitor.breakdown import bytes_over_time, sets_over_time
from pipetrain.monitor.draw.palette import LOOKS
from pipetrain.monitor.draw.table import number
from pipetrain.monitor.shown import Shown
from pipetrain.schedule.events import ran_beside
from pipetrain.schedule.op import Kind, Lane

# Of each cause of the bubble: the head of its column, the field of the breakdown, what the rank does meanwhile, what to try, its colour.
CAUSES = {
    "fill": ("fill_seconds", "has not started its first op", "more microbatches, or more stages per rank", "#dcb64c"),
    "drain": ("drain_seconds", "has ended its last op", "more microbatches, or more stages per rank", "#8d7bc3"),
    "reduce": (
        "reduce_exposed_seconds",
        "adds up gradients after the last op of any rank",
        "recompute.segments, for smaller buckets",
        "#6b7280",
    ),
    "wait F": (
        "wait_activation_seconds",
        "waits for an activation of the stage before",
        "transport.prefetch, pipeline.warmup, or faster links",
        "#e07a5f",
    ),
    "wait B": (
        "wait_gradient_seconds",
        "waits for a gradient of the stage after",
        "recompute.mode=overlap if it is another, or pipeline.split_backward=true",
        "#c2477f",
    ),
    "copy": (
        "wait_copy_seconds",
        "waits for a set to come back from host memory, or for the copy that frees a place",
        "more recompute.sets, or recompute.offload=auto",
        "#9a6fb0",
    ),
    "imbalance": (
        "imbalance_seconds",
        "has less work than the busiest rank, which no order avoids",
        "another pipeline.balance",
        "#5f9ea0",
    ),
    "host": (
        "host_seconds",
        "has all that its next op needs, and is on the way to it",
        "larger microbatches, or fewer of them",
        "#b5838d",
    ),
    "hand-over": (
        "handover_seconds",
        "has all that its next op needs, and the thread that computes has not been woken yet",
        "an idle machine, larger microbatches, or fewer of them",
        "#7f9c96",
    ),
    "machine": (
        "machine_seconds",
        "has all that its next op needs, and is not run, as its machine runs others or another thread holds Python's lock",
        "an idle machine, or fewer ranks on it",
        "#3d405b",
    ),
    "unexplained": (
        "other_seconds",
        "has all that its next op needs, and runs nothing",
        "layers that do not wait for the device",
        "#a40e26",
    ),
}
_LANES = list(Lane)
Panel = dict[str, Any]


def panel_of(one: Shown, name: str, *, peak: Sequence[float | None] = (), limit: Sequence[float | None] = ()) -> Panel:
    """One schedule or step. `peak`: bytes of activations measured per rank; `limit`: bytes that its device has."""
    schedule, costs, start = one.schedule, one.costs, one.start
    ranks = range(schedule.num_ranks)
    of_rank = [one.timeline.of_rank(rank) for rank in ranks]
    in_bytes = bool(costs.set_bytes and costs.input_bytes)
    held = [
        bytes_over_time(schedule, events, costs) if in_bytes else sets_over_time(schedule, events) for events in of_rank
    ]
    fields = ["busy_seconds", *(field for field, *_ in CAUSES.values())]
    return {
        "name": name,
        "facts": "  ·  ".join(facts_of(one)),
        "seconds": _rounded(one.step_seconds),
        "ranks": [one.rank_name(rank) for rank in ranks],
        "rank_stages": [
            [stage for stage, holder in enumerate(schedule.stage_ranks) if holder == rank] for rank in ranks
        ],
        "beside": any(ran_beside(event for event in events if event.op.kind.computes) for events in of_rank),
        "ops": [
            [
                rank,
                _LANES.index(event.lane),
                str(event.op),
                _rounded(event.start - start),
                _rounded(event.end - event.start),
            ]
            for rank in ranks
            for event in of_rank[rank]
        ],
        "exposed": [
            [rank, _rounded(begin - start), _rounded(end - start)] for rank in ranks for begin, end in one.exposed(rank)
        ],
        "parts": [[_rounded(getattr(rank, field)) for field in fields] for rank in one.breakdown],
        # Changes at one moment count as one: a set that takes another's place.
        "held": [[[_rounded(time - start), amount] for time, amount in dict(curve).items()] for curve in held],
        "bytes": in_bytes,
        "input": list(costs.input_bytes) if in_bytes else [],
        "set": list(costs.set_bytes) if in_bytes else [],
        "peak": list(peak),
        "limit": list(limit) if any(limit) else [],
    }


def facts_of(one: Shown) -> list[str]:
    """Step, bound, bubble and where recomputation went, in a few words each."""
    facts = [f"step {number(one.step_seconds)} s", f"bound {number(one.bound_seconds)} s"]
    facts.append(f"bubble {one.bubble_fraction:.0%}")
    if (recompute := one.hidden_seconds + one.exposed_seconds) > 0:
        facts.append(f"recompute hidden {number(one.hidden_seconds)} of {number(recompute)} s")
    if reducing := max(rank.reduce_exposed_seconds for rank in one.breakdown):
        facts.append(f"reduce exposed {number(reducing)} s")
    facts.append(f"sets alive per rank {' '.join(f'{rank.peak_sets:.3g}' for rank in one.breakdown)}")
    return facts


def charts_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures over steps, from lines of metrics.jsonl; what is no finite number is None."""
    known = [line for line in lines if isinstance(line.get("step"), int)]
    shapes = (("loss", "loss", False), ("tokens per second", "tokens_per_second", False))
    return {
        "steps": [line["step"] for line in known],
        "lines": [
            {"name": name, "values": [_finite(line.get(key)) for line in known], "percent": percent}
            for name, key, percent in (*shapes, ("bubble", "bubble_fraction", True))
        ],
    }


def drawing_data(
    fixed: Sequence[Panel], steps: Sequence[Mapping[str, Any]] = (), *, stages: Sequence[str] = (), charts: Any = None
) -> str:
    """The JSON for a page, safe inside of a `script` element. `fixed` panels are always drawn; of `steps` the user picks one."""
    values = {
        "kinds": {
            kind.value: {"word": looks.word, "fill": looks.fill, "ink": looks.ink}
            for kind in Kind
            if (looks := LOOKS.get(kind.row.looks or "")) is not None
        },
        "causes": [
            {"name": name, "words": words, "tries": tries, "fill": fill}
            for name, (_, words, tries, fill) in CAUSES.items()
        ],
        "fixed": list(fixed),
        "steps": list(steps),
        "stages": list(stages),
        "charts": charts or charts_of(()),
    }
    # ASCII alone, and no character that could end the element; JSON has no other place for them than strings.
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(seconds: float) -> float:
    return round(seconds, 7)


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
