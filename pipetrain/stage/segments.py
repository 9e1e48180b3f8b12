"""A stage that is recomputed in parts: between F and B of a microbatch only the parts' inputs stay (recompute.segments).

    F1     part 0 ─ part 1 ─ part 2 ─ part 3    the graph is cut between parts, as between stages
    R1.3   B1.3    R fills part 3, B frees it     [1] B1.3 gets the gradient of the stage's output
    R1.2   B1.2    ...                            [2] B1.2 gets the gradient of part 3's input
    R1.0   B1.0                                   [3] B1.0 returns the gradient of the stage's input

So an activation slot holds one part's set. With one slot, n layers in sqrt(n) parts hold sqrt(n) inputs and the set of sqrt(n) layers
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.2). Each part is a `Stage`: seeds, inspection and proof
work for a part as for a whole stage.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.stage.host_set import HostSet
from pipetrain.stage.microbatch import AddedLosses, StageInput, StageOutput, without_local
from pipetrain.stage.past import Past, run_cached
from pipetrain.stage.stage import LossFn, Stage
from pipetrain.stage.tensor_copies import storage_key

# (leaves of an output, their tree, the device, the name of the last layer for errors, {storage that may not be changed in place: why})
# -> (leaves for the next part or stage, {leaf that may not be changed: why}).
Cross = Callable[
    [Sequence[Any], pytree.TreeSpec, torch.device, str, Mapping[int, str]], tuple[Sequence[Any], Mapping[int, str]]
]


@dataclass
class _Passing:
    """A microbatch between its F and the end of its B."""

    num_inputs: int
    gradients: Sequence[Tensor | None] = ()  # of the input of the part that has run B last
    shared: list[Tensor | None] = field(default_factory=list)  # gradients of weights that parts share


class SegmentedStage:
    """The layers of a stage in parts of `sizes` layers, with the methods of `Stage`; R and B take the index of a part.

    A kept set has one B, which runs the backwards of all parts one after the other. The function `cross` passes the output
    of a part to the next part, as between stages of one rank. `options` are those of `Stage`.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        sizes: Sequence[int],
        *,
        first_layer: int,
        cross: Cross,
        loss_fn: LossFn | None = None,
        **options: Any,
    ) -> None:
        assert sum(sizes) == len(layers)
        assert min(sizes) > 0
        self.index, self.layers, self.first_layer, self.loss_fn = index, list(layers), first_layer, loss_fn
        self.parts: list[Stage] = []
        self._cross = cross
        self._passing: dict[int, _Passing] = {}
        for number, end in enumerate(accumulate(sizes)):
            start, loss = end - sizes[number], loss_fn if end == len(layers) else None
            options |= {"first_layer": first_layer + start, "part": number, "beside": self.layers}
            self.parts.append(Stage(index, self.layers[start:end], loss_fn=loss, **options))
        self.device = self.parts[-1].device
        parameters = {id(one): one for own in parameters_of_parts(self) for one in own}
        num_parts = Counter(key for own in parameters_of_parts(self) for key in set(map(id, own)))
        self._shared = [parameter for key, parameter in parameters.items() if num_parts[key] > 1]

    end = property(lambda self: self.parts[-1].end)  # the name, for errors, of the last layer
    # The same attributes as those of `Stage`, summed over the parts.
    set_bytes = property(lambda self: _summed(part.set_bytes for part in self.parts))
    stash_bytes = property(lambda self: _summed(part.stash_bytes for part in self.parts))
    kept_bytes = property(lambda self: _summed(part.kept_bytes for part in self.parts))

    # F ------------------------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: int, given: StageInput, *, has_backward: bool = True, split: bool = False, **options: bool
    ) -> StageOutput:
        """Run F of all parts; `options` are those of `Stage.forward`. Raises what `Stage.forward` raises, and TypeError: the output of a
        part holds an object that may not be passed to the next part."""
        assert not split, f"stage {self.index} has parts, whose B cannot be split into I and W"
        *before, last = self.parts
        inputs = given
        for part in before:
            # Without `has_backward`, a part whose output needs no gradient stashes nothing, because its B would have nothing to do.
            output = part.forward(microbatch, inputs, has_backward=False, **options)
            inputs = self._handed_over(part, output, inputs)
        output = last.forward(microbatch, inputs, has_backward=has_backward, **options)
        if has_backward or any(output.wants_gradient):
            self._passing[microbatch] = _Passing(len(given.leaves), shared=[None] * len(self._shared))
        return output

    def _handed_over(self, part: Stage, output: StageOutput, given: StageInput) -> StageInput:
        """The next part's input: the `output` of `part`, passed on as between two stages of one rank. `given` was the input of `part`."""
        memories = {storage_key(given.leaves[number]): why for number, why in given.fixed.items()}
        leaves, fixed = self._cross(output.leaves, output.spec, part.device, part.end, memories)
        wants = frozenset(number for number, wanted in enumerate(output.wants_gradient) if wanted)
        return given._replace(leaves=tuple(leaves), spec=output.spec, wants_gradient=wants, is_shared=True, fixed=fixed)

    # R and B ------------------------------------------------------------------------------------------------------

    def recompute(self, microbatch: int, part: int | None) -> None:
        """Run R of one part, as `Stage.recompute`."""
        assert part is not None
        if self.parts[part].holds(microbatch):
            self.parts[part].recompute(microbatch)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, scale: float = 1.0, part: int | None = None
    ) -> list[Tensor | None]:
        """Run B of one part, or of all parts (None). `gradients` are those of the stage's output; only the last part uses them. Returns the
        gradient of each leaf of the input of the part (None: of the stage), as `Stage.backward`."""
        passing = self._passing[microbatch]
        last = len(self.parts) - 1
        for number in range(last, -1, -1) if part is None else (part,):
            given = gradients if number == last else passing.gradients
            passing.gradients = ()
            if self.parts[number].holds(microbatch):
                with self._collecting(passing):
                    passing.gradients = self.parts[number].backward(microbatch, given, scale=scale)
        found = list(passing.gradients)
        if not part:  # the first part, or all
            del self._passing[microbatch]
            with torch.no_grad():
                for parameter, own in zip(self._shared, passing.shared):
                    if own is not None:
                        parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
            found += [None] * (passing.num_inputs - len(found))
        return found

    @contextmanager
    def _collecting(self, passing: _Passing) -> Iterator[None]:
        """In the block, sum the gradients of weights that parts share. `backward` adds their sum to `.grad` once, as autograd does."""
        outside = [parameter.grad for parameter in self._shared]
        for parameter, own in zip(self._shared, passing.shared):
            parameter.grad = own
        try:
            yield
        finally:
            passing.shared = [parameter.grad for parameter in self._shared]
            for parameter, before in zip(self._shared, outside):
                parameter.grad = before

    def host_set(self, microbatch: int, part: int | None) -> HostSet | None:
        """As `Stage.host_set`, for one part."""
        assert part is not None, f"stage {self.index} has parts: name the part of microbatch {microbatch} to copy"
        return self.parts[part].host_set(microbatch)

    def backward_weights(self, microbatch: int) -> None:
        raise AssertionError(f"stage {self.index} has parts, so B{microbatch} is not split and has no W")

    def end_step(self) -> None:
        """As `Stage.end_step`."""
        assert not self._passing, f"stage {self.index} still holds microbatches {', '.join(map(str, self._passing))}"
        for part in self.parts:
            part.end_step()

    def drop(self) -> None:
        """As `Stage.drop`."""
        self._passing.clear()
        for part in self.parts:
            part.drop()


