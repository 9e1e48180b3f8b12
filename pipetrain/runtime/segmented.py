"""A stage that is recomputed in parts: between F and B of a microbatch only the parts' inputs stay (recompute.segments).

    F1     part 0 ─ part 1 ─ part 2 ─ part 3    the graph is cut between parts, as between stages
    R1.3   B1.3    part 3 comes back and goes     [1] B1.3 takes the gradient of the stage's output
    R1.2   B1.2    ...                            [2] B1.2 that of part 3's input
    R1.0   B1.0                                   [3] B1.0 gives that of the stage's input

So one part's set is alive at a time, and sqrt(n) parts of n layers hold sqrt(n) inputs and sqrt(n) layers (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost", section 4.2). Each part is a stage in the stage: whatever `Stage` does for a
microbatch, from seeds to the proof, it does for a part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from pipetrain.stage.leaves import NameOf, no_names
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.past import Past
from pipetrain.stage.selective import Wanted
from pipetrain.stage.stage import LossFn, PartOf, Stage, StageInput, StageOutput
from pipetrain.transport.crossing import cross, memories


@dataclass
class _Passing:
    """A microbatch between its F and the end of its B."""

    num_inputs: int
    gradients: Sequence[Tensor | None] = ()  # of the input of the last part that had its B
    shared: list[Tensor | None] = field(default_factory=list)  # what the parts' B gave the weights that they share


class SegmentedStage:
    """The layers of a stage in parts of `sizes` layers, with the methods of `Stage`; R and B of a part are told which.

    A set that is kept goes back whole: B of all parts, one after the other.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        sizes: Sequence[int],
        *,
        first_layer: int,
        device: torch.device,
        meter: ActivationMeter,
        loss_fn: LossFn | None = None,
        name_of: NameOf = no_names,
        selective: Sequence[Wanted] = (),
        keep_layers: Collection[int] = (),
    ) -> None:
        assert sum(sizes) == len(layers)
        assert min(sizes) > 0
        self.index = index
        self.layers = list(layers)
        self.first_layer = first_layer
        self.loss_fn = loss_fn
        self._parts = []
        start = 0
        for number, size in enumerate(sizes):
            self._parts.append(
                Stage(
                    index,
                    self.layers[start : start + size],
                    first_layer=first_layer + start,
                    device=device,
                    meter=meter,
                    loss_fn=loss_fn if number == len(sizes) - 1 else None,
                    name_of=name_of,
                    part=PartOf(number, self.layers),
                    selective=selective,
                    keep_layers=keep_layers,
                )
            )
            start += size
        self._passing: dict[int, _Passing] = {}
        self._shared = _shared_parameters(self._parts)

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    @property
    def end(self) -> str:
        """Who gives what leaves the stage, in an error."""
        return self._parts[-1].end

    @property
    def set_bytes(self) -> dict[int, int]:
        """Microbatch -> bytes of its set, all parts together."""
        return _summed([part.set_bytes for part in self._parts])

    @property
    def stash_bytes(self) -> dict[int, int]:
        """Microbatch -> bytes of its parts' inputs."""
        return _summed([part.stash_bytes for part in self._parts])

    @property
    def kept_bytes(self) -> dict[int, int]:
        """Microbatch -> bytes of outputs that are kept for R of its parts."""
        return _summed([part.kept_bytes for part in self._parts])

    def layers_by_number(self) -> dict[int, nn.Module]:
        """The layers by their global index."""
        return {number: layer for part in self._parts for number, layer in part.layers_by_number().items()}

    # F ------------------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        given: StageInput,
        *,
        keep: bool,
        prove: bool = False,
        has_backward: bool = True,
        split: bool = False,
        witness: bool = False,
    ) -> StageOutput:
        """F of all parts, as `Stage.forward`.

        Raises:
            TypeError: what may not cross from part to part. As `Stage.forward`.
        """
        assert not split, f"stage {self.index} has parts, and B of parts has no halves"
        inputs = given
        for part in self._parts:
            is_last = part is self._parts[-1]
            # A part whose output needs no gradient has nothing to do in B, and stashes nothing.
            output = part.forward(
                microbatch, inputs, keep=keep, prove=prove, has_backward=is_last and has_backward, witness=witness
            )
            if not is_last:
                inputs = _handed_over(part, output, inputs)
        if has_backward or any(output.wants_gradient):
            self._passing[microbatch] = _Passing(len(given.leaves), shared=[None] * len(self._shared))
        return output

    # R and B ------------------------------------------------------------------------------------------------------

    def recompute(self, microbatch: int, part: int | None) -> None:
        """R of one part, as `Stage.recompute`."""
        assert part is not None
        if self._parts[part].holds(microbatch):
            self._parts[part].recompute(microbatch)

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        *,
        scale: float = 1.0,
        part: int | None = None,
    ) -> list[Tensor | None]:
        """B of one part, or of all (None); the last one's `gradients` are those of the stage's output.

        Returns the gradient of each leaf of the part's input, as `Stage.backward`.
        """
        passing = self._passing[microbatch]
        last = len(self._parts) - 1
        for number in range(last, -1, -1) if part is None else (part,):
            own, given = self._parts[number], gradients if number == last else passing.gradients
            passing.gradients = ()
            if own.holds(microbatch):
                with self._collecting(passing):
                    passing.gradients = own.backward(microbatch, given, scale=scale)
        found = list(passing.gradients)
        if not part:  # the first part, or all
            del self._passing[microbatch]
            self._add_shared(passing)
            found += [None] * (passing.num_inputs - len(found))
        return found

    @contextmanager
    def _collecting(self, passing: _Passing) -> Iterator[None]:
        """What B adds to a weight that parts share is put aside: autograd adds it to `.grad` once, as a sum."""
        outside = [parameter.grad for parameter in self._shared]
        for parameter, own in zip(self._shared, passing.shared):
            parameter.grad = own
        try:
            yield
        finally:
            passing.shared = [parameter.grad for parameter in self._shared]
            for parameter, before in zip(self._shared, outside):
                parameter.grad = before

    def _add_shared(self, passing: _Passing) -> None:
        with torch.no_grad():
            for parameter, own in zip(self._shared, passing.shared):
                if own is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = own
                else:
                    parameter.grad += own

    def backward_weights(self, microbatch: int) -> None:
        raise AssertionError(f"stage {self.index} has parts, and B{microbatch} of parts has no halves")

    def end_step(self) -> None:
        """As `Stage.end_step`."""
        assert not self._passing, f"stage {self.index} still holds microbatches {', '.join(map(str, self._passing))}"
        for part in self._parts:
            part.end_step()

    def drop(self) -> None:
        """Forget everything that is held: a step has failed."""
        self._passing.clear()
        for part in self._parts:
            part.drop()

    # Without a graph ----------------------------------------------------------------------------------------------

    def infer(self, given: StageInput, *, with_loss: bool, past: Past | None = None) -> StageOutput:
        """F without a graph, as `Stage.infer`; a part finds what it kept in `past` by its own layers."""
        for part in self._parts:
            output = part.infer(given, with_loss=with_loss, past=past)
            given = replace(given, leaves=output.leaves, spec=output.spec)
        return output

    def prepare(self, past: Past) -> None:
        for part in self._parts:
            part.prepare(past)


