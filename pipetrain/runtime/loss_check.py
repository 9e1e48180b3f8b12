"""Whether a loss is the mean over rows, or over what `count_fn` counts, that a cut batch takes it for: looked at once, in the first step.

A step back-propagates the sum of `loss_fn(out_i, target_i) * share_i`. That is the loss of the batch where `loss_fn` is a mean; of a sum
it is a part, and of most other losses another number. So the last stage's rank keeps outputs of that step, without their graphs, and
evaluates `loss_fn` on them together. Where there is one output alone (each replica has one microbatch, or an output is large) it is cut in two.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.runtime.arguments import MEAN
from pipetrain.runtime.counting import CountFn, counts_of
from pipetrain.runtime.cut import weights_of
from pipetrain.runtime.executor import Step
from pipetrain.stage.added_losses import WithLosses
from pipetrain.stage.stage import LossFn
from pipetrain.transport.device import Fetch

# Outputs that are kept at once, in all; of larger ones the first alone.
_MOST_BYTES = 1 << 28
_LOG = logging.getLogger(__name__)


class _NotComparable(Exception):
    """What was kept cannot be put together, or cut, as rows."""


class _Kept(NamedTuple):
    """A tensor without the object: what looks for tensors that layers hold (`stage/probe.py`) must not take it for a layer's."""

    storage: torch.UntypedStorage
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]
    like: Tensor  # empty: its dtype and device

    @staticmethod
    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        flat = leaf.detach()
        return _Kept(flat.untyped_storage(), flat.storage_offset(), flat.shape, flat.stride(), flat.new_empty(0))

    def back(self) -> Tensor:
        return self.like.set_(self.storage, self.offset, self.shape, self.stride)


class _Part(NamedTuple):
    """Some rows: the leaves of their output and target, what they are of the batch, and their loss."""

    output: list[Any]
    target: list[Any]
    share: float
    loss: Tensor | None = None


@dataclass
class LossCheck:
    """Compares on the last stage's rank, and on no other. `reduction` is what the user says that `loss_fn` is: `mean` or `sum`.

    A loss that cannot be evaluated so, or gives another value for the same output (it draws random numbers, or has a state), is left alone. It
    is called on a copy, so that a state of its own stays as it is.
    """

    loss_fn: LossFn
    count_fn: CountFn | None
    reduction: str
    last_layer: int
    fetch: Fetch
    warns: bool  # of several replicas one

    def __post_init__(self) -> None:
        self.is_done = False

    @contextmanager
    def over(self, step: Step) -> Iterator[None]:
        """In the block `step` runs, with a graph. The generators are the caller's to restore.

        Raises:
            ValueError: the loss is a sum, and not the mean it is said to be, or the other way round.
        """
        counted = [number for number, share in enumerate(step.shares) if share]
        if self.is_done or step.on_layer is not None or not counted or step.shares[counted[0]] == 1:
            yield
            return
        kept, specs, room = dict[int, list[Any]](), list[pytree.TreeSpec](), _MOST_BYTES
        added: dict[int, Tensor] = {}  # by the layers, to what loss_fn gave

        def keep(microbatch: int, layer: int, output: Any) -> None:
            nonlocal room
            if layer != self.last_layer:
                return
            if isinstance(output, WithLosses):
                added[microbatch], output = output.losses.detach(), output.output
            leaves, spec = pytree.tree_flatten(output)
            room -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            if room >= 0 or not kept:
                kept[microbatch] = [_Kept.of(leaf) for leaf in leaves]
                specs.append(spec)

        step.on_layer = keep
        yield
        step.on_layer = None
        try:
            values = self._evaluate(step, kept, specs, added)
        except Exception as error:
            self.is_done = True
            _LOG.debug(
                "whether the loss is a %s was not looked at: %s: %s", self.reduction, type(error).__name__, error
            )
            return
        if all(map(math.isfinite, values[:3])):
            self.is_done = True
            self._judge(len(step.shares), *values)

    def _evaluate(
        self,
        step: Step,
        kept: dict[int, list[Any]],
        specs: Sequence[pytree.TreeSpec],
        added: Mapping[int, Tensor],
    ) -> tuple[float, float, float, float]:
        """The loss of all that was kept, the mean of the losses of its parts, their sum, and how far rounding may take two of them apart."""
        if any(spec != specs[0] for spec in specs):
            raise _NotComparable("outputs of several structures")
        target_spec = pytree.tree_structure(step.targets[next(iter(kept))])
        parts = [
            _Part(
                [leaf.back() if isinstance(leaf, _Kept) else leaf for leaf in leaves],
                pytree.tree_leaves(step.targets[number]),
                step.shares[number],
                step.outputs[number] / step.weights[number] - added.get(number, 0),
            )
            for number, leaves in sorted(kept.items())
        ]
        whole = set(step.whole_targets)
        loss_fn: LossFn = _copy_of(self.loss_fn)

        def loss_of(output: list[Any], target: list[Any]) -> Tensor:
            with torch.no_grad():
                return loss_fn(pytree.tree_unflatten(output, specs[0]), pytree.tree_unflatten(target, target_spec))

        first, terms = parts[0], sum(leaf.numel() for part in parts for leaf in part.output if isinstance(leaf, Tensor))
        assert first.loss is not None
        found = [first.loss, loss_of(_cloned(first.output), _cloned(first.target))]
        if len(parts) > 1:
            found.append(
                loss_of(_joined([part.output for part in parts]), _joined([part.target for part in parts], whole))
            )
        else:
            parts = self._halves(first, whole, target_spec)
            found.append(first.loss)
        found += [loss_of(part.output, part.target) if part.loss is None else part.loss for part in parts]
        there = found[0].device
        once, again, together, *losses = self.fetch(
            torch.stack([loss.detach().to(there).double() for loss in found]), "the loss of the first step as a whole"
        ).tolist()
        rounding = _rounding(first, terms)
        if math.isfinite(once) and not _are_close(once, again, abs(once), rounding):
            raise _NotComparable("another loss for the same output")
        share = sum(part.share for part in parts)
        mean = sum(part.share / share * loss for part, loss in zip(parts, losses))
        return together, mean, sum(losses), rounding

    def _halves(self, part: _Part, whole: set[int], spec: pytree.TreeSpec) -> list[_Part]:
        outputs, targets = _cut_in_two(_cloned(part.output)), _cut_in_two(_cloned(part.target), whole)
        counts: list[int | float] = [
            next(leaf.shape[0] for leaf in output if isinstance(leaf, Tensor)) for output in outputs
        ]
        if self.count_fn is not None:
            counts = counts_of([pytree.tree_unflatten(target, spec) for target in targets], self.count_fn)
        if not all(counts):
            raise _NotComparable("a half in which nothing counts")
        return [_Part(*parts) for parts in zip(outputs, targets, weights_of(counts))]

    def _judge(self, num_microbatches: int, together: float, mean: float, added: float, rounding: float) -> None:
        scale = max(abs(together), abs(mean))
        is_mean = _are_close(together, mean, scale, rounding)
        is_sum = _are_close(together, added, max(scale, abs(added)), rounding)
        if is_mean if self.reduction == MEAN else is_sum:
            return
        if is_sum:
            raise ValueError(
                f"loss_fn is a sum over rows ({together:.6g} for rows whose parts give {added:.6g} in all), and with loss_reduction='mean' "
                f'loss and gradients would be 1/{num_microbatches} of it or so: give Pipeline(..., loss_reduction="sum"), or a loss_fn '
                "that returns a mean"
            )
        if is_mean:
            raise ValueError(
                f"loss_fn is a mean over rows ({together:.6g} for rows whose parts have the mean {mean:.6g}), and with "
                f"loss_reduction='sum' loss and gradients would be {num_microbatches} times it or so: leave loss_reduction out"
            )
        if self.warns:
            taken = mean if self.reduction == MEAN else added
            warnings.warn(
                f"loss_fn gives {together:.6g} for rows together, and {taken:.6g} as the {self.reduction} over microbatches that is trained on, so "
                "loss and gradients depend on num_microbatches. Usual causes: class weights (cross_entropy with weight=), padding that "
                "the mean does not count (ignore_index=), losses over pairs of the batch (contrastive ones). For the first two give "
                "count_fn=, what of a target counts: the sum of its weights, or how many are no padding. The third sees only the pairs "
                "within a microbatch",
                stacklevel=2,
            )


