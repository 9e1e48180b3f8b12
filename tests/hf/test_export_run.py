"""A run of a Hugging Face model over ranks, from its folder on: exported, gone on with another number of stages, with adapters."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import PIPETRAIN, complete

from pipetrain.cli.main import main
from pipetrain.config.load import load_config
from pipetrain.launcher.outcome import Exit
from pipetrain.models.weights import read_weights
from pipetrain.train import train

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
    "optim.final_fraction=1",
    "snapshot.every_steps=2",
    "observe.progress=false",
    "epochs=null",
    "steps=4",
]
HALF = "snapshots/step-00000002"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `whole`, a run of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    make = runpy.run_path(str(ROOT / "docs" / "small_llama.py"))["main"]
    make(str(folder / "small-llama"), str(folder / "chats.jsonl"), 40, 2, 32)
    train_over_ranks(folder, "run_dir=whole")
    return folder


def train_over_ranks(folder: Path, *options: str) -> None:
    done = complete(folder, [*PIPETRAIN, *OPTIONS, *options])
    assert done.returncode == 0, done.stderr


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(path))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_run_is_exported_from_its_end_and_from_a_snapshot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["export", str(folder / "whole"), f"--out={folder / 'end'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "end")
    model = AutoModelForCausalLM.from_pretrained(folder / "end")
    assert model.dtype is torch.bfloat16
    assert_equal(model.state_dict(), weights_of(folder / "whole" / "weights"))
    assert AutoTokenizer.from_pretrained(folder / "end").chat_template
    stopped = shutil.copytree(folder / "whole", folder / "stopped", symlinks=True)
    shutil.rmtree(stopped / "weights")
    assert main(["export", str(stopped), f"--out={folder / 'snapshot'}"]) == 0
    assert_equal(weights_of(folder / "snapshot"), weights_of(folder / "end"))


def test_a_run_goes_on_with_another_number_of_stages(folder: Path) -> None:
    """Two steps on two ranks and two on four: the weights of four steps on two, bit for bit."""
    train_over_ranks(folder, f"resume=whole/{HALF}", "pipeline.num_stages=4", "run_dir=second")
    assert_equal(weights_of(folder / "second" / "weights"), weights_of(folder / "whole" / "weights"))


def test_adapters_are_saved_taken_up_and_merged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with both stages on one rank."""
    monkeypatch.chdir(folder)
    lora = ["model.lora.rank=4", "model.lora.layers=[1]", "pipeline.balance=[2,2]", "pipeline.stages_per_rank=2"]
    for words in (["run_dir=adapted"], ["run_dir=ended", f"resume=adapted/{HALF}"]):
        assert train(load_config([*OPTIONS, *lora, *words])).code is Exit.DONE
    adapted = weights_of(folder / "adapted" / "weights")
    assert_equal(weights_of(folder / "ended" / "weights"), adapted)
    assert main(["export", "adapted", "--out=merged"]) == 0
    merged, source = weights_of(folder / "merged"), weights_of(folder / "small-llama")
    changed = {name for name in merged if not torch.equal(merged[name], source[name].bfloat16())}
    assert changed == {f"model.layers.1.self_attn.{name}.weight" for name in ("q_proj", "v_proj")}
