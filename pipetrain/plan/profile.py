"""profile.json: what layers take and hold, measured alone by `pipetrain profile`, or what the ops of a run's stages took.

pipetrain profile   layers, and what they were measured with     -> costs of stages of any balance, by `costs_of_layers`
a run               costs of its stages, and its microbatches    -> costs of those stages
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pipetrain.config.read_files import DamagedFile, fitted, read_object
from pipetrain.config.renamed import current_key
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.policy import Outputs, layer_numbers

PROFILE = "profile.json"
_FORMAT_VERSION = 2
_READ = (1, 2)  # 1 had no layers
_LATEST = Path("runs") / "latest"


@dataclass(frozen=True)
class OpProfile:
    """An operation in one submodule of a layer, all its calls in one microbatch together.

    `word` is what `recompute.selective` calls operations of its kind; None: nothing. `unsaved_bytes` are those of its outputs that
    the layer's backward does not need: whoever keeps the outputs holds these besides the set; of them `border_bytes` are the layer's own
    output, which the next layer may save. The `tail_` fields are of the calls that R does not reach if the layer is
    the last of its stage; nothing of theirs is saved.
    """

    op: str
    word: str | None
    path: str
    calls: int
    seconds: float
    output_bytes: int
    unsaved_bytes: int
    border_bytes: int
    tail_seconds: float
    tail_bytes: int

    def is_among(self, outputs: Outputs) -> bool:
        """Whether an entry of `recompute.selective` keeps these, in a layer that it means."""
        if outputs.path and not f"{self.path}.".startswith(f"{outputs.path}."):
            return False
        if outputs.op is None:
            return self.word is not None
        return outputs.op in (self.word, self.op, f"aten::{self.op}", f"aten.{self.op}")


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a layer's set: the operation that makes it (`input` for what the layer is given), and what that takes."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    recompute_seconds: float


@dataclass(frozen=True)
class LayerProfile:
    """Layers that look the same, measured on one of them with one microbatch; the number after the last layer's is the loss.

    `recompute_seconds` is R through the whole layer, `recompute_last_seconds` where it is the last of its stage, so that R ends with its
    last saved tensor. `inner_bytes` is its set but for its input and its output, which neighbours may save as well. W needs `deferred_bytes` after I.
    An offloaded set leaves `staying_bytes` on the device, its small storages. An older profile has neither of these, nor the seconds of I and W.
    No R runs a layer that `is_kept`: what it saves stays from F to B.
    """

    numbers: tuple[int, ...]
    kind: str
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    recompute_last_seconds: float
    selective_seconds: float
    saved_bytes: int
    inner_bytes: int
    saves_input: bool
    saves_output: bool
    input_bytes: int
    output_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    largest: tuple[SavedTensor, ...] = ()
    ops: tuple[OpProfile, ...] = ()
    input_gradient_seconds: float | None = None
    weight_gradient_seconds: float | None = None
    deferred_bytes: int | None = None
    staying_bytes: int = 0
    is_kept: bool = False


@dataclass(frozen=True)
class Link:
    """A connection of two stages: a message of n bytes takes `latency_seconds` + n / `bytes_per_second`, measured both ways at once."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Links:
    """The link behind each stage but the last. A message takes `contention` times as long while both its ranks copy to their hosts' memory
    and back."""

    edges: tuple[Link, ...]
    contention: float


@dataclass(frozen=True)
class HostLink:
    """A device and the memory of its host: bytes per second of a copy `down` to the host, `up` from it, and of the slower of both at once.
    Beside both, a message between stages takes `contention` times as long."""

    down_bytes_per_second: float
    up_bytes_per_second: float
    both_bytes_per_second: float
    contention: float = 1.0

    def seconds(self, num_bytes: float) -> float:
        """A copy of so many bytes, one way. In a pipeline some set goes down while another comes up."""
        return num_bytes / self.both_bytes_per_second


