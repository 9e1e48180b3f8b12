"""What the loop of one replica knows of the others, and what is said where their number changes."""

import json

import pytest
import torch
from ranks import run_ranks
from rounding import rounding

from pipetrain.comm.coordinates import Coordinates
from pipetrain.config.records import ModelConfig, RunConfig
from pipetrain.data.batch import Batch
from pipetrain.engine.engine import NativeEngine, precision_of
from pipetrain.models.loss import IGNORED
from pipetrain.models.spec import make_spec
from pipetrain.plan.plan import Plan, make_plan
from pipetrain.schedule.make import make_schedule
from pipetrain.snapshot.start import told_of_replicas
from pipetrain.snapshot.state import RunState
from pipetrain.train import main
from pipetrain.trainer.steps import Tokens, are_compared, of_all_replicas, shard_of, share_of

CPU = torch.device("cpu")
LARGER = (
    "the batches stay as they are, and a microbatch has up to 8 samples, it had 2; where memory is short, set "
    "pipeline.num_microbatches=16"
)


class Others:
    """A chain on which the other replicas have the same as this one."""

    def concatenate(self, own: bytes, what: str) -> list[bytes]:
        assert what
        return [own] * 3


def plan_of(num_replicas: int) -> Plan:
    return Plan((1, 1), (0, 1), 2, num_replicas)


def test_tokens_are_those_of_all_replicas() -> None:
    assert of_all_replicas(Tokens(64, 50), Others()) == Tokens(192, 150)  # type: ignore[arg-type]


def test_each_takes_its_share_and_the_first_writes_the_weights() -> None:
    first, last = share_of(plan_of(3), 0), share_of(plan_of(3), 2)
    assert first is not None
    assert last is not None
    assert (first.rows_of(12), last.rows_of(12)) == (slice(0, 4), slice(8, 12))
    assert share_of(plan_of(1), 0) is None
    writes, leaves_it = (shard_of(plan_of(3), Coordinates(replica, 1, 0)) for replica in (0, 2))
    assert (writes.number, writes.count, leaves_it.number) == (1, 2, None)


@pytest.mark.parametrize(
    ("every", "num_replicas", "compared"),
    [(4, 3, [4, 5, 8]), (1, 3, [3, 4, 5, 6, 7, 8]), (None, 3, []), (4, 1, [])],
)
def test_replicas_are_compared_in_time_and_before_each_snapshot(
    every: int | None, num_replicas: int, compared: list[int]
) -> None:
    plan = plan_of(num_replicas)
    assert [step for step in range(3, 9) if are_compared(plan, every, step, saving=step == 5)] == compared


@pytest.mark.parametrize(
    ("was", "is_now", "said"),
    [
        ((2, 4), (2, 4), []),
        ((2, 4), (2, 2), []),  # the user's own choice of microbatches
        ((2, 4), (4, 4), ["4 replicas, the run had 2: the batches stay as they are"]),
        ((4, 4), (2, 8), ["2 replicas, the run had 4: the batches stay as they are"]),
        (
            (4, 4),
            (1, 4),
            [f"1 replica, the run had 4: {LARGER}"],
        ),
    ],
)
def test_another_number_of_replicas_is_told(was: tuple[int, int], is_now: tuple[int, int], said: list[str]) -> None:
    before, now = (
        {"data": {"global_batch_size": 32}, "pipeline": {"num_microbatches": num}, "phases": ()}
        for _, num in (was, is_now)
    )
    state = RunState(7, 8, before, {"num_replicas": was[0]})
    assert list(told_of_replicas(state, is_now[0], now)) == said


def test_microbatches_are_those_of_the_phase_that_comes() -> None:
    phases = [{"from": 0, "data": {"global_batch_size": 64}}, {"from": 7, "pipeline": {"num_microbatches": 1}}]
    config = {"data": {"global_batch_size": 32}, "pipeline": {"num_microbatches": 4}, "phases": phases}
    told = [list(told_of_replicas(RunState(step, 8, config, {"num_replicas": 4}), 1, config)) for step in (6, 7)]
    assert [text.split("microbatch has ")[1] for (text,) in told] == [
        "up to 16 samples, it had 4; where memory is short, set pipeline.num_microbatches=16",
        "up to 32 samples, it had 8; where memory is short, set pipeline.num_microbatches=4",
    ]


def test_ranks_that_make_no_replicas_are_refused_before_they_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens at that address: who waited for the others would wait for long."""
    variables = {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["experiment=smoke", "parallel.num_replicas=2", "pipeline.num_stages=2"]) == 2
    assert capsys.readouterr().err == (
        "pipetrain: 6 ranks are not parallel.num_replicas=2 x 2 ranks of one replica (pipeline.num_stages=2) = 4: start 4 ranks, or "
        "set parallel.num_replicas=3\n"
    )


def heldout(num_replicas: int) -> tuple[float | None, float | None]:
    """The loss over batches of several rows, and over one with fewer rows than replicas; a replica may have none that count."""
    spec = make_spec(ModelConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2), 32)
    engine = NativeEngine(
        RunConfig(),
        spec,
        make_plan(spec.num_layers, num_ranks=1, num_microbatches=2, num_replicas=num_replicas),
        make_schedule("gpipe", num_stages=1, num_microbatches=2, num_replicas=num_replicas),
        device=CPU,
        precision=precision_of("fp32", CPU),
    )
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows in (5, 3, 1):
        tokens = torch.randint(32, (rows, 9), generator=generator)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:].clone()))
    batches[0].targets[3:] = IGNORED
    losses = engine.evaluate(batches), engine.evaluate(batches[2:])
    engine.close()
    return losses


def test_an_evaluation_is_shared_out_and_each_token_counts_once() -> None:
    alone = heldout(1)
    ranks = run_ranks(3, heldout, 3)
    assert all(json.dumps(losses) == json.dumps(ranks[0]) for losses in ranks)
    # The mean over 9 rows of 8 tokens.
    assert ranks[0] == pytest.approx(alone, rel=rounding(torch.float32, terms=9 * 8))
