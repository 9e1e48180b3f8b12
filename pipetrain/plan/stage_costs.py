"""What stages of layers take and hold, by a profile of the layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipetrain.plan.profile import LayerProfile, Profile
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Outputs

_OF_W, _SPLIT = (
    0.4,
    1.026,
)  # W's share of a split backward, its time over a whole one (`pipetrain bench split`, a block)


def costs_of_layers(
    profile: Profile, balance: Sequence[int], selective: Sequence[Outputs] = (), num_replicas: int = 1
) -> Costs:
    """What stages of `balance` layers cost, from layers that were measured alone. Hops, and sums of gradients over the replicas, are those of
    the profile's link; without one they take no time.

    A tensor that two neighbours save is held once. `set_bytes` has the outputs that `selective` keeps although no backward needs them.
    """
    stages, host = stages_of(profile, balance, selective), profile.host
    hops = tuple(profile.hop_seconds(edge, stage.layers[-1].output_bytes) for edge, stage in enumerate(stages[:-1]))
    sets = tuple(float(stage.whole) for stage in stages)
    keeps = selective or any(layer.is_kept for layer in profile.layers)
    link, share = profile.link, 2 * (num_replicas - 1) / num_replicas  # a rank of a ring sends this of its gradients
    return Costs(
        forward=tuple(stage.seconds("forward_seconds") + stage.looking_seconds for stage in stages),
        backward=tuple(stage.seconds("backward_seconds") for stage in stages),
        input_gradient=tuple(stage.half("input_gradient_seconds", _SPLIT * (1 - _OF_W)) for stage in stages),
        weight_gradient=tuple(stage.half("weight_gradient_seconds", _SPLIT * _OF_W) for stage in stages),
        recompute=tuple(stage.recompute_seconds() for stage in stages),
        hop_forward=hops,
        hop_backward=hops,
        input_bytes=tuple(float(stage.input) for stage in stages),
        set_bytes=sets,
        kept_bytes=tuple(float(stage.kept) for stage in stages) if keeps else (),
        reduce=() if link is None or share == 0 else tuple(link.seconds(one.gradient_bytes * share) for one in stages),
        offload=() if host is None else tuple(map(host.seconds, sets)),
        copy_contention=() if host is None else (host.contention,) * len(hops),
    )


def as_measured(profile: Profile, balance: Sequence[int], measured: Costs) -> Profile:
    """The profile with the seconds of each layer in proportion to what its stage took in a run of stages of `balance` layers."""
    foreseen, layers = costs_of_layers(profile, balance), []
    for number, stage in enumerate(stages_of(profile, balance)):
        scales = {}
        for name in ("forward", "backward", "recompute"):
            before, now = getattr(foreseen, name)[number], getattr(measured, name)[number]
            scales[name] = now / before if before and now else 1.0
        for place, layer in zip(stage.numbers, stage.layers):
            seconds = {f"{name}_seconds": getattr(layer, f"{name}_seconds") * times for name, times in scales.items()}
            last = layer.recompute_last_seconds * scales["recompute"]
            layers.append(replace(layer, numbers=(place,), recompute_last_seconds=last, **seconds))
    return replace(profile, layers=tuple(layers), smaller=())


def bytes_of_layers(profile: Profile) -> tuple[float, ...]:
    """What each layer of the model adds to the set of a stage that begins before it; the last one with the loss."""
    layers = profile.each()
    ends = [*_borders(layers), layers[-1].saves_output]
    sizes = [layer.inner_bytes + layer.output_bytes * is_saved for layer, is_saved in zip(layers, ends)]
    return _with_loss(profile, sizes)


def seconds_of_layers(profile: Profile, *ops: str) -> tuple[float, ...]:
    """What these ops of each layer of the model take, by default R; of the last one with the loss."""
    names = [f"{op}_seconds" for op in ops or ("recompute",)]
    return _with_loss(profile, [sum(getattr(layer, name) for name in names) for layer in profile.each()])


def _with_loss(profile: Profile, own: Iterable[float]) -> tuple[float, ...]:
    """An entry per layer of the model, from those of `Profile.each`."""
    found = list(map(float, own))
    if profile.has_loss:
        found[-2:] = [found[-2] + found[-1]]
    return tuple(found)


def _borders(layers: Sequence[LayerProfile]) -> list[bool]:
    """Whether what leaves a layer for the next one is saved."""
    return [left.saves_output or right.saves_input for left, right in itertools.pairwise(layers)]


def stages_of(profile: Profile, balance: Sequence[int], selective: Sequence[Outputs] = ()) -> list[StageProfile]:
    """Stages of `balance` layers, or parts of stages; the last one has the loss, too."""
    ends = itertools.accumulate(balance)
    numbers = [list(range(end - size, end)) for end, size in zip(ends, balance)]
    numbers[-1] += [profile.num_layers] * profile.has_loss
    return [StageProfile([profile.layer(one) for one in own], own, selective) for own in numbers]


class StageProfile:
    """Layers that follow one another, as a stage or a part of one runs them: their seconds, and bytes of one microbatch.

    F keeps the outputs that `selective` names. The input of the first stage is a part of the batch, which stays for the whole step.
    """

    def __init__(self, layers: Sequence[LayerProfile], numbers: Sequence[int], selective: Sequence[Outputs]) -> None:
        self.layers, self.numbers, self._is_selective = layers, numbers, bool(selective)
        self._borders = _borders(layers)
        wanted = [[one for one in selective if one.means_layer(number)] for number in numbers]
        self._ops = [
            [op for op in layer.ops if not layer.is_kept and any(map(op.is_among, among))]
            for layer, among in zip(layers, wanted)
        ]
        self._outputs = [op for ops in self._ops for op in ops]
        self.gradient_bytes = sum(layer.gradient_bytes for layer in layers)
        self.input = layers[0].input_bytes
        self._own_input = self.input * (numbers[0] > 0)
        self.saves_input = layers[0].saves_input

    def seconds(self, name: str) -> float:
        total: float = sum(getattr(layer, name) for layer in self.layers)
        return total

    def half(self, name: str, share: float) -> float:
        """Seconds of I or W; of layers that do not tell, a `share` of B."""
        own = ((getattr(layer, name), layer.backward_seconds) for layer in self.layers)
        return sum(backward * share if told is None else told for told, backward in own)

    def recompute_seconds(self) -> float:
        again = [layer for layer in self.layers if not layer.is_kept]
        if not again:
            return 0.0
        whole = sum(layer.recompute_seconds for layer in again[:-1]) + again[-1].recompute_last_seconds
        spared = sum(op.seconds for op in self._outputs) - sum(op.tail_seconds for op in self._ops[-1])
        return max(0.0, whole + self.looking_seconds - spared)

    @property
    def looking_seconds(self) -> float:
        """What it takes to look for the operations whose outputs are kept."""
        return max(0.0, self.seconds("selective_seconds")) if self._is_selective else 0.0

    @functools.cached_property
    def kept(self) -> int:
        """Bytes of a set that R finds."""
        inside, beside = self._bytes_of_kept_layers()
        return sum(op.output_bytes for op in self._outputs) - self._tail_bytes + inside + beside

    @functools.cached_property
    def own(self) -> int:
        """Bytes of a set, without what R alone reads; with the stage's input, saved or not: it is held for R in any case."""
        shared = sum(layer.output_bytes for layer, is_saved in zip(self.layers, self._borders) if is_saved)
        end = self.layers[-1].output_bytes if self.layers[-1].saves_output else 0
        return sum(layer.inner_bytes for layer in self.layers) + shared + self.input + end

    @functools.cached_property
    def whole(self) -> int:
        """Bytes of a set and of what else is kept for R."""
        saved = sum(op.border_bytes for ops, is_saved in zip(self._ops, self._borders) if is_saved for op in ops)
        unsaved = sum(op.unsaved_bytes for op in self._outputs) - saved - self._tail_bytes
        return self.own + unsaved + self._bytes_of_kept_layers()[1]

    @property
    def stash(self) -> int:
        """Held from F to R."""
        return self._own_input + self.kept

    @property
    def full(self) -> int:
        """Held from R to B."""
        return self.whole - (self.input - self._own_input)

    @property
    def full_if_kept(self) -> int:
        """Held from F to B of a microbatch without R."""
        return self.own - (self.input if not self._own_input or not self.saves_input else 0)

    @property
    def full_if_proved(self) -> int:
        """F of a microbatch of which R is proved runs on a copy of the input, in case that a layer changes it."""
        return self.full + (self.input if self.saves_input else 0)

    @functools.cached_property
    def largest(self) -> int:
        """Bytes of the largest layer."""
        return max(one.inner_bytes + one.output_bytes for one in self.layers)

    @functools.cached_property
    def can_leave(self) -> int:
        """Bytes of a set that go to host memory when it is offloaded."""
        return max(0, self.full_if_kept - sum(one.staying_bytes for one in self.layers))

    @property
    def _tail_bytes(self) -> int:
        return sum(op.tail_bytes for op in self._ops[-1])

    def _bytes_of_kept_layers(self) -> tuple[int, int]:
        """What kept layers hold of a set from F to B; and beside it: the inputs that they saved, if R computes these again, and the copy of the
        last output with which R goes on."""
        inside = beside = 0
        for left, right in itertools.zip_longest(self.layers, self.layers[1:]):
            next_is_kept = right is not None and right.is_kept
            is_saved = (left.is_kept and left.saves_output) or (next_is_kept and right.saves_input)
            if left.is_kept:
                inside += left.inner_bytes + left.output_bytes * is_saved
                beside += left.output_bytes * (not next_is_kept)
            else:
                beside += left.output_bytes * is_saved
        return inside, beside
