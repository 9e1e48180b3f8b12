"""Promise: a CALL stays where its generator or its file puts it, through every pass, and holds up nothing else."""

from pathlib import Path

import pytest

from pipetrain.monitor.shown import show_schedule
from pipetrain.schedule.check import check, check_calls
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import FAMILIES, ComputeLanes, Generator, Shape
from pipetrain.schedule.launches import for_device
from pipetrain.schedule.make import make_schedule, with_first_backward
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.simulate import simulate


def calling(family: str) -> Generator:
    """The family, with a CALL behind the last backward of each microbatch on each stage."""

    def called(op: Op) -> tuple[Op, ...]:
        return (op, op._replace(kind=Kind.CALL)) if op.kind is Kind.B else (op,)

    def generate(shape: Shape) -> ComputeLanes:
        return [[one for op in lane for one in called(op)] for lane in FAMILIES[family](shape)]

    return generate


def made(schedule: Generator | str | Path, mode: Mode = Mode.OVERLAP) -> Schedule:
    return make_schedule(schedule, num_stages=4, num_microbatches=6, recompute=mode)


def without_calls(schedule: Schedule) -> list[tuple[int, Lane, Op]]:
    return [entry for entry in schedule.ops() if entry[2].kind is not Kind.CALL]


def calls_of(schedule: Schedule) -> list[str]:
    return [str(op) for _, _, op in schedule.ops() if op.kind is Kind.CALL]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("family", ["gpipe", "1f1b"])
def test_what_is_called_changes_no_other_op(family: str, mode: Mode) -> None:
    plain, called = made(FAMILIES[family], mode), made(calling(family), mode)
    check(called)
    assert without_calls(called) == without_calls(plain)
    assert len(calls_of(called)) == 4 * 6
    costs = Costs.spread(4, hop=0.5)
    assert simulate(called, costs).step_seconds == simulate(plain, costs).step_seconds
    check(for_device(called))


def test_a_file_has_its_calls(tmp_path: Path) -> None:
    called = made(calling("1f1b"), Mode.INLINE)
    (tmp_path / "order.csv").write_text(write_csv(called))
    assert list(made(str(tmp_path / "order.csv"), Mode.INLINE).ops()) == list(called.ops())


def test_a_stage_without_a_backward_keeps_its_calls() -> None:
    frozen = with_first_backward(made(calling("gpipe")), 2)
    check(frozen)
    assert len(calls_of(frozen)) == 4 * 6
    assert not any(op.stage < 2 and op.kind is Kind.B for _, _, op in frozen.ops())


def test_it_is_drawn_and_counts_no_time() -> None:
    shown = show_schedule(made(calling("gpipe")), Costs.spread(4))
    assert shown.breakdown == show_schedule(made(FAMILIES["gpipe"]), Costs.spread(4)).breakdown
    assert Kind.CALL.row.looks == "call"


def test_one_without_a_function_is_refused() -> None:
    called = made(calling("gpipe"))
    check_calls(called, print)
    check_calls(made("gpipe"), None)
    with pytest.raises(
        ValueError, match=r"CALL0: pipeline.schedule=generate calls a function; give it, as in pipeline.on_call"
    ):
        check_calls(called, None)
