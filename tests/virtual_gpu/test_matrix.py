"""Schedules, models and calls on virtual GPUs: no race, no hang whatever host waits for its device, and the plain loop's values."""

from __future__ import annotations

import itertools

import pytest

from virtual_gpu.cases import (
    Case,
    accumulates,
    batch_norm,
    bfloat16,
    bridges,
    changes,
    chunks,
    clips,
    conjugate,
    dropout,
    evaluates,
    evaluates_on_two_streams,
    expanded,
    frozen,
    frozen_below,
    gaps,
    handed_through,
    in_place,
    infers,
    last_of_sequence,
    look,
    missing_gradients,
    pairs,
    tied,
    transposed,
    trees,
)

MODES = ("never", "inline", "early", "overlap")


def _orders() -> list[Case]:
    """Every family x mode x places x stages per rank x placement that there is."""
    found = []
    for mode, sets in itertools.product(MODES, (1, 2, 3)):
        found += [Case("gpipe", mode, sets, 2, per_rank) for per_rank in (1, 2, 3)]
        found += [Case("gpipe", mode, sets, 2, per_rank, "v") for per_rank in (2, 3)]
        found += [Case("1f1b", mode, sets, 4, microbatches=6)]
        found += [Case("interleaved", mode, sets, 2, per_rank) for per_rank in (2, 3)]
        found += [Case("zb-h1", mode, sets, 3, microbatches=6), Case("zbv", mode, sets, 2, 2, "v", 6)]
    return found


