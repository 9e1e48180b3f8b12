"""What the tests of this folder share: a small batch and its loss, and a pipeline beside the plain loop.

The folder is the museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from parity_cases import Case, check_case
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy

ALWAYS = RecomputePolicy(last_stage="always")


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


KEPT = r".* kept from F to B and not recomputed"  # what is said of layers that are not run again
KEPT_WARNINGS = pytest.mark.filterwarnings(f"ignore:{KEPT}")
NEVER = RecomputePolicy("never")
UNPROVED = RecomputePolicy(last_stage="always", verify="off")


def check(
    layers: Callable[[], list[nn.Module]],
    *,
    recompute: RecomputePolicy,
    stages: int = 2,
    steps: int = 2,
    **options: Any,
) -> None:
    """Equal to the plain loop, `stages` stages on one rank."""
    batches = [batch() for _ in range(steps)]
    options = {"num_microbatches": 3, "num_stages": stages, "stages_per_rank": stages, **options}
    loss = options.pop("loss", mean_square)
    case = Case("layers", layers, lambda: batches, loss, options={"recompute": recompute, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=KEPT)
        check_case(case)


def refused(
    error: type[Exception],
    message: str,
    layers: Sequence[nn.Module],
    loss: Any = mean_square,
    given: tuple[Any, Any] | None = None,
    **options: Any,
) -> None:
    """A step of it ends with such an error."""
    options = {"num_microbatches": 3, "recompute": ALWAYS, **options}
    with Pipeline(layers, loss, **options) as pipeline, pytest.raises(error, match=message):
        pipeline.step(*(given or batch()))


EVERY_MODE = pytest.mark.parametrize("recompute", [NEVER, ALWAYS, UNPROVED], ids=["never", "always", "unproved"])


# Recomputed on every stage, in two orders; on one stage and on two; and kept.
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"recompute": ALWAYS},
    "inline": {"recompute": RecomputePolicy("inline", last_stage="always")},
    "two stages": {"recompute": ALWAYS, "schedule": "interleaved", "stages_per_rank": 2, "balance": [1, 3]},
    "two places": {"recompute": RecomputePolicy("early", last_stage="always", sets=2, keep="none")},
    "never": {"recompute": RecomputePolicy("never", last_stage="always")},  # every F before the first B
}


def check_state(
    make_layers: Callable[[], Sequence[nn.Module]],
    ways: Iterable[str] = WAYS,
    *,
    make_loss: Callable[[], Any] = lambda: mean_square,
    before_step: Callable[[int, nn.Sequential], None] = lambda step, model: None,
    make_batch: Callable[[], tuple[Any, Tensor]] = batch,
) -> None:
    """Three steps beside the plain loop, each way: loss, gradients, and at the end buffers, are equal bit for bit.

    There is a linear layer before `make_layers()` and one behind.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=KEPT)
        for way in ways:
            torch.manual_seed(0)
            ours = nn.Sequential(nn.Linear(4, 4), *make_layers(), nn.Linear(4, 4))
            torch.manual_seed(0)
            theirs = nn.Sequential(nn.Linear(4, 4), *make_layers(), nn.Linear(4, 4))
            loss, reference_loss = make_loss(), make_loss()
            options = dict(WAYS[way])
            if "balance" in options:
                options["balance"] = [1, len(ours) - 1]
            with Pipeline(ours, loss, num_microbatches=3, **options) as pipeline:
                for step in range(3):
                    before_step(step, ours)
                    before_step(step, theirs)
                    inputs, targets = make_batch()
                    found = pipeline.step(inputs, targets)
                    inputs, targets = make_batch()
                    expected = reference_step(theirs, reference_loss, inputs, targets, num_microbatches=3, step=step)
                    assert torch.equal(found, expected), f"{way}, step {step}: loss {found}, expected {expected}"
                    assert_same_gradients(ours, theirs)
                for name, value in theirs.state_dict().items():
                    assert torch.equal(ours.state_dict()[name].to_dense(), value.to_dense()), f"{way}: {name} differs"


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters()):
        assert (own.grad is None) == (other.grad is None), name
        assert own.grad is None or torch.equal(own.grad, other.grad), f"{name}.grad differs"
