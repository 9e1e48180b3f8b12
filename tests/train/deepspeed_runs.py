"""What ranks do in the tests of the DeepSpeed engine: some steps, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipetrain.config.load import load_config
from pipetrain.config.records import RunConfig
from pipetrain.config.together import check_run
from pipetrain.data.batch import Batch
from pipetrain.data.dataset import make_data
from pipetrain.engine.available import check_engine
from pipetrain.engine.engine import Engine, make_engine
from pipetrain.models.spec import make_spec
from pipetrain.snapshot.state import Part, Tensors, restore_optimizer, tensors_of
from pipetrain.trainer.prepare import prepare

VOCABULARY = 32
CPU = torch.device("cpu")
TINY = [
    "experiment=smoke",
    "pipeline=1f1b",
    "steps=20",
    "model.num_hidden_layers=3",
    "pipeline.balance=[1,4]",
    "data.sequence_length=16",
    "optim.warmup_steps=2",
]


@dataclass(frozen=True)
class Run:
    """Losses and gradient norms step by step, the held-out loss, and (rank 0) the weights at the end."""

    losses: list[float]
    norms: list[float | None]
    heldout: float | None
    weights: Tensors | None


def accept(step: int, loss: float, norm: float | None) -> bool:
    return True


def checked_config(*options: str) -> RunConfig:
    config = load_config(options)
    check_run(config)
    check_engine(config)
    return config


def config_of(*options: str) -> RunConfig:
    return checked_config(*TINY, *options)


def engine_of(config: RunConfig, vocabulary_size: int = VOCABULARY) -> Engine:
    run = prepare(config, dist.get_world_size() if dist.is_initialized() else 1)
    return make_engine(
        config,
        make_spec(config.model, vocabulary_size),
        run.plan,
        run.schedule,
        device=CPU,
        on_event=lambda event: None,
    )


def batch_of(config: RunConfig, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        VOCABULARY, (config.data.global_batch_size, config.data.sequence_length + 1), generator=generator
    )
    # every position is worth the same, so that there is something to learn: a token and the one after are related
    tokens = (tokens.cumsum(1) // 4) % VOCABULARY
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def heldout_of(config: RunConfig) -> list[Batch]:
    """A whole batch and one that is no multiple of a microbatch."""
    inputs, targets = batch_of(config, 1000)
    return [Batch(inputs, targets), Batch(inputs[:3], targets[:3])]


def train(config: RunConfig) -> Run:
    """All steps on random tokens."""
    engine = engine_of(config)
    results = [engine.step(step, batch_of(config, step), accept) for step in range(1, config.steps + 1)]
    run = Run(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        engine.evaluate(heldout_of(config)),
        engine.weights(),
    )
    engine.close()
    return run


def train_all(configs: list[RunConfig]) -> list[Run]:
    return [train(config) for config in configs]


def train_on_data(configs: list[RunConfig]) -> list[Run]:
    """All steps on the data of the configurations, without an evaluation."""
    runs = []
    for config in configs:
        data = make_data(config.data, config.seed)
        engine = engine_of(config, data.vocabulary_size)
        results = [engine.step(step, data.train.batch(step - 1), accept) for step in range(1, config.steps + 1)]
        runs.append(Run([r.loss for r in results], [r.grad_norm for r in results], None, None))
        engine.close()
    return runs


def snapshot_of(engine: Engine) -> dict[Part, Tensors]:
    parts = tensors_of(engine.model, engine.optimizer, CPU)
    return {part: {name: value.clone() for name, value in tensors.items()} for part, tensors in parts.items()}


def interrupted(before: RunConfig, after: RunConfig, at: int) -> tuple[list[float], list[float], list[str]]:
    """Losses of `before` past step `at`, those of a new engine of `after` that goes on from there, and the names of the state."""
    engine = engine_of(before)
    for step in range(1, at + 1):
        engine.step(step, batch_of(before, step), accept)
    saved = snapshot_of(engine)
    steps = range(at + 1, before.steps + 1)
    expected = [engine.step(step, batch_of(before, step), accept).loss for step in steps]
    engine.close()
    engine = engine_of(after)
    engine.model.load_state_dict(saved[Part.WEIGHTS])
    restore_optimizer(engine.model, engine.optimizer, saved[Part.OPTIMIZER])
    engine.start_at(at + 1)
    losses = [engine.step(step, batch_of(after, step), accept).loss for step in steps]
    engine.close()
    return expected, losses, sorted(saved[Part.OPTIMIZER])


def interrupted_all(
    cases: list[tuple[RunConfig, RunConfig]], at: int
) -> list[tuple[list[float], list[float], list[str]]]:
    return [interrupted(before, after, at) for before, after in cases]
