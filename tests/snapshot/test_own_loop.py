"""A training loop of one's own saves and goes on, on any number of stages, as if it had never stopped."""

from __future__ import annotations

import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import PATIENCE_SECONDS, run_ranks
from saved import CPU, saver_of, state_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

import pipetrain
from pipetrain import Pipeline
from pipetrain.config.records import RunConfig
from pipetrain.snapshot import saver as saver_module
from pipetrain.snapshot.files import path_of, steps_in
from pipetrain.snapshot.session import Snapshots
from pipetrain.snapshot.state import Tensors, tensors_of

SAVED_AT, MORE = 3, 10
EXTRA = {"best": 0.1 + 0.2, "names": ["a", "ü"], "none": None, "nested": {"flag": True, "big": 2**70}}
Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor], Any]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.3)),
        nn.Linear(16, 4),
    ]


def loop_of(pipeline: Pipeline) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    """Matrices and vectors have options of their own, and the rate changes after the save and again later."""
    matrices = [one for one in pipeline.parameters() if one.dim() > 1]
    vectors = [one for one in pipeline.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.02)
    return optimizer, lr_scheduler.MultiStepLR(optimizer, [2, 5, 9], gamma=0.5)


def step(pipeline: Pipeline, optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> float:
    generator = torch.Generator().manual_seed(pipeline.step_index)
    inputs = torch.randn(16, 8, generator=generator)
    loss = pipeline.step(inputs, inputs[:, :4].argmax(1))
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(loss)


def result_of(pipeline: Pipeline, optimizer: torch.optim.Optimizer, losses: list[float], extra: Any) -> Result:
    moments = {
        f"{name}/{key}": value
        for name, parameter in pipeline.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    rate = optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["weight_decay"]
    return losses, pipeline.state_dict(), moments, [extra, rate, pipeline.step_index, pipeline.seed, random.random()]


def saves(folder: str) -> Result:
    """Saves after some steps, and goes on with more while that is written."""
    with Pipeline(layers(), nn.CrossEntropyLoss(), num_microbatches=4, seed=7) as pipeline:
        random.seed(5 + pipeline.rank)
        optimizer, scheduler = loop_of(pipeline)
        assert pipetrain.load(folder, pipeline, optimizer, scheduler=scheduler) is None
        for _ in range(SAVED_AT):
            step(pipeline, optimizer, scheduler)
        pipetrain.save(folder, pipeline, optimizer, scheduler=scheduler, extra=EXTRA)
        losses = [step(pipeline, optimizer, scheduler) for _ in range(MORE)]
        return result_of(pipeline, optimizer, losses, EXTRA)


def loads(folder: str, options: dict[str, Any]) -> Result:
    """Another model, seed and rate, all of which come from the snapshot."""
    with Pipeline(layers(), nn.CrossEntropyLoss(), num_microbatches=4, seed=1, **options) as pipeline:
        optimizer, scheduler = loop_of(pipeline)
        step(pipeline, optimizer, scheduler)
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        extra = pipetrain.load(folder, pipeline, optimizer, scheduler=scheduler)
        losses = [step(pipeline, optimizer, scheduler) for _ in range(MORE)]
        return result_of(pipeline, optimizer, losses, extra)


def whole(ranks: list[Result]) -> Result:
    """The tensors of all ranks; losses and the rest are the same on each, but for what is drawn: that of rank 0."""
    losses, _, _, rest = ranks[0]
    assert all(one[0] == losses and one[3][:-1] == rest[:-1] for one in ranks)
    weights, moments = ({name: t for one in ranks for name, t in one[part].items()} for part in (1, 2))  # type: ignore[union-attr]
    return losses, weights, moments, rest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Result]]:
    """The folder of a loop on two stages, and how each rank went on."""
    folder = str(tmp_path_factory.mktemp("loop") / "saved")
    return folder, run_ranks(2, saves, folder)


