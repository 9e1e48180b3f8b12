"""profile.json: what layers take and hold, measured alone by `pipetrain profile`, or what the ops of a run's stages took.

pipetrain profile   layers, and what they were measured with     -> costs of stages of any balance, by `costs_of_layers`
a run               costs of its stages, and its microbatches    -> costs of those stages
"""

from __future__ import annotations

import functools
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
LOSS = "loss"
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

    def each(self) -> list[LayerProfile]:
        """The record of each layer of the model, and of the loss if it has one."""
        return [self._by_number[number] for number in sorted(self._by_number)]

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
    def has_loss(self) -> bool:
        return any(layer.kind == LOSS for layer in self.layers)


def _split(group: LayerProfile, entries: Sequence[str]) -> Iterator[LayerProfile]:
    """The layers of one record that `entries` name, and the others."""
    kept = {n for n in group.numbers for text in entries if n in (layer_numbers(text) or ()) or text == group.kind}
    for is_kept, numbers in ((True, kept), (group.is_kept, {*group.numbers} - kept)):
        if numbers:
            yield replace(group, numbers=tuple(sorted(numbers)), is_kept=is_kept)


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
        return _profile(read_object(path, todo))
    except (ValueError, KeyError) as error:
        damaged = error if isinstance(error, DamagedFile) else DamagedFile(path, error, todo)
        raise ValueError(f"plan.profile={given}: {damaged}") from error


def _profile(found: dict[str, Any]) -> Profile:
    if found["format_version"] not in _READ:
        raise ValueError(f"format_version {found['format_version']}, known is {_FORMAT_VERSION}")
    given = {one.name: found[one.name] for one in fields(Profile) if one.name in found}
    profile: Profile = fitted(Profile, {**given, "costs": None})
    if found["costs"] is not None:
        count = fitted(int, found["num_microbatches"], "num_microbatches")
        return Profile(_costs(fitted(dict[str, Any], found["costs"], "costs")), count)
    if not profile.layers:
        raise ValueError("it has neither costs nor layers")
    return replace(profile, conditions={current_key(key): value for key, value in profile.conditions.items()})


def _costs(found: dict[str, Any]) -> Costs:
    """Of a run, maybe of an older version with costs that are gone."""
    names = {field.name for field in fields(Costs)}
    made: Costs = fitted(Costs, {name: times for name, times in found.items() if name in names})
    for one in fields(Costs):
        num, wanted = len(getattr(made, one.name)), made.num_stages - one.name.startswith(("hop_", "copy_contention"))
        if num != wanted and (num or one.default != ()):
            raise ValueError(f"{one.name} has {num} entries, for {made.num_stages} stages")
    return made


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
