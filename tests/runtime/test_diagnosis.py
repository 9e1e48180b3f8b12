"""Where the first value that is not finite comes from, over three ranks: the layer, the microbatch and the cause are named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn

from pipetrain.runtime.diagnosis import Finding, Where
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

MARK = 43.0


class Overflowing(nn.Module):
    """Hands a mark on; where it sees one, its output is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] == MARK, math.inf, self.linear(x))


class Passing(nn.Module):
    """A layer with weights, a running mean and dropout that leaves the first column, where the mark is, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 7)
        self.norm = nn.BatchNorm1d(7)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], self.dropout(self.norm(self.linear(x)))], dim=1)


class SteepAtTheMark(nn.Module):
    """Finite everywhere; its gradient is infinite where the first column is the mark."""

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, :1] == MARK
        return x + torch.where(marked, torch.where(marked, x - x.detach(), 1.0).sqrt(), 0.0)


def layers_for(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    odd = SteepAtTheMark() if name == "gradient" else Overflowing()
    return [Passing(), Passing(), Passing(), odd, Passing(), nn.Linear(8, 8)]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def diagnose(name: str, mode: str) -> dict[str, Any]:
    """One good step, a bad one, its diagnosis, and a good step after it."""
    bad, targets = batch(1)
    bad[5, 0] = math.nan if name == "inputs" else MARK
    if name == "largest":
        bad, targets = batch(1)
    reference = nn.Sequential(*layers_for(name))
    with Pipeline(
        layers_for(name),
        mean_square,
        num_microbatches=4,
        balance=[2, 2, 2],
        recompute=mode,
        seed=3,
        timeout_seconds=NEVER_SECONDS,
    ) as pipeline:
        pipeline.step(*batch(0))
        pipeline.zero_grad()
        if name == "weights":
            with torch.no_grad():
                for number, parameter in pipeline.named_parameters():
                    if number == "4.norm.bias":
                        parameter[0] = math.nan
        before = {key: value.clone() for key, value in pipeline.state_dict().items()}
        loss = failed = None
        try:
            loss = float(pipeline.step(bad, targets))
        except LossNotFinite as error:
            failed = (error.step, error.microbatch)
        after_step = {key: value.clone() for key, value in pipeline.state_dict().items()}
        norm = float(pipeline.clip_grad_norm_(math.inf))
        diagnosis = pipeline.find_not_finite(bad, targets)
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        assert pipeline.step_index == 2
        assert failed == {"output": (1, 2), "inputs": (1, 2), "weights": (1, 0)}.get(name)
        for key, value in pipeline.state_dict().items():  # the running means are those after one pass, not two
            assert torch.allclose(value, after_step[key], rtol=0, atol=0, equal_nan=True), key
        if name == "weights":
            return {"finding": diagnosis.finding, "norm": norm, "loss": loss}
        pipeline.load_state_dict(before)
        good = pipeline.step(*batch(2))
        expected = reference_step(reference, mean_square, *batch(2), num_microbatches=4, seed=3, step=2)
        assert torch.equal(good, expected)
        wanted = dict(reference.named_parameters())
        assert all(torch.equal(own.grad, wanted[key].grad) for key, own in pipeline.named_parameters())
    return {"finding": diagnosis.finding, "norm": norm, "loss": loss, "losses": diagnosis.losses}


OVERFLOWS = "its inputs and its weights are finite: the value overflows there"
EXPECTED = {
    "output": Finding(Where.OUTPUT, 2, 3, "Overflowing", 1, 1, OVERFLOWS),
    "gradient": Finding(Where.GRADIENT, 2, 3, "SteepAtTheMark", 1, 1, OVERFLOWS),
    "inputs": Finding(Where.OUTPUT, 2, 0, "Passing", 0, 0, "the inputs of the batch are not finite"),
    "weights": Finding(Where.OUTPUT, 0, 4, "Passing", 2, 2, "its own weights are not finite (norm.bias)"),
    "largest": None,
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("output", "overlap", marks=pytest.mark.slow),
        pytest.param("gradient", "overlap", marks=pytest.mark.slow),
        ("inputs", "early"),
        ("weights", "inline"),
        ("largest", "overlap"),
    ],
)
def test_the_first_bad_layer_is_named_on_every_rank(name: str, mode: str) -> None:
    first, *others = run_ranks(3, diagnose, name, mode)
    assert first["finding"] == EXPECTED[name]
    assert all(other["finding"] == first["finding"] for other in others)
    assert math.isfinite(first["norm"]) == (name == "largest")
    assert (first["loss"] is None) == (name in ("output", "inputs", "weights"))
    if name == "largest":
        assert sum(first["losses"].values()) / 4 == pytest.approx(first["loss"], rel=1e-6)


def test_the_text_names_everything() -> None:
    found = EXPECTED["gradient"]
    assert found is not None
    assert found.text == (
        f"layer 3 (SteepAtTheMark) of stage 1 on rank 1 gives the first gradient that is not finite in microbatch 2; {OVERFLOWS}"
    )
    assert dataclasses.replace(found, layer_name="loss_fn", microbatch=None).text.startswith(
        "the loss of stage 1 on rank 1 gives the first gradient that is not finite; "
    )


def test_a_sum_over_microbatches_that_overflows() -> None:
    """Each microbatch's gradient is finite, their sum is not: there is no microbatch to name."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    inputs = torch.full((4, 1), 3e38)
    with Pipeline([layer], lambda output, target: 4 * output.sum(), num_microbatches=4, recompute="never") as pipeline:
        assert pipeline.step(inputs, inputs) == 0.0
        assert not torch.isfinite(pipeline.clip_grad_norm_(math.inf))
        found = pipeline.find_not_finite(inputs, inputs).finding
    assert found == Finding(
        Where.SUM, None, 0, "Linear", 0, 0, "the gradient of each microbatch is finite, but their sum overflows"
    )