def _joined(parts: Sequence[list[Any]], whole: set[int] | None = None) -> list[Any]:
    """The leaves of several parts as those of one; `whole` are the same in each."""
    return [
        column[0]
        if number in (whole or ())
        else torch.cat([_rows(leaf) for leaf in column])
        if isinstance(column[0], Tensor)
        else _same(column)
        for number, column in enumerate(zip(*parts, strict=True))
    ]


def _cut_in_two(leaves: list[Any], whole: set[int] | None = None) -> list[list[Any]]:
    columns = [
        torch.tensor_split(_rows(leaf), 2) if isinstance(leaf, Tensor) and number not in (whole or ()) else (leaf, leaf)
        for number, leaf in enumerate(leaves)
    ]
    return [list(half) for half in zip(*columns)]


def _cloned(leaves: list[Any]) -> list[Any]:
    """Not views of the user's batch: a loss may change what it is given in place."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _rows(leaf: Tensor) -> Tensor:
    if not leaf.dim():
        raise _NotComparable("a tensor without dimensions")
    return leaf


def _same(column: Sequence[Any]) -> Any:
    if any(type(leaf) is not type(column[0]) or leaf != column[0] for leaf in column):
        raise _NotComparable(f"a {type(column[0]).__name__} that is another for each microbatch")
    return column[0]


def _copy_of(value: Any) -> Any:
    """A loss, or what it holds, with a state of its own: also in what a function closes over. Weights are not copied."""
    if isinstance(value, partial):
        named = {name: _copy_of(one) for name, one in value.keywords.items()}
        return partial(_copy_of(value.func), *map(_copy_of, value.args), **named)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy_of(value.__self__))
    if isinstance(value, FunctionType):
        return value if value.__closure__ is None else _with_own_cells(value)
    if isinstance(value, (nn.Module, Tensor, list, tuple, dict, set)):
        modules = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, nn.Module)]
        return copy.deepcopy(value, {id(weight): weight for module in modules for weight in module.parameters()})
    try:
        return copy.copy(value)
    except TypeError:  # a module of Python, a lock: they have no state that a loss would change
        return value


def _with_own_cells(function: FunctionType) -> FunctionType:
    cells = tuple(CellType(_copy_of(cell.cell_contents)) for cell in function.__closure__ or ())
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure=cells)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _rounding(part: _Part, terms: int) -> float:
    """How far apart two sums of so many terms may be that differ in their order, as a part of them: the root of their number in roundings.

    16-bit losses are summed in float32 and rounded once. Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis
    (2019).
    """
    assert part.loss is not None
    dtypes = [
        part.loss.dtype,
        *(leaf.dtype for leaf in part.output if isinstance(leaf, Tensor) and leaf.is_floating_point()),
    ]
    is_double = all(dtype is torch.float64 for dtype in dtypes)
    summed = torch.finfo(torch.float64 if is_double else torch.float32).eps * math.sqrt(terms)
    return 4 * (torch.finfo(part.loss.dtype).eps + summed)


def _are_close(one: float, other: float, scale: float, rounding: float) -> bool:
    return abs(one - other) <= rounding * scale
