"""A wrong argument is refused by its name before anything runs."""

from __future__ import annotations

import math

import pytest
from beside_the_loop import mean_square
from torch import nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule


@pytest.mark.parametrize("field", ["forward", "backward", "recompute", "hop", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, [1.0, math.nan]])
def test_costs_are_finite(field: str, seconds: float | list[float]) -> None:
    """Symptom: `pipetrain show cost.forward_seconds=nan` never ended.

    Cause: no time is later than nan, so the simulated step had no next moment.
    """
    with pytest.raises(ValueError, match=f"cost.{field}_seconds=.*(nan|inf|-1)"):
        Costs.spread(2 + (field == "hop"), **{field: seconds})
    with pytest.raises(ValueError, match=r"recompute=\[nan\]: costs are finite numbers, 0 or more"):
        Costs((1.0,), (1.0,), (math.nan,), (), ())


def test_a_schedule_that_is_too_large_is_refused() -> None:
    """Symptom: `pipetrain show pipeline.num_stages=99999999` never ended, nor did a schedule of so many microbatches.

    Cause: there was no limit, and every op of it was to be made.
    """
    with pytest.raises(ValueError, match=r"99999999 stages .* are too many: allowed are 4096"):
        make_schedule(num_stages=99999999, num_microbatches=1)
    with pytest.raises(ValueError, match=r"num_microbatches=99999999 with 4 stages.*=32768"):
        make_schedule(num_stages=4, num_microbatches=99999999)


def test_a_state_of_another_model() -> None:
    """Symptom: a misspelt name in the state was ignored, and the layer kept its old buffer or extra tensors vanished; no word.

    Cause: each layer picked what it knows.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        state = pipeline.state_dict()
        for name in ("0.wieght", "1.weight", "weight"):
            with pytest.raises(ValueError, match=f"the state has '?{name}.*which the model does not"):
                pipeline.load_state_dict({**state, name: state["0.weight"]})
        with pytest.raises(ValueError, match=r"0.weight is a list in the state"):
            pipeline.load_state_dict({**state, "0.weight": [1.0]})
