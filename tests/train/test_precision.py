"""`precision` and `model.compile`: the built-in models in each of them, over ranks, and runs that go on."""

from __future__ import annotations

import pathlib
import shutil
from dataclasses import replace
from typing import Any

import deepspeed_runs
import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import checked_config
from ranks import run_ranks
from rounding import rounding

from pipetrain.config.load import load_config
from pipetrain.config.records import RunConfig
from pipetrain.config.together import with_steps
from pipetrain.data.batch import Batch
from pipetrain.engine.engine import Engine, precision_of
from pipetrain.models.spec import make_spec, with_compiled_layers
from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import Part, RunState, tensors_of

CPU = torch.device("cpu")
VOCABULARY = 64
TINY = [
    "experiment=smoke",
    "model.hidden_size=16",
    "model.max_position_embeddings=32",
    "model.dropout=0.1",
    "data.global_batch_size=4",
    "pipeline.num_microbatches=2",
    "optim.warmup_steps=0",
]


def config_of(*options: str) -> RunConfig:
    return checked_config(*TINY, *options)


def engine_of(config: RunConfig) -> Engine:
    return deepspeed_runs.engine_of(config, VOCABULARY)


def batch(step: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(step))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def losses_of(engine: Engine, steps: range) -> list[float]:
    return [engine.step(step, batch(step), lambda *_: True).loss for step in steps]


# Each precision, each built-in model, and a run that goes on ------------------------------------------------------------

PRECISIONS = ("fp32", "bf16-true", "bf16-mixed")
BF16 = ("precision=bf16-true", "optim.learning_rate=1e-4")


def figures(config: RunConfig) -> tuple[list[float], float | None, set[str], set[str]]:
    """Losses of three steps, held-out loss, dtypes of weights and of what the optimizer holds."""
    engine = engine_of(config)
    losses = losses_of(engine, range(1, 4))
    heldout = engine.evaluate([batch(9)])
    weights = {str(weight.dtype) for _, weight in engine.model.named_parameters()}
    states = {str(value.dtype) for state in engine.optimizer.state.values() for value in state.values()}
    engine.close()
    return losses, heldout, weights, states


