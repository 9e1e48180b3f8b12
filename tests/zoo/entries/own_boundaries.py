"""The zoo's boundaries and wholes: what layers hand on, what they share, what needs no gradient, routing, losses, batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from entries.entry import WIDTH, Entry, block, dense, rows, square, stack
from pipetrain.runtime.cut import Whole
from pipetrain.stage.microbatch import add_loss
from pipetrain.verify.beside_loop import Batch, Verdict

# What layers hand on --------------------------------------------------------------------------------------------------


class Splits(nn.Module):
    """To a dict with a tuple inside, with a number and a tensor that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(x)
        return {"pair": (hidden, torch.tanh(hidden)), "scale": 0.5, "unused": hidden.cos(), "nothing": None}


class Passes(nn.Module):
    """The same structure on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, given: dict[str, Any]) -> Any:
        left, right = given["pair"]
        return {**given, "pair": (self.inner(left), right * given["scale"])}


class Joins(nn.Module):
    def forward(self, given: dict[str, Any]) -> Any:
        left, right = given["pair"]
        return left + right


class LeftRight(NamedTuple):
    left: Tensor
    right: Tensor


class ToPair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return LeftRight(torch.tanh(x), torch.sin(x))


class FromPair(nn.Module):
    def forward(self, given: LeftRight) -> Any:
        return given.left * given.right


class Sorts(nn.Module):
    """What torch.sort returns, as it is."""

    def forward(self, x: Tensor) -> Any:
        return torch.sort(x, dim=1)


class Unsorts(nn.Module):
    def forward(self, given: Any) -> Any:
        return given.values * (1 + given.indices)


class Twice(nn.Module):
    """One tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(x)
        return hidden, hidden


class AddsInPlaceToPair(nn.Module):
    """Changes the first of two, which may be the second as well."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        first, second = given
        first.mul_(2.0)
        return first + second


class ResidualPair(nn.Module):
    """A pair to a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        first, second = given
        return first + self.inner(second), second