AnyStage = Stage | SegmentedStage


def make_stage(
    index: int,
    layers: Sequence[nn.Module],
    sizes: Sequence[int],
    *,
    first_layer: int,
    device: torch.device,
    meter: ActivationMeter,
    loss_fn: LossFn | None = None,
    name_of: NameOf = no_names,
    selective: Sequence[Wanted] = (),
    keep_layers: Collection[int] = (),
) -> AnyStage:
    """A stage in parts of `sizes` layers; where there are fewer than two parts, one as a whole."""
    make = Stage if len(sizes) < 2 else partial(SegmentedStage, sizes=sizes)
    return make(
        index,
        layers,
        first_layer=first_layer,
        device=device,
        meter=meter,
        loss_fn=loss_fn,
        name_of=name_of,
        selective=selective,
        keep_layers=keep_layers,
    )


def parameters_of_parts(stage: AnyStage) -> list[list[nn.Parameter]]:
    """Of each part of a stage its parameters, in the order of its layers."""
    parts = stage._parts if isinstance(stage, SegmentedStage) else [stage]
    return [[parameter for layer in part.layers for parameter in layer.parameters()] for part in parts]


def _handed_over(part: Stage, output: StageOutput, given: StageInput) -> StageInput:
    """The output of `part`, which got `given`, as the next one gets it: as a stage of the same rank would."""
    fixed = memories(given.leaves, given.fixed)
    leaves, may_not_change = cross(output.leaves, output.spec, part.device, part.end, fixed)
    wants = frozenset(number for number, wanted in enumerate(output.wants_gradient) if wanted)
    return replace(
        given,
        leaves=tuple(leaves),
        spec=output.spec,
        wants_gradient=wants,
        is_shared=True,
        fixed=may_not_change,
    )


def _shared_parameters(parts: Sequence[Stage]) -> list[nn.Parameter]:
    """Those of more than one part."""
    seen: dict[int, int] = {}
    shared: dict[int, nn.Parameter] = {}
    for number, part in enumerate(parts):
        for layer in part.layers:
            for parameter in layer.parameters():
                if seen.setdefault(id(parameter), number) != number:
                    shared[id(parameter)] = parameter
    return list(shared.values())


def _summed(of_parts: Sequence[dict[int, int]]) -> dict[int, int]:
    microbatches = {microbatch for sizes in of_parts for microbatch in sizes}
    return {microbatch: sum(sizes.get(microbatch, 0) for sizes in of_parts) for microbatch in microbatches}
