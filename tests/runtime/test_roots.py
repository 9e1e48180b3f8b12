"""Any map from stages to ranks: a call starts where stage 0 is, the loss where the last stage is, and the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_cases import Case, check_case, mean_square, plain, rows
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline

M = 4
# The first stage on the first rank, in the middle and on the last; likewise the last stage.
BALANCES = {2: [3, 3], 3: [2, 2, 2], 4: [2, 1, 2, 1]}
PLACEMENTS = [(0, 0, 1, 1), (0, 1, 1, 0), (1, 0), (2, 0, 1)]
# In one piece and in microbatches: the mean over 8 rows of 8. The sums that lead to outputs, of order 1, are shorter: five of 8.
ROUNDING = rounding(torch.float32, terms=8 * 8)


def placed(stage_ranks: tuple[int, ...]) -> dict[str, Any]:
    """A pipeline's arguments."""
    plan = make_plan(6, placement=stage_ranks, balance=BALANCES[len(stage_ranks)], num_microbatches=M)
    return {"plan": plan, "timeout_seconds": NEVER_SECONDS}


def train(stage_ranks: tuple[int, ...]) -> None:
    options = placed(stage_ranks)
    check_case(Case("placed", lambda: plain(0.3), lambda: rows(8, 11, 8), options=options))
    check_case(Case("freezing", lambda: plain(0.3), lambda: rows(8, 8, 8, 8, 8), options=options, before_step=freeze))


def freeze(step: int, model: nn.Sequential) -> None:
    """Other layers need gradients in each step, and those of two steps ago do again."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for layer in [(), (0,), (5,), (0,), ()][step]:
        model[layer].requires_grad_(False)


@pytest.mark.quick("(1, 0)")
@pytest.mark.parametrize("stage_ranks", PLACEMENTS, ids=str)
def test_parity(stage_ranks: tuple[int, ...]) -> None:
    run_ranks(max(stage_ranks) + 1, train, stage_ranks)


class Overflow(nn.Module):
    """Not finite in the row that begins with 7."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] == 7, x / 0, x)


def call(stage_ranks: tuple[int, ...]) -> list[str]:
    """Everything but training, on a batch that only the first and the last stage's ranks have; returns what they all tell."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model[0] = Overflow()
    inputs, targets = rows(8)[0]
    with Pipeline(model, mean_square, **placed(stage_ranks)) as pipeline:
        assert pipeline.is_first == (pipeline.rank == stage_ranks[0])
        assert pipeline.is_last == (pipeline.rank == stage_ranks[-1])
        mine = (inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
        loss = pipeline.evaluate(*mine)
        assert torch.allclose(loss, mean_square(model(inputs), targets), rtol=ROUNDING)
        output = pipeline(mine[0])
        assert (output is not None) == pipeline.is_last
        assert output is None or torch.allclose(output, model(inputs), rtol=ROUNDING, atol=ROUNDING)
        whole = pipeline.full_state_dict()
        assert (whole is not None) == (pipeline.rank == 0)
        assert whole is None or list(whole) == list(model.state_dict())
        with pytest.raises(ValueError, match=r".") as refused:
            pipeline.step(inputs[:3], targets[:3])
        inputs[5, 0] = 7
        with pytest.raises(LossNotFinite) as bad:
            pipeline.step(*mine)
        found = pipeline.find_not_finite(*mine).finding
        assert found is not None
        return [str(refused.value), str(bad.value), found.text]


@pytest.mark.quick("(0, 0, 1, 1)", "(0, 1, 1, 0)")
@pytest.mark.parametrize("stage_ranks", PLACEMENTS, ids=str)
def test_calls(stage_ranks: tuple[int, ...]) -> None:
    first, *others = run_ranks(max(stage_ranks) + 1, call, stage_ranks)
    assert others == [first] * len(others)
    refused, bad, found = first
    assert "inputs has 3 rows, fewer than num_microbatches=4" in refused
    assert "the loss of microbatch 2 in step 1 is not finite" in bad
    assert (
        f"layer 0 (Overflow) of stage 0 on rank {stage_ranks[0]} gives the first output that is not finite in microbatch 2"
        in found
    )


def messages_of_a_step(stage_ranks: tuple[int, ...]) -> list[str]:
    """The passes along the chain of one step, in order."""
    passes: list[str] = []
    with Pipeline(nn.Sequential(*plain(0.0)), mean_square, **placed(stage_ranks)) as pipeline:
        pipeline.step(*rows(8)[0])
        for way in ("down", "up"):
            carry = getattr(Chain, way)
            setattr(Chain, way, lambda *given, carry=carry, way=way: (passes.append(way), carry(*given))[1])
        pipeline.step(*rows(8)[0])
    return passes


@pytest.mark.parametrize(
    ("stage_ranks", "passes"),
    [((0, 1), ["down", "up"]), ((0, 0, 1, 1), ["down", "up"]), ((0, 1, 0, 1), ["up", "down", "up"]),
     ((0, 1, 1, 0), ["up", "down", "down"]), ((1, 0), ["up", "down", "down"])],
)  # fmt: skip
def test_messages_of_a_step(stage_ranks: tuple[int, ...], passes: list[str]) -> None:
    """One for the header and one for the loss where stages stand in the order of the ranks."""
    assert run_ranks(2, messages_of_a_step, stage_ranks) == [passes] * 2
