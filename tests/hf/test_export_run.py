"""A run of a Hugging Face model over ranks, from its folder on: exported, gone on with another number of stages, with adapters."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import PIPETRAIN, complete

from pipetrain.models.weights import read_weights

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    "experiment=finetune",
    "model.path=small-llama",
    "data.path=chats.jsonl",
    "data.cache_dir=cache",
    "data.global_batch_size=4",
    "data.sequence_length=64",
    "pipeline.num_microbatches=2",
    "optim.warmup_steps=0",
    "optim.learning_rate=1e-2",
    "observe.progress=false",
    "epochs=null",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make = runpy.run_path(str(ROOT / "docs" / "small_llama.py"))["main"]
    make(str(folder / "small-llama"), str(folder / "chats.jsonl"), 40, 2, 32)
    return folder


def run(folder: Path, *words: str) -> str:
    *command, _ = PIPETRAIN  # without `train`
    done = complete(folder, [*command, *words])
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def train(folder: Path, *options: str) -> None:
    run(folder, "train", *OPTIONS, *options)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(path))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_run_is_exported_from_its_end_and_from_a_snapshot(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(folder, "steps=4", "snapshot.every_steps=2", "run_dir=whole")
    assert run(folder, "export", "whole", "--out=end").splitlines()[-1] == str(folder / "end")
    model = AutoModelForCausalLM.from_pretrained(folder / "end")
    assert model.dtype is torch.bfloat16
    assert_equal(model.state_dict(), weights_of(folder / "whole" / "weights"))
    assert AutoTokenizer.from_pretrained(folder / "end").chat_template
    shutil.rmtree(folder / "whole" / "weights")
    run(folder, "export", "whole", "--out=snapshot")
    assert_equal(weights_of(folder / "snapshot"), weights_of(folder / "end"))


def test_a_run_goes_on_with_another_number_of_stages(folder: Path) -> None:
    """Two steps on two ranks and two on four: the weights of four steps on two, bit for bit."""
    train(folder, "steps=4", "optim.final_fraction=1", "run_dir=straight")
    train(folder, "steps=2", "optim.final_fraction=1", "snapshot.every_steps=2", "run_dir=first")
    train(folder, "steps=4", "optim.final_fraction=1", "resume=first", "pipeline.num_stages=4", "run_dir=second")
    assert_equal(weights_of(folder / "second" / "weights"), weights_of(folder / "straight" / "weights"))


def test_adapters_are_saved_taken_up_and_merged(folder: Path) -> None:
    lora = ["model.lora.rank=4", "model.lora.layers=[1]", "optim.final_fraction=1", "pipeline.balance=[2,2]"]
    train(folder, *lora, "steps=4", "run_dir=adapted")
    train(folder, *lora, "steps=2", "snapshot.every_steps=2", "run_dir=begun")
    train(folder, *lora, "steps=4", "resume=begun", "run_dir=ended")
    adapted = weights_of(folder / "adapted" / "weights")
    assert_equal(weights_of(folder / "ended" / "weights"), adapted)
    run(folder, "export", "adapted", "--out=merged")
    merged, source = weights_of(folder / "merged"), weights_of(folder / "small-llama")
    changed = {name for name in merged if not torch.equal(merged[name], source[name].bfloat16())}
    assert changed == {f"model.layers.1.self_attn.{name}.weight" for name in ("q_proj", "v_proj")}