AnyStage = Stage | SegmentedStage


def make_stage(
    index: int, layers: Sequence[nn.Module], sizes: Sequence[int], *, cross: Cross, **options: Any
) -> AnyStage:
    """A stage in parts of `sizes` layers; with fewer than two parts, a `Stage`. `options` are those of `Stage`."""
    if len(sizes) < 2:
        return Stage(index, layers, **options)
    return SegmentedStage(index, layers, sizes, cross=cross, **options)


def parameters_of_parts(stage: AnyStage) -> list[list[nn.Parameter]]:
    """The parameters of each part of a stage, in the order of its layers."""
    parts = stage.parts if isinstance(stage, SegmentedStage) else [stage]
    return [[parameter for layer in part.layers for parameter in layer.parameters()] for part in parts]


def _summed(of_parts: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for sizes in of_parts:
        total.update(sizes)
    return dict(total)


# F without a graph: for `evaluate`, for a call of the pipeline without a loss, and for generation token by token -------------


def infer(stage: AnyStage, given: StageInput, *, with_loss: bool, past: Past | None = None) -> StageOutput:
    """F without a graph. `with_loss`: the last stage ends with the weighted loss. With `past`, layers read earlier tokens from it, and F
    runs in inference mode: without torch's bookkeeping for a backward, a token takes a tenth less time."""
    for part in stage.parts if isinstance(stage, SegmentedStage) else (stage,):
        output = _infer(part, given, with_loss=with_loss, past=past)
        given = given._replace(leaves=output.leaves, spec=output.spec)
    return output


def _infer(stage: Stage, given: StageInput, *, with_loss: bool, past: Past | None) -> StageOutput:
    calls: list[Callable[[Any], Any]] = list(stage.layers)
    seeds: list[int] = []
    if past is None:
        seeds = given.seeds_of(stage.indices)
    else:
        calls = [functools.partial(run_cached, layer, past=past) for layer in calls]
    tree = pytree.tree_unflatten(list(given.leaves), given.spec)
    with torch.no_grad() if past is None else torch.inference_mode(), AddedLosses(tree) as added:
        value = added.value
        if with_loss and stage.loss_fn is not None:
            calls.append(functools.partial(stage.weighted_loss, stage.loss_fn, given=given, added=added))
        for number, call in enumerate(calls):
            if past is None:
                stage.state.seeders[number](seeds[number])
            added.of_layer = []
            value = call(value)
            added.losses += added.of_layer
        if with_loss and stage.loss_fn is None:
            value = added.beside(value)
    leaves, spec = pytree.tree_flatten(without_local(value))
    return StageOutput(tuple(leaves), spec, (False,) * len(leaves))


def prepare_stage(stage: AnyStage, past: Past) -> None:
    """While the input is still being received, let layers compute what depends only on the positions of the new tokens."""
    with torch.inference_mode():
        for layer in stage.layers:
            if (prepare := getattr(layer, "prepare_cached", None)) is not None:
                prepare(past)
