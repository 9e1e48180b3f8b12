"""Checks in the first step that `loss_fn` is a mean or a sum, as the user says.

A step back-propagates the sum of `loss_fn(out_i, target_i) * share_i`. That is the loss of the batch if `loss_fn` is a mean over rows, or
over what `count_fn` counts. If `loss_fn` is a sum, it is only a fraction of that loss, so `loss_reduction="sum"` sets the factors to 1. For
most other functions, neither sum is that loss. `LossCheck` keeps outputs of the first step, without their graphs, and evaluates `loss_fn` on all of
them together. If it has only one output (each replica has one microbatch, or outputs are large), it cuts that one in two.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.device import Fetch
from pipetrain.comm.failure import PipelineError
from pipetrain.runtime.arguments import MEAN
from pipetrain.runtime.cut import CountFn, counts_of, weights_of
from pipetrain.runtime.executor import Step
from pipetrain.stage.microbatch import WithLosses
from pipetrain.stage.stage import LossFn

# The most bytes of outputs that are kept for the check; the first output is kept whatever its size.
_MOST_BYTES = 1 << 28
_LOG = logging.getLogger(__name__)


class LossNotFinite(PipelineError):
    """The loss of a step is not finite. Every rank raises it after the whole step, and the pipeline can go on.

    `microbatch` is the first whose own loss is not finite, counted over all replicas; `loss` is the sum over all. `step` counts from 0, but
    the message from 1. Discard the gradients. Buffers that a forward changes (running means) already include the batch.
    """

    def __init__(self, step: int, microbatch: int, loss: float) -> None:
        super().__init__(
            f"the loss of microbatch {microbatch} in step {step + 1} is not finite (the sum is {loss}): look at that batch, lower "
            "the learning rate, or clip the gradients"
        )
        self.step = step
        self.microbatch = microbatch
        self.loss = loss


class _NotComparable(Exception):
    """The kept outputs do not allow the comparison."""


class _Part(NamedTuple):
    """Some rows: the leaves of their output and target, their share of the batch, and their loss."""

    output: list[Any]
    target: list[Any]
    share: float
    loss: Tensor


@dataclass
class LossCheck:
    """Compares, on the last stage's rank, `loss_fn` of all rows with its values on microbatches. The user says by `reduction` whether it is
    a mean or a sum.

    A loss that cannot be evaluated on all rows, or that gives two values for one output (random numbers, a state), is not checked. A copy
    of `loss_fn` is called, so its state stays as it is.
    """

    loss_fn: LossFn
    count_fn: CountFn | None
    reduction: str
    last_layer: int
    fetch: Fetch
    warns: bool  # True in one replica only
    is_done: bool = False

    @contextmanager
    def over(self, step: Step) -> Iterator[None]:
        """Check the loss of a step with a graph, which runs in the block. The caller restores the generators. Raises ValueError:
        `reduction` says mean and the loss is a sum, or the other way round."""
        counted = [index for index, share in enumerate(step.shares) if share]
        if step.on_layer is not None or not counted or step.shares[counted[0]] == 1:
            yield
            return
        kept, specs, room = dict[int, list[Callable[[], Any]]](), set[pytree.TreeSpec](), _MOST_BYTES
        added: dict[int, Tensor] = {}  # microbatch -> what layers added to the loss of loss_fn

        def keep(microbatch: int, layer: int, output: Any) -> None:
            nonlocal room
            if layer != self.last_layer:
                return
            if isinstance(output, WithLosses):
                added[microbatch], output = output.losses.detach(), output.output
            leaves, spec = pytree.tree_flatten(output)
            room -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            if room >= 0 or not kept:
                kept[microbatch] = [_put_away(leaf) for leaf in leaves]
                specs.add(spec)

        step.on_layer = keep
        yield
        step.on_layer = None
        try:
            (spec,) = specs
            parts = [
                _Part(
                    [back() for back in leaves],
                    pytree.tree_leaves(step.targets[index]),
                    step.shares[index],
                    step.outputs[index] / step.weights[index] - added.get(index, 0),
                )
                for index, leaves in sorted(kept.items())
            ]
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
        """Return the loss of all kept rows together; the mean of the losses of their parts; the sum of these losses; and the relative
        difference that rounding allows."""
        loss_fn: LossFn = _copy_of(self.loss_fn)

        def loss_of(output: list[Any], target: list[Any]) -> Tensor:
            with torch.no_grad():
                return loss_fn(pytree.tree_unflatten(output, spec), pytree.tree_unflatten(target, target_spec))

        first = parts[0]
        again = loss_of(_cloned(first.output), _cloned(first.target))
        rounding = _rounding(first.loss, [leaf for part in parts for leaf in part.output if isinstance(leaf, Tensor)])
        if len(parts) > 1:
            target = _joined([part.target for part in parts], whole)
            together = loss_of(_joined([part.output for part in parts]), target)
        else:
            together, outputs = first.loss, _cut_in_two(_cloned(first.output))
            targets = _cut_in_two(_cloned(first.target), whole)
            counts: list[int | float]
            if self.count_fn is None:
                counts = [next(len(leaf) for leaf in output if isinstance(leaf, Tensor)) for output in outputs]
            else:
                counts = counts_of([pytree.tree_unflatten(half, target_spec) for half in targets], self.count_fn)
            if not all(counts):
                raise _NotComparable("a half in which nothing counts")
            halves = zip(outputs, targets, weights_of(counts))
            parts = [_Part(output, target, share, loss_of(output, target)) for output, target, share in halves]
        found = [first.loss, again, together, *(part.loss for part in parts)]
        stacked = torch.stack([loss.detach().to(first.loss.device).double() for loss in found])
        once, twice, of_all, *losses = self.fetch(stacked, "the loss of the first step as a whole").tolist()
        if math.isfinite(once) and abs(once - twice) > rounding * abs(once):
            raise _NotComparable("another loss for the same output")
        share = sum(part.share for part in parts)
        mean = sum(part.share / share * loss for part, loss in zip(parts, losses))
        return of_all, mean, sum(losses), rounding

    def _judge(self, num_microbatches: int, together: float, mean: float, added: float, rounding: float) -> None:
        scale = max(abs(together), abs(mean))
        is_mean = abs(together - mean) <= rounding * scale
        is_sum = abs(together - added) <= rounding * max(scale, abs(added))
        if is_mean if self.reduction == MEAN else is_sum:
            return
        if is_sum:
            raise ValueError(
                f"loss_fn is a sum over rows: {together:.6g} for all rows, and {added:.6g} as the sum of their parts. With "
                f"loss_reduction='mean', loss and gradients would be about 1/{num_microbatches} of that: give "
                'Pipeline(..., loss_reduction="sum"), or a loss_fn that returns a mean'
            )
        if is_mean:
            raise ValueError(
                f"loss_fn is a mean over rows: {together:.6g} for all rows, and {mean:.6g} as the mean of their parts. With "
                f"loss_reduction='sum', loss and gradients would be about {num_microbatches} times that: leave loss_reduction out"
            )
        if self.warns:
            taken = mean if self.reduction == MEAN else added
            warnings.warn(
                f"loss_fn gives {together:.6g} for rows together, and {taken:.6g} as the {self.reduction} over microbatches that is trained on, so "
                "loss and gradients depend on num_microbatches. Usual causes: class weights (cross_entropy with weight=), padding that "
                "the mean does not count (ignore_index=), losses over pairs of the batch (contrastive ones). For the first two give "
                "count_fn=, which returns how much of a target counts: the sum of its weights, or the number of entries that are not "
                "padding. A loss over pairs gets only the pairs within a microbatch",
                stacklevel=2,
            )


def _put_away(leaf: Any) -> Callable[[], Any]:
    """Return a function that makes the leaf again. It holds the leaf's storage, but not the leaf."""
    if not isinstance(leaf, Tensor):
        return lambda: leaf
    return partial(
        leaf.detach().new_empty(0).set_, leaf.untyped_storage(), leaf.storage_offset(), tuple(leaf.shape), leaf.stride()
    )


