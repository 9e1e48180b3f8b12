"""Microbatches that count nothing: their ops do nothing on every rank, and every number is that of the loop that leaves them out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parity_cases import Batch, Case, mean_square, run_cases
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.call_programs import Programs
from pipetrain.runtime.cut import counts_of
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy

M = 4


class Steep(nn.Module):
    """Its derivative is endless where the input is 0: zeros that come back would be NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def layers() -> list[nn.Module]:
    """The linear layers have no bias, so rows of zeros stay zeros up to the Steep one; running means see who runs."""
    return [
        nn.Linear(4, 6, bias=False),
        nn.Sequential(Steep(), nn.BatchNorm1d(6)),
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 6),
        nn.Linear(6, 4),
    ]


def counted(target: Tensor) -> int:
    return int((target[:, 0] > -50).sum())


def counted_loss(output: Tensor, target: Tensor) -> Tensor:
    """Endless for a microbatch that counts nothing."""
    which = target[:, 0] > -50
    return ((output[which] - target[which]) ** 2).sum() / which.sum()


def batch(counts: Sequence[int], seed: int = 0) -> Batch:
    """Three rows per microbatch. Where it does not count all inputs are 0, and no target counts."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(3 * len(counts), 4, generator=generator) for _ in range(2))
    for number, count in enumerate(counts):
        rows = slice(3 * number + count, 3 * number + 3)
        targets[rows] = -99.0
        if not count:
            inputs[rows] = 0.0
    return inputs, targets


def batches(*which: Sequence[int]) -> Callable[[], list[Batch]]:
    return lambda: [batch(counts, seed) for seed, counts in enumerate(which)]


SETS = batches((0, 1, 3, 0), (2, 2, 2, 2), (0, 1, 3, 0), (1, 0, 0, 0), (3, 0, 2, 1), (0, 0, 0, 3))


def on_one_rank() -> list[Case]:
    cases = []
    for num_stages, mode, last in (
        (1, "overlap", "always"),
        (3, "overlap", "always"),
        (3, "never", "auto"),
        (3, "inline", "auto"),
    ):
        policy = RecomputePolicy(mode=mode, last_stage=last)  # type: ignore[arg-type]
        options = {"stages_per_rank": num_stages, "recompute": policy, "count_fn": counted}
        cases.append(Case(f"{num_stages} stages, {mode}", layers, SETS, counted_loss, options))
    return cases


def test_every_number_is_that_of_the_plain_loop() -> None:
    run_cases(on_one_rank)


def on_ranks(file: str) -> list[Case]:
    placed = make_plan(6, placement=(0, 1, 1, 0), num_microbatches=M)
    backwards = make_plan(6, placement=(1, 0), num_microbatches=M)
    different: dict[str, dict[str, Any]] = {
        "interleaved": {"schedule": "interleaved", "stages_per_rank": 2},
        "a v": {"plan": placed, "recompute": "overlap"},
        "the other way round": {"plan": backwards, "recompute": "inline"},
        "from a file": {"schedule": file},
        "two sets": {"recompute": RecomputePolicy(sets=3)},
    }
    return [
        Case(name, layers, SETS, counted_loss, {"count_fn": counted, "timeout_seconds": NEVER_SECONDS, **options})
        for name, options in different.items()
    ]


@pytest.mark.slow
def test_on_several_ranks(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(write_csv(make_schedule("gpipe", num_stages=2, num_microbatches=M)))
    run_ranks(2, run_cases, on_ranks, str(file))


def freeze_by_turns(step: int, model: nn.Sequential) -> None:
    for number, layer in enumerate(model):
        layer.requires_grad_(number >= (0, 2, 2, 0, 0, 2)[step])


def frozen_by_turns() -> list[Case]:
    options = {"count_fn": counted, "timeout_seconds": NEVER_SECONDS}
    return [
        Case(
            "frozen by turns",
            layers,
            SETS,
            counted_loss,
            {**options, "schedule": schedule},
            before_step=freeze_by_turns,
        )
        for schedule in ("gpipe", "1f1b")
    ]


def test_what_is_told_of_messages_is_known_microbatch_by_microbatch() -> None:
    """Which forms both ends of an edge know depends on the microbatches that came, and on what needed a gradient then."""
    run_ranks(3, run_cases, frozen_by_turns)


def runs_no_op_of_them() -> None:
    seen = []
    torch.manual_seed(0)
    with Pipeline(
        layers(), counted_loss, num_microbatches=M, count_fn=counted, timeout_seconds=NEVER_SECONDS
    ) as pipeline:
        pipeline.before_ops(lambda op, step: seen.append(op.microbatch))
        pipeline.step(*batch((2, 0, 1, 0)))
        assert set(seen) == {0, 2}
        report = pipeline.gather_report()
        if report is not None:
            assert {event.op.microbatch for event in report.timeline.events} == {0, 2}
        found = pipeline.find_not_finite(*batch((2, 0, 1, 0)))
        assert found.finding is None
        assert sorted(found.losses) == [0, 2]
        pipeline.step(*batch((1, 1, 1, 1)))
        assert pipeline.gather_report() is None or pipeline.rank == 0


def test_no_rank_runs_them() -> None:
    run_ranks(2, runs_no_op_of_them)


def evaluates() -> list[float]:
    """Any number of rows, and of microbatches that count."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    losses = []
    with Pipeline(model, counted_loss, num_microbatches=M, count_fn=counted, timeout_seconds=NEVER_SECONDS) as pipeline:
        for counts in ((3, 0, 2, 1), (1, 0, 0, 3), (2, 2, 2, 2), (0, 0, 0, 1)):
            inputs, targets = batch(counts)
            losses.append(
                float(pipeline.evaluate(inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
            )
        for rows in (1, 2, 3):
            inputs, targets = torch.randn(rows, 4), torch.full((rows, 4), -99.0)
            targets[-1] = 1.0
            losses.append(float(pipeline.evaluate(inputs, targets)))
        pipeline.step(*batch((0, 3, 2, 1)))
        assert pipeline(batch((0, 3, 2, 1))[0]) is None or pipeline.is_last
    return losses


def test_evaluation_skips_them_too() -> None:
    first, second = run_ranks(2, evaluates)
    assert first == second
    assert all(map(math.isfinite, first))


# What count_fn gives --------------------------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n,
    "float": lambda n: n / 3,
    "0-dim tensor": lambda n: torch.tensor(n),
    "0-dim float32": lambda n: torch.tensor(n / 3),
    "numpy": lambda n: np.int64(n),
    "numpy float": lambda n: np.float32(n / 3),
    "fraction": lambda n: Fraction(n, 3),
}


def of_numbers() -> list[Case]:
    """And one where a share is so little that it counts as nothing."""
    counts = {name: lambda target, make=make: make(counted(target)) for name, make in NUMBERS.items()}
    counts["shares"] = lambda target: counted(target) * 1e300 or 5e-324
    return [
        Case(name, layers, SETS, counted_loss, {"stages_per_rank": 2, "count_fn": count})
        for name, count in counts.items()
    ]


def test_any_number_will_do() -> None:
    run_cases(of_numbers)


MISTAKES: dict[str, tuple[Callable[[int], Any], str]] = {
    "nan": (lambda n: math.nan, r"count_fn gave nan for the target of microbatch 1: it must return how much of it counts"),
    "inf": (lambda n: math.inf, r"count_fn gave inf for the target of microbatch 1"),
    "negative": (lambda n: -2, r"count_fn gave -2 for the target of microbatch 1"),
    "None": (lambda n: None, r"count_fn gave None for the target of microbatch 1"),
    "bool": (lambda n: True, r"count_fn gave True for the target of microbatch 1"),
    "tensor": (lambda n: torch.ones(1), r"count_fn gave a tensor of shape \[1\] for the target of microbatch 1"),
    "nan tensor": (lambda n: torch.tensor(math.nan), r"count_fn gave tensor\(nan\) for the target of microbatch 1"),
    "bool tensor": (lambda n: torch.tensor(True), r"count_fn gave tensor\(True\) for the target of microbatch 1"),
    "complex": (lambda n: 1j, r"count_fn gave 1j for the target of microbatch 1"),
    "word": (lambda n: "3", r"count_fn gave '3' for the target of microbatch 1"),
    "fails": (lambda n: {}["x"], r"count_fn failed on the target of microbatch 1: KeyError: 'x'"),
}  # fmt: skip


def counting(mistake: str) -> Callable[[Tensor], Any]:
    """Right but for microbatch 1, which is marked."""
    return lambda target: MISTAKES[mistake][0](0) if (target == 7).any() else counted(target)


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_what_is_no_count_is_refused(mistake: str) -> None:
    targets = [torch.ones(2, 2), torch.full((2, 2), 7.0), torch.ones(2, 2)]
    with pytest.raises(ValueError, match=MISTAKES[mistake][1]):
        counts_of(targets, counting(mistake))
    inputs, labels = torch.randn(6, 4), torch.cat(targets)
    with pytest.raises(ValueError, match=MISTAKES[mistake][1]):
        reference_step([nn.Linear(4, 2)], mean_square, inputs, labels, num_microbatches=3, count_fn=counting(mistake))


def refused_on_every_rank() -> list[str]:
    """The batch is refused before anything runs, and the pipeline goes on."""
    found = []
    mark = {"as": "counted"}

    def count(target: Tensor) -> Any:
        if mark["as"] in MISTAKES:
            return counting(mark["as"])(target)
        return 0 if mark["as"] == "nothing" else counted(target)

    torch.manual_seed(0)
    model, reference = nn.Sequential(*layers()), nn.Sequential(*layers())
    reference.load_state_dict(model.state_dict())
    with Pipeline(model, counted_loss, num_microbatches=M, count_fn=count, timeout_seconds=NEVER_SECONDS) as pipeline:
        for mistake in (*MISTAKES, "nothing", "rows"):
            mark["as"] = mistake
            inputs, targets = batch((2, 2, 2, 2))
            targets[4] = 7
            for call in (pipeline.step, pipeline.evaluate):
                with pytest.raises(ValueError) as caught:  # noqa: PT011, the messages are compared
                    call(inputs, targets[:-1] if mistake == "rows" else targets)
                found.append(str(caught.value))
        mark["as"] = "counted"
        loss = pipeline.step(*batch((0, 1, 2, 3)))
        expected = reference_step(reference, counted_loss, *batch((0, 1, 2, 3)), num_microbatches=M, count_fn=counted)
        assert torch.equal(loss, expected)
    return found


def test_a_bad_count_is_the_same_error_on_every_rank() -> None:
    first, *others = run_ranks(3, refused_on_every_rank)
    assert others == [first] * 2
    wanted = [message for _, message in MISTAKES.values()]
    wanted += [r"count_fn gave \[0, 0, 0, 0\]", "targets have 11 rows on the last rank, inputs 12 on the first"]
    for number, message in enumerate(wanted):
        assert all(re.search(message, text) for text in first[2 * number : 2 * number + 2]), message


def counts_on_one_rank(rank: int) -> str:
    count_fn = counted if dist.get_rank() == rank else None
    with pytest.raises(ValueError, match="count_fn") as caught:
        Pipeline(layers(), mean_square, num_microbatches=M, count_fn=count_fn, timeout_seconds=NEVER_SECONDS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "rank 1 was given no count_fn, rank 0 one"), (1, "rank 1 was given a count_fn, rank 0 none")],
)
def test_every_rank_counts_or_none(rank: int, message: str) -> None:
    first, second = run_ranks(2, counts_on_one_rank, rank)
    assert first == second
    assert message in first


# Programs -------------------------------------------------------------------------------------------------------------


def test_programs_of_a_device_that_runs_ahead_have_one_queue() -> None:
    plan = make_plan(8, num_ranks=2, num_microbatches=8)
    programs = Programs("1f1b", RecomputePolicy(), plan, 0, runs_ahead=True)
    for program in (programs.whole(), programs.training(1), programs.inference(4)):
        assert program.ops == program.schedule.launch_order[0]
        assert program.queues == (range(len(program.ops)),)
    assert not Programs("1f1b", RecomputePolicy(), plan, 0).whole().schedule.launch_order
