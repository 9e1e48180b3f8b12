"""The zoo's state: counters, caches, generators, buffers that change late, values changed behind autograd's back."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from entries.entry import WIDTH, Entry, block, dense, rows, square, stack
from pipetrain.verify.beside_loop import Verdict


class Counts(nn.Module):
    """Each forward is a little stronger than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x * x * (1 + 0.1 * self.calls)


class RemembersMean(nn.Module):
    """A running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(x - self.mean) * self.mean.cos()


class CachesTable(nn.Module):
    """Makes a table in its first forward, and finds it in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH).cos()
        return torch.sin(x * self.table)


class LastOutput(nn.Module):
    """Leaves its output where others can look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.inner(x)
        return self.last * 2


class EveryThird(nn.Module):
    """A buffer that changes in every third forward alone."""

    steps: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls % 3 == 0:
            self.scale.mul_(1.1)
        return torch.tanh(x * self.scale)


class LateBuffer(nn.Module):
    """Registers its buffer in its first forward, and changes it in each."""

    seen: Tensor

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(WIDTH))
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return torch.sin(x + self.seen)


class LateMomentum(nn.Module):
    """BatchNorm whose statistics stand still in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.0)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x) + self.norm.running_mean


def _momentum_from_step_1(step: int, layers: Any) -> None:
    for layer in layers:
        if isinstance(layer, LateMomentum):
            layer.norm.momentum = 0.1 if step else 0.0


class NormsTwice(nn.Module):
    """One BatchNorm, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.tanh(self.norm(x)) * 2) * self.norm.running_var


class ReadsOther(nn.Module):
    """Reads a buffer of another layer, which changes."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self._norm = [norm]  # a reference, not a part

    def forward(self, x: Tensor) -> Any:
        mean = self._norm[0].running_mean
        assert mean is not None
        return torch.sin(x + mean)


def _norm_and_reader() -> list[nn.Module]:
    norm = nn.BatchNorm1d(WIDTH)
    return [square(), dense(), norm, ReadsOther(norm), square()]


class PythonDepth(nn.Module):
    """Stochastic depth by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x) if random.random() < 0.5 else x.sin()


class TorchDepth(nn.Module):
    """Stochastic depth per row, by torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: Tensor) -> Any:
        keep = torch.rand(x.shape[0], 1) < 0.7
        return x + self.inner(x) * keep / 0.7


class NumpyNoise(nn.Module):
    """Noise by numpy's own generator."""

    def forward(self, x: Tensor) -> Any:
        import numpy

        return x * torch.from_numpy(numpy.random.rand(WIDTH)).to(x.dtype)


def _lacks_numpy() -> str:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return "no numpy"
    return ""


class OwnGenerator(nn.Module):
    """Noise from a generator that it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Any:
        return x * (1 + 0.1 * torch.randn(x.shape, generator=self.generator))


class ScalesData(nn.Module):
    """Changes what it gets through `.data`, which autograd does not see."""

    def forward(self, x: Tensor) -> Any:
        x.data.mul_(0.5)
        return torch.sin(x)


class MovesAverage(nn.Module):
    """The average of its weight in a frozen one, moved in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.average = square(), square().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        self.average.weight.data.lerp_(self.inner.weight.detach(), 0.1)
        return self.inner(x) + torch.tanh(self.average(x))


class LossWithMemory:
    """A loss that knows the mean of the losses before it."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = ((output - target) ** 2).mean()
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss.tanh() * self.mean


_OUTSIDE = {"calls": 0}  # no module knows of it


class MattersLater(nn.Module):
    """Counts outside of any module, and minds the count from the second step on."""

    def forward(self, x: Tensor) -> Any:
        _OUTSIDE["calls"] += 1
        return x * x if _OUTSIDE["calls"] < 12 else x * x * (1 + 0.1 * _OUTSIDE["calls"])


def _minds_later() -> list[nn.Module]:
    _OUTSIDE["calls"] = 0
    return [square(), MattersLater(), dense(), square()]


class GraphLayer(nn.Module):
    """Neighbours by a sparse buffer."""

    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()
        self.register_buffer("adjacency", torch.eye(WIDTH).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(torch.sparse.mm(self.adjacency, self.inner(x).t()).t())


class Summary:
    """What a layer fills on the way; autograd and pytree see a plain value."""

    def __init__(self) -> None:
        self.means: list[float] = []


class FillsSummary(nn.Module):
    """Fills an object that came with the inputs, and reads what it holds."""

    def forward(self, given: tuple[Tensor, Summary]) -> Any:
        x, summary = given
        summary.means.append(float(x.detach().mean()))
        return torch.sin(x) * (1 + len(summary.means))


def _rows_and_summary(step: int) -> Any:
    inputs, targets = rows(step)
    return (inputs, Summary()), targets


ENTRIES: tuple[Entry, ...] = (
    block("a counter", Counts, Verdict.KEPT),
    block("a running mean in an attribute", RemembersMean, Verdict.KEPT),
    block("a table made in the first forward", CachesTable),
    block("an output left in an attribute", LastOutput, Verdict.KEPT),
    block("a buffer that changes every third time", EveryThird, Verdict.KEPT),
    block("a buffer registered in the first forward", LateBuffer, Verdict.KEPT),
    block("statistics that begin in the second step", LateMomentum, before_step=_momentum_from_step_1),
    block("BatchNorm used twice in a layer", NormsTwice),
    stack("a layer that reads another's buffer", _norm_and_reader, stages=(1, 2), on_ranks=False),
    block("stochastic depth by Python", PythonDepth),
    block("stochastic depth by torch", TorchDepth),
    block("noise by numpy", NumpyNoise, lacks=_lacks_numpy),
    block("a generator of its own", OwnGenerator, Verdict.KEPT),
    stack("a change through .data", lambda: [square(), ScalesData(), square(), ScalesData(), square()]),
    stack(
        "a change through .data of what another stage has saved",
        lambda: [square(), dense(), ScalesData(), square()],  # dense ends with a tanh, which saves its output
        Verdict.DIFFERS,
        "gradient",
        stages=(2, 4),
        on_ranks=False,
    ),
    block("the average of a weight, moved in F", MovesAverage, Verdict.REFUSED, "(MovesAverage)", on_ranks=False),
    block("a loss with memory", dense, Verdict.KEPT, loss=LossWithMemory),
    stack("state outside that matters later", _minds_later, Verdict.DIFFERS, on_ranks=False),
    block("a sparse buffer", GraphLayer),
    stack(
        "an object in the inputs, filled by F",
        lambda: [FillsSummary(), dense(), dense(), square()],
        Verdict.KEPT,
        batch=_rows_and_summary,
        on_ranks=False,
    ),
)
