"""A set that goes to host memory between F and B changes no bit, frees its place on the device, and is never waited for without end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import CPU, make_stages
from parity_cases import Case, channels_last, images, mean_square, plain, rows, run_cases, transposed
from ranks import NEVER_SECONDS, run_outcomes, run_ranks
from stage_models import batch, linear, meter_of
from test_failures import assert_gone, last_line
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.device import CpuDevice
from pipetrain.plan.host_memory import checked_limit
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.host_copies import HostPool
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.alive import peak_on_host
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage import host_set
from pipetrain.stage.errors import SavedTensorChanged
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.seeding import layer_seeds

RANKS, STAGES = 3, 6
FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "auto")
MODELS = (plain, transposed, channels_last)

# Equal numbers ----------------------------------------------------------------------------------------------------------


def random_case(seed: int) -> Case:
    chance = random.Random(seed)
    family, mode = chance.choice(FAMILIES), chance.choice(("inline", "early", "overlap"))
    per_rank = 2 if family in ("interleaved", "zbv") else 1
    m = RANKS * chance.randint(1, 3) if per_rank == 2 else chance.randint(2, 9)
    offload = chance.choice(("auto", "always"))
    sets = chance.randint(2 if offload == "always" else 1, 3)
    plan = make_plan(
        STAGES,
        num_ranks=RANKS,
        stages_per_rank=per_rank,
        num_microbatches=m,
        placement="v" if family == "zbv" else "loop",
        split_backward=family in ("gpipe", "1f1b") and chance.random() < 0.3,
    )
    # A stage of two layers may have two parts, each with copies of its own.
    segments = chance.choice((1, 2)) if per_rank == 1 and family != "zb-h1" and not plan.split_backward else 1
    model, dropout = chance.choice(MODELS), chance.choice((0.0, 0.3))
    counts = [m * chance.randint(1, 2) + chance.randint(0, 2) for _ in range(2)]
    return Case(
        f"{seed}: {family} {mode} {offload} sets={sets} m={m} {model.__name__} {plan.split_backward} segments={segments}",
        lambda: model(dropout),
        lambda: (images if model is channels_last else rows)(*counts, counts[0]),
        options={
            "plan": plan,
            "num_microbatches": m,
            "schedule": family,
            "recompute": RecomputePolicy(mode=mode, sets=sets, offload=offload, segments=segments),  # type: ignore[arg-type]
        },
    )


def run_small(make_cases: Callable[..., Any], *args: Any) -> int:
    """As `run_cases`; tensors of any size go to the host."""
    host_set.LEAST_BYTES = 1
    return run_cases(make_cases, *args)


def some_cases(first: int, count: int) -> list[Case]:
    return [random_case(seed) for seed in range(first, first + count)]


def num_offloaded(case: Case) -> int:
    plan, policy = case.options["plan"], case.options["recompute"]
    made = make_schedule(
        case.options["schedule"],
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        placement=plan.stage_ranks,
        recompute=policy,
        split_backward=plan.split_backward,
    )
    return len(made.offloaded)


@pytest.mark.quick("0")
@pytest.mark.parametrize("part", range(5))
def test_no_bit_changes(part: int) -> None:
    """50 random schedules, modes, models and batches: losses, gradients and buffers of the plain loop."""
    first, count = 10 * part, 10
    assert sum(num_offloaded(case) > 0 for case in some_cases(first, count)) > count // 3
    assert run_ranks(RANKS, run_small, some_cases, first, count) == [count] * RANKS


# Memory -----------------------------------------------------------------------------------------------------------------

WIDE = 128


def wide_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE))


def train_wide(schedule: str, policy: RecomputePolicy, m: int, steps: int, uneven: bool) -> dict[str, Any]:
    """On each rank: what is held on the device and on the host, and how large the pool is after each step."""
    torch.manual_seed(0)
    pools: list[int] = []
    with Pipeline(
        [wide_block() for _ in range(2 * RANKS)], mean_square, num_microbatches=m, schedule=schedule, recompute=policy
    ) as pipeline:
        copies = pipeline._runner.executor.copies
        assert copies is not None
        for step in range(steps):
            x = torch.randn(2 * m + (step % 3 if uneven else 0), 64, WIDE)
            pipeline.step(x, x)
            pools.append(copies.pool.num_bytes)
        report, (stage,) = pipeline.report, pipeline.report.stages
        return {
            "pools": pools,
            "peak": report.peak_stage_bytes,
            "set": report.set_bytes,
            "on host": peak_on_host(pipeline.schedule, stage)[0],
            "copies": sum(event.op.kind is Kind.OFFLOAD for event in report.events),
        }


@pytest.mark.parametrize(("schedule", "segments"), [("1f1b", 1), ("gpipe", 1), ("gpipe", 2)])
def test_device_and_host_hold_what_check_allows(schedule: str, segments: int) -> None:
    places, m = 2, 8
    policy = RecomputePolicy(offload="always", sets=places, segments=segments)  # type: ignore[arg-type]
    for rank, found in enumerate(run_ranks(RANKS, train_wide, schedule, policy, m, 3, False)):
        if rank == RANKS - 1:  # each B follows its F: nothing has time to go
            assert found["copies"] == found["pools"][-1] == 0
            continue
        assert found["copies"] == m * segments
        on_host = found["pools"][-1] // found["on host"]
        # Of all sets together: the batch, of which the first stage saves slices; small tensors.
        rest = found["set"] - on_host
        # Whether outputs are there at the peak is luck: a copy that is quick frees its set before the next F has one.
        assert 0.95 * places * on_host <= found["peak"] <= 1.05 * (places * on_host + rest), found


def test_the_pool_does_not_grow_after_the_first_step() -> None:
    policy = RecomputePolicy(offload="auto", sets=2)  # type: ignore[arg-type]
    for found in run_ranks(RANKS, train_wide, "1f1b", policy, 8, 9, False):
        assert set(found["pools"]) == {found["pools"][0]}


def test_a_larger_batch_takes_the_place_of_smaller_slabs() -> None:
    """Batches of 16, 17 and 18 rows: a slab grows, and their number does not."""
    policy = RecomputePolicy(offload="auto", sets=2)  # type: ignore[arg-type]
    for found in run_ranks(RANKS, train_wide, "1f1b", policy, 8, 9, True):
        assert found["pools"][3:] == found["pools"][3:4] * 6
        assert found["pools"][-1] <= 1.5 * found["pools"][0]


def test_what_is_copied() -> None:
    """Each storage once, in its views; no parameter, nothing small, and not the batch of which the microbatch is a slice."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, 2 * WIDE), Chunks(), nn.Linear(WIDE, WIDE)]
    meter = meter_of(nn.Sequential(*layers))
    (stage,) = make_stages(layers, [3], mean_square, meter)
    whole = torch.randn(512, WIDE)
    given = stage_input(whole[:256], torch.zeros(256, WIDE))
    stage.forward(0, given, keep=True, moves=True)
    before, found = meter.current_bytes, stage.host_set(0)
    assert found is not None
    halves = 256 * 2 * WIDE * 4  # both halves that `Chunks` multiplies are views of one storage
    product = difference = 256 * WIDE * 4  # inputs of the last layer and of the square in the loss
    assert found.num_bytes == halves + product + difference
    held = found.leave(torch.empty(found.num_bytes, dtype=torch.uint8), Tensor.copy_)
    held.clear()
    assert before - meter.current_bytes == found.num_bytes
    found.come_back(lambda size: torch.empty(size, dtype=torch.uint8).untyped_storage(), Tensor.copy_)
    assert meter.current_bytes == before
    stage.backward(0, ())
    assert meter.current_bytes == 0