@dataclass(frozen=True)
class Profile:
    """What was measured: `layers` under `conditions` (key -> value), or `costs` of a run whose batch was cut into
    `num_microbatches`.

    `layers` are of a microbatch of `samples` samples, `smaller` the same layers of one sample: a line through both says what others cost
    (`at`). `link` joins neighbouring stages; None: messages take no time. `edges` are those that were measured, behind stages 0, 1 ...
    `host` is None where copies to host memory were not measured.
    """

    costs: Costs | None = None
    num_microbatches: int | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[LayerProfile, ...] = ()
    samples: int | None = None
    smaller: tuple[LayerProfile, ...] = ()
    link: Link | None = None
    edges: tuple[Link, ...] = ()
    host: HostLink | None = None
    device: str = "cpu"

    def as_json(self) -> str:
        """The text of profile.json."""
        return json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    @property
    def num_layers(self) -> int:
        """Of the model, without the loss; 0 where layers were not measured."""
        return sum(len(layer.numbers) for layer in self.layers) - any(layer.kind == LOSS for layer in self.layers)

    def layer(self, number: int) -> LayerProfile:
        return self._by_number[number]

    @functools.cached_property
    def _by_number(self) -> dict[int, LayerProfile]:
        return {number: layer for layer in self.layers for number in layer.numbers}

    def hop_seconds(self, edge: int, num_bytes: float) -> float:
        """What a message over the link behind stage `edge` takes."""
        link = self.edges[edge] if edge < len(self.edges) else self.link
        return 0.0 if link is None else link.seconds(num_bytes)

    def at(self, samples: int) -> Profile:
        """The profile of microbatches of so many samples.

        Raises:
            ValueError: it has only microbatches of another size.
        """
        if samples == self.samples or self.samples is None:
            return self
        if not self.smaller or self.samples == 1:
            raise ValueError(
                f"the profile is of microbatches of {self.samples} samples, and this has {samples}; measure again with `pipetrain profile`"
            )
        share = (samples - 1) / (self.samples - 1)
        layers = tuple(_between(one, many, share) for one, many in zip(self.smaller, self.layers, strict=True))
        return replace(self, layers=layers, samples=samples, smaller=())

    def keeping(self, entries: Sequence[str]) -> Profile:
        """The profile of a run whose `recompute.keep_layers` has these entries."""
        if not entries:
            return self
        layers, smaller = (
            tuple(one for group in of for one in _split(group, entries)) for of in (self.layers, self.smaller)
        )
        return replace(self, layers=layers, smaller=smaller)

    @property
    def keeps(self) -> bool:
        return any(layer.is_kept for layer in self.layers)

    @property
    def has_loss(self) -> bool:
        return any(layer.kind == LOSS for layer in self.layers)


def _split(group: LayerProfile, entries: Sequence[str]) -> Iterator[LayerProfile]:
    """The layers of one record that `entries` name, and the others."""
    kept = {n for n in group.numbers for text in entries if n in (layer_numbers(text) or ()) or text == group.kind}
    for is_kept, numbers in ((True, kept), (group.is_kept, {*group.numbers} - kept)):
        if numbers:
            yield replace(group, numbers=tuple(sorted(numbers)), is_kept=is_kept)


LOSS = "loss"
_OF_W, _SPLIT = (
    0.4,
    1.026,
)  # W's share of a split backward, and its time over a whole one (`pipetrain bench split`, a block)


def costs_of_layers(profile: Profile, balance: Sequence[int], selective: Sequence[Outputs] = ()) -> Costs:
    """What stages of `balance` layers cost, from layers that were measured alone. Hops are those of the profile's link; without one they
    take no time.

    A tensor that two neighbours save is held once. `set_bytes` has the outputs that `selective` keeps although no backward needs them.
    """
    stages = _stages(profile, balance, selective)
    sizes = [stage.layers[-1].output_bytes for stage in stages[:-1]]
    hops = tuple(profile.hop_seconds(edge, size) for edge, size in enumerate(sizes))
    sets, host = tuple(float(stage.set_bytes() + stage.unsaved_bytes()) for stage in stages), profile.host
    return Costs(
        forward=tuple(stage.seconds("forward_seconds") + stage.looking_seconds() for stage in stages),
        backward=tuple(stage.seconds("backward_seconds") for stage in stages),
        input_gradient=tuple(stage.half("input_gradient_seconds", _SPLIT * (1 - _OF_W)) for stage in stages),
        weight_gradient=tuple(stage.half("weight_gradient_seconds", _SPLIT * _OF_W) for stage in stages),
        recompute=tuple(stage.recompute_seconds() for stage in stages),
        hop_forward=hops,
        hop_backward=hops,
        input_bytes=tuple(float(stage.layers[0].input_bytes) for stage in stages),
        set_bytes=sets,
        kept_bytes=tuple(float(stage.kept_bytes()) for stage in stages) if selective or profile.keeps else (),
        offload=() if host is None else tuple(map(host.seconds, sets)),
        copy_contention=() if host is None else (host.contention,) * len(hops),
    )


def bytes_of_sets(profile: Profile, balance: Sequence[int]) -> list[int]:
    """Of a set that F keeps, by stage."""
    return [stage.set_bytes() for stage in _stages(profile, balance)]


