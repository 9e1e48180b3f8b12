"""Your own model through `pipetrain train`: on two ranks it has the losses of your own loop, and goes on only with the same code."""

import json
import pathlib
import re

import pytest
import torch
from commands import PIPETRAIN, complete
from resumed import assert_same_weights
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


def train(folder: pathlib.Path, *typed: str, code: int = 0) -> str:
    """Runs to its end; returns stderr."""
    done = complete(folder, [*PIPETRAIN, *RUN, *typed])
    assert done.returncode == code, done.stderr
    return done.stderr


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
    train(folder, *OWN, "steps=4", "snapshot.every_steps=3", "pipeline.num_stages=2")
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(MODEL, names)
    expected = losses_of_a_loop(names["make_layers"](width=24), 4)  # type: ignore[operator]
    assert losses_of(folder) == expected
    (folder / "mine.py").write_text(f"{MODEL}# another comment\n")
    told = train(folder, *OWN, "steps=5", "resume=auto", "pipeline.num_stages=2", code=2)
    assert re.search("model.file_sha256=.*set model.file_sha256=", told.splitlines()[-1])


PAIRS = """
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
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.x[index, :4].argmax())

def one_per_sample(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""
OWN_PAIRS = ["model=python", "model.target=pairs:make_layers", "data=python", "data.target=pairs:Pairs", "steps=6"]


@pytest.mark.slow
def test_a_profile_is_asked_for_in_short(folder: pathlib.Path) -> None:
    """And the run after it is balanced by it."""
    (folder / "pairs.py").write_text(PAIRS)
    own, keys = ["pairs:make_layers", "--data=pairs:Pairs"], ["pipeline.num_stages=2", "data.global_batch_size=8"]
    done = complete(folder, [*PIPETRAIN[:-1], "profile", *own, *keys, "--rounds=1", "--json"])
    assert done.returncode == 0, done.stderr
    assert [layer["numbers"] for layer in json.loads(done.stdout)["layers"]] == [[0], [1], [2], [3]]
    run = ["plan.profile=profile.json", "steps=2", "observe.progress=false", "run_dir=run"]
    done = complete(folder, [*PIPETRAIN, *own, *keys, *run])
    assert done.returncode == 0, done.stderr
    assert "until plan.profile names a file" not in done.stderr


KILLED = """
import os
import pathlib
import signal
import torch
from pairs import make_layers

def read(index, seen=[]):  # as many samples as the file says are the last that the process reads
    seen.append(index)
    if pathlib.Path("kill-at").exists() and len(seen) == int(pathlib.Path("kill-at").read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, generator=torch.Generator().manual_seed(index))
    return x, int(x[:4].argmax())

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return read(index)

class Stream(torch.utils.data.IterableDataset):
    at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield read(self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
"""
WHOLE = ["model=python", "model.target=killed:make_layers", "data=python", "steps=8", "data.global_batch_size=8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "stages", "more"),
    [("Samples", 3, ["data.num_workers=1", "data.heldout_target=killed:Samples"]), ("Stream", 2, [])],
    ids=["samples", "stream"],
)
def test_a_kill_changes_nothing(folder: pathlib.Path, dataset: str, stages: int, more: list[str]) -> None:
    """Of the losses and weights of a run on one stage, which may have workers and held-out samples, wherever the run that was killed goes on."""
    (folder / "pairs.py").write_text(PAIRS)
    (folder / "killed.py").write_text(KILLED)
    run = [*WHOLE, f"data.target=killed:{dataset}", "snapshot.every_steps=1"]
    train(folder, *run, "run_dir=whole", "pipeline.num_stages=1", *more)
    report = json.loads((folder / "whole" / "report.json").read_text())
    assert (report["heldout_loss"] is not None) == (dataset == "Samples")
    own = [*run, f"pipeline.num_stages={stages}", "resume=auto", "run_dir=killed"]
    (folder / "kill-at").write_text(str(5 * 8 + 5))  # in the batch of step 6, when the snapshot of step 4 is whole
    assert complete(folder, [*PIPETRAIN, *RUN, *own]).returncode not in (0, 2)
    (folder / "kill-at").unlink()
    assert "going on from" in train(folder, *own)
    losses = losses_of(folder, "killed")
    assert len(losses) == 8
    assert losses == losses_of(folder, "whole")
    assert_same_weights(folder / "killed", folder / "whole")


def test_what_only_a_rank_can_find_out_is_one_line_and_exit_code_2(folder: pathlib.Path) -> None:
    """The other rank only waits for this one, and may be the first to end."""
    (folder / "pairs.py").write_text(PAIRS)
    told = train(folder, *OWN_PAIRS, "pipeline.num_stages=2", "model.loss=pairs:one_per_sample", code=2)
    says = "model.loss=pairs:one_per_sample: returned a tensor of shape [2]: it must return a 0-dim tensor"
    assert says in told.splitlines()[-1]
