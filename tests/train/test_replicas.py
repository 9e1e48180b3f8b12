"""Runs of several replicas: what is trained, saved and gone on with."""

import json
import os
import pathlib

import pytest
import torch
from commands import make_text
from ranks import run_ranks

from pipetrain.snapshot.weights import read_weights
from pipetrain.train import main

STEPS = 8
RUN = (
    *(
        "experiment=smoke",
        "data=text",
        "data.path=text",
        "observe.progress=false",
        f"steps={STEPS}",
        "snapshot.every_steps=4",
    ),
    *("snapshot.keep_last=9", "pipeline.num_microbatches=2", "model.dropout=0.1", "parallel.check_every_steps=3"),
)
TWO_BY_TWO = ("parallel.num_replicas=2", "pipeline.num_stages=2")
HALF = "resume=whole/snapshots/step-00000004"


def train(folder: str, *runs: tuple[str, ...]) -> list[int]:
    """Exit codes of runs, one after the other, of this rank."""
    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return [main([*RUN, *words]) for words in runs]


def lines_of(run: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: pathlib.Path, *keys: str) -> list[list[object]]:
    return [[line[key] for key in keys] for line in lines_of(run)]


def weights_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(folder / "weights"))


def assert_same_weights(run: pathlib.Path, other: pathlib.Path) -> None:
    ours, theirs = weights_of(run), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Runs of four ranks: `whole` of two replicas of two stages; from its step 4 on as it was, and on other meshes."""
    folder = tmp_path_factory.mktemp("replicas")
    make_text(folder / "text")
    runs = (
        ("run_dir=whole", *TWO_BY_TWO),
        ("run_dir=again", HALF, *TWO_BY_TWO),
        ("run_dir=zero", HALF, *TWO_BY_TWO, "parallel.zero=1", "parallel.order=stage-replica"),
        ("run_dir=deep", HALF, "pipeline.num_stages=4", "steps=4"),
        ("run_dir=wide", HALF, "parallel.num_replicas=auto", "pipeline.num_stages=1", "steps=4"),
        ("run_dir=wider", HALF, "parallel.num_replicas=4", "pipeline.num_microbatches=1"),
    )
    assert run_ranks(4, train, str(folder), *runs) == [[0] * len(runs)] * 4
    return folder


def test_figures_are_those_of_all_replicas(folder: pathlib.Path) -> None:
    for line in lines_of(folder / "whole"):
        assert line["tokens"] == line["counted_tokens"] == 8 * 32
    assert lines_of(folder / "whole")[-1]["tokens_seen"] == STEPS * 8 * 32
    report = json.loads((folder / "whole" / "report.json").read_text())
    assert report["tokens_seen"] == STEPS * 8 * 32
    assert len(list((folder / "whole" / "events").iterdir())) == 4


def test_a_run_goes_on_bit_for_bit(folder: pathlib.Path) -> None:
    assert (
        figures(folder / "again", "step", "loss", "grad_norm", "tokens_seen")
        == figures(folder / "whole", "step", "loss", "grad_norm", "tokens_seen")[4:]
    )
    assert_same_weights(folder / "again", folder / "whole")


def test_it_goes_on_with_its_state_shared_out_over_the_replicas(folder: pathlib.Path) -> None:
    """ZeRO 1 makes the same updates, and the order of the ranks changes none of them."""
    assert figures(folder / "zero", "step", "loss") == figures(folder / "whole", "step", "loss")[4:]
    assert_same_weights(folder / "zero", folder / "whole")


def test_other_replicas_and_stages_begin_with_the_same_weights(folder: pathlib.Path) -> None:
    """They do no step, so what they leave is what they read."""
    for run in ("deep", "wide"):
        assert json.loads((folder / run / "plan.json").read_text())["num_replicas"] == {"deep": 1, "wide": 4}[run]
    assert_same_weights(folder / "deep", folder / "wide")
    snapshot = folder / "whole" / "snapshots" / "step-00000004" / "weights"
    saved = {name: value for path in sorted(snapshot.iterdir()) for name, value in _read(path).items()}
    ours = weights_of(folder / "deep")
    assert {name for name in ours if torch.equal(ours[name], saved[name])} == saved.keys()


def test_slices_of_a_batch_are_the_same_whoever_takes_them(folder: pathlib.Path) -> None:
    """Four replicas of one microbatch take the slices of two replicas of two, with the same dropout: seeds are of slices."""
    ours, theirs = figures(folder / "wider", "loss"), figures(folder / "whole", "loss")[4:]
    assert [row[0] for row in ours] == pytest.approx([row[0] for row in theirs], abs=1e-5)


def _read(path: pathlib.Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
