"""Where ranks stand, what they hold and what they send: computed beside what torch, the schedule and an optimizer say."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import pytest
from ranks import run_ranks

from pipetrain.cli.main import main
from pipetrain.comm.coordinates import Grid
from pipetrain.config.load import load_config
from pipetrain.config.records import ModelConfig, OptimConfig
from pipetrain.data.tokenizer import ByteTokenizer
from pipetrain.models.size import shapes_per_layer, transformer_size
from pipetrain.models.spec import make_spec
from pipetrain.monitor.draw.terminal import MeshShown, draw_mesh
from pipetrain.plan.mesh import (
    ACTIVATIONS,
    GRADIENTS,
    REDUCE,
    SHARED,
    UPDATES,
    Holds,
    Mesh,
    NumberBytes,
    Sent,
    mesh_of,
    rank_places,
    shares_of,
)
from pipetrain.plan.plan import make_plan
from pipetrain.schedule.make import make_schedule
from pipetrain.trainer.prepare import predict, predict_mesh

FLOAT32 = NumberBytes(weight=4, gradient=4, optimizer=8, boundary=4)
PARAMETERS = (100, 40, 40, 60)
MODEL = Holds(parameters=PARAMETERS, width=10, tokens=tuple(range(1, 9)), number_bytes=FLOAT32)


def two_by_two(order: str = "replica-stage", *, ranks_per_node: int = 2, model: Holds = MODEL, zero: int = 0) -> Mesh:
    """4 layers in 2 stages, 4 microbatches a replica; microbatch i has i + 1 tokens."""
    tied = [(0, 1)] if model.tied else []
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=4, num_replicas=2, tied=tied)
    plan = make_plan(4, num_stages=2, num_microbatches=4, num_replicas=2)
    grid = Grid(2, 2, order=order)
    return mesh_of(plan, schedule, grid, ranks_per_node=ranks_per_node, model=model, zero=zero)


def test_who_is_where() -> None:
    plan = make_plan(6, num_stages=6, stages_per_rank=3, num_replicas=2)
    near, far = (rank_places(plan, Grid(2, 2, order=order)) for order in ("replica-stage", "stage-replica"))
    assert [(one.replica, one.place, one.stages) for one in near] == [
        (0, 0, (0, 2, 4)), (0, 1, (1, 3, 5)), (1, 0, (0, 2, 4)), (1, 1, (1, 3, 5)),
    ]  # fmt: skip
    assert [(one.replica, one.place) for one in far] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_what_a_rank_holds() -> None:
    mesh = two_by_two()
    assert [rank.parameters for rank in mesh.ranks] == [140, 100, 140, 100]
    first = mesh.ranks[2]
    assert (first.weight_bytes, first.gradient_bytes, first.optimizer_bytes) == (560, 560, 1120)


def test_what_a_rank_sends() -> None:
    """Replica 1 has microbatches 4 to 7 of the step, of 5 to 8 tokens of 10 numbers of 4 bytes."""
    mesh = two_by_two()
    assert mesh.ranks[0].sent == {ACTIVATIONS: Sent(4, 10 * 40), REDUCE: Sent(1, 560)}
    assert mesh.ranks[2].sent == {ACTIVATIONS: Sent(4, 26 * 40), REDUCE: Sent(1, 560)}
    assert mesh.ranks[3].sent == {GRADIENTS: Sent(4, 26 * 40), REDUCE: Sent(1, 400)}
    assert [(edge.sender, edge.receiver) for edge in mesh.edges] == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert [group.ranks for group in mesh.groups] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("order", "edges_cross", "groups_cross"), [("replica-stage", False, True), ("stage-replica", True, False)]
)
def test_what_crosses_nodes_is_a_matter_of_the_order(order: str, edges_cross: bool, groups_cross: bool) -> None:
    mesh = two_by_two(order)
    assert {edge.crosses_nodes for edge in mesh.edges} == {edges_cross}
    assert {group.crosses_nodes for group in mesh.groups} == {groups_cross}
    assert [rank.node for rank in mesh.ranks] == [0, 0, 1, 1]


def test_a_shared_parameter_is_added_up_once_and_by_itself() -> None:
    """Layers 0 and 3 share the smaller one's parameters: 60."""
    model = Holds(parameters=PARAMETERS, tied=((0, 3),), number_bytes=FLOAT32)
    mesh = two_by_two(model=model)
    assert mesh.ranks[0].sent[SHARED] == Sent(1, 60 * 4)
    assert mesh.ranks[0].sent[REDUCE] == Sent(1, 80 * 4)
    assert mesh.ranks[1].sent[REDUCE] == Sent(1, 40 * 4)
    together = make_plan(4, num_stages=1, num_microbatches=4, num_replicas=2)
    schedule = make_schedule("gpipe", num_stages=1, num_microbatches=4, num_replicas=2)
    alone = mesh_of(together, schedule, Grid(2, 1), ranks_per_node=1, model=model)
    assert alone.ranks[0].parameters == sum(PARAMETERS) - 60


def test_what_is_not_known_is_none() -> None:
    for rank in two_by_two(model=Holds(), zero=1).ranks:
        assert (rank.parameters, rank.optimizer_bytes) == (None, None)
        assert rank.sent[REDUCE] == Sent(1, None)
        assert rank.sent[UPDATES] == Sent(None, None)


def test_with_zero_an_even_share_where_sizes_are_not_known() -> None:
    assert [rank.optimizer_bytes for rank in two_by_two(zero=1).ranks] == [560, 400, 560, 400]


