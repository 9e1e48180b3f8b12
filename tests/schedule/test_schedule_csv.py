"""Schedules in files: written and read back, run by torch's own runtime, and the errors for broken ones."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from random_schedules import split
from shows import show

from pipetrain.schedule.check import ScheduleError, check
from pipetrain.schedule.csv_file import size_of_csv, write_csv
from pipetrain.schedule.families import ComputeLanes, Shape, gpipe
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Lane
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.recompute import AllKept

FAMILIES = [("gpipe", 4), ("1f1b", 4), ("interleaved", 2)]


# What is asked for beside a family: all of it comes back from its file.
BESIDE = {
    "plain": {},
    "halves": {"split_backward": True},
    "parts": {"segments": 2},
    "sums": {"tied": [(0, 3)], "num_replicas": 2},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
@pytest.mark.parametrize(("family", "ranks"), [*FAMILIES, ("zb-h1", 4)])
def test_there_and_back(family: str, ranks: int, mode: str, beside: str, tmp_path: Path) -> None:
    """A file has the compute lane: its messages and sums are made when it is read."""
    numbers = {"num_stages": 4, "num_ranks": ranks, "num_microbatches": 6, **BESIDE[beside]}
    split_backward, segments = numbers.pop("split_backward", False), numbers.pop("segments", 1)
    if family == "zb-h1" and beside in ("halves", "parts"):
        return
    numbers["recompute"] = RecomputePolicy(mode, sets=2, segments=segments)
    schedule = make_schedule(family, **numbers, split_backward=split_backward)
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(schedule))
    assert "REDUCE" not in path.read_text()
    assert size_of_csv(path) == (4, ranks, 6)
    assert dataclasses.replace(make_schedule(path, **numbers), family=family) == schedule
    if split_backward:
        with pytest.raises(
            ValueError, match=r"mine\.csv says itself where I and W are; leave out pipeline\.split_back"
        ):
            make_schedule(path, **numbers, split_backward=True)


def test_a_file_without_r_leaves_recomputation_to_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text(write_csv(make_schedule("1f1b", num_stages=3, num_microbatches=4, recompute="never")))
    assert "R" not in path.read_text()
    for mode in ("inline", "overlap"):
        for split_backward in (False, True):
            how = {"num_stages": 3, "num_microbatches": 4, "recompute": mode, "split_backward": split_backward}
            ours, theirs = make_schedule("1f1b", **how), make_schedule(str(path), **how)
            assert dataclasses.replace(theirs, family="1f1b") == ours


def test_a_file_with_r_says_which_sets_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0, 0F1,, 0B0, 0R1, 0B1\n\n1F0,1B0,1F1,1B1\n")
    shown = show(str(path), num_stages=2, num_microbatches=2, recompute=RecomputePolicy(sets=2))
    assert shown.schedule.kept == {(0, 0), (1, 0), (1, 1)}
    assert [str(op) for op in shown.schedule.lane(0, Lane.RECOMPUTE)] == ["0R1"]
    path.write_text("0F0,0F1,0F2,0B0,0B1,0R2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    with pytest.raises(
        ScheduleError,
        match=r"0F1: stage 0 can have 2 sets alive at once, but only 1 activation slot; use recompute.sets=2",
    ):
        show(str(path), num_stages=2, num_microbatches=3)
    with pytest.raises(ValueError, match="but the schedule itself has R"):
        show(str(path), num_stages=2, num_microbatches=3, recompute="never")


def keeping_all(shape: Shape) -> ComputeLanes:
    return AllKept(gpipe(shape))


@pytest.mark.parametrize("mode", ["never", "inline", "early", "overlap"])
def test_a_generator_or_a_file_may_say_that_all_sets_are_kept(mode: str, tmp_path: Path) -> None:
    numbers = {"num_stages": 3, "num_microbatches": 4, "recompute": RecomputePolicy(mode, sets=4)}
    schedule = make_schedule(keeping_all, **numbers)
    check(schedule)
    assert schedule.kept == {(stage, microbatch) for stage in range(3) for microbatch in range(4)}
    assert "R" not in write_csv(schedule)
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(schedule))
    assert size_of_csv(path) == (3, 3, 4)
    if mode != "never":
        assert path.read_text().startswith("keep\n0F0,")
        assert make_schedule(str(path), **numbers).kept == schedule.kept


def test_keeping_all_stays_within_the_policy() -> None:
    for split_backward in (False, True):
        made = make_schedule(keeping_all, num_stages=3, num_microbatches=4, split_backward=split_backward)
        with pytest.raises(
            ScheduleError, match=r"stage 0 can have 4 sets alive at once, but only 1 activation slot; use"
        ):
            check(made)
    frozen = make_schedule(keeping_all, num_stages=3, num_microbatches=2, first_backward=2)
    check(frozen)
    assert frozen.kept == {(2, 0), (2, 1)}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 5), (8, 16)])
def test_torchs_own_zero_bubble_v(ranks: int, microbatches: int, tmp_path: Path, torch_stages: Callable) -> None:
    """Its file is read as it is, and takes as long and holds as much as the family `zbv`, or more."""
    from torch.distributed.pipelining import ScheduleZBVZeroBubble

    stages = torch_stages(2 * ranks, ranks, (0, 2 * ranks - 1))
    theirs = ScheduleZBVZeroBubble(stages, n_microbatches=microbatches, loss_fn=lambda output, _: output.sum())
    path = tmp_path / "torch.csv"
    theirs._dump_csv(str(path), format="compute_only")
    numbers = {"num_stages": 2 * ranks, "num_ranks": ranks, "placement": "v", "num_microbatches": microbatches}
    assert size_of_csv(path) == (2 * ranks, ranks, microbatches)
    read = show(str(path), **numbers, recompute="never")
    for rank in range(ranks):
        actions = [str(action) for action in theirs.pipeline_order[rank] if action is not None]
        assert actions == list(map(str, read.schedule.lane(rank, Lane.COMPUTE)))
    ours = show("zbv", **numbers, recompute="never")
    assert ours.step_seconds <= read.step_seconds
    if microbatches >= 2 * ranks:
        assert ours.step_seconds == read.step_seconds == 6 * microbatches + ranks - 1
        assert [rank.peak_sets for rank in ours.breakdown] == [rank.peak_sets for rank in read.breakdown]


def test_pairs_of_torchs_dual_pipe_are_refused(tmp_path: Path, torch_stages: Callable) -> None:
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    theirs = ScheduleDualPipeV(torch_stages(4, 2, (0, 3)), n_microbatches=4, loss_fn=lambda output, _: output.sum())
    path = tmp_path / "dual.csv"
    theirs._dump_csv(str(path), format="compute_only")
    assert "(0F3;3B1)OVERLAP_F_B" in path.read_text()
    with pytest.raises(
        ValueError, match=r"line 1, cell \d+: '\(0F3;3B1\)OVERLAP_F_B': a rank runs one op at a time; write the F and"
    ):
        show(str(path), num_stages=4, num_ranks=2, placement="v", num_microbatches=4, recompute="never")


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
BAD = {
    "unknown op": (GOOD.replace("1B0", "1X0"), "line 2, cell 2: '1X0' is no op of a schedule file; allowed are"),
    "message": (GOOD.replace("1B0", "1SEND_B0"), "line 2, cell 2: '1SEND_B0' is no op of a schedule file"),
    "stage": (GOOD.replace("1B0", "2B0"), "line 2, cell 2: 2B0 is of stage 2; allowed are 0 to 1"),
    "microbatch": (GOOD.replace("1B0", "1B5"), "line 2, cell 2: 1B5 is of microbatch 5; allowed are 0 to 1"),
    "rank": (
        GOOD.replace("1B0", "0B0"),
        "line 2, cell 2: 0B0 stands in the line of rank 1, but stage 0 lives on rank 0 (pipeline.placement)",
    ),
    "twice": (GOOD.replace("1F1", "1F0"), "line 2, cell 3: 1F0 stands in this line twice"),
    "truncated line": (GOOD[:-5], "line 2, cell 3: the line ends without 1B1"),
    "truncated cell": (GOOD[:-2], "line 2, cell 4: '1B' is no op of a schedule file"),
    "w without i": (
        GOOD.replace("1B1", "1W1"),
        "line 2, cell 4: 1W1 stands without 1I1; allowed are B, or I and W after it",
    ),
    "i without w": (
        GOOD.replace("1B1", "1I1"),
        "line 2, cell 4: 1I1 stands without 1W1; allowed are B, or I and W after it",
    ),
    "w and b": (GOOD.replace("1B1", "1I1,1B1"), "1I1 is extra to 1B1; allowed are B, or I and W, not both"),
    "w first": (GOOD.replace("1B1", "1W1,1I1"), "line 2, cell 4: 1W1 stands before 1I1, whose other half it is"),
    "too few lines": (GOOD.splitlines()[0], "has 1 lines of ops; allowed is one per rank, which makes 2"),
    "keep and r": (
        "keep\n" + GOOD.replace("0B1", "0R1,0B1"),
        "line 2, cell 4: 0R1 recomputes a set, but the first line says",
    ),
    "keep later": (GOOD + "keep\n", "line 3, cell 1: 'keep' is no op of a schedule file"),
    "empty": ("", "has 0 lines of ops"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.csv") as error:
        make_schedule(str(path), num_stages=2, num_microbatches=2)
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.csv' cannot be read"):
        make_schedule(str(tmp_path / "none.csv"), num_stages=2, num_microbatches=2)
    (tmp_path / "empty.csv").write_text("\n")
    with pytest.raises(ValueError, match="holds no op"):
        size_of_csv(tmp_path / "empty.csv")


@pytest.fixture
def torch_stages() -> Iterator[Callable[[int, int], list]]:
    """Makes the stages of rank 0 for torch's runtime, in a process group that sends nothing."""
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(num_stages: int, num_ranks: int, own: Sequence[int] | None = None) -> list:
        torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        cpu, stages = torch.device("cpu"), range(0, num_stages, num_ranks) if own is None else own
        return [PipelineStage(torch.nn.Linear(2, 2), stage, num_stages, cpu) for stage in stages]

    yield make
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize(("family", "ranks"), FAMILIES)
def test_torch_loads_what_we_write(
    family: str, ranks: int, halved: bool, tmp_path: Path, torch_stages: Callable
) -> None:
    """Its runtime reads the file and lowers it to the same sends and receives as ours."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    made = split(family, 1) if halved else family
    schedule = make_schedule(made, num_stages=4, num_ranks=ranks, num_microbatches=6, recompute="never")
    path = tmp_path / "torch.csv"
    path.write_text(write_csv(schedule))
    runtime = _PipelineScheduleRuntime(torch_stages(4, ranks), n_microbatches=6, loss_fn=lambda output, _: output.sum())
    runtime._load_csv(str(path))
    messages = re.compile(r"SEND|RECV")
    for rank in range(ranks):
        assert list(map(str, runtime.pipeline_order[rank])) == list(map(str, schedule.lane(rank, Lane.COMPUTE)))
        theirs = {str(action) for action in runtime.pipeline_order_with_comms[rank] if messages.search(str(action))}
        assert theirs == {str(op) for lane in (Lane.SEND, Lane.RECV) for op in schedule.lane(rank, lane)}