def _joined(parts: Sequence[list[Any]], whole: Set[int] = frozenset()) -> list[Any]:
    """Join the leaves of several parts into those of one; `whole` has the indices of leaves that are the same in each part."""
    joined = []
    for index, column in enumerate(zip(*parts, strict=True)):
        if isinstance(column[0], Tensor) and index not in whole:
            joined.append(torch.cat(column))
        elif isinstance(column[0], Tensor) or all(leaf == column[0] for leaf in column):
            joined.append(column[0])
        else:
            raise _NotComparable(f"a {type(column[0]).__name__} that differs between microbatches")
    return joined


def _cut_in_two(leaves: list[Any], whole: Set[int] = frozenset()) -> list[list[Any]]:
    pairs = [(leaf, isinstance(leaf, Tensor) and index not in whole) for index, leaf in enumerate(leaves)]
    return [*map(list, zip(*(torch.tensor_split(leaf, 2) if is_cut else (leaf, leaf) for leaf, is_cut in pairs)))]


def _cloned(leaves: list[Any]) -> list[Any]:
    """Return copies, because a loss may change its arguments in place, and leaves may be views of the user's batch."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _copy_of(loss_fn: Any) -> Any:
    """Return a copy of a loss, or of a value in it, with attributes of its own. Values in a function's closure are copied, weights are
    not."""
    if isinstance(loss_fn, partial):
        named = {name: _copy_of(one) for name, one in loss_fn.keywords.items()}
        return partial(_copy_of(loss_fn.func), *map(_copy_of, loss_fn.args), **named)
    if isinstance(loss_fn, MethodType):
        return MethodType(loss_fn.__func__, _copy_of(loss_fn.__self__))
    if isinstance(loss_fn, FunctionType) and loss_fn.__closure__ is not None:
        cells = tuple(CellType(_copy_of(cell.cell_contents)) for cell in loss_fn.__closure__)
        own = FunctionType(loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, loss_fn.__defaults__, closure=cells)
        own.__kwdefaults__ = loss_fn.__kwdefaults__
        return own
    if isinstance(loss_fn, (nn.Module, Tensor, list, tuple, dict, set)):
        modules = [leaf for leaf in pytree.tree_leaves(loss_fn) if isinstance(leaf, nn.Module)]
        return copy.deepcopy(loss_fn, {id(weight): weight for module in modules for weight in module.parameters()})
    try:
        return copy.copy(loss_fn)
    except TypeError:  # a module of Python, a lock: they have no state that a loss would change
        return loss_fn


def _rounding(loss: Tensor, outputs: Sequence[Tensor]) -> float:
    """The relative difference allowed between sums of the same terms in two orders: rounding error times the square root of the number of
    terms.

    16-bit losses are summed in float32 and rounded once. Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis
    (2019).
    """
    is_double = all(one.dtype is torch.float64 for one in (loss, *outputs) if one.is_floating_point())
    summed = torch.finfo(torch.float64 if is_double else torch.float32).eps
    terms = sum(output.numel() for output in outputs)
    return 4 * (torch.finfo(loss.dtype).eps + summed * math.sqrt(terms))