def test_the_largest_parameter_bounds_the_balance() -> None:
    assert shares_of([(10, 10), (3, 10), (2, 10), (5,)], 2) == [[100], [30, 20, 5]]
    assert shares_of([(4,), (2, 3)], 3) == [[6], [4], []]


SMALL = ModelConfig(
    num_hidden_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=24, max_position_embeddings=12
)
GROUPED = replace(SMALL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)
MODELS = {"llama": SMALL, "gpt2": replace(SMALL, name="gpt2", num_hidden_layers=1), "grouped": GROUPED}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_shapes_are_those_of_the_model(config: ModelConfig) -> None:
    layers = make_spec(config, 24).build(0, config.num_hidden_layers + 2)
    found = [sorted(tuple(weight.shape) for weight in layer.parameters()) for layer in layers]
    assert found == [sorted(shapes) for shapes in shapes_per_layer(config, 24)]
    assert [sum(weight.numel() for weight in layer.parameters()) for layer in layers] == list(
        transformer_size(config, 24, 1).parameters_per_layer
    )


def bytes_of_state(zero: bool) -> int:
    """What AdamW keeps on this rank, without its counts of steps."""
    import torch
    import torch.distributed as dist

    from pipetrain.optim.optimizer import make_optimizer

    layers = make_spec(SMALL, 24).build(0, 4)
    parameters = [weight for layer in layers for weight in layer.parameters()]
    optimizer = make_optimizer(OptimConfig(), parameters, dist.group.WORLD if zero else None)
    for weight in parameters:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    return sum(value.nbytes for value in kept)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_optimizer_bytes_are_those_that_an_optimizer_has(zero: int) -> None:
    words = (
        f"pipeline.num_stages=1 parallel.num_replicas=3 parallel.zero_stage={zero} model.num_hidden_layers=2 "
        "model.hidden_size=16 model.num_attention_heads=2 model.vocab_size=24 data.global_batch_size=24"
    )
    config = load_config(words.split())
    mesh, unknown = predict_mesh(config, predict(config).schedule)
    assert unknown == ""
    assert [rank.optimizer_bytes for rank in mesh.ranks] == run_ranks(3, bytes_of_state, bool(zero))


# What `show` makes of it --------------------------------------------------------------------------------------------


def test_the_grid_as_text() -> None:
    lines = draw_mesh(MeshShown(two_by_two())).splitlines()
    assert lines[0] == "2 replicas x 2 ranks = 4 ranks on 2 nodes (parallel.order=replica-stage)"
    assert lines[2:6] == [
        "           stage 0             stage 1",
        "replica 0  rank 0 (node 0) --> rank 1 (node 0)",
        "             ||                  ||",
        "replica 1  rank 2 (node 1) --> rank 3 (node 1)",
    ]
    assert lines[-1] == "Between nodes: no messages from stage to stage; 2 of 2 groups add up gradients, 960 B in all."
    far = draw_mesh(MeshShown(two_by_two("stage-replica"))).splitlines()
    assert far[3:6] == [
        "replica 0  rank 0 (node 0) ==> rank 2 (node 1)",
        "             |                   |",
        "replica 1  rank 1 (node 0) ==> rank 3 (node 1)",
    ]
    assert "16 messages from stage to stage, 2.88 kB in all; 0 of 2 groups add up gradients." in far[-1]


def test_one_replica_adds_up_nothing() -> None:
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=4)
    mesh = mesh_of(make_plan(4, num_stages=2, num_microbatches=4), schedule, Grid(1, 2), ranks_per_node=2, model=MODEL)
    text = draw_mesh(MeshShown(mesh))
    assert "replica 0  rank 0  --> rank 1" in text
    assert "reduce" not in text
    assert "Between nodes" not in text


QUICK = ("pipeline.num_stages=2", "parallel.num_replicas=2", "pipeline.num_microbatches=4", "data.global_batch_size=10")


def test_the_command_draws_it(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mesh.html"
    assert main(["show", "--mesh", *QUICK, "cluster.ranks_per_node=2", f"--out={out}", f"--json={tmp_path / 'x'}"]) == 0
    text = capsys.readouterr().out
    assert "replica 1  rank 2 (node 1) --> rank 3 (node 1)" in text
    assert "rank 0 F0" in text, "the schedule, too"
    assert "2 replicas x 2 ranks" in out.read_text()
    assert "<th>reduce, sent</th>" in out.read_text()
    mesh = json.loads((tmp_path / "x").read_text())["mesh"]
    # 10 samples of 256 tokens as 8 slices: two of 2, six of 1; hidden_size 64 in float32.
    assert [mesh["ranks"][rank]["sent"]["activations"]["num_bytes"] for rank in (0, 2)] == [
        samples * 256 * 64 * 4 for samples in (6, 4)
    ]


def test_formats_without_a_mesh_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--mesh", *QUICK, f"--out={tmp_path / 'm.svg'}"]) == 2
    assert ".svg holds no mesh; with --mesh use .html or .json" in capsys.readouterr().err


def test_what_the_model_does_not_make_is_drawn_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """16 stages of a model of ten layers: the ranks stand where they would."""
    assert main(["show", "--mesh", "pipeline.num_stages=16", "parallel.num_replicas=2"]) == 0
    text = capsys.readouterr().out
    assert "rank 31" in text
    assert "What ranks hold and send is not all known: " in text
    assert "10 layers" in text


def test_tokens_of_bytes_are_as_many_as_the_tokenizer_has() -> None:
    config = load_config(QUICK)
    mesh, _ = predict_mesh(config, predict(config).schedule)
    model = config.model
    assert sum(rank.parameters or 0 for rank in mesh.ranks) == 2 * sum(
        list(transformer_size(model, ByteTokenizer.vocabulary_size, 1).parameters_per_layer)
    )