HALF = 2 * 4  # a layer gives twice as much where half is sent
MODELS = (
    bridges(gaps, HALF),
    bridges(chunks, HALF),
    bridges(last_of_sequence),
    bridges(expanded),
    bridges(transposed),
    bridges(conjugate),
    bridges(pairs),
    bridges(trees),
    missing_gradients,
    batch_norm,
    dropout,
    frozen,
    frozen_below,
    in_place,
    handed_through,
)
QUICK = [
    Case("gpipe", sets=2),
    Case("1f1b", ranks=3),
    Case("interleaved", stages_per_rank=3),
    Case("gpipe", stages_per_rank=2, placement="v"),
    Case("zb-h1", ranks=3, microbatches=6),
    Case("1f1b", ranks=3, layers=bridges(gaps, HALF)),
    Case("1f1b", ranks=3, layers=bridges(conjugate)),
    Case("1f1b", ranks=3, layers=missing_gradients),
    Case("interleaved", stages_per_rank=2, layers=batch_norm),
    Case("1f1b", layers=dropout, slow=0),
    Case("1f1b", autocast=bfloat16, layers=frozen, ranks=3),
    Case("gpipe", also=clips, saves=True),
    Case("interleaved", sets=2, stages_per_rank=2, selective="matmul"),
    Case("1f1b", also=evaluates),
    Case("1f1b", ranks=3, layers=dropout, also=changes),
    Case("interleaved", stages_per_rank=2, communicators="pair"),
    Case("interleaved", sets=2, stages_per_rank=2, microbatches=6, keep="none"),
    Case("1f1b", ranks=3, sets=1, segments=2),
    Case("1f1b", ranks=3, layers=tied),
    Case("interleaved", stages_per_rank=2, layers=tied, also=clips, slow=1),
    Case("1f1b", replicas=2, layers=dropout),
    Case("interleaved", stages_per_rank=2, replicas=2, segments=2, also=accumulates),
    Case("gpipe", sets=2, microbatches=6, offload="auto"),
    Case("1f1b", sets=2, ranks=3, microbatches=8, layers=dropout, offload="always", slow=0),
    Case("interleaved", sets=2, stages_per_rank=2, microbatches=6, offload="auto"),
    Case("1f1b", sets=1, ranks=3, microbatches=6, segments=2, offload="always", slow=1),
]
MORE = [
    *(
        Case("1f1b", mode, sets, ranks=3, layers=layers, segments=segments)
        for mode in ("inline", "early", "overlap")
        for sets, segments in ((None, 2), (1, 3), (1.5, 2))
        for layers in (batch_norm, dropout, in_place, bridges(trees))
    ),
    *(Case("interleaved", sets=sets, stages_per_rank=2, segments=2) for sets in (None, 1, 1.5)),
    *(Case("gpipe", sets=sets, ranks=3, segments=3, last_stage="always") for sets in (None, 1)),
    Case("auto", sets=1.5, ranks=3, microbatches=6, segments=2),
    *(Case(schedule, ranks=3, layers=layers) for schedule in ("gpipe", "1f1b") for layers in MODELS),
    *(Case("interleaved", sets=2, stages_per_rank=2, layers=layers) for layers in MODELS),
    *(Case("1f1b", mode, autocast=bfloat16, layers=layers) for mode in MODES for layers in (frozen, batch_norm)),
    *(
        Case("interleaved", also=also, stages_per_rank=2)
        for also in (clips, evaluates, evaluates_on_two_streams, infers)
    ),
    *(Case(schedule, saves=True) for schedule in ("gpipe", "1f1b")),
    *(Case("1f1b", mode, ranks=3, layers=tied, also=also) for mode in MODES for also in (accumulates, evaluates)),
    *(Case("1f1b", segments=2, layers=layers, also=changes) for layers in (tied, batch_norm)),
    *(Case("gpipe", ranks=3, layers=tied, slow=slow, saves=True) for slow in range(3)),
    *(Case("zb-h1", ranks=3, layers=tied), Case("auto", ranks=3, microbatches=6, layers=tied)),
    *(Case("1f1b", mode, ranks=3, layers=tied, segments=2) for mode in ("inline", "overlap")),
    *(
        Case("zbv", stages_per_rank=2, placement="v", layers=tied),
        Case("gpipe", ranks=2, stages_per_rank=2, layers=tied),
    ),
    *(Case("1f1b", ranks=3, slow=slow) for slow in range(3)),
    *(
        Case(schedule, mode, replicas=2, layers=layers, also=also)
        for schedule, mode in (("gpipe", "overlap"), ("1f1b", "inline"), ("1f1b", "never"))
        for layers, also in ((missing_gradients, clips), (batch_norm, evaluates), (frozen_below, accumulates))
    ),
    *(Case("1f1b", replicas=2, ranks=3, slow=slow, segments=3) for slow in (0, 4)),
    *(Case("zb-h1", replicas=2, saves=True), Case("auto", replicas=2, segments=2)),
    *(Case(schedule, last_stage="always", ranks=3) for schedule in ("gpipe", "1f1b")),
    Case("1f1b", ranks=3, communicators="pair"),
    *(
        Case(schedule, sets=sets, ranks=2, stages_per_rank=per_rank, microbatches=6, keep="none")
        for schedule, per_rank in (("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
        for sets in (2, 3)
    ),
    *(
        Case(schedule, ranks=3, microbatches=6, ahead=ahead)
        for schedule in ("gpipe", "1f1b", "zb-h1")
        for ahead in (0, 1, 4)
    ),
    *(Case("gpipe", stages_per_rank=per_rank, communicators="pair") for per_rank in (2, 3)),
    *(Case("auto", mode, ranks=3, microbatches=6) for mode in MODES),
    *(
        Case("zbv", stages_per_rank=2, placement="v", layers=layers)
        for layers in (batch_norm, dropout, missing_gradients)
    ),
    *(Case("1f1b", ranks=4, microbatches=8, sets=sets) for sets in (1, 2)),
    *(
        Case(schedule, mode, ranks=3, layers=layers, selective="matmul")
        for schedule in ("gpipe", "1f1b")
        for mode in MODES[1:]
        for layers in (in_place, frozen)
    ),
    *(
        Case(schedule, mode, sets=2, ranks=ranks, microbatches=8, layers=layers, offload=offload, slow=slow)
        for schedule, mode, ranks, slow in (
            ("gpipe", "overlap", 3, None),
            ("1f1b", "early", 2, 1),
            ("zb-h1", "inline", 3, 0),
            ("auto", "overlap", 3, 2),
        )
        for offload in ("auto", "always")
        for layers in (dropout, batch_norm, frozen_below, bridges(chunks, HALF), in_place, handed_through)
    ),
    *(
        Case(schedule, mode, sets=sets, ranks=3, microbatches=6, layers=layers, segments=2, offload=offload)
        for schedule, mode, sets in (("gpipe", "overlap", 2), ("1f1b", "early", 1), ("gpipe", "inline", 1))
        for offload in ("auto", "always")
        for layers in (dropout, batch_norm, in_place)
    ),
    *(
        Case(
            "interleaved",
            sets=2,
            stages_per_rank=2,
            microbatches=6,
            layers=layers,
            also=also,
            offload="always",
            saves=saves,
        )
        for layers, also, saves in (
            (batch_norm, evaluates, False),
            (tied, clips, True),
            (frozen_below, accumulates, False),
        )
    ),
]
# In three places or more a small schedule keeps all sets, which the pipeline says: here it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:recompute.sets")


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_nothing_is_wrong(case: Case) -> None:
    assert look(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_orders(), *MORE], ids=str)
def test_nothing_is_wrong_in_all(case: Case) -> None:
    assert look(case) == []
