"""A Hugging Face model with its tokenizer and chats, trained by `experiment=finetune` over two ranks, as README does it."""

from __future__ import annotations

import json
import math
import pathlib
import runpy
from typing import Any

import pytest
import torch
from commands import PIPETRAIN, complete
from resumed import assert_same_weights, metrics_of

from pipetrain.config.load import load_config
from pipetrain.config.together import check_run
from pipetrain.launcher.outcome import Exit
from pipetrain.models.weights import read_weights
from pipetrain.train import train

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = [
    "experiment=finetune", "model.path=small-llama", "data.path=chats.jsonl", "data.cache_dir=cache",
    "data.global_batch_size=4", "data.sequence_length=64", "pipeline.num_microbatches=2", "optim.warmup_steps=0",
    "observe.progress=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where a small Llama and forty chats are."""
    folder = tmp_path_factory.mktemp("finetune")
    make = runpy.run_path(str(ROOT / "docs" / "small_llama.py"))["main"]
    make(str(folder / "small-llama"), str(folder / "chats.jsonl"), 40, 2, 32)
    return folder


def trained(folder: pathlib.Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run told that went to its end."""
    done = complete(folder, [*PIPETRAIN, *SHORT, *options])
    assert done.returncode == 0, done.stderr
    return told_by(folder / done.stdout.splitlines()[-1].removeprefix("run folder: "))


def told_by(run: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """report.json and metrics.jsonl."""
    return json.loads((run / "report.json").read_text()), metrics_of(run)


def check_learnt(report: dict[str, Any], lines: list[dict[str, Any]], num_steps: int) -> None:
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["tokens"] == 4 * 64 for line in lines)
    assert all(0 < line["counted_tokens"] < line["tokens"] for line in lines), "questions and padding do not count"
    assert report["tokens_seen"] == lines[-1]["tokens_seen"] == num_steps * 4 * 64
    assert report["counted_tokens_seen"] == sum(line["counted_tokens"] for line in lines)
    assert lines[0]["perplexity"] == pytest.approx(math.exp(lines[0]["loss"]))
    assert report["heldout_perplexity"] == pytest.approx(math.exp(report["heldout_loss"]))


def test_a_llama_learns_from_chats(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages on one rank, in this process."""
    monkeypatch.chdir(folder)
    config = load_config(
        [*SHORT, "epochs=0.3", "pipeline.stages_per_rank=3", "optim.learning_rate=1e-2", "run_dir=here"]
    )
    check_run(config)
    assert train(config).code is Exit.DONE
    report, lines = told_by(folder / "here")
    check_learnt(report, lines, len(lines))
    written = (folder / "here" / "config.yaml").read_text()
    assert "precision: bf16" in written
    assert f"steps: {len(lines)}" in written
    assert json.loads((folder / "here" / "plan.json").read_text())["balance"] == [2, 1, 1]
    assert {weight.dtype for weight in read_weights(folder / "here" / "weights").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_fine_tuning_over_two_ranks_goes_on_over_three(folder: pathlib.Path) -> None:
    """Batches of chats, weights and masters after a resume are those of the run that nobody disturbed."""
    options = ["epochs=null", "steps=4", "optim.learning_rate=1e-2", "snapshot.every_steps=2", "snapshot.keep_last=9"]
    report, lines = trained(folder, *options, "pipeline.num_stages=2", "run_dir=two")
    check_learnt(report, lines, 4)
    snapshot = "resume=two/snapshots/step-00000002"
    again, later = trained(folder, *options, "pipeline.num_stages=3", "pipeline=1f1b", "run_dir=three", snapshot)
    for key in ("loss", "grad_norm", "counted_tokens", "tokens_seen"):
        assert [line[key] for line in later] == [line[key] for line in lines[2:]]
    assert again["counted_tokens_seen"] == report["counted_tokens_seen"]
    assert_same_weights(folder / "three", folder / "two")
