"""Stages on any rank: a call starts where stage 0 is, the loss where the last stage is, and the numbers stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity_cases import Case, mean_square, plain, rows, run_cases, transposed
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.plan.plan import Plan, make_plan
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.make import make_schedule

PLACEMENTS: dict[int, list[Sequence[int]]] = {
    2: [(0, 1, 1, 0), (1, 0), (0, 0, 1), (1, 0, 0)],
    3: [(2, 0, 1), (0, 1, 2, 2, 1, 0), (1, 2, 2, 0, 1)],
}
# In one piece and in microbatches: the mean over 8 rows of 8. The sums that lead to outputs, of order 1, are shorter: five of 8.
ROUNDING = rounding(torch.float32, terms=8 * 8)


def plan_for(placement: Sequence[int]) -> Plan:
    return make_plan(6, placement=placement, num_microbatches=4)


def everywhere(num_ranks: int) -> list[Case]:
    """Each placement x mode, by turns as a family orders it, and as a user does with a stage that is frozen for a step."""
    cases = []
    for turn, placement in enumerate(PLACEMENTS[num_ranks]):
        for number, mode in enumerate(("inline", "overlap", "never")):
            options: dict[str, Any] = {"plan": plan_for(placement), "recompute": mode}
            if (turn + number) % 2:
                if len(placement) == num_ranks:
                    options["schedule"] = "1f1b"
                cases.append(
                    Case(f"{placement}, {mode}", lambda: transposed(0.3), lambda: rows(8, 11), options=options)
                )
                continue
            options["schedule"] = make_schedule(
                num_stages=len(placement), placement=placement, num_microbatches=4, recompute=mode, transport_ahead=1
            )
            name = f"{placement}, {mode}, given and frozen by turns"
            batches = lambda: rows(8, 9, 8, 8)  # noqa: E731
            cases.append(Case(name, lambda: plain(0.2), batches, options=options, before_step=freeze_by_turns))
    return cases


def freeze_by_turns(step: int, model: nn.Sequential) -> None:
    for number, layer in enumerate(model):
        layer.requires_grad_(number >= (0, 1, 4, 0)[step])


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_placement_gives_the_same_numbers(num_ranks: int) -> None:
    run_ranks(num_ranks, run_cases, everywhere, num_ranks)


class Overflow(nn.Module):
    """Not finite in the row that begins with 7."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] == 7, x / 0, x)


def call(placement: tuple[int, ...]) -> list[str]:
    """Everything but training, on a batch that only the first and the last stage's ranks have; returns what they all tell."""
    torch.manual_seed(0)
    model = nn.Sequential(Overflow(), *(nn.Linear(8, 8) for _ in range(5)))
    inputs, targets = rows(8)[0]
    with Pipeline(model, mean_square, plan=plan_for(placement), timeout_seconds=NEVER_SECONDS) as pipeline:
        assert pipeline.is_first == (pipeline.rank == placement[0])
        assert pipeline.is_last == (pipeline.rank == placement[-1])
        mine = (inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
        loss = pipeline.evaluate(*mine)
        assert torch.allclose(loss, mean_square(model(inputs), targets), rtol=ROUNDING)
        output = pipeline(mine[0])
        assert (output is not None) == pipeline.is_last
        assert output is None or torch.allclose(output, model(inputs), rtol=ROUNDING, atol=ROUNDING)
        whole = pipeline.full_state_dict()
        assert (whole is not None) == (pipeline.rank == 0)
        for name, value in model.state_dict().items():
            assert whole is None or torch.equal(whole[name], value)
        said = []
        for refused in (
            lambda: pipeline.step(inputs[:3], targets[:3]),
            lambda: pipeline.evaluate(inputs[:0], targets[:0]),
        ):
            with pytest.raises(ValueError, match=r".") as error:
                refused()
            said.append(str(error.value))
        pipeline.step(*mine)
        assert (pipeline.gather_report() is None) == (pipeline.rank > 0)
        inputs[5, 0] = 7
        with pytest.raises(LossNotFinite) as bad:
            pipeline.step(*mine)
        found = pipeline.find_not_finite(*mine).finding
        assert found is not None
        return [*said, str(bad.value), found.text, str(float(loss))]


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (2, 0, 1)], ids=str)
def test_calls(placement: tuple[int, ...]) -> None:
    first, *others = run_ranks(max(placement) + 1, call, placement)
    assert others == [first] * len(others)
    few, none, bad, found, _ = first
    assert "inputs has 3 rows, fewer than num_microbatches=4" in few
    assert f"on rank {placement[0]}, which holds the first stage" in none
    assert "the loss of microbatch 2 in step 2 is not finite" in bad
    assert (
        f"layer 0 (Overflow) of stage 0 on rank {placement[0]} gives the first output that is not finite in microbatch 2"
        in found
    )


def messages_of_a_step(placement: tuple[int, ...]) -> list[str]:
    """The passes along the chain of one step, in order."""
    passes: list[str] = []
    with Pipeline(plain(0.0), mean_square, plan=plan_for(placement), timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(*rows(8)[0])
        for way in ("down", "up"):
            carry = getattr(Chain, way)
            setattr(Chain, way, lambda *given, carry=carry, way=way: (passes.append(way), carry(*given))[1])
        pipeline.step(*rows(8)[0])
    return passes


@pytest.mark.parametrize(
    ("placement", "passes"),
    [((0, 0, 1, 1), ["down", "up"]), ((0, 1, 0, 1), ["up", "down", "up"]), ((0, 1, 1, 0), ["up", "down", "down"])],
)
def test_messages_of_a_step(placement: tuple[int, ...], passes: list[str]) -> None:
    """One for the header and one for the loss where stages stand in the order of the ranks."""
    assert run_ranks(2, messages_of_a_step, placement) == [passes] * 2
