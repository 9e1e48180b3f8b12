"""The gradient norm over stages: that of torch.nn.utils.clip_grad_norm_, whatever the gradients are; or an error on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import NEVER_SECONDS, run_ranks
from rounding import rounding
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipetrain.runtime.gradients import clip_grad_norm
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step

CPU = torch.device("cpu")


def alone(parameters: list[nn.Parameter], max_norm: Any) -> Tensor:
    return clip_grad_norm({0: parameters}, max_norm, lambda own: [own], CPU)


def parameters_with(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("max_norm", [-1, -math.inf, math.nan, "1", None, True, 1j])
def test_a_norm_that_is_none(max_norm: Any) -> None:
    (parameter,) = parameters_with(random(3))
    before = parameter.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"clip_grad_norm_ was given max_norm=.*: a number, 0 or more, is needed"):
        alone([parameter], max_norm)
    assert torch.equal(parameter.grad, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [0, 0.1, 1e9, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [random(3), random(2, 3)],
        lambda: [random(3, dtype=torch.complex64), random(2, 3)],
        lambda: [random(3, dtype=torch.float64), random(2, 3, dtype=torch.bfloat16)],
        lambda: [random(0), random(3)],
        list,
    ],
    ids=["dense", "complex", "dtypes", "empty", "none"],
)
def test_dense_gradients_as_torch_clips_them(make: Callable[[], list[Tensor]], max_norm: float) -> None:
    ours, theirs = parameters_with(*make()), parameters_with(*make())
    norm = alone(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(norm, expected)
    for own, wanted in zip(ours, theirs):
        assert torch.equal(own.grad, wanted.grad)  # type: ignore[arg-type]


def test_a_gradient_with_entries_that_meet() -> None:
    """The norm is that of the sums, and not of the entries."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), random(3, 4), (5, 4), check_invariants=True)
    dense = sparse.to_dense()
    ours, theirs = parameters_with(sparse, random(3)), parameters_with(dense, random(3))
    norm, expected = alone(ours, 0.5), torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    # The norm's sum; the gradients are multiplied by what comes of it. Entries that meet may nearly cancel: within the norm's, which is 0.5.
    within = rounding(torch.float32, terms=5 * 4 + 3)
    assert torch.allclose(norm, expected, rtol=within, atol=0)
    assert torch.allclose(ours[0].grad.to_dense(), theirs[0].grad, rtol=within, atol=0.5 * within)  # type: ignore[union-attr, arg-type]
    assert torch.allclose(ours[1].grad, theirs[1].grad, rtol=within, atol=0)  # type: ignore[arg-type]


def sparse_embedding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4))
    dense = copy.deepcopy(model)
    dense[0].sparse = False  # type: ignore[assignment]
    tokens = torch.randint(7, (8,), generator=torch.Generator().manual_seed(1))
    targets = random(8, 4)
    loss = nn.MSELoss()
    with Pipeline(model, loss, num_microbatches=4, timeout_seconds=NEVER_SECONDS) as pipeline:
        found = pipeline.step(tokens, targets)
        assert torch.equal(found, reference_step(dense, loss, tokens, targets, num_microbatches=4))
        norm = pipeline.clip_grad_norm_(0.01)
        within = rounding(torch.float32, terms=7 * 4 + 4 * 4 + 4)  # the norm's sum
        assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.01), rtol=within, atol=0)
        for name, parameter in pipeline.named_parameters():
            wanted = dict(dense.named_parameters())[name].grad
            found = parameter.grad.to_dense()  # type: ignore[union-attr]
            # An entry may be a sum of up to 8 tokens' that nearly cancel: within the norm's, which is 0.01.
            assert torch.allclose(found, wanted, rtol=within, atol=0.01 * within), name  # type: ignore[arg-type]


def test_a_sparse_embedding_over_two_ranks() -> None:
    run_ranks(2, sparse_embedding)


def sharded_gradient() -> None:
    """Each rank has half of a gradient, and both have all of another: as with tensor parallelism, where both are one pipeline's rank 0."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # half a second

    mesh = DeviceMesh("cpu", [0, 1])
    whole = random(4, 3)
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(whole, mesh, [Shard(0)])
    ours, theirs = [parameter, *parameters_with(random(3))], parameters_with(whole.clone(), random(3))
    norm, expected = alone(ours, 0.5), torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    within = rounding(torch.float32, terms=4 * 3 + 3)  # the norm's sum
    assert torch.allclose(norm, expected, rtol=within, atol=0), f"{norm} on rank {dist.get_rank()}, expected {expected}"
    assert isinstance(parameter.grad, DTensor)
    assert torch.allclose(parameter.grad.full_tensor(), theirs[0].grad, rtol=within, atol=0)  # type: ignore[arg-type]


def test_a_rank_s_share_is_not_the_norm() -> None:
    run_ranks(2, sharded_gradient)


def clips_wrongly_on(bad: int) -> str:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with Pipeline(layers, nn.MSELoss(), num_microbatches=2, timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(random(4, 4), random(4, 4))
        before = [parameter.grad.clone() for parameter in pipeline.parameters()]  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"max_norm=nan") as caught:
            pipeline.clip_grad_norm_(math.nan if dist.get_rank() == bad else 1e-3)
        for parameter, gradient in zip(pipeline.parameters(), before):
            assert torch.equal(parameter.grad, gradient), "a gradient was scaled"  # type: ignore[arg-type]
        pipeline.clip_grad_norm_(1e-3)
    return str(caught.value)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_norm_that_is_none_on_one_rank(bad: int) -> None:
    first, second = run_ranks(2, clips_wrongly_on, bad)
    assert first == second
