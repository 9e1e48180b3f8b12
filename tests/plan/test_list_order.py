"""The rule of `pipeline.schedule=auto`: sound for every problem, and near the best known."""

import dataclasses

import pytest
from examples import examples
from problems import Cell, cells, specs

from pipetrain.schedule.bound import bound
from pipetrain.schedule.check import check
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make, problem_of
from pipetrain.schedule.op import Lane, Op
from pipetrain.schedule.policy import Keep, Mode, RecomputePolicy
from pipetrain.schedule.recompute import hold_back, order_of
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import OrderProblem, list_order, rules_of
from pipetrain.schedule.simulate import simulate

WITHIN = 1.055  # of the best known, rule alone
OF_EIGHT = {(8, 16, places): seconds for places, seconds in ((1, 74), (2, 69), (3, 65), (4, 63), (6, 58))}
SPLIT_BY_RULE = {**OF_EIGHT, (8, 8, 2): 39, (4, 16, 1): 66}


def seconds(spec: ScheduleSpec) -> float:
    assert spec.costs is not None
    return simulate(make(spec), spec.costs).step_seconds


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_the_rule_is_near_the_best_known(cell: Cell) -> None:
    spec = cell.unsolved
    shape = cell.stages, cell.microbatches, cell.places
    assert seconds(spec) <= (SPLIT_BY_RULE[shape] if cell.split else cell.goal * WITHIN)


@examples(40, 150, specs())
def test_any_problem_has_an_order(spec: ScheduleSpec) -> None:
    assert spec.costs is not None
    schedule = make(spec)
    check(schedule)
    assert schedule.family == "auto"
    taken = simulate(schedule, spec.costs).step_seconds
    policy = dataclasses.replace(spec.policy, keep=Keep.AUTO)
    same = {key: getattr(spec, key) for key in ("first_backward", "split_backward")}
    least = bound(spec.costs, spec.num_microbatches, policy=policy, placement=list(spec.stage_ranks), **same)
    assert taken >= least * (1 - 1e-9)
    if spec.transport_ahead == 0 or any(spec.costs.hop_forward + spec.costs.hop_backward):
        return  # a receive that is posted late delays its hop: the rule knows nothing of that
    listed = list_order(problem_of(spec, spec.costs))
    assert taken <= listed.seconds * (1 + 1e-9), "no op starts later than in the order, one op after the other"


@examples(40, 150, specs())
def test_an_order_comes_back_from_its_schedule(spec: ScheduleSpec) -> None:
    assert spec.costs is not None
    schedule = make(spec)
    again = make(dataclasses.replace(spec, order=order_of(schedule)))
    check(again)
    assert again.lanes == schedule.lanes
    assert again.kept == schedule.kept
    events, events_again = (simulate(one, spec.costs).events for one in (schedule, again))
    assert events == events_again


def test_r_waits_for_the_op_in_front_of_it() -> None:
    first, last = "0F0 0F1 0F2 0B0 0R1 0B1 0R2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"
    early, late = (
        make(dataclasses.replace(Cell(2, 3, 0, 2, 0).spec, order=[list(map(Op.parse, lane.split())) for lane in order]))
        for order in ((first.replace("0B0 0R1", "0R1 0B0"), last), (first, last))
    )
    assert early.lanes == late.lanes
    again = Op.parse("0R1")
    assert Op.parse("0F2") in early.waits[again]
    assert Op.parse("0B0") in set(late.waits[again]) - set(early.waits[again])
    assert hold_back(late, order_of(late)) == late


def test_in_flight_stays_within_the_stash() -> None:
    for stash in (1, 2, 5):
        spec = Cell(4, 8, 0, 2, 0).unsolved
        spec = dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, stash=stash))
        check(make(spec))
    assert seconds(spec) < 3 * 8 * 4  # the last: of five


def test_never_keeps_every_set() -> None:
    spec = Cell(3, 4, 0, 1, 0).unsolved
    spec = dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, mode=Mode.NEVER))
    assert len(make(spec).kept) == 12
    assert seconds(spec) == 18


def test_forwards_alone_run_in_their_order() -> None:
    spec = dataclasses.replace(Cell(2, 3, 0, 1, 0).spec, order=None, first_backward=2)
    lanes = [make(spec).lane(rank, Lane.COMPUTE) for rank in (0, 1)]
    assert [" ".join(map(str, lane)) for lane in lanes] == ["0F0 0F1 0F2", "1F0 1F1 1F2"]


def test_a_stage_may_live_on_any_rank() -> None:
    spec = Cell(3, 6, 0, 2, 0).unsolved
    moved = dataclasses.replace(spec, stage_ranks=(2, 0, 1))
    assert seconds(moved) == seconds(spec)
    assert {op.stage for op in make(moved).lane(2, Lane.COMPUTE)} == {0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stage_ranks": (0, 0, 1, 1)}, "one stage per rank, not 4 stages on 2 ranks"),
        ({"stage_ranks": (0, 1, 1, 0)}, "one stage per rank, not 4 stages on 2 ranks"),
        ({"warmup": 3}, "pipeline.warmup=3 is for pipeline.schedule=1f1b, not for 'auto'"),
    ],
)
def test_what_auto_cannot_do_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match="pipeline") as caught:
        dataclasses.replace(Cell(4, 4, 0, 1, 0).spec, order=None, **changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_r_on_the_last_stage_is_for_named_families() -> None:
    spec = Cell(4, 4, 0, 1, 0).spec
    with pytest.raises(ValueError, match=r"recompute.last_stage=always: pipeline.schedule=auto decides"):
        dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, last_stage="always"))


def test_an_order_of_other_ops_is_refused() -> None:
    spec = Cell(2, 2, 0, 1, 0).spec
    with pytest.raises(ValueError, match=r"1F5 is of microbatch 5"):
        make(dataclasses.replace(spec, order=[[Op.parse("0F0")], [Op.parse("1F5")]]))


def test_of_many_ops_fewer_rules_are_tried() -> None:
    counts = []
    for stages, microbatches in ((8, 32), (16, 64), (32, 128), (64, 1024)):
        problem = OrderProblem(Costs.spread(stages), microbatches, RecomputePolicy(sets=2))
        rules = list(rules_of(problem))
        assert len(set(rules)) == len(rules)
        counts.append(len(rules))
    assert counts[0] == counts[1] == 108
    assert counts[1] > counts[2] > counts[3] >= 6
