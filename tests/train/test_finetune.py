"""A Hugging Face model with its tokenizer and chats, trained by `experiment=finetune` over two ranks, as README does it."""

from __future__ import annotations

import json
import math
import pathlib
import runpy

import pytest
from commands import PIPETRAIN, complete

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = [
    "experiment=finetune",
    "model.path=small-llama",
    "data.path=chats.jsonl",
    "data.cache_dir=cache",
    "data.batch_size=4",
    "data.sequence_length=64",
    "pipeline.num_microbatches=2",
    "optim.warmup_steps=0",
    "observe.progress=false",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where a small Llama and forty chats are."""
    folder = tmp_path_factory.mktemp("finetune")
    make = runpy.run_path(str(ROOT / "docs" / "small_llama.py"))["main"]
    make(str(folder / "small-llama"), str(folder / "chats.jsonl"), 40, 2, 32)
    return folder


def trained(folder: pathlib.Path, *options: str) -> tuple[dict[str, object], list[dict[str, float]]]:
    """report.json and metrics.jsonl of a run that went to its end."""
    done = complete(folder, [*PIPETRAIN, *SHORT, *options])
    assert done.returncode == 0, done.stderr
    run = folder / done.stdout.splitlines()[-1].removeprefix("run folder: ")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run / "report.json").read_text()), lines


def test_a_llama_learns_from_chats_over_two_ranks(folder: pathlib.Path) -> None:
    report, lines = trained(folder, "epochs=null", "steps=4", "optim.learning_rate=1e-2", "run_dir=short")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["tokens"] == 4 * 64 for line in lines)
    assert all(0 < line["counted_tokens"] < line["tokens"] for line in lines), "questions and padding do not count"
    assert report["tokens_seen"] == 4 * 4 * 64
    assert report["counted_tokens_seen"] == sum(line["counted_tokens"] for line in lines)
    assert lines[0]["perplexity"] == pytest.approx(math.exp(lines[0]["loss"]))
    config = (folder / "short" / "config.yaml").read_text()
    assert "precision: bf16" in config
    assert "steps: 4" in config
