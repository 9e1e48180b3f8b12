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
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.device import Fetch
from pipetrain.runtime.arguments import MEAN
from pipetrain.runtime.cut import CountFn, counts_of, weights_of
from pipetrain.runtime.executor import Step
from pipetrain.stage.added_losses import WithLosses
from pipetrain.stage.stage import LossFn

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
    """Some rows: the leaves of their output and target, their share of the batch, and their loss where it is known."""

    output: list[Any]
    target: list[Any]
    share: float
    loss: Tensor | None = None


@dataclass
class LossCheck:
    """Compares on the last stage's rank. `reduction` is what the user says that `loss_fn` is: `mean` or `sum`.

    A loss that cannot be evaluated so, or gives another value for the same output (random numbers, a state), is left alone. It is called on a
    copy: a state of its own stays as it is.
    """

    loss_fn: LossFn
    count_fn: CountFn | None
    reduction: str
    last_layer: int
    fetch: Fetch
    warns: bool  # of several replicas one
    is_done: bool = False

    @contextmanager
    def over(self, step: Step) -> Iterator[None]:
        """Around a step with a graph. The generators are the caller's to restore.

        Raises:
            ValueError: the loss is a sum, and not the mean it is said to be, or the other way round.
        """
        counted = [index for index, share in enumerate(step.shares) if share]
        if self.is_done or step.on_layer is not None or not counted or step.shares[counted[0]] == 1:
            yield
            return
        kept, specs, room = dict[int, list[Any]](), set[pytree.TreeSpec](), _MOST_BYTES
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
                specs.add(spec)

        step.on_layer = keep
        yield
        step.on_layer = None
        parts = [
            _Part(
                [leaf.back() if isinstance(leaf, _Kept) else leaf for leaf in leaves],
                pytree.tree_leaves(step.targets[index]),
                step.shares[index],
                step.outputs[index] / step.weights[index] - added.get(index, 0),
            )
            for index, leaves in sorted(kept.items())
        ]
        try:
            (spec,) = specs
            target_spec = pytree.tree_structure(step.targets[next(iter(kept))])
            values = self._evaluate(parts, set(step.whole_targets), spec, target_spec)
        except Exception as error:
            self.is_done = True
            name = type(error).__name__
            _LOG.debug("whether the loss is a %s was not looked at: %s: %s", self.reduction, name, error)
            return
        if all(map(math.isfinite, values)):
            self.is_done = True
            self._judge(len(step.shares), *values)

    def _evaluate(
        self, parts: list[_Part], whole: set[int], spec: pytree.TreeSpec, target_spec: pytree.TreeSpec
    ) -> tuple[float, float, float, float]:
        """The loss of all that was kept, the mean of the losses of its parts, their sum, and how far rounding may take two of them apart."""
        loss_fn: LossFn = _copy_of(self.loss_fn)

        def loss_of(output: list[Any], target: list[Any]) -> Tensor:
            with torch.no_grad():
                return loss_fn(pytree.tree_unflatten(output, spec), pytree.tree_unflatten(target, target_spec))

        first = parts[0]
        assert first.loss is not None
        again = loss_of(_cloned(first.output), _cloned(first.target))
        rounding = _rounding(first.loss, [leaf for part in parts for leaf in part.output if isinstance(leaf, Tensor)])
        if len(parts) > 1:
            joined = _joined([part.output for part in parts]), _joined([part.target for part in parts], whole)
            together = loss_of(*joined)
        else:
            together, outputs = first.loss, _cut_in_two(_cloned(first.output))
            targets = _cut_in_two(_cloned(first.target), whole)
            counts: list[int | float] = [
                next(leaf.shape[0] for leaf in output if isinstance(leaf, Tensor)) for output in outputs
            ]
            if self.count_fn is not None:
                counts = counts_of([pytree.tree_unflatten(half, target_spec) for half in targets], self.count_fn)
            if not all(counts):
                raise _NotComparable("a half in which nothing counts")
            halves = zip(outputs, targets, weights_of(counts))
            parts = [_Part(output, target, share, loss_of(output, target)) for output, target, share in halves]
        found = [first.loss, again, together, *(part.loss for part in parts if part.loss is not None)]
        stacked = torch.stack([loss.detach().to(first.loss.device).double() for loss in found])
        once, twice, whole_loss, *losses = self.fetch(stacked, "the loss of the first step as a whole").tolist()
        if math.isfinite(once) and not _are_close(once, twice, abs(once), rounding):
            raise _NotComparable("another loss for the same output")
        share = sum(part.share for part in parts)
        mean = sum(part.share / share * loss for part, loss in zip(parts, losses))
        return whole_loss, mean, sum(losses), rounding

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


def _joined(parts: Sequence[list[Any]], whole: Set[int] = frozenset()) -> list[Any]:
    """The leaves of several parts as those of one; `whole` are the same in each."""
    joined = []
    for index, column in enumerate(zip(*parts, strict=True)):
        if isinstance(column[0], Tensor) and index not in whole:
            joined.append(torch.cat(column))
        elif isinstance(column[0], Tensor) or all(leaf == column[0] for leaf in column):
            joined.append(column[0])
        else:
            raise _NotComparable(f"a {type(column[0]).__name__} that is another for each microbatch")
    return joined


def _cut_in_two(leaves: list[Any], whole: Set[int] = frozenset()) -> list[list[Any]]:
    columns = [
        torch.tensor_split(leaf, 2) if isinstance(leaf, Tensor) and index not in whole else (leaf, leaf)
        for index, leaf in enumerate(leaves)
    ]
    return [list(half) for half in zip(*columns)]


def _cloned(leaves: list[Any]) -> list[Any]:
    """Not views of the user's batch: a loss may change what it is given in place."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _copy_of(value: Any) -> Any:
    """A loss, or what it holds, with a state of its own: also in what a function closes over. Weights are not copied."""
    if isinstance(value, partial):
        named = {name: _copy_of(one) for name, one in value.keywords.items()}
        return partial(_copy_of(value.func), *map(_copy_of, value.args), **named)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy_of(value.__self__))
    if isinstance(value, FunctionType) and value.__closure__ is not None:
        cells = tuple(CellType(_copy_of(cell.cell_contents)) for cell in value.__closure__)
        own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure=cells)
        own.__kwdefaults__ = value.__kwdefaults__
        return own
    if isinstance(value, (nn.Module, Tensor, list, tuple, dict, set)):
        modules = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, nn.Module)]
        return copy.deepcopy(value, {id(weight): weight for module in modules for weight in module.parameters()})
    try:
        return copy.copy(value)
    except TypeError:  # a module of Python, a lock: they have no state that a loss would change
        return value


def _rounding(loss: Tensor, outputs: Sequence[Tensor]) -> float:
    """How far apart two sums of so many terms may be that differ in their order, as a part of them: the root of their number in roundings.

    16-bit losses are summed in float32 and rounded once. Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis
    (2019).
    """
    is_double = all(one.dtype is torch.float64 for one in (loss, *outputs) if one.is_floating_point())
    summed = torch.finfo(torch.float64 if is_double else torch.float32).eps
    terms = sum(output.numel() for output in outputs)
    return 4 * (torch.finfo(loss.dtype).eps + summed * math.sqrt(terms))


def _are_close(one: float, other: float, scale: float, rounding: float) -> bool:
    return abs(one - other) <= rounding * scale
