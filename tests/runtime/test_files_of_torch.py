"""Schedules that torch.distributed.pipelining wrote, with halves of backwards and with pairs of ops, run here; and zero bubbles of ours."""

import warnings
from pathlib import Path

import pytest
import torch
from parity_cases import Case, check_case, plain, rows, run_cases
from ranks import run_ranks
from torch import nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.call_programs import Programs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy

RANKS, MICROBATCHES = 2, 4


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """What torch's ZBV and DualPipeV write for two ranks with two stages each."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    names = []
    for kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        stages = [PipelineStage(nn.Linear(2, 2), stage, 2 * RANKS, torch.device("cpu")) for stage in (0, 2 * RANKS - 1)]
        names.append(str(tmp_path / f"{kind.__name__}.csv"))
        kind(stages, n_microbatches=MICROBATCHES, loss_fn=lambda output, _: output.sum())._dump_csv(
            names[-1], format="compute_only"
        )
    torch.distributed.destroy_process_group()
    return names[0], names[1]


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


def run_pairs(path: str) -> list[str]:
    """On every rank: what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_case(case(path, "never", stages_per_rank=2, placement="v"))
    return [str(warning.message) for warning in said]


def test_zero_bubbles_equal_the_plain_loop(files: tuple[str, str]) -> None:
    assert run_ranks(RANKS, run_cases, cases, files[0]) == [6, 6]


def test_pairs_run_one_after_the_other_and_that_is_said_once(files: tuple[str, str]) -> None:
    said = [[text for text in texts if "OVERLAP_F_B" in text] for texts in run_ranks(RANKS, run_pairs, files[1])]
    assert [len(texts) for texts in said] == [1, 0]
    assert "6 cells with OVERLAP_F_B are read as F, then B" in said[0][0]


def test_it_is_said_of_a_schedule_that_was_made_before(files: tuple[str, str]) -> None:
    plan = make_plan(6, num_ranks=RANKS, num_microbatches=MICROBATCHES, stages_per_rank=2, placement="v")
    made = make_schedule(
        files[1], num_stages=2 * RANKS, num_microbatches=MICROBATCHES, num_ranks=RANKS, placement="v", recompute="never"
    )
    with pytest.warns(UserWarning, match="cells with OVERLAP_F_B are read as F, then B"):
        Programs(made, made.policy, plan, 0)
