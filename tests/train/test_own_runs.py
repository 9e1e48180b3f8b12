"""Your own model through `pipetrain train`: on two ranks it has the losses of your own loop, and goes on only with the same code."""

import json
import pathlib
import subprocess

import pytest
import torch
from commands import PIPETRAIN, complete
from torch import nn

from pipetrain.config.load import load
from pipetrain.data.dataset import make_data

MODEL = """
from torch import nn

def make_layers(width=16, depth=3):
    body = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(256, width), *body, nn.Linear(width, 256))
"""
OPTIM = ["optim.warmup_steps=0", "optim.final_fraction=1.0", "optim.weight_decay=0.0", "optim.max_grad_norm=null"]
RUN = ["experiment=smoke", "observe.progress=false", "run_dir=run", *OPTIM]
OWN = ["model=python", "model.target=mine:make_layers", "model.args.width=24", "data.eval_fraction=0"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def train(folder: pathlib.Path, *typed: str) -> "subprocess.CompletedProcess[str]":
    return complete(folder, [*PIPETRAIN, *RUN, *typed])


def losses_of(folder: pathlib.Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def losses_of_a_loop(layers: nn.Sequential, num_steps: int) -> list[float]:
    """Those of a plain loop over the same batches, in four microbatches."""
    config = load([*RUN[:1], "data.eval_fraction=0"])
    batches = make_data(config.data, config.seed).train
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses = []
    for step in range(num_steps):
        inputs, targets = batches.batch(step)
        total = torch.zeros(())
        for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4)):
            loss = nn.functional.cross_entropy(layers(x).flatten(0, 1), y.flatten()) * (y.numel() / targets.numel())
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def test_it_has_the_losses_of_a_plain_loop_and_resumes_with_the_same_code(folder: pathlib.Path) -> None:
    done = train(folder, *OWN, "steps=4", "snapshot.every_steps=3", "pipeline.num_stages=2")
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(MODEL, names)
    expected = losses_of_a_loop(names["make_layers"](width=24), 4)  # type: ignore[operator]
    assert losses_of(folder) == expected
    (folder / "mine.py").write_text(f"{MODEL}# another comment\n")
    done = train(folder, *OWN, "steps=5", "resume=auto", "pipeline.num_stages=2")
    assert done.returncode == 2
    assert "model.file_sha256=" in done.stderr.splitlines()[-1]
    assert "set model.file_sha256=" in done.stderr.splitlines()[-1]
