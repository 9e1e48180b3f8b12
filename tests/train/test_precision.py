"""`precision` and `model.compile`: the built-in models in each of them, over ranks, and runs that go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed_runs
import pytest
import torch
from deepspeed_runs import checked_config
from ranks import run_ranks
from rounding import rounding

from pipetrain.config.load import load_config
from pipetrain.config.records import RunConfig
from pipetrain.config.together import with_steps
from pipetrain.data.batch import Batch
from pipetrain.engine.engine import Engine, precision_of
from pipetrain.models.spec import make_spec, with_compiled_layers

CPU = torch.device("cpu")
VOCABULARY = 64
TINY = [
    "experiment=smoke", "model.hidden_size=16", "model.max_position_embeddings=32", "model.dropout=0.1",
    "data.global_batch_size=4", "pipeline.num_microbatches=2", "optim.warmup_steps=0",
]  # fmt: skip


def config_of(*options: str) -> RunConfig:
    return checked_config(*TINY, *options)


def engine_of(config: RunConfig) -> Engine:
    return deepspeed_runs.engine_of(config, VOCABULARY)


def batch(step: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(step))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def losses_of(engine: Engine, steps: range) -> list[float]:
    return [engine.step(step, batch(step), lambda *_: True).loss for step in steps]


# Each precision, each built-in model ------------------------------------------------------------


def figures(config: RunConfig) -> tuple[list[float], float | None, set[str], set[str]]:
    """Losses of three steps, held-out loss, dtypes of weights and of what the optimizer holds."""
    engine = engine_of(config)
    losses = losses_of(engine, range(1, 4))
    heldout = engine.evaluate([batch(9)])
    weights = {str(weight.dtype) for _, weight in engine.model.named_parameters()}
    states = {str(value.dtype) for state in engine.optimizer.state.values() for value in state.values()}
    engine.close()
    return losses, heldout, weights, states


def on_a_rank(configs: dict[str, RunConfig]) -> dict[str, Any]:
    return {name: figures(config) for name, config in configs.items()}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_built_in_model_trains_in_each_precision(name: str) -> None:
    configs = {
        precision: config_of(f"model={name}", f"precision={precision}", "recompute.verify=every")
        for precision in ("fp32", "bf16-true", "bf16-mixed")
    }
    for found in run_ranks(2, on_a_rank, configs):
        whole, bf16, autocast = found.values()
        assert whole[2:] == autocast[2:] == ({"torch.float32"}, {"torch.float32"})
        assert bf16[2:] == ({"torch.bfloat16"}, {"torch.float32"})
        for other in (bf16, autocast):
            assert other[0] == pytest.approx(whole[0], rel=0.01)
            assert other[0] != whole[0]
            assert other[1] == pytest.approx(whole[1], rel=0.01)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tolerance"),
    # the longest sum; more than an order of sums: it fuses, and has its own exp and tanh
    [("aot_eager", rounding(torch.float32, terms=VOCABULARY)), ("inductor", 1e-4)],
)
def test_compiled_layers_are_recomputed_like_others(backend: str, tolerance: float) -> None:
    plain, compiled = losses_and_ops(None), losses_and_ops(backend)
    assert compiled[0] == pytest.approx(plain[0], rel=tolerance)
    assert compiled[1] == plain[1]
    assert any("R" in op.split("_")[0] for op in compiled[1]), "nothing was recomputed"
    assert compiled[2].keys() == plain[2].keys()
    for name, gradient in compiled[2].items():
        torch.testing.assert_close(gradient, plain[2][name], rtol=tolerance, atol=tolerance * 0.1)  # of order 0.1
    assert plain[3] == 0
    # Each of three kinds is compiled for training and for evaluation, however many layers there are.
    assert 0 < compiled[3] <= 9


def test_epochs_give_the_steps() -> None:
    config = config_of("steps=null", "epochs=1.5")
    found = with_steps(config, 10)
    assert (found.num_steps, found.epochs) == (4, None)  # 15 samples, 4 a step
    assert with_steps(config_of("steps=null", "epochs=0.01"), 10).num_steps == 1
    assert with_steps(config_of("steps=7"), 10).num_steps == 7
    assert with_steps(RunConfig(), 10).num_steps == RunConfig().num_steps == 200
