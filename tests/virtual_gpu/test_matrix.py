"""Schedules, models and calls on virtual GPUs: no race, no hang whatever host waits for its device, and the plain loop's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pairwise import quick_rows

from virtual_gpu import cases
from virtual_gpu.cases import Case, look

MODES = ("never", "inline", "early", "overlap")


def rows(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of a value of each axis in which any two values meet."""
    chosen = sorted(quick_rows([len(axis) for axis in axes]))
    return [tuple(axis[index] for axis, index in zip(axes, row)) for row in chosen]


QUICK = [
    Case("gpipe", sets=2),
    Case("1f1b", ranks=3),
    Case("interleaved", stages_per_rank=3),
    Case("gpipe", stages_per_rank=2, placement="v"),
    Case("zb-h1", ranks=3, microbatches=6),
    Case("1f1b", ranks=3, layers=cases.bridges(cases.gaps)),
    Case("1f1b", ranks=3, layers=cases.bridges(cases.conjugate)),
    Case("1f1b", ranks=3, layers=cases.missing_gradients),
    Case("interleaved", stages_per_rank=2, layers=cases.batch_norm),
    Case("1f1b", layers=cases.dropout, slow=0),
    Case("1f1b", autocast=cases.bfloat16, layers=cases.frozen, ranks=3),
    Case("gpipe", also=cases.clips, saves=True),
    Case("interleaved", sets=2, stages_per_rank=2, selective="matmul"),
    Case("1f1b", also=cases.evaluates),
    Case("1f1b", ranks=3, layers=cases.dropout, also=cases.changes),
    Case("interleaved", stages_per_rank=2, communicators="pair"),
    Case("interleaved", sets=2, stages_per_rank=2, microbatches=6, keep="none"),
    Case("1f1b", ranks=3, sets=1, segments=2),
    Case("1f1b", ranks=3, layers=cases.tied),
    Case("interleaved", stages_per_rank=2, layers=cases.tied, also=cases.clips, slow=1),
    Case("1f1b", replicas=2, layers=cases.dropout),
    Case("interleaved", stages_per_rank=2, replicas=2, segments=2, also=cases.accumulates),
    Case("gpipe", sets=2, microbatches=6, offload="auto"),
    Case("1f1b", sets=2, ranks=3, microbatches=8, layers=cases.dropout, offload="always", slow=0),
    Case("interleaved", sets=2, stages_per_rank=2, microbatches=6, offload="auto"),
    Case("1f1b", sets=1, ranks=3, microbatches=6, segments=2, offload="always", slow=1),
]
BRIDGES = tuple(
    map(
        cases.bridges,
        (cases.gaps, cases.chunks, cases.last_of_sequence, cases.expanded, cases.transposed, cases.conjugate),
    )
)
STATEFUL = (cases.dropout, cases.batch_norm, cases.in_place)
TREES, FROZEN = cases.bridges(cases.trees), (cases.frozen_below, cases.frozen)
MODELS = (
    *BRIDGES,
    cases.bridges(cases.pairs),
    TREES,
    cases.missing_gradients,
    *STATEFUL,
    *FROZEN,
    cases.handed_through,
)
ORDERS = (
    *(Case("gpipe", stages_per_rank=per_rank) for per_rank in (1, 2, 3)),
    *(Case("gpipe", stages_per_rank=per_rank, placement="v") for per_rank in (2, 3)),
    *(Case("interleaved", stages_per_rank=per_rank) for per_rank in (2, 3)),
    Case("1f1b", ranks=4, microbatches=6),
    Case("zb-h1", ranks=3, microbatches=6),
    Case("zbv", stages_per_rank=2, placement="v", microbatches=6),
)
THREE_RANKS = Case("1f1b", ranks=3)
SIX_MICROBATCHES = Case("gpipe", ranks=3, microbatches=6)
ZBV = Case("zbv", stages_per_rank=2, placement="v")
AUTO = Case("auto", ranks=3, microbatches=6)
TIED = replace(THREE_RANKS, layers=cases.tied)
TWO_REPLICAS = Case("1f1b", replicas=2)
NO_KEEP = Case("gpipe", microbatches=6, keep="none")
SELECTIVE = replace(THREE_RANKS, selective="matmul")
INTERLEAVED = Case("interleaved", stages_per_rank=2)
OFFLOADED = replace(INTERLEAVED, sets=2, microbatches=6, offload="always")
# Of a step with offload: a schedule, a mode, ranks, and which of them is slow.
STEPS = (("gpipe", "overlap", 3, None), ("1f1b", "early", 2, 1), ("zb-h1", "inline", 3, 0), ("auto", "overlap", 3, 2))
OFFLOADED_LAYERS = (*STATEFUL, cases.frozen_below, cases.bridges(cases.chunks), cases.handed_through)
SLOW = [
    *(replace(order, mode=mode, sets=sets) for order, mode, sets in rows(ORDERS, MODES, (1, 2, 3))),
    *(replace(INTERLEAVED, sets=2, layers=layers) for layers in MODELS),
    *(replace(THREE_RANKS, schedule="gpipe", layers=layers) for layers in MODELS[::2]),
    *(replace(THREE_RANKS, layers=layers) for layers in MODELS[1::2]),
    *(
        replace(THREE_RANKS, mode=mode, sets=sets, layers=layers, segments=segments)
        for mode, (sets, segments), layers in rows(MODES[1:], ((None, 2), (1, 3), (1.5, 2)), (*STATEFUL, TREES))
    ),
    *(
        Case(schedule, mode, sets=2, ranks=ranks, microbatches=8, layers=layers, offload=offload, slow=slow)
        for (schedule, mode, ranks, slow), offload, layers in rows(STEPS, ("auto", "always"), OFFLOADED_LAYERS)
    ),
    *(
        replace(SIX_MICROBATCHES, schedule=schedule, mode=mode, sets=sets, layers=layers, segments=2, offload=offload)
        for (schedule, mode, sets), offload, layers in rows(
            (("gpipe", "overlap", 2), ("1f1b", "early", 1), ("gpipe", "inline", 1)), ("auto", "always"), STATEFUL
        )
    ),
    replace(OFFLOADED, layers=cases.batch_norm, also=cases.evaluates),
    replace(OFFLOADED, layers=cases.tied, also=cases.clips, saves=True),
    replace(OFFLOADED, layers=cases.frozen_below, also=cases.accumulates),
    *(
        replace(SELECTIVE, schedule=schedule, mode=mode, layers=layers)
        for schedule, mode, layers in rows(("gpipe", "1f1b"), MODES[1:], (cases.in_place, cases.frozen))
    ),
    *(replace(TIED, mode=mode, also=also) for mode, also in zip(MODES, (cases.accumulates, cases.evaluates) * 2)),
    replace(TIED, ranks=2, segments=2, also=cases.changes),
    replace(TIED, mode="inline", segments=2),
    replace(TIED, schedule="gpipe", slow=1, saves=True),
    replace(TIED, schedule="zb-h1"),
    *(replace(order, layers=cases.tied) for order in (ZBV, AUTO, ORDERS[1])),
    replace(TWO_REPLICAS, schedule="gpipe", layers=cases.missing_gradients, also=cases.clips),
    replace(TWO_REPLICAS, mode="inline", layers=cases.batch_norm, also=cases.evaluates),
    replace(TWO_REPLICAS, mode="never", layers=cases.frozen_below, also=cases.accumulates),
    replace(TWO_REPLICAS, ranks=3, slow=4, segments=3),
    replace(TWO_REPLICAS, schedule="zb-h1", saves=True),
    replace(TWO_REPLICAS, schedule="auto", segments=2),
    replace(INTERLEAVED, sets=1.5, segments=2),
    Case("gpipe", ranks=3, segments=3, last_stage="always"),
    replace(AUTO, sets=1.5, segments=2),
    *(replace(AUTO, mode=mode) for mode in MODES),
    Case("1f1b", segments=2, layers=cases.batch_norm, also=cases.changes),
    *(
        Case("1f1b", mode, autocast=cases.bfloat16, layers=layers)
        for mode, layers in zip(MODES, (cases.frozen, cases.batch_norm) * 2)
    ),
    *(
        replace(INTERLEAVED, also=also)
        for also in (cases.clips, cases.evaluates, cases.evaluates_on_two_streams, cases.infers)
    ),
    *(replace(NO_KEEP, sets=sets, stages_per_rank=per_rank) for sets, per_rank in ((2, 1), (3, 2))),
    replace(NO_KEEP, schedule="1f1b", sets=3),
    *(replace(NO_KEEP, schedule="interleaved", sets=s, stages_per_rank=n) for s, n in ((3, 2), (2, 3))),
    *(
        replace(SIX_MICROBATCHES, schedule=schedule, ahead=ahead)
        for schedule, ahead in (("gpipe", 0), ("1f1b", 4), ("zb-h1", 1))
    ),
    *(replace(ZBV, layers=layers) for layers in (cases.batch_norm, cases.dropout, cases.missing_gradients)),
    Case("1f1b", saves=True),
    *(replace(THREE_RANKS, slow=slow) for slow in (1, 2)),
    replace(THREE_RANKS, last_stage="always"),
    replace(THREE_RANKS, communicators="pair"),
    Case("gpipe", stages_per_rank=3, communicators="pair"),
    Case("1f1b", ranks=4, microbatches=8, sets=2),
]
# In three places or more a small schedule keeps all sets, which the pipeline says: here it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:recompute.sets")


_NAMES = set(map(str, QUICK))
_ROWS = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW if str(case) not in _NAMES)]


@pytest.mark.parametrize("case", _ROWS, ids=str)
def test_nothing_is_wrong(case: Case) -> None:
    assert look(case) == []
