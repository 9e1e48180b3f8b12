"""Stages on any rank: headers begin where the first stage is, the loss where the last one is, and the numbers stay."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from parity_cases import Case, mean_square, plain, rows, run_cases, transposed
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding
from torch import nn

from pipetrain.plan.plan import Plan, make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.make import make_schedule

PLACEMENTS: dict[int, list[Sequence[int]]] = {
    2: [(0, 1, 1, 0), (1, 0), (0, 0, 1), (1, 0, 0)],
    3: [(2, 0, 1), (0, 1, 2, 2, 1, 0), (1, 2, 2, 0, 1)],
}
# In one piece and in microbatches: the mean over 7 rows of 8. The sums that lead to outputs, of order 1, are shorter: 8 + 12 + 12 + 12.
ROUNDING = rounding(torch.float32, terms=7 * 8)


def plan_for(placement: Sequence[int]) -> Plan:
    return make_plan(6, placement=placement, num_microbatches=4)


def everywhere(num_ranks: int) -> list[Case]:
    """Each placement x mode, as a family orders them, and as a user does with a stage that is frozen for a step.

    On three ranks each of both, on two ranks by turns.
    """
    cases = []
    for turn, placement in enumerate(PLACEMENTS[num_ranks]):
        plan = plan_for(placement)
        for mode in ("inline", "overlap", "never"):
            turn += 1
            options = {"plan": plan, "recompute": mode}
            given = make_schedule(
                num_stages=len(placement), placement=placement, num_microbatches=4, recompute=mode, transport_ahead=1
            )
            if len(placement) == num_ranks:
                options["schedule"] = "1f1b"
            both = [
                Case(f"{placement}, {mode}", lambda: transposed(0.3), lambda: rows(8, 11), options=options),
                Case(
                    f"{placement}, {mode}, given and frozen by turns",
                    lambda: plain(0.2),
                    lambda: rows(8, 9, 8, 8),
                    options={**options, "schedule": given},
                    before_step=freeze_by_turns,
                ),
            ]
            cases += both if num_ranks == 3 else [both[turn % 2]]
    return cases


def freeze_by_turns(step: int, model: nn.Sequential) -> None:
    for number, layer in enumerate(model):
        layer.requires_grad_(number >= (0, 1, 4, 0)[step])


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_placement_gives_the_same_numbers(num_ranks: int) -> None:
    run_ranks(num_ranks, run_cases, everywhere, num_ranks)


def uses_the_rest(placement: Sequence[int]) -> dict[str, object]:
    """`evaluate`, a call and the whole state, with inputs and targets only where the first and the last stage are."""
    torch.manual_seed(0)
    model = nn.Sequential(*plain(0.0))
    whole = copy.deepcopy(model)
    inputs, targets = rows(7)[0]
    with Pipeline(model, mean_square, plan=plan_for(placement), timeout_seconds=NEVER_SECONDS) as pipeline:
        assert pipeline.is_first == (pipeline.rank == placement[0])
        assert pipeline.is_last == (pipeline.rank == placement[-1])
        own = inputs if pipeline.is_first else None
        loss = pipeline.evaluate(own, targets if pipeline.is_last else None)
        assert torch.allclose(loss, mean_square(whole(inputs), targets), rtol=ROUNDING, atol=0)
        output = pipeline(own)
        assert (output is not None) == pipeline.is_last
        assert output is None or torch.allclose(output, whole(inputs), rtol=ROUNDING, atol=ROUNDING)
        with pytest.raises(ValueError, match=f"on rank {placement[0]}, which holds the first stage"):
            pipeline.evaluate(torch.zeros(0, 8), torch.zeros(0, 8))
        pipeline.step(own, targets if pipeline.is_last else None)
        report = pipeline.gather_report()
        assert (report is None) == (pipeline.rank > 0)
        state = pipeline.full_state_dict()
        assert (state is None) == (pipeline.rank > 0)
        for name, value in whole.state_dict().items():
            assert state is None or torch.equal(state[name], value)
        return {"loss": float(loss), "names": None if state is None else list(state)}


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (2, 0, 1)], ids=str)
def test_the_rest_of_a_pipeline(placement: tuple[int, ...]) -> None:
    first, *others = run_ranks(max(placement) + 1, uses_the_rest, placement)
    assert first["names"] == list(nn.Sequential(*plain(0.0)).state_dict())
    assert {other["loss"] for other in others} == {first["loss"]}


def fails_in_the_last_stage() -> str:
    def not_finite(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_square(output, target) * torch.inf

    with Pipeline(plain(0.0), not_finite, plan=plan_for((0, 1, 1, 0)), timeout_seconds=NEVER_SECONDS) as pipeline:
        inputs, targets = rows(8)[0]
        with pytest.raises(Exception, match="loss of microbatch 0 in step 1 is not finite"):
            pipeline.step(inputs, targets)
        return str(pipeline.find_not_finite(inputs, targets))


def test_where_it_is_not_finite_is_told_alike() -> None:
    first, second = run_ranks(2, fails_in_the_last_stage)
    assert first == second
