"""Where a run starts and when it saves, on one rank."""

import dataclasses
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from saved import CPU, saver_of, state_of, trained
from torch import nn

from pipetrain.comm.coordinates import Coordinates
from pipetrain.config.records import DataConfig, RunConfig, SnapshotConfig
from pipetrain.plan.plan import Plan
from pipetrain.snapshot.files import path_of, steps_in
from pipetrain.snapshot.session import Snapshots, as_dict
from pipetrain.snapshot.state import tensors_of
from pipetrain.trainer.guard import Guard
from pipetrain.trainer.steps import TokensSeen

PLAN = Plan((3,), (0,), 1)


@dataclass
class Alone:
    """One rank, which agrees with itself."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    coordinates = Coordinates(0, 0, 0)

    def largest(self, value: int) -> int:
        return value

    def from_first(self, value: Any) -> Any:
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


def test_every_so_manieth_stays_for_good(tmp_path: pathlib.Path) -> None:
    """Multiples of every_steps x keep_every, beside the newest; a snapshot of a stop in between is none of them."""
    config = RunConfig(steps=19, snapshot=SnapshotConfig(every_steps=2, keep_last=2, keep_every=3))
    train(tmp_path, config)
    assert steps_in(tmp_path / "snapshots") == [18, 16, 12, 6]


@dataclass
class Counting:
    """Something that a run carries along."""

    count: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state.get("count", 0)


def test_what_a_run_carries_comes_back_with_a_resume_and_a_rollback(tmp_path: pathlib.Path) -> None:
    config = RunConfig(steps=9, snapshot=SnapshotConfig(every_steps=2))
    model, optimizer = trained(1)
    guard, snapshots = Counting(), session(tmp_path, config)
    snapshots.attach(model, optimizer, guard)
    assert snapshots.roll_back() is None
    for step in range(1, 6):
        guard.count = 10 * step
        snapshots.after_step(step, stopping=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    snapshots.before_update()
    with torch.no_grad():
        model[0].weight.zero_()
    state = snapshots.roll_back()
    assert state is not None
    assert (state.step, state.guard) == (4, {"count": 40})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = Counting()
    resumed = session(tmp_path, dataclasses.replace(config, resume="auto"))
    resumed.attach(*trained(2), other)
    assert other.count == 40
    elsewhere = session(tmp_path / "elsewhere", dataclasses.replace(config, resume=str(tmp_path)))
    elsewhere.attach(*trained(2), other)
    state = elsewhere.roll_back()  # it has none of its own: the one it started from
    assert state is not None
    assert state.step == 4


FORGED: dict[str, dict[str, Any]] = {
    "replicas": {"plan": {"num_replicas": [1]}},
    "a group of keys": {"config": {"data": 5}},
    "a phase": {"config": {"phases": [5]}},
    "losses": {"guard": {"losses": ["1"]}},
    "batches that were passed over": {"guard": {"passed_over": [[2, 1]]}},
    "tokens": {"tokens": {"all": "many"}},
}


@pytest.mark.parametrize("values", FORGED.values(), ids=FORGED)
def test_a_state_of_other_values_is_damaged(tmp_path: pathlib.Path, values: dict[str, Any]) -> None:
    """Whoever writes a snapshot also writes its manifest."""
    config = RunConfig(steps=9, resume="auto")
    known = {"config": as_dict(config), "plan": as_dict(PLAN), **values}
    if "config" in values:
        known["config"] = as_dict(config) | values["config"]
    saver = saver_of(tmp_path / "snapshots")
    saver.save(dataclasses.replace(state_of(4), **known), tensors_of(*trained(), CPU))
    saver.wait()

    def resume() -> None:
        session(tmp_path, config).attach(*trained(), Guard(config.guard), TokensSeen())

    with pytest.raises(
        ValueError, match=r"step-00000004/state\.json holds no state of a run \(.*\); name an older snapshot"
    ):
        resume()


def test_other_text_is_refused(tmp_path: pathlib.Path) -> None:
    config = RunConfig(steps=2, snapshot=SnapshotConfig(every_steps=2))

    def on(fingerprint: str | None, resume: str | None) -> Snapshots:
        return Snapshots(dataclasses.replace(config, resume=resume), PLAN, tmp_path, Alone(), data=fingerprint)

    first = on("a" * 64, None)
    first.attach(*trained())
    first.after_step(2, stopping=True)
    assert on("a" * 64, "auto").first_step == 3
    with pytest.raises(
        ValueError, match=r"the text is not that of .*step-00000002 \(its SHA-256 is bbbbbbbbbbbb\.\.\., it was"
    ):
        on("b" * 64, "auto")


def test_the_default_saves_every_ten_minutes_and_keeps_two(tmp_path: pathlib.Path) -> None:
    """Counted from the snapshot before, whyever that was made."""
    minutes = {"now": 0.0}
    snapshots = Snapshots(RunConfig(), PLAN, tmp_path, Alone(), clock=lambda: 60 * minutes["now"])
    snapshots.attach(*trained())
    asked = []
    for step, now in enumerate([5, 9.9, 10, 15, 20.1, 31, 40.9], start=1):
        minutes["now"] = now
        asked.append(snapshots.clock_asks())
        snapshots.after_step(step, stopping=False, by_clock=asked[-1])
    snapshots.finish()
    assert asked == [False, False, True, False, True, True, False]
    assert steps_in(tmp_path / "snapshots") == [6, 5]


def test_only_the_clock_of_rank_0_asks(tmp_path: pathlib.Path) -> None:
    late = iter([0.0, 1e6])
    assert not Snapshots(RunConfig(), PLAN, tmp_path, Alone(rank=1, size=2), clock=lambda: next(late)).clock_asks()
    none = dataclasses.replace(RunConfig(), snapshot=SnapshotConfig(every_minutes=None))
    late = iter([0.0, 1e6])
    assert not Snapshots(none, PLAN, tmp_path, Alone(), clock=lambda: next(late)).clock_asks()


def test_without_every_steps_there_is_one_where_the_run_stops(tmp_path: pathlib.Path) -> None:
    snapshots = session(tmp_path, RunConfig())
    snapshots.attach(*trained())
    snapshots.after_step(4, stopping=False)
    assert snapshots.newest is None
    snapshots.after_step(5, stopping=True)
    assert snapshots.newest == path_of(tmp_path / "snapshots", 5)


def test_auto_goes_on_and_other_learning_rates_are_allowed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(steps=4, snapshot=SnapshotConfig(every_steps=2))
    assert session(tmp_path, dataclasses.replace(config, resume="auto")).first_step == 1, "there is nothing yet"
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


SHORT = {"from": 2, "data": {"sequence_length": 128}}
PHASED = RunConfig(steps=4, snapshot=SnapshotConfig(every_steps=2), phases=({"from": 0}, SHORT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seed=1: the run of .* had 0, .*; set seed=0, or start a new run with init_from="),
        ({"data": DataConfig(global_batch_size=8)}, r"data\.global_batch_size=8: .* had 16"),
        ({"steps": 3}, r"steps=3: .* has 4 steps behind it; set steps to 4 or more"),
        ({"phases": ()}, r"phases: the first 4 steps of the run of .* had batches of data\.global_batch_size=16 data\.sequence_length=256 after 0 steps, "),
        ({"phases": ({"from": 0}, {**SHORT, "from": 3})}, r"let what is new begin with from=4 or later, or start"),
        ({"phases": ({"from": 0}, {"from": 2, "data": {"global_batch_size": 8}})}, r"here it is .*data\.global_batch_size=8 data\.sequence_length=256 after 2"),
    ],
)  # fmt: skip
def test_the_steps_behind_a_run_stay(tmp_path: pathlib.Path, change: dict[str, Any], message: str) -> None:
    train(tmp_path, PHASED)
    with pytest.raises(ValueError, match=message):
        session(tmp_path, dataclasses.replace(PHASED, resume=str(tmp_path), **change))


@pytest.mark.parametrize(
    "phases",
    [
        ({"from": 0, "recompute": {"mode": "inline"}}, SHORT),  # the policy may change
        ({"from": 0}, SHORT, {"from": 4, "data": {"global_batch_size": 8}}),  # and what is to come
        ({"from": 0, "pipeline": {"num_microbatches": 2}}, {"from": 1}, {**SHORT, "recompute": {"sets": 2}}),
    ],
)
def test_what_is_no_batch_of_steps_behind_may_change(tmp_path: pathlib.Path, phases: Any) -> None:
    train(tmp_path, PHASED)
    assert session(tmp_path, dataclasses.replace(PHASED, resume=str(tmp_path), steps=6, phases=phases)).first_step == 5


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


def test_init_from_reads_a_file_under_the_names_that_the_model_has_there(tmp_path: pathlib.Path) -> None:
    """A snapshot has the model's own names always, so nothing is translated there."""
    model = train(tmp_path / "run", RunConfig(steps=2, snapshot=SnapshotConfig(every_steps=2)))
    save_file({f"lm.{name}": value for name, value in model.state_dict().items()}, tmp_path / "lm.safetensors")
    for source in ("lm.safetensors", "run"):
        other, optimizer = trained(2)
        session(tmp_path / "new", RunConfig(init_from=str(tmp_path / source))).attach(
            other, optimizer, from_file=lambda tensors: {name[3:]: value for name, value in tensors.items()}
        )
        assert_equal(model, other)


def test_init_from_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    save_file({"0.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"init_from=.*model\.safetensors: these weights are of another model"):
        session(tmp_path, RunConfig(init_from=str(tmp_path / "model.safetensors"))).attach(*trained())
