"""Your own model through `pipetrain train`: on two ranks it has the losses of your own loop, and goes on only with the same code."""

import json
import pathlib
import subprocess

import pytest
import torch
from commands import PIPETRAIN, complete
from torch import nn

from pipetrain.config.load import load_config
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


def losses_of(folder: pathlib.Path, run: str = "run") -> list[float]:
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def losses_of_a_loop(layers: nn.Sequential, num_steps: int) -> list[float]:
    """Those of a plain loop over the same batches, in four microbatches."""
    config = load_config([*RUN[:1], "data.eval_fraction=0"])
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


PAIRS = """
import os
import pathlib
import torch
from torch import nn

def make_layers(width=8):
    return [
        lambda: nn.Linear(width, 16),
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(16, 16)),
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(16, 4)),
    ]

class Pairs(torch.utils.data.Dataset):
    def __init__(self, size=40):
        pathlib.Path(f"read-by-{os.environ.get('RANK')}").touch()
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.x[index, :4].argmax())
"""
OWN_PAIRS = ["model=python", "model.target=pairs:make_layers", "data=python", "data.target=pairs:Pairs", "steps=6"]


@pytest.mark.slow
def test_your_data_gives_the_same_losses_on_any_stages_and_after_a_resume(folder: pathlib.Path) -> None:
    (folder / "pairs.py").write_text(PAIRS)
    expected: list[float] = []
    for stages, more in ((1, ["data.heldout_target=pairs:Pairs"]), (2, ["data.num_workers=1"]), (3, [])):
        for steps in ("steps=4", "steps=6"):  # the second goes on from the first
            run = [
                f"run_dir=run{stages}",
                f"pipeline.num_stages={stages}",
                "snapshot.every_steps=4",
                "resume=auto",
                *more,
            ]
            done = train(folder, *OWN_PAIRS, *run, steps)
            assert done.returncode == 0, done.stderr
        losses = losses_of(folder, f"run{stages}")
        expected = expected or losses
        assert losses == expected
    assert len(expected) == 6
    report = json.loads((folder / "run1" / "report.json").read_text())
    assert report["heldout_loss"] > 0


def test_a_rank_between_the_first_and_the_last_reads_nothing(folder: pathlib.Path) -> None:
    (folder / "pairs.py").write_text(PAIRS)
    done = train(folder, *OWN_PAIRS, "pipeline.num_stages=3", "steps=1")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.glob("read-by-*")) == ["read-by-0", "read-by-2"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["data.args.size=0"], "data.target=pairs:Pairs: the dataset has no samples"),
    ],
)
def test_what_only_a_rank_can_find_out_is_one_line_and_exit_code_2(
    folder: pathlib.Path, typed: list[str], says: str
) -> None:
    (folder / "pairs.py").write_text(PAIRS)
    done = train(folder, *OWN_PAIRS, "pipeline.num_stages=2", *typed)
    assert (done.returncode, says in done.stderr.splitlines()[-1]) == (2, True), done.stderr