class AddsPair(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        return given[0] + given[1]


class Chunks(nn.Module):
    """Two views that do not overlap."""

    def forward(self, x: Tensor) -> Any:
        return tuple(x.chunk(2, 1))


class Concatenates(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        left, right = given
        return torch.cat((right, left), 1)


class Transposes(nn.Module):
    """The values with the strides of a transposed matrix."""

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x).t().contiguous().t()


class Expands(nn.Module):
    """A view with stride 0."""

    def forward(self, x: Tensor) -> Any:
        return x.mean(1, keepdim=True).expand(-1, WIDTH)


class ToComplex(nn.Module):
    """A conjugated view, not yet computed."""

    def forward(self, x: Tensor) -> Any:
        return torch.fft.fft(x).conj()


class FromComplex(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.real + 2 * x.imag


class OneGraph(nn.Module):
    """Hands on a list that holds lists."""

    def forward(self, x: Tensor) -> Any:
        return [[x, torch.sin(x)], [torch.cos(x)]]


class SumsGraph(nn.Module):
    def forward(self, given: Any) -> Any:
        return given[0][0] * given[0][1] + given[1][0]


class CallNumber(nn.Module):
    """Hands on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x, self.calls


class UsesNumber(nn.Module):
    def forward(self, given: tuple[Tensor, int]) -> Any:
        x, number = given
        return torch.sin(x * number)


# What layers share, what needs no gradient ----------------------------------------------------------------------------


def _shared() -> list[nn.Module]:
    one = dense()
    return [square(), one, square(), one, square()]


def _shared_by_three() -> list[nn.Module]:
    one = square()
    return [one, square(), one, square(), one]


class Tied(nn.Module):
    """One module used twice in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        return self.inner(torch.tanh(self.inner(x)))


def _shared_norm() -> list[nn.Module]:
    one = nn.BatchNorm1d(WIDTH)
    return [square(), one, dense(), one, square()]


def _hidden_reference() -> list[nn.Module]:
    first = square()

    class UsesFirst(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x @ first.weight

    return [first, dense(), UsesFirst(), square()]


def _frozen_first() -> list[nn.Module]:
    return [square().requires_grad_(False), dense(), dense(), square()]


def _frozen_middle() -> list[nn.Module]:
    return [square(), dense().requires_grad_(False), nn.BatchNorm1d(WIDTH).requires_grad_(False), square()]


def _frozen_but_last() -> list[nn.Module]:
    return [*(dense().requires_grad_(False) for _ in range(3)), square()]


def _freeze_in_odd_steps(step: int, layers: Any) -> None:
    layers[0].requires_grad_(step % 2 == 0)


class WithoutGradientInOddSteps(nn.Module):
    """Hands on what needs no gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.detaches = False

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(x)
        return (x.detach(), hidden.detach()) if self.detaches else (x, hidden)


def _detach_in_odd_steps(step: int, layers: Any) -> None:
    for layer in layers:
        if isinstance(layer, WithoutGradientInOddSteps):
            layer.detaches = step % 2 == 1


class Detaches(nn.Module):
    """Trains nothing that stands before it, nor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).detach()


class Chooses(nn.Module):
    """Hands on the number of the largest entry."""

    def forward(self, x: Tensor) -> Any:
        return x.argmax(1)


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, numbers: Tensor) -> Any:
        return self.table(numbers)


class PartlyUsed(nn.Module):
    """Has a parameter that it does not use, and one without a gradient for some microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = square(), square()
        self.seldom = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.inner(x))
        return hidden * self.seldom if x.shape[0] == 3 else hidden


class Routes(nn.Module):
    """Each row to one of three experts: how many rows each gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(dense() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (weights.argmax(1) == number).nonzero().flatten()
            if len(chosen):
                output = output.index_add(0, chosen, expert(x[chosen]) * weights[chosen, number, None])
        return x + output


class RoutesEvenly(Routes):
    """Adds to the loss how unevenly rows are routed."""

    def forward(self, x: Tensor) -> Any:
        add_loss(0.1 * self.gate(x).softmax(1).mean(0).square().sum())
        return super().forward(x)


class DropsRows(nn.Module):
    """Rows packed to as many as are positive, and unpacked again: shapes that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: Tensor) -> Any:
        mask = x.sum(1) > 0
        return x.masked_scatter(mask[:, None], self.inner(x[mask]))


# Losses and batches ---------------------------------------------------------------------------------------------------


class LossWithWeight(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        return ((output - target) ** 2 * self.weight).mean()


def _needs_gradient(step: int) -> Batch:
    inputs, targets = rows(step)
    return inputs.requires_grad_(), targets


def _with_whole(step: int) -> Batch:
    inputs, targets = rows(step)
    return (inputs, Whole(torch.linspace(0, 1, WIDTH)[None])), targets


class AddsWhole(nn.Module):
    """Adds what came with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        x, positions = given
        return self.inner(x + positions), positions


class FillsWhole(nn.Module):
    """Changes what came with the batch, for all microbatches after it."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        x, positions = given
        positions.add_(x.detach().mean(0))
        return torch.sin(x + positions)


def _some_count(step: int) -> Batch:
    """In the second microbatch nothing counts; its loss would be infinite."""
    inputs, targets = rows(step)
    targets[3:5] = float("inf")
    return inputs, targets


def _counts(target: Tensor) -> int:
    return int(target.isfinite().all(1).sum())


class ManyKinds(nn.Module):
    """Tensors of other dtypes and sizes beside what is trained."""

    def forward(self, x: Tensor) -> Any:
        kinds = {"whole": x.argmax(1), "yes": x > 0, "scalar": x.mean(), "empty": x[:, :0], "unused": x * 3}
        return x, {**kinds, "double": x.double(), "half": (x * 2).bfloat16()}


class JoinsKinds(nn.Module):
    def forward(self, given: Any) -> Tensor:
        x, kinds = given
        x = torch.where(kinds["yes"], x, x * 0.1) * kinds["scalar"] + kinds["whole"][:, None] + kinds["empty"].sum()
        return torch.tanh(x + kinds["double"].float() + kinds["half"].float())


ENTRIES: tuple[Entry, ...] = (
    stack("tensors of other dtypes and sizes", lambda: [square(), ManyKinds(), nn.Identity(), JoinsKinds(), square()]),
    stack("a dict with a tuple, a number and None", lambda: [Splits(), Passes(), Passes(), Joins(), square()]),
    stack("a namedtuple", lambda: [square(), ToPair(), FromPair(), square()]),
    stack("what torch.sort returns", lambda: [square(), Sorts(), Unsorts(), square()]),
    stack("lists in lists", lambda: [square(), OneGraph(), SumsGraph(), square()]),
    stack("one tensor in two places", lambda: [Twice(), ResidualPair(), AddsPair(), square()]),
    stack("one tensor in two places, changed in place", lambda: [square(), Twice(), AddsInPlaceToPair(), square()]),
    stack("views that do not overlap", lambda: [square(), Chunks(), Concatenates(), square()]),
    # Between ranks such a number is refused by name: tests/regressions/test_values_at_a_cut.py.
    stack(
        "a number that differs each time",
        lambda: [square(), CallNumber(), UsesNumber(), square()],
        Verdict.KEPT,
        on_ranks=False,
    ),
    stack("a conjugated view", lambda: [square(), ToComplex(), FromComplex(), square()]),
    block("transposed strides", Transposes),
    block("an expanded view", Expands),
    block("nothing but its input", nn.Identity),
    block("one module used twice in a layer", Tied),
    stack("one module used in two layers", _shared, stages=(1,), on_ranks=False),
    stack(
        "one module used in three stages", _shared_by_three, Verdict.REFUSED, "parameter", stages=(3, 4), on_ranks=False
    ),
    stack("one BatchNorm used in two layers", _shared_norm, stages=(1,), on_ranks=False),
    stack(
        "a hidden reference to another stage's weight",
        _hidden_reference,
        Verdict.REFUSED,
        "0.weight",
        stages=(2, 3, 4),
        on_ranks=False,
    ),
    stack("a frozen first layer", _frozen_first),
    stack("frozen layers in the middle", _frozen_middle),
    stack("all frozen but the last", _frozen_but_last),
    stack(
        "a layer frozen in every other step",
        lambda: [square(), dense(), dense(), square()],
        before_step=_freeze_in_odd_steps,
    ),
    stack(
        "a gradient that comes and goes at a cut",
        lambda: [square(), WithoutGradientInOddSteps(), AddsPair(), square()],
        before_step=_detach_in_odd_steps,
        on_ranks=False,
    ),
    stack("a layer that detaches", lambda: [square(), Detaches(), dense(), square()]),
    stack("a choice by argmax", lambda: [dense(), Chooses(), LooksUp(), square()]),
    block("parameters that are not or seldom used", PartlyUsed),
    block("experts with routing", Routes),
    block("shapes that depend on the data", DropsRows),
    block("a loss with a parameter", dense, Verdict.REFUSED, "loss_fn", loss=LossWithWeight, on_ranks=False),
    stack(
        "inputs that need a gradient",
        lambda: [dense(), dense(), dense(), square()],
        Verdict.REFUSED,
        "inputs",
        batch=_needs_gradient,
        on_ranks=False,
    ),
    stack("an input for all microbatches", lambda: [AddsWhole(), AddsWhole(), AddsPair(), square()], batch=_with_whole),
    stack(
        "an input for all microbatches, changed in place",
        lambda: [FillsWhole(), dense(), dense(), square()],
        Verdict.REFUSED,
        "Whole",
        batch=_with_whole,
        on_ranks=False,
    ),
    block("a microbatch that does not count", lambda: nn.BatchNorm1d(WIDTH), batch=_some_count, count_fn=_counts),
    block("experts with a loss of their own", RoutesEvenly),
)
