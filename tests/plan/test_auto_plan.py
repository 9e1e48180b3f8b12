"""plan=auto: the first plan is taken, its folder keeps the profile and the keys, and a resumed run measures and plans nothing again."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from random_plans import random_profile

from pipetrain.cli import train_command
from pipetrain.cli.train_command import with_plan
from pipetrain.config.load import load_config
from pipetrain.monitor.folder import RunFolder
from pipetrain.plan.profile import Profile, read_profile
from pipetrain.trainer.prepare import conditions_of, foreseen_bytes, prepare

KEYS = "model.num_hidden_layers=4 data.global_batch_size=8 pipeline.num_microbatches=4 pipeline.search_seconds=0"
MODEL = KEYS.split()


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """What `with_plan` measured; the run's folder is `run`, in the current one."""
    found: list[Profile] = []

    def measure(config: Any, rounds: int) -> Profile:
        found.append(
            dataclasses.replace(random_profile(random.Random(0), 6), conditions=conditions_of(config), samples=2)
        )
        return found[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(train_command, "measure_profile", measure)
    return found


def planned(*typed: str) -> list[str]:
    words = [*MODEL, "plan=auto", "run_dir=run", *typed]
    return with_plan(load_config(words), words)


def test_the_run_folder_keeps_the_profile_and_the_keys(measured: list[Profile]) -> None:
    words, folder = planned(), RunFolder(Path("run").resolve())
    kept = read_profile(str(folder.layers))
    assert (kept.layers, kept.link, kept.samples) == (measured[0].layers, measured[0].link, 2)
    keys = json.loads(folder.planned.read_text())
    assert words == [*MODEL, f"run_dir={folder.path}", *keys]
    run = prepare(load_config(words))
    assert f"pipeline.balance=[{','.join(map(str, run.plan.balance))}]" in keys
    foreseen = foreseen_bytes(load_config(words), run, folder.layers)
    assert len(foreseen) == run.plan.num_ranks
    assert min(foreseen) > 0
    assert foreseen_bytes(load_config(words), run, folder.layers.with_name("nowhere")) in ((), foreseen)


@pytest.mark.parametrize("resume", ["resume=auto", "resume=run/snapshots/step-00000002"])
def test_a_resumed_run_has_the_same_plan(resume: str, measured: list[Profile]) -> None:
    keys = json.loads(RunFolder(Path("run")).planned.read_text()) if planned() else []
    Path("run/snapshots/step-00000002").mkdir(parents=True)
    words = planned(resume)
    assert len(measured) == 1
    assert words[-len(keys) :] == keys
    assert "plan=auto" not in words


def test_a_given_profile_is_taken(measured: list[Profile]) -> None:
    planned()
    Path("run/layers.json").rename("mine.json")
    words = [*MODEL, "plan=auto", "plan.profile=mine.json", "run_dir=other"]
    with_plan(load_config(words), words)
    assert len(measured) == 1
    assert read_profile("other/layers.json").layers == measured[0].layers


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            ["plan.memory_budget_bytes=20000"],
            "Nothing fits plan.memory_budget_bytes=20000: the smallest plan needs .* more. What would fit",
        ),
        (["cluster=slurm"], "plans a run on this machine; for several type the keys"),
        (["cluster.num_nodes=2"], "plans a run on this machine; for several type the keys"),
    ],
    ids=["budget", "slurm", "nodes"],
)
def test_what_cannot_be_planned_is_refused(typed: list[str], told: str, measured: list[Profile]) -> None:
    with pytest.raises(ValueError, match=told) as error:
        planned(*typed)
    assert "\n" not in str(error.value)