class Chunks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=1)
        return one * other


def stage_input(x: Tensor, target: Tensor) -> StageInput:
    leaves, spec = pytree.tree_flatten(x)
    return StageInput(tuple(leaves), spec, frozenset(), lambda layers: layer_seeds(0, 0, 0, layers), target)


# Errors -----------------------------------------------------------------------------------------------------------------


def test_a_tensor_that_changes_before_its_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_set, "LEAST_BYTES", 1)
    layers = [linear(), nn.Tanh(), linear()]
    (stage,) = make_stages(layers, [3], mean_square, meter_of(nn.Sequential(*layers)))
    stage.forward(0, stage_input(*batch()), keep=True, moves=True)
    found = stage.host_set(0)
    assert found is not None
    late = found._late
    (output_of_tanh,) = (view.tensor for (view, *_) in found._views if late.layer_of(view.slot.number) == 1)
    with torch.no_grad():
        output_of_tanh.add_(1)
    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Tanh\).*before it was copied to host memory"):
        found.leave(torch.empty(found.num_bytes, dtype=torch.uint8), Tensor.copy_)


def test_a_pool_ends_where_its_limit_is() -> None:
    pool = HostPool(CpuDevice(), 250, {0: 2, 1: 1})
    first = pool.take(Op.parse("0OFFLOAD0"), 100)
    assert (pool.num_bytes, first.nbytes) == (200, 100)
    with pytest.raises(
        ValueError, match=r"recompute\.host_bytes=250: 1 sets of 100 bytes .* allow 300 or more"
    ) as raised:
        pool.take(Op.parse("1OFFLOAD0"), 100)
    assert "\n" not in str(raised.value)