def as_measured(profile: Profile, balance: Sequence[int], measured: Costs) -> Profile:
    """The profile with the seconds of each layer in proportion to what its stage took in a run of stages of `balance` layers."""
    foreseen, ends = costs_of_layers(profile, balance), list(itertools.accumulate(balance))
    layers = []
    for number in range(profile.num_layers + profile.has_loss):
        stage = next((stage for stage, end in enumerate(ends) if number < end), len(ends) - 1)
        layer, scales = profile.layer(number), {}
        for name in ("forward", "backward", "recompute"):
            before, now = getattr(foreseen, name)[stage], getattr(measured, name)[stage]
            scales[f"{name}_seconds"] = getattr(layer, f"{name}_seconds") * (now / before if before and now else 1.0)
        last = layer.recompute_last_seconds * scales["recompute_seconds"] / (layer.recompute_seconds or 1.0)
        layers.append(replace(layer, numbers=(number,), recompute_last_seconds=last, **scales))
    return replace(profile, layers=tuple(layers), smaller=())


def bytes_of_layers(profile: Profile) -> tuple[float, ...]:
    """What each layer of the model adds to the set of a stage that begins before it; the last one with the loss."""
    layers = [profile.layer(number) for number in range(profile.num_layers + profile.has_loss)]
    borders = [left.saves_output or right.saves_input for left, right in itertools.pairwise(layers)]
    ends = [*borders, layers[-1].saves_output]
    own = [layer.inner_bytes + layer.output_bytes * is_saved for layer, is_saved in zip(layers, ends)]
    if profile.has_loss:
        own[-2:] = [own[-2] + own[-1]]
    return tuple(map(float, own))


def seconds_of_layers(profile: Profile) -> tuple[float, ...]:
    """What R of each layer of the model takes; of the last one with the loss."""
    own = [profile.layer(number).recompute_seconds for number in range(profile.num_layers + profile.has_loss)]
    if profile.has_loss:
        own[-2:] = [own[-2] + own[-1]]
    return tuple(own)


_Measured = TypeVar("_Measured", LayerProfile, OpProfile, SavedTensor)


def _between(one: _Measured, many: _Measured, share: float) -> _Measured:
    """The record with its seconds and bytes on the line from `one` (share 0) to `many` (share 1), and beyond it; none below 0."""
    changed: dict[str, Any] = {}
    for name, value in vars(many).items():
        if value is not None and (name.endswith(("_seconds", "_bytes")) or name in ("seconds", "bytes")):
            start = getattr(one, name)
            found = max(0.0, start + (value - start) * share)
            changed[name] = round(found) if isinstance(value, int) else found
        elif name in ("largest", "ops") and len(value) == len(getattr(one, name)):
            changed[name] = tuple(_between(*pair, share) for pair in zip(getattr(one, name), value))
    return replace(many, **changed)


def _stages(profile: Profile, balance: Sequence[int], selective: Sequence[Outputs] = ()) -> list[_Stage]:
    starts = itertools.accumulate(balance[:-1], initial=0)
    return [_Stage(profile, range(start, start + size), selective) for start, size in zip(starts, balance)]


class _Stage:
    """The layers of one stage, and of the last one the loss."""

    def __init__(self, profile: Profile, numbers: range, selective: Sequence[Outputs]) -> None:
        if profile.has_loss and numbers.stop == profile.num_layers:
            numbers = range(numbers.start, numbers.stop + 1)
        self.layers = [profile.layer(number) for number in numbers]
        self._is_selective = bool(selective)
        self._kept = [
            [
                op
                for op in profile.layer(number).ops
                if any(op.is_among(one) for one in selective if one.means_layer(number))
            ]
            if not profile.layer(number).is_kept
            else []
            for number in numbers
        ]

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
        spared = self.kept("seconds") - sum(op.tail_seconds for op in self._kept[-1])
        return max(0.0, whole + self.looking_seconds() - spared)

    def looking_seconds(self) -> float:
        return max(0.0, self.seconds("selective_seconds")) if self._is_selective else 0.0

    def kept(self, name: str) -> float:
        total: float = sum(getattr(op, name) for ops in self._kept for op in ops)
        return total

    def kept_bytes(self) -> float:
        inside, beside = self._bytes_of_kept_layers()
        return self.kept("output_bytes") - sum(op.tail_bytes for op in self._kept[-1]) + inside + beside

    def unsaved_bytes(self) -> float:
        """Kept bytes that are in no set."""
        saved = sum(op.border_bytes for ops, shares in zip(self._kept, self._borders()) if shares for op in ops)
        unsaved = self.kept("unsaved_bytes") - saved - sum(op.tail_bytes for op in self._kept[-1])
        return unsaved + self._bytes_of_kept_layers()[1]

    def _bytes_of_kept_layers(self) -> tuple[int, int]:
        """What kept layers hold of a set from F to B; and beside it: the inputs that they saved, if R computes these again, and the copy of the
        last output with which R goes on."""
        inside = beside = 0
        for left, right in zip(self.layers, [*self.layers[1:], None]):
            next_is_kept = right is not None and right.is_kept
            is_saved = (left.is_kept and left.saves_output) or (
                right is not None and next_is_kept and right.saves_input
            )
            if left.is_kept:
                inside += left.inner_bytes + left.output_bytes * is_saved
                beside += left.output_bytes * (not next_is_kept)
            else:
                beside += left.output_bytes * is_saved
        return inside, beside

    def _borders(self) -> list[bool]:
        """Whether what leaves a layer for the next one is saved."""
        return [left.saves_output or right.saves_input for left, right in zip(self.layers, self.layers[1:])]

    def set_bytes(self) -> int:
        """With the stage's input, saved or not: it is held for R in any case."""
        shared = sum(layer.output_bytes for layer, is_saved in zip(self.layers, self._borders()) if is_saved)
        first, last = self.layers[0], self.layers[-1]
        ends = first.input_bytes + (last.output_bytes if last.saves_output else 0)
        return sum(layer.inner_bytes for layer in self.layers) + shared + ends


