"""`pipetrain new DIR`: writes a small project that trains at once: a model, data, their configuration, a script for SLURM, and a test."""

from __future__ import annotations

from pathlib import Path

from pipetrain.cli.main import OWN_FILE, Arguments, Parser
from pipetrain.launcher.outcome import Exit

_MODEL = """\
\"\"\"The layers. Each takes what the one before returned; a rank calls only the factories of its own stages.\"\"\"
from functools import partial

from torch import nn


def block(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def make_layers(width=64, depth=6):
    return [partial(nn.Linear, 16, width), *[partial(block, width)] * depth, partial(nn.Linear, width, 4)]
"""
_DATA = """\
\"\"\"The samples: pairs of inputs and targets.\"\"\"
import torch
from torch.utils.data import TensorDataset


def make_dataset(size=2048, seed=0):
    inputs = torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def make_batch():
    return make_dataset(16)[:]
"""
_CONFIG = """\
# What `pipetrain train` runs in this folder; `pipetrain train --help-keys` lists all keys.
defaults:
  - config
  - override model: python
  - override data: python
  - override experiment: null
  - _self_
experiment: NAME
steps: 60
model: {target: "model:make_layers", args: {width: 64}}
data:
  target: data:make_dataset
  heldout_target: data:make_dataset
  heldout_args: {size: 256, seed: 1}
  global_batch_size: 64
pipeline: {num_stages: 2}
"""
_LAUNCH = """\
#!/usr/bin/env bash
# A SLURM job of two GPUs; further keys follow: ./launch.sh steps=1000
exec pipetrain train cluster=slurm cluster.ranks_per_node=2 "$@"
"""
_TEST = """\
\"\"\"The layers in a pipeline equal the plain loop bit for bit.\"\"\"
import subprocess
import sys

VERIFY = [sys.executable, "-m", "pipetrain.cli", "verify", "--quick"]


def test_the_pipeline_equals_one_process():
    subprocess.run([*VERIFY, "model:make_layers", "--batch", "data:make_batch"], check=True)
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder to write; it must not exist")


def run(arguments: Arguments) -> int:
    folder = Path(arguments.folder)
    texts = {
        "model.py": _MODEL,
        "data.py": _DATA,
        OWN_FILE: _CONFIG.replace("NAME", folder.resolve().name),
        "launch.sh": _LAUNCH,
        "test_model.py": _TEST,
    }
    try:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
        (folder / "launch.sh").chmod(0o755)
    except FileExistsError as error:
        raise ValueError(f"{folder}: it is there already; give another name") from error
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from error
    print(f"cd {folder} && pipetrain train")
    return Exit.DONE
