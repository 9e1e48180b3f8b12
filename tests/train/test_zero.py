"""ZeRO 1: who holds which state, the same updates as without, and runs that go on over another number of replicas."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import accept, batch_of, engine_of
from deepspeed_runs import config_of as engine_config
from ranks import NEVER_SECONDS, run_outcomes, run_ranks
from torch import Tensor, nn
from updates import stage_in, train_stage

from pipetrain.comm.failure import PipelineError
from pipetrain.config.records import OptimConfig
from pipetrain.data.batch import Batch
from pipetrain.models.trained import Sharded
from pipetrain.optim.optimizer import ShardedOptimizer, Updates, make_optimizer
from pipetrain.snapshot.state import Part, Tensors, restore_optimizer, tensors_of

CPU = torch.device("cpu")
PRECISIONS = {
    "float32": (torch.float32, "auto"),
    "masters": (torch.bfloat16, "auto"),
    "bfloat16": (torch.bfloat16, "off"),
}
LARGEST_SHARE = {2: 0.51, 4: 0.27}
model_in, train = functools.partial(stage_in, num_hidden_layers=2), functools.partial(train_stage, rate=1e-3)


def config_of(masters: str) -> OptimConfig:
    return OptimConfig(learning_rate=1e-3, masters=masters)


def saved(model: nn.Module, optimizer: Updates) -> Tensors:
    return {name: value.clone() for name, value in tensors_of(model, optimizer, CPU)[Part.OPTIMIZER].items()}


def gathered(own: Tensors, group: dist.ProcessGroup) -> list[Tensors]:
    """What each rank has, on every rank."""
    parts: list[Tensors] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, own, group=group)
    return parts


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].dtype != theirs[name].dtype or not ours[name].equal(theirs[name])] == []


# Shares -----------------------------------------------------------------------------------------------------------------


def shares_and_runs_that_go_on(dtype: torch.dtype, masters: str) -> tuple[float, float]:
    """The largest share of the bytes of the state, and the largest tensor's; all the rest is asserted."""
    config = config_of(masters)
    everyone = dist.new_group()
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]
    whole, model = model_in(dtype), model_in(dtype)
    plain, shared = make_optimizer(config, whole.parameters()), make_optimizer(config, model.parameters(), everyone)
    assert isinstance(shared, ShardedOptimizer)
    for each in ((whole, plain), (model, shared)):
        train(*each, range(3))
    assert_same(dict(model.state_dict()), dict(whole.state_dict()))
    expected, parts = saved(whole, plain), gathered(saved(model, shared), everyone)
    together = {name: value for part in parts for name, value in part.items()}
    assert_same(together, expected)
    assert sum(map(len, parts)) == len(together), "a state is on two ranks"
    for part in parts:
        assert {name.rpartition("/")[0] for name in part} != {name.rpartition("/")[0] for name in expected}
    # On two replicas, and on one, whoever held what before.
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(whole, plain, range(3, 5))
    for group in (pairs[dist.get_rank() // 2], None):
        other = model_in(dtype)
        optimizer = make_optimizer(config, other.parameters(), group)
        train(other, optimizer, range(7, 8))  # it has a state of its own by then
        other.load_state_dict(start)
        restore_optimizer(other, optimizer, {name: value.clone() for name, value in together.items()})
        train(other, optimizer, range(3, 5))
        assert_same(dict(other.state_dict()), dict(whole.state_dict()))
        own = [saved(other, optimizer)] if group is None else gathered(saved(other, optimizer), group)
        assert_same({name: value for part in own for name, value in part.items()}, saved(whole, plain))
    of_weight: dict[str, int] = {}
    for name, value in expected.items():
        weight = name.rpartition("/")[0]
        of_weight[weight] = of_weight.get(weight, 0) + num_bytes({name: value})
    total = num_bytes(expected)
    return max(map(num_bytes, parts)) / total, max(of_weight.values()) / total


class _Counting(dict[str, Tensor]):
    """Tensors of a snapshot; `read` are those that were asked for."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def read_names() -> tuple[set[str], set[str]]:
    model = model_in(torch.float32)
    optimizer = make_optimizer(config_of("auto"), model.parameters(), dist.new_group())
    train(model, optimizer, range(1))
    own = saved(model, optimizer)
    files = _Counting({name: value for part in gathered(own, dist.group.WORLD) for name, value in part.items()})
    restore_optimizer(model, optimizer, files)
    return files.read, set(own)


# Edges ------------------------------------------------------------------------------------------------------------------


def few_weights() -> None:
    """One weight and several replicas; then nothing that is trained; then two dtypes."""
    replicas = dist.new_group()
    layer, alone = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    alone.load_state_dict(layer.state_dict())
    dist.broadcast(layer.weight.data, 0)
    dist.broadcast(alone.weight.data, 0)
    optimizers = (
        make_optimizer(config_of("auto"), layer.parameters(), replicas),
        make_optimizer(config_of("auto"), alone.parameters()),
    )
    for one, optimizer in zip((layer, alone), optimizers):
        one(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight, alone.weight)
    assert bool(optimizers[0].state) == (dist.get_rank() == 0)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    make_optimizer(config_of("auto"), frozen.parameters(), replicas).step()
    mixed = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"parallel\.zero_stage=1: a stage has weights of bfloat16 and float32"):
        make_optimizer(config_of("auto"), mixed.parameters(), replicas)


def an_engine() -> None:
    """Of replicas of one stage on one rank each; with one replica there is nobody to share with."""
    for zero in (0, 1):
        config = engine_config(
            "parallel.num_replicas=auto",
            "pipeline.num_stages=1",
            "pipeline.num_microbatches=2",
            "pipeline.balance=[5]",
            f"parallel.zero_stage={zero}",
        )
        engine = engine_of(config)
        batch = Batch(
            *(torch.tensor_split(leaf, dist.get_world_size())[dist.get_rank()] for leaf in batch_of(config, 1))
        )
        engine.step(1, batch, accept)
        engine.check_replicas()
        weights = [weight for _, weight in engine.model.named_parameters()]
        held = [weight in engine.optimizer.state for weight in weights]
        assert isinstance(engine.optimizer, Sharded) == bool(zero)
        assert any(held)
        assert all(held) != bool(zero)
        engine.close()


def on_a_rank() -> tuple[list[tuple[float, float]], tuple[set[str], set[str]]]:
    """All of it in one process: what torch loads for it takes two seconds."""
    few_weights()
    an_engine()
    return [shares_and_runs_that_go_on(*precision) for precision in PRECISIONS.values()], read_names()


@pytest.mark.parametrize("num_replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_replica_holds_its_share(num_replicas: int) -> None:
    """And all that is asserted in there: updates as without, bit for bit, also of runs that go on as two and as one."""
    for shares, (read, own) in run_ranks(num_replicas, on_a_rank):
        assert read == own, "a rank reads the state of another"
        for share, largest in shares:
            assert 1 / num_replicas <= share <= max(LARGEST_SHARE[num_replicas], largest)


# A replica that does not come ---------------------------------------------------------------------------------------------


def one_is_missing(leaves: bool) -> str:
    """What rank 0 is told where rank 1 ends, or goes on with something else."""
    replicas = dist.new_group(timeout=timedelta(seconds=NEVER_SECONDS))
    layer = nn.Linear(64, 64)
    optimizer = make_optimizer(config_of("auto"), layer.parameters(), replicas)
    layer(torch.ones(2, 64)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        if leaves:
            os._exit(7)
        dist.barrier()
        return ""
    if not leaves:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), replicas)
    with pytest.raises(PipelineError) as error:
        optimizer.step()
    if not leaves:
        dist.barrier()
    return str(error.value)


def test_a_replica_that_is_gone_is_named() -> None:
    first, second = run_outcomes(2, one_is_missing, True)
    assert second.exit_code == 7
    assert first.value.startswith("rank 1 is gone: rank 0 lost its connection in the exchange of updated weights"), (
        first
    )


@pytest.mark.slow
def test_a_replica_that_does_not_come_is_named() -> None:
    text, _ = run_ranks(2, one_is_missing, False)
    assert text.startswith("rank 0 waits for the weights that rank 1 updates (parallel.zero_stage=1)"), text
