"""How many ranks a run has, in how many replicas: what is said, what follows, and what does not fit."""

import re

import pytest

from pipetrain.config.load import load_config
from pipetrain.launcher.nodes import choose_ranks_per_node
from pipetrain.plan.world import World, world_of
from pipetrain.schedule.kinds import Kind
from pipetrain.trainer.prepare import prepare

STAGES_2, STAGES_4 = "pipeline.num_stages=2", "pipeline.num_stages=4"
AUTO, TWO, THREE = (f"parallel.num_replicas={number}" for number in ("auto", 2, 3))
EIGHT_GPUS = ("cluster.num_nodes=2", "cluster.ranks_per_node=4")


def world(words: str, num_ranks: int | None = None) -> World:
    config = load_config(words.split())
    return world_of(config.pipeline, config.parallel, config.cluster, num_ranks)


@pytest.mark.parametrize(
    ("words", "num_ranks", "expected"),
    [
        ("", None, (1, 2)),
        ("", 3, (1, 3)),
        ("cluster.num_nodes=3", None, (1, 3)),
        (TWO, None, (2, 2)),
        (TWO, 6, (2, 3)),
        (f"{TWO} {STAGES_2}", None, (2, 2)),
        (f"{TWO} cluster.num_nodes=2 cluster.ranks_per_node=4", None, (2, 4)),
        (f"{THREE} {STAGES_4} pipeline.stages_per_rank=2", None, (3, 2)),
        (f"{THREE} {STAGES_4} pipeline.stages_per_rank=2", 6, (3, 2)),
        (f"{TWO} pipeline.placement=[0,1,1,0]", None, (2, 2)),
        (f"{AUTO} {STAGES_2}", 8, (4, 2)),
        (f"{AUTO} {STAGES_2}", 2, (1, 2)),
        (f"{AUTO} {STAGES_4} cluster.num_nodes=2 cluster.ranks_per_node=4", None, (2, 4)),
        # the ranks that torchrun has started count, whatever the machines should have had
        (f"{AUTO} {STAGES_4} cluster.num_nodes=2 cluster.ranks_per_node=4", 4, (1, 4)),
    ],
)
def test_replicas_and_ranks_of_each(words: str, num_ranks: int | None, expected: tuple[int, int]) -> None:
    assert world(words, num_ranks) == World(*expected)


@pytest.mark.parametrize(
    ("words", "num_ranks", "says"),
    [
        (f"{TWO} {STAGES_4}", 12, ["12 ranks are not", "2 x 4", "= 8: start 8 ranks", "parallel.num_replicas=3"]),
        (f"{THREE} {STAGES_4}", 6, ["6 ranks are not", "3 x 4", "start 12 ranks", "pipeline.num_stages=2"]),
        (f"{TWO} {STAGES_4}", 7, ["7 ranks are not", "start 8 ranks, or 4 or 8 with parallel.num_replicas=auto"]),
        (f"{TWO} pipeline.placement=[0,1,1,0]", 6, ["pipeline.placement=[0, 1, 1, 0]", "parallel.num_replicas=3"]),
        (THREE, 7, ["7 ranks make no 3 replicas of equal size", "start 6 or 9 ranks", "parallel.num_replicas=1"]),
        (f"{AUTO} {STAGES_4}", 3, ["3 ranks are not a multiple of the 4", "start 4 ranks"]),
        (f"{AUTO} {STAGES_4}", 6, ["6 ranks are not a multiple of the 4", "start 4 or 8 ranks"]),
        (AUTO, 6, ["set pipeline.num_stages"]),
    ],
)
def test_ranks_that_make_no_replicas_name_the_nearest_that_do(words: str, num_ranks: int, says: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(says[0])) as caught:
        world(words, num_ranks)
    assert "\n" not in str(caught.value)
    assert [word for word in says if word not in str(caught.value)] == [], caught.value


def test_the_plan_knows_all_ranks() -> None:
    plan = prepare(load_config([TWO, STAGES_2, "experiment=smoke"])).plan
    assert (plan.num_replicas, plan.num_ranks, plan.world_size) == (2, 2, 4)


def test_each_microbatch_of_each_replica_needs_a_sample() -> None:
    words = ["experiment=smoke", STAGES_2, "pipeline.num_microbatches=4"]
    prepare(load_config([*words, TWO, "data.global_batch_size=8"]))
    with pytest.raises(
        ValueError,
        match=r"data.global_batch_size=7 is less than parallel.num_replicas=2 x .*=4 = 8.*num_microbatches=3",
    ):
        prepare(load_config([*words, TWO, "data.global_batch_size=7"]))
    with pytest.raises(ValueError, match=r"data.global_batch_size=8 is less than parallel.num_replicas=3"):
        prepare(load_config([*words, AUTO, "data.global_batch_size=8"]), 6)


def test_machines_start_the_ranks_of_all_replicas() -> None:
    config = load_config([*EIGHT_GPUS, STAGES_4])
    assert choose_ranks_per_node(config.cluster, config.pipeline, 4, 2) == 4
    with pytest.raises(
        ValueError, match=r"make 8 ranks, but pipeline.num_stages=4 .* need 4 ranks; set .*num_replicas=2"
    ):
        choose_ranks_per_node(config.cluster, config.pipeline, 4)


def test_zero_waits_for_replicas_that_auto_may_not_find() -> None:
    # A run whose machines are gone but one goes on with one replica: then there is nothing to share.
    words = ["experiment=smoke", STAGES_2, AUTO, "parallel.zero_stage=1"]
    assert prepare(load_config(words), 2).plan.num_replicas == 1
    with pytest.raises(ValueError, match=r"parallel.zero_stage=1 with parallel.num_replicas=1"):
        prepare(load_config(["experiment=smoke", STAGES_2, "parallel.zero_stage=1"]))


@pytest.mark.parametrize(
    ("replicas", "num_ranks", "parts"), [(TWO, 4, {1, 0}), (AUTO, 4, {1, 0}), (AUTO, 2, set()), ("", 2, set())]
)
def test_what_is_not_recomputed_has_parts_for_replicas(replicas: str, num_ranks: int, parts: set[int]) -> None:
    """What a run trains, however its replicas are counted."""
    words = f"{replicas} {STAGES_2} recompute.mode=never recompute.segments=2 data.global_batch_size=32"
    run = prepare(load_config(words.split()), num_ranks=num_ranks)
    found = {op.part for _, _, op in run.schedule.ops() if op.kind is Kind.B and op.part is not None}
    assert found == parts
