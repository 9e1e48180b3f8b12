"""Layers whose weight gradients wait for W, or stay in I, and batches for them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipetrain.stage.split_backward import SplitFunction

WIDTH = 6
M = 4
_NODES: list[Node] = []


def mean_square(output: Any, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Times(nn.Module):
    """A linear layer whose weight is made in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2)


class Twice(nn.Module):
    """One linear layer, twice, with a nonlinearity between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.inner = linear()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.embedding(ids))), self.embedding.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.inside = linear(), linear()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(
            lambda given: torch.tanh(self.inside(given)), self.before(x), use_reentrant=self.use_reentrant
        )
        assert isinstance(inside, Tensor)
        return inside


class Hooked(nn.Module):
    """A hook that doubles a gradient, or is told when it has been added: by the weight, or by the node that adds it."""

    def __init__(self, *, after: bool = False, on_node: bool = False) -> None:
        super().__init__()
        self.inner, self.plain, self.after, self.on_node = linear(), linear(), after, on_node

    def hook(self) -> None:
        """A copy of a layer has no hooks."""
        if self.on_node:
            weight, node = self.inner.weight, get_gradient_edge(self.inner.weight).node
            node.register_hook(lambda *_: _double(weight))
            _NODES.append(node)  # it goes, with its hooks, when nobody holds it
        elif self.after:
            self.inner.weight.register_post_accumulate_grad_hook(_double)
        else:
            self.inner.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(torch.tanh(self.inner(x)))


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


class Penalty(nn.Module):
    """Adds the slope of its own network, which it takes inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.inner(probe)).sum(), probe, create_graph=True)
        return self.inner(x) + slope


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.func.vmap(self.inner)(x)
        return mapped


class Conv1D(nn.Module):
    """As GPT-2 of Hugging Face has it: the weight is not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, WIDTH), self.weight).view(x.shape)


class Cross(nn.Module):
    """Attention to something else: its projections are views of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x.flip(0), x.flip(1))[0]
        return attended


class InFull(nn.Module):
    """Switches autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            full: Tensor = self.inner(x.float())
        return full


class Transposed(nn.Module):
    """The same values with the strides of a transposed matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).t().contiguous().t()


class Scale(SplitFunction):
    """x * weight, with two kernels for its backward, as a user has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sign = 1.0
        return x * weight

    @staticmethod
    def backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.saved_tensors[1] * ctx.sign if ctx.needs_input_grad[0] else None, None

    @staticmethod
    def backward_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, (gradient * ctx.saved_tensors[0] * ctx.sign).sum(0)


class Scaled(nn.Module):
    def __init__(self, *, made: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scale.apply(x, self.weight * 1.0 if self.made else self.weight)
        return scaled


Batch = tuple[Any, Any]


def rows(*shape: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    shape = shape or (M * 2, WIDTH)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)
