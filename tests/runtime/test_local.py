"""A leaf that stays in its stage: neither sent, nor stashed, nor taken for a leak; in a set it counts once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain import Pipeline
from pipetrain.stage.microbatch import StageLocal, without_local

WIDTH = 256


MADE: list[int] = []  # a number for each table


class Scaling(nn.Module):
    """x * w * table; the table, as large as x, is made by the first layer of a stage for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tree: Any) -> dict[str, Any]:
        value, local = (tree, None) if isinstance(tree, Tensor) else (tree["value"], tree["table"])
        if local is None:
            MADE.append(1)
            local = StageLocal(torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape).cos())
        return {"value": value * self.weight * local.value, "table": local}


def loss(output: Any, target: Tensor) -> Tensor:
    assert output["table"] is not None or not torch.is_grad_enabled()
    return ((output["value"] - target) ** 2).mean()


def step(mode: str, stages: int) -> tuple[Tensor, list[Tensor], list[int]]:
    layers, rows = [Scaling() for _ in range(4)], torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH)
    MADE.clear()
    with (
        warnings.catch_warnings(),
        Pipeline(layers, loss, num_microbatches=2, stages_per_rank=stages, recompute=mode) as pipeline,
    ):
        warnings.simplefilter("error")
        found = pipeline.step(rows, rows)
        bytes_of_sets = [stage.set_bytes[1] for stage in pipeline._stages.values()]
    return found, [layer.weight.grad for layer in layers], bytes_of_sets


def test_each_stage_makes_its_own_in_f_and_in_r() -> None:
    whole = step("never", 1)
    assert len(MADE) == 2, "once for each microbatch"
    for mode, stages in (("never", 2), ("never", 4), ("overlap", 2), ("overlap", 4)):
        found = step(mode, stages)
        recomputed = stages - 1 if mode == "overlap" else 0
        assert len(MADE) == 2 * (stages + recomputed), "once in each F, and once in each R"
        assert found[0] == whole[0]
        assert all(map(torch.equal, found[1], whole[1]))


def test_a_set_holds_it_once() -> None:
    """Four layers in one stage: what each saves of its own, and one table."""
    _, _, (found,) = step("never", 1)
    of_one = 32 * WIDTH * 4
    weights = 4
    # Each layer saves its input and x * w, of which the first's input is the batch; the loss saves the difference.
    assert found <= (2 * 4 + 1 + 1) * of_one + weights * WIDTH * 4


def test_it_leaves_as_none() -> None:
    local, tensor = StageLocal(torch.zeros(3)), torch.ones(2)
    left = without_local({"value": (tensor, 3), "table": local})
    assert left == {"value": (tensor, 3), "table": None}
    tree = {"value": (tensor, 3)}
    assert without_local(tree) is tree
    assert without_local(tensor) is tensor


def test_a_call_without_a_loss_returns_none_in_its_place() -> None:
    with Pipeline([Scaling(), Scaling()], num_microbatches=2, stages_per_rank=2) as pipeline:
        output = pipeline(torch.ones(4, WIDTH))
    assert output["table"] is None
    assert output["value"].shape == (4, WIDTH)
