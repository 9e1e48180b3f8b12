"""engine=deepspeed with replicas: the numbers of one pipeline of as many microbatches, its snapshots, and steps that all refuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import CPU, accept, batch_of, config_of, engine_of, heldout_of, snapshot_of, train_all
from ranks import PATIENCE_SECONDS, run_ranks
from rounding import rounding
from torch import Tensor, nn

from pipetrain.comm.coordinates import Grid
from pipetrain.comm.failure import PipelineError
from pipetrain.config.records import RunConfig
from pipetrain.data.batch import Batch
from pipetrain.engine.deepspeed.engine_deepspeed import clip
from pipetrain.engine.deepspeed.environment import import_deepspeed, join_world
from pipetrain.models.trained import Sharded
from pipetrain.snapshot.state import Part, Tensors, restore_optimizer

STEPS = ("steps=6", "model.dropout=0.1", "optim.max_grad_norm=0.5", "data.global_batch_size=8")
ONE = ("recompute=never", "pipeline.num_microbatches=4", *STEPS)
TWO = ("engine=deepspeed", "parallel.num_replicas=2", "pipeline.num_microbatches=2", "recompute=inline", *STEPS)
BREAK_AT = 4


@dataclass(frozen=True)
class Trained:
    """What a rank found: figures step by step, the held-out loss, its parts of a snapshot after `BREAK_AT` - 1 steps and its weights at the end."""

    losses: list[float]
    norms: list[float | None]
    heldout: float | None
    saved: dict[Part, Tensors]
    weights: Tensors
    held: set[str]  # names of weights of which this rank has some of the state


def own_rows(config: RunConfig, step: int) -> Batch:
    """This replica's share of the batch: what `torch.tensor_split` gives it."""
    grid = Grid(2, dist.get_world_size() // 2, order=config.parallel.order)
    replica = grid.coordinates_of(dist.get_rank()).replica
    return Batch(*(torch.tensor_split(leaf, 2)[replica].contiguous() for leaf in batch_of(config, step)))


def refuse(step: int, loss: float, norm: float | None) -> bool:
    return False


def train_with_replicas(config: RunConfig, start: dict[Part, Tensors] | None = None) -> Trained:
    """All steps; with a `start`, those from `BREAK_AT` on. A step that is refused comes before step 2, and leaves nothing behind."""
    engine = engine_of(config)
    first = 1
    if start is not None:
        first = BREAK_AT
        engine.model.load_state_dict(start[Part.WEIGHTS])
        restore_optimizer(engine.model, engine.optimizer, start[Part.OPTIMIZER])
    results, saved = [], {}
    for step in range(first, config.steps + 1):
        if step == 2:
            before = {name: value.clone() for name, value in engine.weights().items()}
            assert not engine.step(step, own_rows(config, 99), refuse).is_accepted
            assert all(torch.equal(value, before[name]) for name, value in engine.weights().items())
        if step == BREAK_AT:
            saved = snapshot_of(engine)
        results.append(engine.step(step, own_rows(config, step), accept))
        engine.check_replicas()
    weights = {name: value.clone() for name, value in engine.weights().items()}
    holds = engine.optimizer.holds if isinstance(engine.optimizer, Sharded) else lambda _: True
    run = Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        engine.evaluate(heldout_of(config)),
        saved,
        weights,
        {name for name, weight in engine.model.named_parameters() if holds(weight)},
    )
    if dist.get_rank() == 3:
        with torch.no_grad():
            next(iter(engine.model.named_parameters()))[1][0] += 1e-3
    with pytest.raises(PipelineError, match=r"after step 6 the weights of rank 3 \(replica 1\) are not those of"):
        engine.check_replicas()
    engine.close()
    return run


def train_each(configs: list[RunConfig]) -> list[Trained]:
    return [train_with_replicas(config) for config in configs]


def go_on(configs: list[RunConfig], start: dict[Part, Tensors]) -> list[Trained]:
    copies = [
        {part: {name: value.clone() for name, value in of.items()} for part, of in start.items()} for _ in configs
    ]
    return [train_with_replicas(config, copy) for config, copy in zip(configs, copies)]


def together(ranks: list[Trained], part: Part) -> Tensors:
    return {name: value for rank in ranks for name, value in rank.saved[part].items()}