# The file --------------------------------------------------------------------------------------------------------------


def read_profile(given: str) -> Profile:
    """The profile that `plan.profile` names: a run folder, `latest`, or the file itself.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = _LATEST if given == "latest" else Path(given)
    path = folder if folder.is_file() else folder / PROFILE
    if not path.is_file():
        raise ValueError(
            f"plan.profile={given}: {path} is not there; a run of engine=native writes it at its end: name such a run, "
            "or leave plan.profile out"
        )
    todo = "name another run"
    try:
        found = read_object(path, todo)
        return _profile(found)
    except DamagedFile as error:
        raise ValueError(f"plan.profile={given}: {error}") from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"plan.profile={given}: {DamagedFile(path, error, todo)}") from error


def _profile(found: dict[str, Any]) -> Profile:
    if found["format_version"] not in _READ:
        raise ValueError(f"format_version {found['format_version']}, known is {_FORMAT_VERSION}")
    layers = fitted(tuple[LayerProfile, ...], found.get("layers", []), "layers")
    if found["costs"] is None:
        if not layers:
            raise ValueError("it has neither costs nor layers")
        conditions = fitted(dict[str, Any], found["conditions"], "conditions")
        more: dict[str, Any] = {
            "samples": int | None,
            "smaller": tuple[LayerProfile, ...],
            "link": Link | None,
            "edges": tuple[Link, ...],
            "host": HostLink | None,
            "device": str,
        }
        told = {name: fitted(kind, found[name], name) for name, kind in more.items() if name in found}
        return Profile(conditions={current_key(key): value for key, value in conditions.items()}, layers=layers, **told)
    names = {field.name for field in fields(Costs)}
    costs = {name: times for name, times in fitted(dict[str, Any], found["costs"], "costs").items() if name in names}
    made = fitted(Costs, costs)
    for one in fields(Costs):
        num, wanted = len(getattr(made, one.name)), made.num_stages - one.name.startswith(("hop_", "copy_contention"))
        if num != wanted and (num or one.default != ()):
            raise ValueError(f"{one.name} has {num} entries, for {made.num_stages} stages")
    return Profile(made, fitted(int, found["num_microbatches"], "num_microbatches"))


def check_profile(given: str, profile: Profile, num_stages: int, num_microbatches: int) -> None:
    """Raises:
    ValueError: what the run's ops took says nothing of other stages, or of other microbatches.
    """
    if profile.costs is None:
        return
    for key, there, wanted in (
        ("pipeline.num_stages", profile.costs.num_stages, num_stages),
        ("pipeline.num_microbatches", profile.num_microbatches, num_microbatches),
    ):
        if there != wanted:
            raise ValueError(
                f"plan.profile={given}: a run with {key}={there}, and this has {wanted}; set {key}={there}, or name another run"
            )


def check_conditions(given: str, profile: Profile, conditions: Mapping[str, Any]) -> None:
    """Raises:
    ValueError: layers were measured with something else than `conditions`; names the first that differs.
    """
    for key, wanted in json.loads(json.dumps(dict(conditions))).items():  # as a file has them: lists, no tuples
        there = profile.conditions.get(key)
        if profile.layers and there != wanted:
            raise ValueError(
                f"plan.profile={given}: measured with {key}={there}, and this has {wanted}; measure again with `pipetrain profile`, or "
                "leave plan.profile out"
            )
