"""Steps whose loss or gradient cannot be right: what the guard decides, and whole runs with it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import pathlib
import random
import re
from typing import Any

import pytest
import torch
from commands import PIPETRAIN, complete
from ranks import run_ranks
from resumed import assert_same_training, metrics_of
from safetensors import safe_open
from safetensors.torch import load_file
from torch import equal

from pipetrain.config.records import GuardConfig
from pipetrain.data.batch import Batch
from pipetrain.models.weights import has_weights
from pipetrain.runtime.cut import Whole
from pipetrain.train import main
from pipetrain.trainer.guard import Action, Guard, Incident, folder_of, write_incident

STEPS = 24
RUN = [
    "experiment=smoke", "data=text", "data.path=text", "data.eval_fraction=0", "data.global_batch_size=2",
    "pipeline.num_microbatches=2", f"steps={STEPS}", "optim.warmup_steps=2", "optim.learning_rate=1e-2",
    "model.dropout=0.1", "observe.progress=false",
]  # fmt: skip
KEYS = ("loss", "grad_norm", "lr", "skipped", "tokens_seen")
assert_same_end = functools.partial(assert_same_training, steps=STEPS, keys=KEYS)
SPIKES = ["guard.spike_factor=1.5", "guard.spike_window=5", "snapshot.every_steps=4", "snapshot.keep_last=99"]


# Decisions ------------------------------------------------------------------------------------------------------------


def accepted(guard: Guard, *losses: float, norm: float = 1.0, first_step: int = 1) -> list[bool]:
    return [guard.accepts(first_step + number, loss, norm) for number, loss in enumerate(losses)]


def test_what_is_not_finite_is_refused_whatever_it_is() -> None:
    guard = Guard(GuardConfig())
    assert accepted(guard, 3.0, math.nan, math.inf, -math.inf) == [True, False, False, False]
    assert not guard.accepts(5, 3.0, math.nan)
    assert guard.incident is not None
    assert guard.incident.what == "the gradient norm of step 5 is not finite (nan)"
    assert guard.incident.action is Action.STOP
    assert guard.accepts(6, 3.0, 1.0)
    assert guard.incident is None


def test_a_spike_is_seen_once_the_window_is_full_and_does_not_enter_it() -> None:
    guard = Guard(GuardConfig(spike="skip", spike_factor=2.0, spike_window=3, spike_norm_factor=10.0))
    assert accepted(guard, 1.0, 9.0, 1.0, 2.1, 2.1, 1.9) == [True, True, True, False, False, True]
    assert not guard.accepts(7, 1.0, 10.5)
    assert guard.incident is not None
    assert guard.incident.what == ("the gradient norm of step 7 is 10.5, 10.5 times the median of the last 3 steps")
    assert guard.num_skipped == 3


def test_spikes_are_not_looked_for_unless_wanted() -> None:
    assert accepted(Guard(GuardConfig(spike_window=2)), 1.0, 1.0, 1000.0) == [True, True, True]


def test_too_many_skips_in_a_row_stop() -> None:
    guard = Guard(GuardConfig(not_finite="skip", max_skips=2))
    accepted(guard, math.nan, math.nan, 1.0, math.nan, math.nan)
    assert guard.incident is not None
    assert guard.incident.action is Action.SKIP
    accepted(guard, math.nan)
    assert guard.incident.action is Action.STOP
    assert "2 steps before it were skipped (guard.max_skips)" in guard.incident.advice


def test_a_rollback_passes_over_the_batches_up_to_the_bad_one() -> None:
    guard = Guard(GuardConfig(not_finite="rollback", max_rollbacks=2))
    assert [guard.batch_of(step) for step in (1, 2)] == [0, 1]
    saved = json.loads(json.dumps(guard.state_dict()))
    accepted(guard, math.nan, first_step=7)  # batch 6, the snapshot was after step 4
    guard.rolled_back(4, saved)
    assert [guard.batch_of(step) for step in (5, 6)] == [7, 8]
    accepted(guard, math.nan, first_step=6)  # batch 8, and back to the same snapshot
    guard.rolled_back(4, saved)
    assert guard.batch_of(5) == 9
    accepted(guard, math.nan, first_step=5)
    assert guard.incident is not None
    assert guard.incident.action is Action.STOP
    assert "rolled back 2 times (guard.max_rollbacks)" in guard.incident.advice


def test_the_batch_of_an_incident_may_be_trees(tmp_path: pathlib.Path) -> None:
    incident = Incident(3, 2, is_spike=False, what="", action=Action.SKIP, advice="", loss=math.nan, grad_norm=None)
    ids, shared = torch.arange(6).reshape(2, 3), torch.ones(3)
    batch = Batch({"ids": ids.t(), "mask": (Whole(shared), True)}, [ids, ids])
    folder = folder_of(tmp_path / "inspect", incident)
    write_incident(folder, incident, None, batch, seed=0)
    kept = load_file(folder / "batch.safetensors")
    assert sorted(kept) == ["inputs['ids']", "inputs['mask'][0]", "targets[0]", "targets[1]"]
    assert equal(kept["inputs['ids']"], ids.t())
    assert equal(kept["inputs['mask'][0]"], shared)
    with safe_open(folder / "batch.safetensors", "pt") as file:
        assert file.metadata() == {"inputs['mask'][1]": "True"}


def test_a_guard_with_another_ones_state_decides_as_that_one() -> None:
    config = GuardConfig(spike="skip", spike_factor=2.0, spike_window=3, not_finite="rollback")
    chance = random.Random(4)
    losses = [chance.uniform(1.0, 3.0) for _ in range(60)]
    whole, first, second = Guard(config), Guard(config), Guard(config)
    expected = accepted(whole, *losses)
    assert len(set(expected)) == 2
    decided = accepted(first, *losses[:31])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert decided + accepted(second, *losses[31:], first_step=32) == expected
    assert second.state_dict() == whole.state_dict()


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Text that is soon learnt, with some noise in it: a batch that meets the noise has a far larger loss."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text(f"the stage {number} waits while " * 300)
    (folder / "text" / "noise.txt").write_bytes(random.Random(0).randbytes(2000))
    return folder


def guarded(folder: str, options: tuple[str, ...]) -> tuple[int, str]:
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main([*RUN, "pipeline.num_stages=1", *options])
    return code, said.getvalue()


def run(folder: pathlib.Path, *options: str) -> str:
    """On one rank, in a process of its own, to its end; returns stderr."""
    ((code, said),) = run_ranks(1, guarded, str(folder), options)
    assert code == 0, said
    return said


def incident_of(run_dir: pathlib.Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "inspect" / f"step-{step:08d}" / "incident.json").read_text())


@pytest.mark.slow
def test_spikes_are_left_out_and_their_batches_kept_and_a_resumed_run_does_the_same(folder: pathlib.Path) -> None:
    skipping = folder / "skipping"
    run(folder, "run_dir=skipping", "guard=skip", *SPIKES)
    metrics = metrics_of(skipping)
    skipped = [line["step"] for line in metrics if line["skipped"]]
    assert 1 <= len(skipped) < STEPS // 2
    assert sorted(path.name for path in (skipping / "inspect").iterdir()) == [f"step-{step:08d}" for step in skipped]
    for step in skipped:
        incident = incident_of(skipping, step)
        assert [incident[key] for key in ("step", "batch", "action", "seed")] == [step, step - 1, "skip", 0]
        assert incident["loss"] == metrics[step - 1]["loss"]
        losses = incident["microbatch_losses"]
        assert sum(losses) / 2 == pytest.approx(incident["loss"], rel=1e-5)
        assert incident["microbatch"] == losses.index(max(losses))
        kept = load_file(skipping / "inspect" / f"step-{step:08d}" / "batch.safetensors")
        assert kept["inputs"].shape == kept["targets"].shape == (2, 32)
        assert equal(kept["inputs"][:, 1:], kept["targets"][:, :-1])
        assert kept["inputs"][incident["microbatch"]].max() >= 128  # the noise itself: the rest is ASCII
    assert [path for path in [skipping, *skipping.rglob("*")] if path.stat().st_mode & 0o027] == []  # none for others
    report = json.loads((skipping / "report.json").read_text())
    assert (report["skipped_steps"], report["rollbacks"]) == (len(skipped), 0)
    assert report["tokens_seen"] == metrics[-1]["tokens_seen"] == (STEPS - len(skipped)) * 2 * 32
    assert f"Steps skipped because of their loss or gradient: {len(skipped)}." in (skipping / "report.md").read_text()
    start = 4 * (skipped[0] // 4)  # the window of losses before it must come from the snapshot
    run(folder, "run_dir=skipping-on", "guard=skip", *SPIKES, f"resume=skipping/snapshots/step-{start:08d}")
    assert_same_end(folder / "skipping-on", skipping, from_step=start + 1)


@pytest.mark.slow
def test_a_rollback_goes_on_with_later_batches_and_a_resume_too(folder: pathlib.Path) -> None:
    guard = ["guard.spike=rollback", "guard.max_rollbacks=20", *SPIKES]
    told = [line for line in run(folder, "run_dir=back", *guard).splitlines() if "back to step" in line]
    back = folder / "back"
    report = json.loads((back / "report.json").read_text())
    assert len(told) == report["rollbacks"] >= 1
    assert report["skipped_steps"] == 0
    metrics = metrics_of(back)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))  # those before the rollback are written over
    assert not any(line["skipped"] for line in metrics)
    passed_over = json.loads((back / "snapshots" / f"step-{STEPS:08d}" / "state.json").read_text())["guard"]
    assert len(passed_over["passed_over"]) == report["rollbacks"]
    assert all(start < end for start, end in passed_over["passed_over"])
    assert passed_over["num_rollbacks"] == report["rollbacks"]
    kept = list((back / "inspect").iterdir())
    assert len(kept) == report["rollbacks"]  # a step that comes again with another batch has a folder of its own
    middle = int(told[0].split("back to step ")[1].split(";")[0]) + 4
    run(folder, "run_dir=back-on", *guard, f"resume=back/snapshots/step-{middle:08d}")
    assert_same_end(folder / "back-on", back, from_step=middle + 1)


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_names_the_layer(folder: pathlib.Path) -> None:
    """A learning rate that is far too large: the weights after step 1 are huge, so step 2 is not finite."""
    diverging = ["optim.learning_rate=1e30", "optim.max_grad_norm=null", "optim.warmup_steps=0"]
    done = complete(folder, [*PIPETRAIN, *RUN, "run_dir=diverged", *diverging])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(r"pipetrain: the (loss|gradient norm) of step 2 is not finite \(", last), last
    incident = incident_of(folder / "diverged", 2)
    layer, where = "layer {layer} ({layer_name}) ", "of stage {stage} on rank {rank}"
    assert (layer + where).format(**incident) in last
    assert f"in microbatch {incident['microbatch']}" in last
    assert "no weight was changed; the batch is in" in last
    assert "Traceback" not in done.stderr
    assert incident["action"] == "stop"
    assert not has_weights(folder / "diverged" / "weights")