def test_a_machine_without_so_much_memory_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"recompute\.host_bytes=1000000000000000: this machine has \d+ bytes of memory"
    ):
        checked_limit(10**15)
    assert checked_limit(None) > 0


# Faults -----------------------------------------------------------------------------------------------------------------


def train_with(harm: Callable[[], None], timeout_seconds: float) -> None:
    """The second copy to the host of rank 1 does harm."""
    rank = torch.distributed.get_rank()
    copy, count = CpuDevice.copy, [0]

    def harmful(self: CpuDevice, target: Tensor, source: Tensor) -> None:
        count[0] += 1
        if rank == 1 and count[0] == 2:
            harm()
        copy(self, target, source)

    CpuDevice.copy = harmful  # type: ignore[method-assign]
    torch.manual_seed(0)
    policy = RecomputePolicy(offload="always", sets=2)  # type: ignore[arg-type]
    layers = [wide_block() for _ in range(2 * RANKS)]
    with Pipeline(
        layers, mean_square, num_microbatches=8, schedule="1f1b", recompute=policy, timeout_seconds=timeout_seconds
    ) as pipeline:
        for _ in range(3):
            x = torch.randn(16, 64, WIDE)
            pipeline.step(x, x)


def raises() -> None:
    raise RuntimeError("the copy failed on purpose")


def hangs() -> None:
    threading.Event().wait(NEVER_SECONDS)


def test_a_copy_that_fails_names_its_op_on_every_rank() -> None:
    outcomes = run_outcomes(RANKS, train_with, raises, NEVER_SECONDS)
    assert_gone(outcomes)
    assert "the copy failed on purpose" in last_line(outcomes[1], "RuntimeError")
    assert "rank 1 failed in 1OFFLOAD" in (outcomes[1].error or "")
    for rank in (0, 2):
        assert "rank 1 failed in 1OFFLOAD" in last_line(outcomes[rank], "PipelineError")


@pytest.mark.slow
def test_a_copy_that_never_ends_is_waited_for_no_longer_than_the_time_out() -> None:
    outcomes = run_outcomes(RANKS, train_with, hangs, 5.0)
    assert_gone(outcomes)
    assert any("waits in 1" in (outcome.error or "") and "OFFLOAD" in (outcome.error or "") for outcome in outcomes)


# A schedule of one's own -------------------------------------------------------------------------------------------------


def own_order(shape: Any) -> list[list[Op]]:
    """One rank: the first of three sets goes to the host."""
    return [[Op.parse(text) for text in ("0F0", "0OFFLOAD0", "0F1", "0F2", "0B2", "0B1", "0RELOAD0", "0B0")]]


def test_a_generator_may_place_copies_itself() -> None:
    torch.manual_seed(0)
    policy = RecomputePolicy(offload="auto", sets=3)  # type: ignore[arg-type]
    layers = [wide_block(), wide_block()]
    with Pipeline(
        layers, mean_square, num_microbatches=3, schedule=own_order, recompute=policy, device=CPU
    ) as pipeline:
        x = torch.randn(6, 64, WIDE)
        pipeline.step(x, x)
        done = [str(event.op) for event in pipeline.report.events if event.op.kind in (Kind.OFFLOAD, Kind.RELOAD)]
        assert done == ["0OFFLOAD0", "0RELOAD0"]