def train(config: RunConfig, folder: str, *ends: int, start: int = 0) -> list[float]:
    """Steps after `start`, from its snapshot, with a snapshot at each of `ends`."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine = engine_of(config)
    engine.start_at(start + 1)
    if start:
        Snapshot(path_of(pathlib.Path(folder), start)).restore(engine.model, engine.optimizer, rank, CPU)
    saver = Saver(pathlib.Path(folder), rank=rank, agree=largest, keep_last=9, say=print)
    losses: list[float] = []
    for end in ends:
        losses += losses_of(engine, range(start + len(losses) + 1, end + 1))
        saver.save(RunState(end, num_ranks, {}, {}), tensors_of(engine.model, engine.optimizer, CPU))
        saver.wait()
    engine.close()
    return losses


def largest(value: int) -> int:
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def on_a_rank(configs: dict[str, RunConfig], bf16: RunConfig, folder: str) -> tuple[dict[str, Any], list[float]]:
    return {name: figures(config) for name, config in configs.items()}, train(bf16, folder, 2, 4)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[float], pathlib.Path]:
    """What each rank found in each precision; the losses of a bfloat16 run of four steps, and its snapshots after 2 and 4."""
    folder = tmp_path_factory.mktemp("snapshots")
    configs = {
        f"{name} {precision}": config_of(f"model={name}", f"precision={precision}", "recompute.verify=every")
        for name in ("llama", "gpt2")
        for precision in PRECISIONS
    }
    outcomes = run_ranks(2, on_a_rank, configs, config_of(*BF16), str(folder))
    return [found for found, _ in outcomes], outcomes[0][1], folder


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_built_in_model_trains_in_each_precision(name: str, on_two_ranks: Any) -> None:
    for found in on_two_ranks[0]:
        whole, bf16, autocast = (found[f"{name} {precision}"] for precision in PRECISIONS)
        assert whole[2:] == autocast[2:] == ({"torch.float32"}, {"torch.float32"})
        assert bf16[2:] == ({"torch.bfloat16"}, {"torch.float32"})
        for other in (bf16, autocast):
            assert other[0] == pytest.approx(whole[0], rel=0.01)
            assert other[0] != whole[0]
            assert other[1] == pytest.approx(whole[1], rel=0.01)


def saved(folder: pathlib.Path, step: int) -> dict[str, torch.Tensor]:
    snapshot = Snapshot(path_of(folder, step))
    return {
        f"{part}/{name}": tensor
        for part in (Part.WEIGHTS, Part.OPTIMIZER)
        for name, tensor in snapshot.tensors(part).items()
    }


def test_masters_go_on_bit_for_bit_over_another_number_of_stages(on_two_ranks: Any, tmp_path: pathlib.Path) -> None:
    _, losses, whole = on_two_ranks
    shutil.copytree(path_of(whole, 2), path_of(tmp_path, 2))
    config = config_of(*BF16, "pipeline.stages_per_rank=3")
    assert train(config, str(tmp_path), 4, start=2) == losses[2:]
    ours, theirs = saved(tmp_path, 4), saved(whole, 4)
    assert any(name.endswith("/master") for name in ours)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].dtype != theirs[name].dtype or not ours[name].equal(theirs[name])] == []


def test_what_auto_is() -> None:
    assert precision_of("auto", CPU) == precision_of("fp32", CPU)
    assert precision_of("auto", torch.device("cuda")) == precision_of("bf16-mixed", CPU)


# Compiled layers ------------------------------------------------------------------------------------------------------


def losses_and_ops(backend: str | None) -> tuple[list[float], list[str], dict[str, torch.Tensor], int]:
    """Three steps over 3 stages on one rank in `overlap`, their last step's ops, the gradients, and how often something was compiled."""
    import pipetrain
    from pipetrain.models.loss import count_tokens, next_token_loss

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = load_config([*TINY, "model.num_hidden_layers=4"])
    spec = make_spec(replace(config.model, dropout=0.0), VOCABULARY)
    if backend is not None:
        spec = with_compiled_layers(spec, backend)
    layers = spec.build(0, spec.num_layers)
    with pipetrain.Pipeline(
        layers, next_token_loss, count_fn=count_tokens, num_stages=3, stages_per_rank=3, num_microbatches=4
    ) as pipeline:
        losses = [float(pipeline.step(*batch(step))) for step in range(3)]
        ops = sorted(str(event.op) for event in pipeline.report.events)
        gradients = {name: weight.grad.clone() for name, weight in pipeline.named_parameters()}
        losses.append(float(pipeline.evaluate(*batch(9))))
    return losses, ops, gradients, torch._dynamo.utils.counters["stats"]["unique_graphs"]


# Where warnings are errors, dynamo's look at an activation's .grad is one: it hides the warning and does not filter it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def assert_compiled_is_equal(backend: str, tolerance: float) -> None:
    plain, compiled = losses_and_ops(None), losses_and_ops(backend)
    assert compiled[0] == pytest.approx(plain[0], rel=tolerance)
    assert compiled[1] == plain[1]
    assert any("R" in op.split("_")[0] for op in compiled[1]), "nothing was recomputed"
    assert compiled[2].keys() == plain[2].keys()
    for name, gradient in compiled[2].items():
        torch.testing.assert_close(gradient, plain[2][name], rtol=tolerance, atol=tolerance * 0.1)  # of order 0.1
    assert plain[3] == 0
    assert 0 < compiled[3] <= 9, (
        "each of three kinds is compiled for training and for evaluation, however many layers there are"
    )


@pytest.mark.slow
def test_compiled_layers_are_recomputed_like_others() -> None:
    assert_compiled_is_equal("aot_eager", rounding(torch.float32, terms=VOCABULARY))  # the longest sum


@pytest.mark.slow
def test_layers_compiled_to_machine_code() -> None:
    assert_compiled_is_equal("inductor", 1e-4)  # more than an order of sums: it fuses, and has its own exp and tanh


def test_epochs_give_the_steps() -> None:
    config = config_of("steps=null", "epochs=1.5")
    found = with_steps(config, 10)
    assert (found.num_steps, found.epochs) == (4, None)  # 15 samples, 4 a step
    assert with_steps(config_of("steps=null", "epochs=0.01"), 10).num_steps == 1
    assert with_steps(config_of("steps=7"), 10).num_steps == 7
    assert with_steps(RunConfig(), 10).num_steps == RunConfig().num_steps == 200
