"""A small model in one piece, and its snapshots."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch
from torch import nn

from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import RunState, tensors_of

CPU = torch.device("cpu")


def trained(seed: int = 0, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with buffers, and an optimizer that has state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(step: int, num_ranks: int = 1) -> RunState:
    return RunState(step, num_ranks, {"seed": 3}, {"balance": [3]})


def saver_of(folder: pathlib.Path, *, keep_last: int = 2, say: Callable[[str], None] = lambda text: None) -> Saver:
    return Saver(folder, rank=0, agree=lambda value: value, keep_last=keep_last, say=say)


def save(folder: pathlib.Path, step: int, *, keep_last: int = 9) -> pathlib.Path:
    """A whole snapshot of a model whose weights depend on the step."""
    saver = saver_of(folder, keep_last=keep_last)
    saver.save(state_of(step), tensors_of(*trained(step), CPU))
    saver.wait()
    assert saver.last_step == step
    return path_of(folder, step)
