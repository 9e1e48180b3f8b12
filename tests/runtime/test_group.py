"""What ranks agree on and carry along their chain, groups of some of them, and their places in the grid."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import assert_same_tensors, mean_square, rows
from ranks import NEVER_SECONDS, run_outcomes, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.comm import chain as chains
from pipetrain.comm.clocks import align_clocks
from pipetrain.comm.coordinates import ORDERS, Coordinates, Grid, Names, grid_of
from pipetrain.comm.courier import Courier, finish
from pipetrain.comm.failure import FailureBoard, Monitor, PipelineError
from pipetrain.comm.group import join_group
from pipetrain.runtime import copies
from pipetrain.runtime.pipeline import Pipeline


@pytest.mark.parametrize("grid", [Grid(stage=4), Grid(2, 3, 2), Grid(2, 3, order="stage-replica")], ids=str)
def test_every_rank_has_a_place_in_the_grid(grid: Grid) -> None:
    places = [grid.coordinates_of(rank) for rank in range(grid.size)]
    assert [grid.rank_of(place) for place in places] == list(range(grid.size))
    dimensions = [*grid.order.split("-"), "tensor"]
    assert places == sorted(places, key=lambda place: [getattr(place, name) for name in dimensions])
    assert places[-1] == Coordinates(grid.replica - 1, grid.stage - 1, grid.tensor - 1)
    with pytest.raises(ValueError, match=rf"rank {grid.size} of {grid.size} ranks: they count from 0"):
        grid.coordinates_of(grid.size)


def test_who_is_in_a_replica_and_who_holds_the_same_stages() -> None:
    assert [Grid(2, 3).ranks_of_replica(4), Grid(2, 3).ranks_of_stage(4)] == [(3, 4, 5), (1, 4)]
    across = Grid(2, 3, order="stage-replica")
    assert [across.ranks_of_replica(4), across.ranks_of_stage(4)] == [(0, 2, 4), (4, 5)]


def test_ranks_that_make_no_replicas_of_equal_size() -> None:
    for order in ORDERS:
        assert grid_of(6, 2, order) == Grid(2, 3, order=order)
    said = "6 ranks make no 4 replicas of equal size; start 4 or 8 ranks, or set parallel.num_replicas=3"
    with pytest.raises(ValueError, match=f"^parallel.num_replicas=4: {said}$"):
        grid_of(6, 4)
    with pytest.raises(ValueError, match=r"start 4 ranks, or set parallel.num_replicas=2$"):
        grid_of(2, 4)
    with pytest.raises(ValueError, match=r"parallel.order='stage': allowed are replica-stage and stage-replica"):
        grid_of(6, 2, "stage")


def test_what_ranks_are_called() -> None:
    alone, names = Names(Grid(stage=3)), Names(Grid(2, 2))
    assert alone(2) == "rank 2"
    assert names(3) == "rank 3 (replica 1, place 1)"
    names.tell_stages((0, 1, 0))
    assert [names(2), names(3)] == ["rank 2 (replica 1, stages 0 and 2)", "rank 3 (replica 1, stage 1)"]


def talk() -> dict[str, Any]:
    long = 3 * chains._FRAME_BYTES
    with join_group(timeout_seconds=NEVER_SECONDS) as group:
        chain, own = group.chain, str(group.rank).encode()
        assert (group.coordinates.stage, group.grid.size) == (group.rank, 3)
        clock = align_clocks(chain)
        assert clock.offset_seconds == 0.0, "ranks of one machine share their clock"
        assert (clock.error_seconds > 0) == (group.rank > 0)
        return {
            "down": chain.down(lambda received: (received or b"") + own, "down"),
            "up": chain.up(lambda received: (received or b"") + own, "up"),
            "broadcast": [chain.broadcast(own * long, root, "from one") == b"%d" % root * long for root in range(3)],
            "bring": chain.bring(b"of the middle" if group.rank == 1 else None, "to the first"),
            "largest": group.largest([-3, -1, -2][group.rank]),
            "concatenate": chain.concatenate(own * group.rank, "all"),
            "gather": chain.gather(own * group.rank, "to the first"),
            "from_first": group.from_first({"rank": group.rank}),
        }


def talk_of_all_sizes() -> list[int]:
    """Short messages behind long ones, of which the courier still has the rest to send."""
    sizes = [size for _ in range(20) for size in (40 * chains._FRAME_BYTES, 1, 2 * chains._FRAME_BYTES, 0)]
    with join_group(timeout_seconds=NEVER_SECONDS) as group:
        first = group.rank == 0
        values = [
            group.chain.down(lambda received, size=size: bytes(size) if first else received, "sizes")  # type: ignore[misc]
            for size in sizes
        ]
    return [len(value) for value in values]


def test_messages_keep_their_order() -> None:
    first, second = run_ranks(2, talk_of_all_sizes)
    assert first == second


def test_a_transfer_begins_at_once_behind_none_that_waits() -> None:
    """A short message does not wait for a thread to wake; one behind another does, and one that fails is told of by its job."""
    monitor = Monitor(0, FailureBoard(None), NEVER_SECONDS)
    courier = Courier("to rank 1", "rank 1", monitor)
    begun: list[str] = []
    ended: list[str] = []
    gate = threading.Event()

    def submit(name: str, wait: bool = False, lost: bool = False) -> None:
        def transfer() -> None:
            begun.append(name)
            if lost:
                raise RuntimeError("gone")

        transfer = courier.begun(transfer)

        def job() -> Callable[[], None]:
            if wait:
                assert gate.wait(NEVER_SECONDS)
            finish(transfer())
            return lambda: ended.append(name)

        courier.submit(name, job)

    def wait_for(names: list[str]) -> None:
        monitor.wait(lambda: ended == names, lambda: str(names))

    submit("first", wait=True)
    assert begun == ["first"]
    submit("second")
    assert begun == ["first"]
    gate.set()
    wait_for(["first", "second"])
    submit("third")
    assert begun[:3] == ["first", "second", "third"]
    wait_for(["first", "second", "third"])
    submit("fourth", lost=True)
    with pytest.raises(PipelineError, match=r"rank 1 is gone: rank 0 lost its connection in fourth \(gone\)"):
        monitor.wait(lambda: "fourth" in ended, lambda: "the fourth")


def test_what_a_chain_can_carry() -> None:
    found = run_ranks(3, talk)
    assert [each["down"] for each in found] == [b"0", b"01", b"012"]
    assert [each["up"] for each in found] == [b"210", b"21", b"2"]
    assert [each["gather"] for each in found] == [[b"", b"1", b"22"], None, None]
    assert found[0]["bring"] == b"of the middle"
    for each in found:
        assert each["broadcast"] == [True] * 3
        assert each["largest"] == -1
        assert each["concatenate"] == [b"", b"1", b"22"]
        assert each["from_first"] == {"rank": 0}


def talk_in_replicas(order: str) -> dict[str, Any]:
    """Of six ranks in two replicas: what each of all hears."""
    with join_group(timeout_seconds=NEVER_SECONDS, num_replicas=2, order=order) as group:
        at, everyone, own = group.coordinates, group.everyone, str(group.rank).encode()
        clock = align_clocks(group.chain, group.replicas)
        assert clock.offset_seconds == 0.0, "ranks of one machine share their clock"
        assert (clock.error_seconds > 0) == (group.rank > 0)
        assert (group.chain.rank, group.replicas.rank) == (at.stage, at.replica)
        names = group.mesh.mesh_dim_names
        copies, total = group.replica_process_group(), torch.tensor(10**at.replica)
        dist.all_reduce(total, group=copies)
        in_replica = torch.tensor(group.rank)
        dist.all_reduce(in_replica, group=group.mesh.get_group("stage"))
        return {
            "down": everyone.down(lambda received: (received or b"") + own, "down"),
            "broadcast": everyone.broadcast(b"from the first" if group.rank == 0 else b"", "broadcast"),
            "largest": group.largest(group.rank),
            "concatenate": b"".join(everyone.concatenate(own, "all")),
            "gather": everyone.gather(own, "to the first"),
            "mesh": (names, int(total), int(in_replica), group.mesh.mesh.tolist()),
        }


@pytest.mark.parametrize("order", ORDERS)
def test_what_replicas_say_to_each_other(order: str) -> None:
    found = run_ranks(6, talk_in_replicas, order)
    grid = Grid(2, 3, order=order)
    rows = [grid.ranks_of_replica(first) for first in grid.ranks_of_stage(0)]
    in_order = "".join(str(rank) for row in rows for rank in row).encode()
    names = tuple(order.split("-"))
    mesh = [list(row) for row in (rows if names[0] == "replica" else zip(*rows))]
    for rank, each in enumerate(found):
        at = grid.coordinates_of(rank)
        on_the_way = [*grid.ranks_of_stage(0)[: at.replica], *rows[at.replica][: at.stage + 1]]
        assert each["down"] == "".join(map(str, on_the_way)).encode()
        assert each["broadcast"] == b"from the first"
        assert each["largest"] == 5
        assert each["concatenate"] == in_order
        assert each["gather"] == ([bytes([letter]) for letter in in_order] if rank == 0 else None)
        assert each["mesh"] == (names, 11, sum(rows[at.replica]), mesh)


def lost_in_a_replica() -> str:
    """The second rank of the second replica is gone before the others agree."""
    with join_group(timeout_seconds=NEVER_SECONDS, num_replicas=2) as group:
        if group.rank == 3:
            os._exit(1)
        with pytest.raises(PipelineError) as caught:
            group.largest(0)
        return str(caught.value)


def test_a_lost_rank_is_named_by_its_coordinates() -> None:
    outcomes = run_outcomes(4, lost_in_a_replica)
    assert outcomes[3].exit_code == 1
    for outcome in outcomes[:3]:
        assert "rank 3 (replica 1, place 1) is gone" in outcome.value, outcome


def given_meshes() -> list[str]:
    """Of four ranks: what is said to meshes that are none of a pipeline's; one of them all is."""
    names, said = ("replica", "stage"), []
    flat = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("stage",))
    wrong = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    wide = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=(*names, "tensor"))
    twisted = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names)
    plain = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for mesh in ("2 x 2", flat, wrong, wide, twisted):
        with pytest.raises(ValueError, match="mesh") as caught:
            join_group(timeout_seconds=NEVER_SECONDS, mesh=mesh)
        said.append(str(caught.value))
    for beside in ({"num_replicas": 4}, {"process_group": dist.group.WORLD}):
        with pytest.raises(ValueError, match="mesh") as caught:
            join_group(timeout_seconds=NEVER_SECONDS, mesh=plain, **beside)  # type: ignore[arg-type]
        said.append(str(caught.value))
    thin = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replica", "tensor"))
    for mesh, order in ((plain, "replica-stage"), (thin, "stage-replica")):
        with join_group(timeout_seconds=NEVER_SECONDS, mesh=mesh) as group:
            assert group.grid == Grid(2, 2, order=order)
            assert group.mesh is mesh
            assert dist.get_process_group_ranks(group.replica_process_group()) == list(
                group.grid.ranks_of_stage(group.rank)
            )
            assert group.largest(group.rank) == 3
    return said


