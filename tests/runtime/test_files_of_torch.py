"""Schedules that torch.distributed.pipelining wrote, with halves of backwards, run here; and zero bubbles of ours."""

from pathlib import Path

import pytest
import torch
from parity_cases import Case, plain, rows, run_cases
from ranks import run_ranks
from torch import nn

from pipetrain.plan.plan import make_plan
from pipetrain.schedule.policy import RecomputePolicy

RANKS, MICROBATCHES = 2, 4


@pytest.fixture
def zbv(tmp_path: Path) -> str:
    """What torch's ZBV writes for two ranks with two stages each."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    stages = [PipelineStage(nn.Linear(2, 2), stage, 2 * RANKS, torch.device("cpu")) for stage in (0, 2 * RANKS - 1)]
    path = str(tmp_path / "zbv.csv")
    theirs = ScheduleZBVZeroBubble(stages, n_microbatches=MICROBATCHES, loss_fn=lambda output, _: output.sum())
    theirs._dump_csv(path, format="compute_only")
    torch.distributed.destroy_process_group()
    return path


def case(schedule: str, mode: str, sets: int = 1, **plan: object) -> Case:
    options = {
        "schedule": schedule,
        "recompute": RecomputePolicy(mode, sets=sets),  # type: ignore[arg-type]
        "num_microbatches": MICROBATCHES,
        "plan": make_plan(6, num_ranks=RANKS, num_microbatches=MICROBATCHES, **plan),  # type: ignore[arg-type]
    }
    return Case(f"{Path(schedule).stem} {mode}", lambda: plain(0.1), lambda: rows(4, 7, 6), options=options)


def cases(zbv: str) -> list[Case]:
    there_and_back = {"stages_per_rank": 2, "placement": "v"}
    found = [case(schedule, "never", **there_and_back) for schedule in (zbv, "zbv")]
    found.append(case(zbv, "overlap", 2, **there_and_back))  # its W stay where they are, so one place is too few
    found.append(case("zbv", "overlap", **there_and_back))
    return [*found, *(case("zb-h1", mode) for mode in ("inline", "early"))]


def test_zero_bubbles_equal_the_plain_loop(zbv: str) -> None:
    assert run_ranks(RANKS, run_cases, cases, zbv) == [6, 6]
