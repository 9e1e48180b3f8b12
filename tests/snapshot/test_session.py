"""Where a run starts and when it saves, on one rank."""

import dataclasses
import pathlib
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from saved import CPU, trained
from torch import nn

from pipetrain.config.records import DataConfig, RunConfig, SnapshotConfig
from pipetrain.plan.plan import Plan
from pipetrain.snapshot.folder import path_of, steps_in
from pipetrain.snapshot.session import Snapshots

PLAN = Plan((3,), (0,), 1)


@dataclass
class Alone:
    """One rank, which agrees with itself."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    def largest(self, value: int) -> int:
        return value

    def from_first(self, value: str) -> str:
        return value


def session(run_dir: pathlib.Path, config: RunConfig) -> Snapshots:
    return Snapshots(config, PLAN, run_dir, Alone())


def train(run_dir: pathlib.Path, config: RunConfig, seed: int = 1) -> nn.Module:
    """All steps of a run that changes nothing, so that each snapshot has the same weights."""
    model, optimizer = trained(seed)
    snapshots = session(run_dir, config)
    snapshots.attach(model, optimizer)
    for step in range(snapshots.first_step, config.steps + 1):
        snapshots.after_step(step, stopping=False)
    snapshots.finish()
    return model


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())


def test_snapshots_come_at_their_steps(tmp_path: pathlib.Path) -> None:
    train(tmp_path, RunConfig(steps=10, snapshot=SnapshotConfig(every_steps=3, keep_last=2)))
    assert steps_in(tmp_path / "snapshots") == [9, 6]


def test_without_every_steps_there_is_one_where_the_run_stops(tmp_path: pathlib.Path) -> None:
    snapshots = session(tmp_path, RunConfig())
    snapshots.attach(*trained())
    snapshots.after_step(4, stopping=False)
    assert snapshots.newest is None
    snapshots.after_step(5, stopping=True)
    assert snapshots.newest == path_of(tmp_path / "snapshots", 5)


def test_auto_starts_afresh_where_there_is_nothing(tmp_path: pathlib.Path) -> None:
    assert session(tmp_path, RunConfig(resume="auto")).first_step == 1


def test_auto_goes_on_and_other_learning_rates_are_allowed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(steps=4, snapshot=SnapshotConfig(every_steps=2))
    model = train(tmp_path, config)
    changed = dataclasses.replace(
        config, resume="auto", steps=6, optim=dataclasses.replace(config.optim, learning_rate=1e-4)
    )
    snapshots = session(tmp_path, changed)
    assert snapshots.first_step == 5
    other, optimizer = trained(2)
    snapshots.attach(other, optimizer)
    assert_equal(model, other)
    assert capsys.readouterr().err == f"pipetrain: going on from {path_of(tmp_path / 'snapshots', 4)}\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seed=1: the run of .* had 0, .*; set seed=0, or start a new run with init_from="),
        ({"data": DataConfig(batch_size=8)}, r"data\.batch_size=8: .* had 16"),
        ({"steps": 3}, r"steps=3: .* has 4 steps behind it; set steps to 4 or more"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: pathlib.Path, change: dict[str, object], message: str) -> None:
    config = RunConfig(steps=4, snapshot=SnapshotConfig(every_steps=2))
    train(tmp_path, config)
    with pytest.raises(ValueError, match=message):
        session(tmp_path, dataclasses.replace(config, resume=str(tmp_path), **change))


def test_init_from_takes_the_weights_and_nothing_else(tmp_path: pathlib.Path) -> None:
    model = train(tmp_path / "run", RunConfig(steps=2, snapshot=SnapshotConfig(every_steps=2)))
    (tmp_path / "done" / "weights").mkdir(parents=True)
    save_file(model.state_dict(), tmp_path / "done" / "weights" / "model.safetensors")
    for source in ("run", "run/snapshots/step-00000002", "done", "done/weights/model.safetensors"):
        other, optimizer = trained(2)
        before = [state["exp_avg"].clone() for state in optimizer.state.values()]
        snapshots = session(tmp_path / "new", RunConfig(init_from=str(tmp_path / source)))
        snapshots.attach(other, optimizer)
        assert snapshots.first_step == 1
        assert_equal(model, other)
        assert all(torch.equal(old, new["exp_avg"]) for old, new in zip(before, optimizer.state.values()))


def test_init_from_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    save_file({"0.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"init_from=.*model\.safetensors: these weights are of another model"):
        session(tmp_path, RunConfig(init_from=str(tmp_path / "model.safetensors"))).attach(*trained())
