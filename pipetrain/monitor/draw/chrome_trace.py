"""A timeline in the Chrome trace event format, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from typing import Any

from pipetrain.schedule.events import Timeline
from pipetrain.schedule.op import Lane

_MICROSECONDS = 1e6


def chrome_trace(timeline: Timeline) -> str:
    """JSON text: a process per rank, a thread per lane, a complete event ("ph": "X") per op."""
    lanes = list(Lane)
    events: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, lane in enumerate(lanes):
            name = {"name": lane.value}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": name})
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": str(event.op),
                "cat": event.op.kind.value,
                "pid": event.rank,
                "tid": lanes.index(event.lane),
                "ts": event.start * _MICROSECONDS,
                "dur": (event.end - event.start) * _MICROSECONDS,
                "args": {"stage": event.op.stage, "microbatch": event.op.microbatch},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