@pytest.mark.slow
def test_replicas_give_the_numbers_of_one_pipeline_of_as_many_microbatches() -> None:
    """Two replicas of two microbatches and one of four, which have the same dropout; with and without ZeRO, in either order of the ranks."""
    native = run_ranks(2, train_all, [config_of(*ONE)])[0][0]
    assert max(norm for norm in native.norms if norm is not None) > 0.5, "no step is clipped"
    configs = [
        config_of(*TWO),
        config_of(*TWO, "parallel.zero_stage=1"),
        config_of(*TWO, "parallel.zero_stage=1", "parallel.order=stage-replica"),
    ]
    ranks = run_ranks(4, train_each, configs)
    plain, sharded, turned = ([rank[case] for rank in ranks] for case in range(3))
    for runs, pairs in ((plain, [(0, 2), (1, 3)]), (sharded, [(0, 2), (1, 3)]), (turned, [(0, 1), (2, 3)])):
        for run in runs:
            assert run.losses == pytest.approx(native.losses, rel=1e-4)
            assert run.norms == pytest.approx(native.norms, rel=1e-4)
            assert run.norms == runs[0].norms, "another norm on another rank"
            assert run.heldout == pytest.approx(native.heldout, rel=1e-3)
        for one, other in pairs:
            assert runs[one].weights.keys() == runs[other].weights.keys()
            assert all(torch.equal(value, runs[other].weights[name]) for name, value in runs[one].weights.items())
    # Each state is on one rank, whole, under the name that it has without ZeRO; DeepSpeed cut through some weight.
    assert sharded[0].held & sharded[2].held
    expected, found = together(plain, Part.OPTIMIZER), together(sharded, Part.OPTIMIZER)
    assert sum(len(run.saved[Part.OPTIMIZER]) for run in sharded) == len(found)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape
        # DeepSpeed's own arithmetic, which is another one with ZeRO: more than an order of sums, for as many steps as there are.
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)
    # A run that goes on does so exactly, and with what the other has saved.
    start = {part: together(sharded, part) for part in (Part.WEIGHTS, Part.OPTIMIZER)}
    for runs in run_ranks(4, go_on, [configs[1], configs[0]], start):
        same, without = runs
        assert same.losses == sharded[0].losses[BREAK_AT - 1 :]
        assert without.losses == pytest.approx(same.losses, rel=1e-5)


# The pieces alone, without an engine ----------------------------------------------------------------------------------------

SHAPES = ((2, 2), (3, 2), (1,))  # 11 numbers in two parts of 6: the second tensor is cut after 2
SIZE = 6


def zero_of(replica: int, group: Any, gradients: list[Tensor]) -> tuple[Any, list[Any]]:
    """What `ShardedAdamW` reads of DeepSpeed's optimizer, on one of two replicas; its parameters."""
    from deepspeed.utils import link_hp_params

    weights: list[Any] = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    flat = torch.zeros(SIZE)
    link_hp_params(weights, flat, {}, {}, False, 0, replica * SIZE, SIZE, group)
    here = [weight for weight in weights if weight._hp_mapping is not None]
    pieces = [
        gradient.flatten()
        .narrow(0, weight._hp_mapping.lp_fragment_address.start, weight._hp_mapping.lp_fragment_address.numel)
        .clone()
        for weight, gradient in zip(weights, gradients)
        if weight._hp_mapping is not None
    ]
    padding: Any = torch.full((1,), 7.0)
    padding._zero_padding = True
    zero = SimpleNamespace(
        optimizer=SimpleNamespace(state=defaultdict(dict), param_groups=[{"lr": 0.1, "params": [flat]}]),
        bit16_groups=[weights],
        single_partition_of_fp32_groups=[flat],
        params_in_partition=[here],
        averaged_gradients={0: [*pieces, padding]},
        all_grad_tensors={0: pieces},
    )
    return zero, weights


def of_all_in(group: Any) -> Callable[[Any], list[Any]]:
    def of_all(value: Any) -> list[Any]:
        values = [value, value]
        dist.all_gather_object(values, value, group=group)
        return values

    return of_all


def pieces() -> list[int]:
    """Loads states, asks for them, clips and drops gradients; returns whose state this rank tells."""
    join_world(import_deepspeed(CPU), timedelta(seconds=PATIENCE_SECONDS))
    from pipetrain.engine.deepspeed.stages import ShardedAdamW

    group, rank = dist.new_group(), dist.get_rank()
    gradients = [
        torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number, shape in enumerate(SHAPES)
    ]
    zero, weights = zero_of(rank, group, gradients)
    optimizer = ShardedAdamW(zero)
    assert optimizer.state == {}
    saved = {
        number: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.arange(float(torch.Size(shape).numel())).view(shape) + 10 * number,
        }
        for number, shape in enumerate(SHAPES)
    }
    optimizer.load_state_dict({"state": saved})
    told = optimizer.state_dict()
    for number, state in told["state"].items():
        assert state.keys() == saved[number].keys()
        assert all(torch.equal(value, saved[number][key]) for key, value in state.items())
    assert told["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]
    whole = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
    norm = clip(optimizer.gradients(), weights, 0, 0.5, of_all_in(group))
    assert norm == pytest.approx(float(whole), rel=rounding(torch.float32, terms=11))  # 11 numbers, in parts
    again = clip(optimizer.gradients(), weights, 0, float("inf"), of_all_in(group))
    assert again == pytest.approx(0.5, rel=1e-5)
    optimizer.drop_gradients()
    assert zero.averaged_gradients == zero.all_grad_tensors == {0: None}
    return sorted(told["state"])


def test_a_state_that_is_cut_is_told_whole_by_one_replica() -> None:
    assert run_ranks(2, pieces) == [[0, 1], [2]]
