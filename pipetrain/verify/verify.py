"""Whether pipelines on this machine compute what one process computes: every schedule and mode, bit for bit.

Each case trains some steps as a pipeline over gloo ranks and with `reference_step`, and compares losses, gradients and
weights. Dropout, microbatches of different sizes and clipping are part of every case. Several replicas add up their gradients in
another order than one process does, so these are compared within rounding; the replicas hold the same bits.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from pipetrain.comm.failure import PipelineError
from pipetrain.comm.torch_distributed import all_gather_bytes
from pipetrain.config.records import ModelConfig
from pipetrain.data.batch import Batch
from pipetrain.models.spec import ModelSpec, make_spec, spec_of
from pipetrain.monitor.draw.table import Table
from pipetrain.plan.plan import make_plan
from pipetrain.schedule.families import AUTO, FAMILIES
from pipetrain.schedule.policy import Mode
from pipetrain.verify.beside_loop import (
    NUM_MICROBATCHES,
    SEED,
    START_METHOD,
    Subject,
    Trace,
    Way,
    differences,
    forking,
    piped,
    plain,
)

NUM_ROWS = 7  # over 3 microbatches: 3, 2 and 2 rows
RANKS = ((1, 1), (2, 1), (3, 1), (4, 2))  # (all ranks, replicas)
QUICK_RANKS = ((2, 1),)
# Of several replicas: the norm of a difference over the norm of what it differs from.
WITHIN, WITHIN_AFTER_STEPS = 1e-6, 1e-5


@dataclass(frozen=True)
class Case:
    """One pipeline to compare."""

    model: str
    num_ranks: int
    schedule: str
    mode: str
    num_replicas: int = 1


@dataclass(frozen=True)
class Row:
    """A case and what came out: the first tensor that differs, and the largest difference of any."""

    case: Case
    differs: str | None
    largest_difference: float

    @property
    def is_equal(self) -> bool:
        return self.differs is None

    def as_json(self) -> dict[str, Any]:
        """Plain values, the case's own first."""
        return {**asdict(self.case), "differs": self.differs, "largest_difference": self.largest_difference}


def verify(*, quick: bool = False) -> list[Row]:
    """Runs all cases, the ranks of a case as processes of this machine. Raises RuntimeError: a rank failed."""
    return [row for ranks in (QUICK_RANKS if quick else RANKS) for row in _on_ranks(*ranks)]


def parity_table(rows: list[Row]) -> str:
    """A line per case and a verdict."""
    cells = []
    for row in rows:
        case, replicas = row.case, row.case.num_replicas
        ranks = str(case.num_ranks) if replicas == 1 else f"{replicas} x {case.num_ranks // replicas}"
        equal = "equal" if replicas == 1 else f"within {WITHIN:g}"
        result = equal if row.is_equal else f"{row.differs} differs by {row.largest_difference:.3g}"
        cells.append((case.model, ranks, case.schedule, case.mode, result))
    table = Table(("model", "ranks", "schedule", "recompute", "result"), cells, left=frozenset({0, 2, 3, 4}))
    wrong = sum(not row.is_equal for row in rows)
    rounded = sum(row.case.num_replicas > 1 for row in rows)
    of_replicas = f" but {rounded} of several replicas, which are equal within {WITHIN:g}" if rounded else ""
    right = f"{len(rows)} cases, all equal bit for bit{of_replicas}"
    return f"{table.as_text()}\n\n{f'{len(rows)} cases, {wrong} differ' if wrong else right}"


def cases(num_ranks: int, num_replicas: int = 1) -> Iterator[Case]:
    """All models, trainable schedules and modes."""
    for model in _MODELS:
        for schedule in (*FAMILIES, AUTO):
            if schedule != "inference":
                for mode in Mode:
                    yield Case(model, num_ranks, schedule, mode.value, num_replicas)


def _on_ranks(num_ranks: int, num_replicas: int = 1) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="pipetrain-verify-") as folder:
        forking()
        start_processes(_rank, (num_ranks, num_replicas, folder), num_ranks, start_method=START_METHOD)  # type: ignore[no-untyped-call]
        found = json.loads((Path(folder) / "rows.json").read_text())
    return [Row(case, *result) for case, result in zip(cases(num_ranks, num_replicas), found)]


def _rank(rank: int, num_ranks: int, num_replicas: int, folder: str) -> None:
    torch.set_num_threads(1)  # with more, the order of summation is no longer fixed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    found = []
    for case in cases(num_ranks, num_replicas):
        everywhere = all_gather_bytes(json.dumps(_differences(case)).encode())
        differ = [difference for here in everywhere for difference in json.loads(here)]
        largest = max((size for _, size in differ), default=0.0)
        found.append((differ[0][0] if differ else None, largest))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _differences(case: Case) -> list[tuple[str, float]]:
    """The tensors of this rank that differ, each with its largest difference."""
    subject, expected = _plain_of(case.model, case.num_replicas)
    plan = make_plan(
        len(subject.layers()),
        num_ranks=case.num_ranks // case.num_replicas,
        stages_per_rank=2 if case.schedule in ("interleaved", "zbv") else 1,
        num_microbatches=NUM_MICROBATCHES,
        num_replicas=case.num_replicas,
        placement="v" if case.schedule == "zbv" else "loop",
    )
    way = Way(case.mode, plan.num_stages, case.num_ranks, case.schedule, policy={"last_stage": "auto"}, plan=plan)

    def within(what: str) -> float:
        if case.num_replicas == 1:
            return 0.0
        # What was trained by the step before differs by rounding, and so does all that follows.
        return WITHIN if what.endswith((" of step 1", " in step 1")) else WITHIN_AFTER_STEPS

    try:
        return list(differences(piped(subject, way), expected, within))
    except PipelineError as error:  # of replicas that are not equal, say
        return [(str(error), float("inf"))]


@functools.lru_cache(maxsize=2)
def _plain_of(model: str, num_replicas: int) -> tuple[Subject, Trace]:
    """What one process trains, and what comes of it."""
    spec, batch_of = _MODELS[model]()
    loss_fn = spec.loss_fn
    assert loss_fn is not None
    subject = Subject(
        lambda: spec.build(0, spec.num_layers, seed=SEED),
        batch_of,
        lambda: loss_fn,
        count_fn=spec.count_fn,
        max_norm=0.1,
        num_microbatches=NUM_MICROBATCHES * num_replicas,
    )
    return subject, plain(subject)


BatchOf = Callable[[int], Batch]


def _dense() -> tuple[ModelSpec, BatchOf]:
    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return Batch(torch.randn(NUM_ROWS, 8, generator=generator), torch.randn(NUM_ROWS, 8, generator=generator))

    layers = [lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())] * 7
    return replace(spec_of(layers), loss_fn=nn.functional.mse_loss), batch


def _transformer() -> tuple[ModelSpec, BatchOf]:
    vocabulary_size = 32

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(vocabulary_size, (NUM_ROWS, 9), generator=generator)
        return Batch(tokens[:, :-1], tokens[:, 1:])

    return make_spec(
        ModelConfig(num_hidden_layers=4, hidden_size=16, num_attention_heads=2, dropout=0.1), vocabulary_size
    ), batch


_MODELS: dict[str, Callable[[], tuple[ModelSpec, BatchOf]]] = {"dense": _dense, "transformer": _transformer}