def test_meshes_of_users() -> None:
    expected = [
        "mesh='2 x 2': give a DeviceMesh",
        r"mesh has the dimensions \['stage'\]: 'replica' and 'stage' are needed",
        r"mesh has the dimensions \['dp', 'pp'\]: 'replica' and 'stage' are needed",
        "mesh has 2 ranks along 'tensor': only 1 is supported so far",
        r"mesh has the ranks \[\[0, 2\], \[1, 3\]\], which do not count up",
        "num_replicas=4: the mesh has 2 along 'replica'; leave num_replicas out",
        "group and mesh were both given",
    ]
    for said in run_ranks(4, given_meshes):
        for line, pattern in zip(said, expected, strict=True):
            assert re.match(pattern, line), line
            assert "\n" not in line


def runs_ahead() -> int:
    """Of two ranks, the first sends without an answer; returns how many messages it held when the second began to take them."""
    with join_group(timeout_seconds=NEVER_SECONDS) as group:
        store, unsent = group.store, 0
        assert store is not None
        neighbour = group.chain._after
        if neighbour is not None:
            wait = group.monitor.wait

            def note(*given: Any) -> None:
                nonlocal unsent
                unsent = max(unsent, neighbour._num_given - neighbour._num_sent)
                if unsent == chains._MOST_UNSENT:
                    store.set("piled up", "")
                wait(*given)

            group.monitor.wait = note  # type: ignore[method-assign]
        else:
            store.get("piled up")
        for number in range(20):
            assert group.chain.broadcast(b"%d" % number, 0, "ahead") == b"%d" % number
        return unsent