INTERLEAVED = {"schedule": "interleaved", "stages_per_rank": 2, "recompute": "early"}


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {"recompute": "never"}),
        (2, {}),
        (2, INTERLEAVED),
        (3, {"schedule": "1f1b", "recompute": "inline", "balance": [1, 2, 1]}),
    ],
)
def test_a_loop_goes_on_as_if_it_had_not_stopped(
    saved: tuple[str, list[Result]], num_ranks: int, options: dict[str, Any]
) -> None:
    """Whatever the split, the schedule and the mode; and on the same ranks each draws what it would have drawn."""
    folder, undisturbed = saved
    losses, weights, moments, rest = whole(undisturbed)
    assert steps_in(pathlib.Path(folder)) == [SAVED_AT]
    ranks = run_ranks(num_ranks, loads, folder, options)
    found = whole(ranks)
    assert num_ranks != 2 or [one[3][-1] for one in ranks] == [one[3][-1] for one in undisturbed]
    assert found[0] == losses
    assert found[3] == rest
    for ours, theirs in ((found[1], weights), (found[2], moments)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def on_replicas(folder: str, again: str) -> Result:
    """Two of two ranks with two stages each load, and save at once."""
    with Pipeline(layers(), nn.CrossEntropyLoss(), num_microbatches=2, num_replicas=2, **INTERLEAVED) as pipeline:
        optimizer, scheduler = loop_of(pipeline)
        extra = pipetrain.load(folder, pipeline, optimizer, scheduler=scheduler)
        pipetrain.save(again, pipeline, optimizer, scheduler=scheduler, extra=extra)
        return result_of(pipeline, optimizer, [], extra)


def test_replicas_load_and_what_they_save_goes_on_without_them(
    saved: tuple[str, list[Result]], tmp_path: pathlib.Path
) -> None:
    folder, (losses, weights, *_) = saved[0], whole(saved[1])
    run_ranks(4, on_replicas, folder, str(tmp_path))
    found = whole(run_ranks(1, loads, str(tmp_path), {}))
    assert found[0] == losses
    assert all(torch.equal(value, weights[name]) for name, value in found[1].items())


# On one rank -----------------------------------------------------------------------------------------------------------


class Loop:
    """A pipeline of one rank and its optimizer."""

    def __init__(self) -> None:
        self.pipeline = Pipeline(layers(), nn.CrossEntropyLoss(), num_microbatches=2)
        self.optimizer, self.scheduler = loop_of(self.pipeline)
        step(self.pipeline, self.optimizer, self.scheduler)

    def save(self, folder: pathlib.Path, **more: Any) -> None:
        pipetrain.save(folder, self.pipeline, self.optimizer, **more)

    def load(self, folder: pathlib.Path, **more: Any) -> Any:
        return pipetrain.load(folder, self.pipeline, self.optimizer, **more)

    def weight(self) -> Tensor:
        return self.pipeline.state_dict()["3.weight"].clone()


@pytest.fixture
def loop() -> Any:
    made = Loop()
    yield made
    made.pipeline.close()


def test_a_save_that_was_cut_anywhere_is_never_taken_for_a_whole_one(
    loop: Loop, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.save(tmp_path / "saved")
    older = loop.weight()
    step(loop.pipeline, loop.optimizer, loop.scheduler)
    loop.save(tmp_path / "saved")
    loop.pipeline.beside[0].wait()
    newest = path_of(tmp_path / "saved", 2)
    folders = [newest / path for path in ("weights", "optimizer", "options", "generators")]
    written = [file for folder in folders for file in folder.iterdir()]
    written += [newest / "state.json", newest / "manifest.json"]
    total = sum(file.stat().st_size for file in written)
    for tenth in range(10):
        copy, left = tmp_path / f"cut-{tenth}", total * tenth // 10
        shutil.copytree(tmp_path / "saved", copy)
        for file in written:
            size = file.stat().st_size
            cut = copy / file.relative_to(tmp_path / "saved")
            if left:
                cut.write_bytes(file.read_bytes()[:left])
                left -= min(left, size)
            else:
                cut.unlink()
        with torch.no_grad():
            next(loop.pipeline.parameters()).zero_()
        assert loop.load(copy) == {}
        assert loop.pipeline.step_index == 1
        assert torch.equal(loop.weight(), older)
        assert "that snapshot is set aside" in capsys.readouterr().err
        shutil.rmtree(copy)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies to host memory wait for this event."""
    may_copy, copies = threading.Event(), saver_module._image

    def wait_and_copy(tensors: Mapping[str, Tensor], before: Tensors | None) -> Tensors:
        assert may_copy.wait(PATIENCE_SECONDS)
        return copies(tensors, before)

    monkeypatch.setattr(saver_module, "_image", wait_and_copy)
    return may_copy


def test_only_the_optimizer_waits_for_a_save(loop: Loop, tmp_path: pathlib.Path, copying: threading.Event) -> None:
    before, updated = loop.weight(), threading.Event()
    mean = loop.pipeline.state_dict()["0.1.running_mean"].clone()
    loop.save(tmp_path)
    inputs = torch.randn(4, 8)
    loop.pipeline.step(inputs, inputs[:, :4].argmax(1))
    assert not torch.equal(loop.pipeline.state_dict()["0.1.running_mean"], mean), "a step changes buffers at once"

    def update() -> None:
        loop.optimizer.step()
        updated.set()

    updating = threading.Thread(target=update)
    updating.start()
    assert not updated.wait(0.2)
    assert torch.equal(loop.weight(), before)
    copying.set()
    updating.join(PATIENCE_SECONDS)
    assert updated.is_set()
    assert not torch.equal(loop.weight(), before)
    loop.load(tmp_path)
    assert torch.equal(loop.weight(), before)
    assert torch.equal(loop.pipeline.state_dict()["0.1.running_mean"], mean)


def test_weights_that_something_else_changes_meanwhile_are_not_saved(
    loop: Loop, tmp_path: pathlib.Path, copying: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.save(tmp_path)
    with torch.no_grad():
        next(loop.pipeline.parameters()).mul_(2)
    copying.set()
    loop.pipeline.beside[0].wait()
    assert steps_in(tmp_path) == []
    assert (
        "could not write the snapshot of step 1 (0.0.weight changed while it was copied; only an"
        in capsys.readouterr().err
    )


def test_so_many_are_kept_as_each_save_says(loop: Loop, tmp_path: pathlib.Path) -> None:
    for keep_last in (None, None, None, 2):
        loop.save(tmp_path, keep_last=keep_last)
        loop.pipeline.step_index += 1
    assert steps_in(tmp_path) == [3, 2, 1]
    loop.pipeline.close()
    assert steps_in(tmp_path) == [4, 3]


def test_a_snapshot_gets_its_name_while_steps_go_on(loop: Loop, tmp_path: pathlib.Path) -> None:
    loop.save(tmp_path)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not steps_in(tmp_path) and time.monotonic() < deadline:
        step(loop.pipeline, loop.optimizer, loop.scheduler)
    assert steps_in(tmp_path) == [1]


def test_an_optimizer_without_hooks_is_copied_at_once(loop: Loop, tmp_path: pathlib.Path) -> None:
    class Plain:
        state = loop.optimizer.state
        param_groups = loop.optimizer.param_groups

    before = loop.weight()
    pipetrain.save(tmp_path, loop.pipeline, Plain())  # type: ignore[arg-type]
    step(loop.pipeline, loop.optimizer, loop.scheduler)
    loop.load(tmp_path)
    assert torch.equal(loop.weight(), before)


def test_a_loop_takes_the_snapshot_of_a_run(loop: Loop, tmp_path: pathlib.Path) -> None:
    """All but the options, which a run has from its configuration."""
    saver = saver_of(tmp_path / "snapshots")
    saver.save(state_of(8), tensors_of(loop.pipeline, loop.optimizer, CPU))
    saver.wait()
    before, moment = loop.weight(), loop.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    loop.optimizer.param_groups[0]["lr"] = 0.5
    step(loop.pipeline, loop.optimizer, loop.scheduler)
    assert loop.load(tmp_path) == {}
    assert (loop.pipeline.step_index, loop.pipeline.seed) == (8, 3)
    assert torch.equal(loop.weight(), before)
    assert torch.equal(loop.optimizer.state_dict()["state"][0]["exp_avg"], moment)
    assert loop.optimizer.param_groups[0]["lr"] == 0.25


WITHOUT_THE_TRAINER = """
import sys
for name in ("omegaconf", "hydra", "rich"):
    sys.modules[name] = None
import torch, pipetrain
with pipetrain.Pipeline([torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss, num_microbatches=1) as pipeline:
    optimizer = torch.optim.AdamW(pipeline.parameters())
    pipetrain.save(sys.argv[1], pipeline, optimizer, extra=[1])
    assert pipetrain.load(sys.argv[1], pipeline, optimizer) == [1]
"""


def test_a_loop_needs_nothing_of_what_only_the_trainer_needs(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_THE_TRAINER, str(tmp_path)], check=True)


SCHEDULERS: dict[str, Any] = {
    "milestones": lambda one: lr_scheduler.MultiStepLR(one, [3, 5, 5, 8]),
    "function": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "in turn": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.MultiStepLR(one, [2, 3])], [3]
    ),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.1, 20),
    "never better": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=1),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on_with_the_rates_that_it_would_have_had(kind: str, tmp_path: pathlib.Path) -> None:
    def rates(scheduler: Any, num_steps: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "never better" else []))
            group = optimizer.param_groups[0]
            found.append((group["lr"], group["betas"][0]))
        return found

    with Pipeline(layers()[3:], nn.CrossEntropyLoss()) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        rates(scheduler, 4)
        pipetrain.save(tmp_path, pipeline, optimizer, scheduler=scheduler)
        expected = rates(scheduler, 8)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        pipetrain.load(tmp_path, pipeline, optimizer, scheduler=scheduler)
        assert rates(scheduler, 8) == expected


# What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"extra": {"losses": [1, torch.ones(2)]}}, r"extra\['losses'\]\[1\] is a Tensor: a snapshot holds what JSON"),
        ({"extra": {3: "three"}}, r"extra has the key 3: JSON has text as keys; use '3'"),
        ({"keep_last": 0}, "keep_last=0: 1 or more is needed"),
    ],
)
def test_what_a_snapshot_cannot_hold_is_named(
    loop: Loop, tmp_path: pathlib.Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        loop.save(tmp_path, **more)
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_others_are_named(loop: Loop, tmp_path: pathlib.Path) -> None:
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    with pytest.raises(ValueError, match=r"a parameter of shape \[5\] that is not the pipeline's"):
        loop.save(tmp_path)


def test_who_loads_something_else_is_refused(loop: Loop, tmp_path: pathlib.Path) -> None:
    """Without its scheduler or with one, as a run, into another model, and into other groups."""
    folder = tmp_path / "without"
    loop.save(tmp_path / "with", scheduler=loop.scheduler)
    loop.save(folder)
    loop.pipeline.beside[0].wait()
    with pytest.raises(ValueError, match=r"was saved with a scheduler: call load with scheduler="):
        loop.load(tmp_path / "with")
    with pytest.raises(ValueError, match=r"was saved with no scheduler: call load without it"):
        loop.load(folder, scheduler=loop.scheduler)
    with pytest.raises(ValueError, match=r"was saved by pipetrain\.save .* start one with init_from="):
        Snapshots(RunConfig(resume=str(folder)), loop.pipeline.plan, tmp_path / "run", loop.pipeline.ranks)
    with Pipeline([nn.Linear(8, 3)], nn.CrossEntropyLoss()) as other:
        with pytest.raises(ValueError, match=r"step-00000001 is a snapshot of another model"):
            pipetrain.load(folder, other, torch.optim.AdamW(other.parameters()))
        assert other.step_index == 0
    loop.optimizer = torch.optim.AdamW(loop.pipeline.parameters())
    with pytest.raises(ValueError, match=r"group 0 of the optimizer has parameters that were in groups with other"):
        loop.load(folder)
