"""A pipeline whose backward is split: the numbers of `reference_step`, bit for bit, and the memory that was foreseen."""

from __future__ import annotations

import copy
import dataclasses
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairwise import pairwise
from parity_cases import Case, mean_square, plain, rows, run_cases, transposed
from ranks import NEVER_SECONDS, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipetrain.config.records import ModelConfig
from pipetrain.models.loss import next_token_loss
from pipetrain.models.transformer import transformer_layers
from pipetrain.monitor.breakdown import bytes_over_time
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.op import Kind
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.simulate import simulate

VOCABULARY = 11


def split(**options: Any) -> dict[str, Any]:
    return {"plan": make_plan(6, num_ranks=3, num_microbatches=4, split_backward=True), **options}


def front_frozen(num_layers: int) -> list[nn.Module]:
    layers = plain(0.3)
    for layer in layers[:num_layers]:
        layer.requires_grad_(False)
    return layers


def every_split_schedule() -> list[Case]:
    cases = []
    for row in pairwise(["gpipe", "1f1b"], [*Mode], [1, 2]):
        family, mode, sets = row.values
        options = split(schedule=family, recompute=RecomputePolicy(mode, sets=sets, keep="none"))  # type: ignore[arg-type]
        if not row.marks:
            name = f"{family}, {mode}, {sets} sets"
            cases.append(Case(name, lambda: transposed(0.3), lambda: rows(9, 12), options=options))
    for family in ("gpipe", "1f1b"):
        options = split(schedule=family)
        for frozen in (1, 3):
            cases.append(
                Case(f"{frozen} layers frozen", partial(front_frozen, frozen), lambda: rows(8, 8), options=options)
            )
        cases.append(Case("scaled", lambda: plain(0.3), lambda: rows(8, 11), options=options, scale=0.5))
    return cases


@pytest.mark.slow
def test_every_mode() -> None:
    run_ranks(3, run_cases, every_split_schedule)


def transformer() -> list[nn.Module]:
    config = ModelConfig(
        name="gpt2", num_hidden_layers=6, hidden_size=16, num_attention_heads=2, dropout=0.1, max_position_embeddings=16
    )
    return [build() for build in transformer_layers(config, VOCABULARY)]


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (24, 17), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def bytes_of_a_step(mode: str, sets: int, seconds: tuple[float, float]) -> tuple[int, float, float]:
    """On every rank the most bytes in the second step: as measured, and of places and stashed inputs in the order in which its ops ran
    and in that of its schedule."""
    plan = make_plan(8, num_ranks=2, num_microbatches=6, split_backward=True)
    policy = RecomputePolicy(Mode(mode), sets=sets, keep="none", last_stage="always")  # type: ignore[arg-type]
    with Pipeline(
        transformer(), next_token_loss, plan=plan, schedule="1f1b", recompute=policy, timeout_seconds=NEVER_SECONDS
    ) as pipeline:
        pipeline.before_ops(lambda op, step: time.sleep(seconds[pipeline.rank]))
        for _ in range(2):
            pipeline.step(*tokens())
        (stage,) = pipeline._stages.values()
        stash = max(stage.stash_bytes.values(), default=0)
        costs = Costs.spread(2)
        sized = dataclasses.replace(
            costs, input_bytes=(stash,) * 2, set_bytes=(max(stage.set_bytes.values()) + stash,) * 2
        )
        foreseen = simulate(pipeline.schedule, costs).of_rank(pipeline.rank)
        events = pipeline.report.events
        assert {Kind.I, Kind.W} <= {event.op.kind for event in events}
        in_order, promised = (
            max(held for _, held in bytes_over_time(pipeline.schedule, order, sized)) for order in (events, foreseen)
        )
        return pipeline.report.peak_activation_bytes, in_order, promised


def bytes_of_steps(seconds: tuple[float, float]) -> list[tuple[str, int, float, float]]:
    """On every rank; each of them is late by its `seconds` before each of its ops."""
    ways = [("never", 1), ("inline", 1), ("inline", 2), ("overlap", 2)]
    return [(f"{mode}, {sets} sets", *bytes_of_a_step(mode, sets, seconds)) for mode, sets in ways]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [(0.01, 0.0), (0.0, 0.01)])
def test_peak_bytes_are_as_foreseen(seconds: tuple[float, float]) -> None:
    """What waits for W takes its set's place, and no more. A rank that is late finds its messages there, and recomputes ahead of
    none of them: it holds less than its schedule allows."""
    for found in run_ranks(2, bytes_of_steps, seconds):
        for way, measured, in_order, promised in found:
            said = f"{way}: {measured} bytes, {in_order} in the order that ran, {promised} in that of the schedule"
            assert 0.85 * in_order <= measured <= 1.05 * in_order, said
            assert measured <= 1.05 * promised, said


def test_sharded_layers_stay_whole() -> None:
    """`fully_shard` puts other leaves in the place of its weights, and reduces their gradients in the backward that it hooks."""
    from torch.distributed.fsdp import fully_shard  # half a second
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        reference = copy.deepcopy(nn.Sequential(*layers))
        fully_shard(layers[0], mesh=init_device_mesh("cpu", (1,)))
        plan = make_plan(2, num_ranks=1, num_microbatches=4, split_backward=True)
        ((inputs, targets),) = rows(8)
        with (
            Pipeline(layers, mean_square, plan=plan, device="cpu", recompute="never") as pipeline,
            pytest.warns(
                UserWarning, match=r"layer 0 \(FSDPLinear\): gradients of its weights stay in I .*: fully_shard"
            ),
        ):
            pipeline.step(inputs, targets)
        reference_step(reference, mean_square, inputs, targets, num_microbatches=4)
        for ours, theirs in zip(nn.Sequential(*layers).parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            gathered = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            assert torch.equal(gathered, theirs.grad)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