def test_a_rank_that_runs_ahead_waits() -> None:
    assert run_ranks(2, runs_ahead) == [chains._MOST_UNSENT, 0]


def pairs_of_three() -> int:
    """Rank 0 makes a pipeline with rank 1, then one with rank 2, which has made none before."""
    pairs = [pair for pair in [dist.new_group([0, 1]), dist.new_group([0, 2])] if dist.get_rank(pair) >= 0]
    for pair in pairs:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        with Pipeline(layers, mean_square, num_microbatches=2, group=pair, timeout_seconds=NEVER_SECONDS) as pipeline:
            pipeline.step(*rows(4)[0])
    return len(pairs)


def test_groups_of_some_ranks_are_numbered_among_these_ranks() -> None:
    assert run_ranks(3, pairs_of_three) == [2, 1, 1]


class Odd(nn.Module):
    """Tensors of each kind that a state may hold; `number` makes those of each layer differ."""

    def __init__(self, number: int) -> None:
        super().__init__()
        values = torch.arange(60.0).reshape(3, 4, 5) + number
        self.short = nn.Parameter(values.bfloat16())
        self.scalar = nn.Parameter(torch.tensor(number + 0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(values.permute(2, 0, 1))
        self.gaps = nn.Parameter(values[:, ::2, 1:])
        self.spread = nn.Parameter(torch.full((1, 4), float(number)).expand(3, 4))
        self.register_buffer("large", torch.arange(5000) * number)
        self.register_buffer("mask", torch.tensor([True, False, True]))


class Nothing(nn.Module):
    """A layer whose state is a number."""

    def get_extra_state(self) -> int:
        return 3


def gathers_odd() -> None:
    copies._PIECE_BYTES = 3000
    model = nn.Sequential(*(Odd(number) for number in range(5)), nn.Sequential(nn.Tanh(), Nothing()))
    with Pipeline(list(model), num_microbatches=1, balance=[3, 2, 1], timeout_seconds=NEVER_SECONDS) as pipeline:
        for _ in range(2):
            found = pipeline.full_state_dict()
            assert (found is not None) == (pipeline.rank == 0)
            if found is not None:
                expected = model.state_dict()
                assert list(found) == list(expected)
                assert found.pop("5.1._extra_state") == 3
                assert_same_tensors(found, expected)
                for name, value in found.items():
                    assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape)


def test_the_whole_state_of_three_ranks() -> None:
    """In pieces, of which the largest tensor needs many, and the names more than a frame; the last rank has no tensors."""
    run_ranks(3, gathers_odd)


class FailsAlone(nn.Linear):
    """Cannot be made on the second rank."""

    def __init__(self) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        super().__init__(8, 8)


def makes_one_that_fails() -> None:
    Pipeline([FailsAlone] * 3, mean_square, timeout_seconds=NEVER_SECONDS)


def test_a_rank_that_cannot_make_its_part_is_named_by_all() -> None:
    outcomes = run_outcomes(3, makes_one_that_fails)
    for outcome in outcomes:
        assert outcome.error is not None
        wanted = "out of memory" if outcome.rank == 1 else "rank 1 failed: RuntimeError: out of memory"
        assert wanted in outcome.error, outcome.error


def makes_with_own_mistake() -> str:
    """Rank 1 is told nonsense: every rank says so, and a good pipeline works afterwards."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    with pytest.raises(ValueError, match=r"pipeline\.num_microbatches=0") as caught:
        Pipeline(layers, num_microbatches=1 - dist.get_rank(), timeout_seconds=NEVER_SECONDS)
    with Pipeline(layers, mean_square, num_microbatches=2, timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(*rows(4)[0])
    return str(caught.value)


def test_a_mistake_on_one_rank_is_raised_by_all() -> None:
    first, second = run_ranks(2, makes_with_own_mistake)
    assert first == second
