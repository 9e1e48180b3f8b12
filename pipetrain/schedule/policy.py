"""What to recompute and when: the user's keys, which the passes turn into ops."""

from __future__ import annotations

import difflib
import enum
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

_T = TypeVar("_T", bound=enum.StrEnum)
_V = TypeVar("_V", float, int, int | None)

PerStage = int | tuple[int, ...]  # a number for all stages, or one for each
CutStage = Callable[[int, int], Sequence[int]]  # a stage and in how many parts it is cut -> the layers of each part
Sets = float | tuple[float, ...]  # a number of sets for all stages, or one for each; with segments it may be a fraction


class Mode(enum.StrEnum):
    """When R runs. Losses and gradients are identical in all four modes; time and memory are not."""

    NEVER = "never"  # R does not run: all sets are kept
    INLINE = "inline"  # on the compute lane, just before its B, when the gradient for B has arrived
    EARLY = "early"  # on the compute lane, maybe before the gradient for B has arrived
    OVERLAP = "overlap"  # on a lane of its own


class Keep(enum.StrEnum):
    """Whether sets may stay from F to B in free slots. Ignored if the order says what is kept (`auto`, a file with R)."""

    NONE = "none"  # none, but for those whose B comes right after their F
    AUTO = "auto"  # where that is faster and a slot is free


class Offload(enum.StrEnum):
    """Whether sets are copied to host memory after F and back before B. Copies run beside the ops that compute."""

    NONE = "none"
    AUTO = "auto"  # each set is kept, recomputed or offloaded, whichever is faster
    ALWAYS = "always"  # each set but those whose B comes right after their F


class LastStage(enum.StrEnum):
    """Whether the last stage recomputes too. Its B can run right after its F, because its gradient is there."""

    AUTO = "auto"  # F0 B0 F1 B1 ...: no R, one set held
    ALWAYS = "always"  # R too, as in other libraries


SQRT, LAYERS = "sqrt", "layers"  # values of recompute.segments; a number is another

# An entry of recompute.selective: layers (2, 0-3, 2.attention, 0-3.mlp), an operation, or both with a colon between them.
_LAYERS = r"(?P<first>\d+)(?:-(?P<last>\d+))?(?:\.(?P<path>[\w.]+))?"
_OP = r"[A-Za-z_]\w*(?:(?:::|\.)\w+)*"
_OUTPUTS = re.compile(rf"{_LAYERS}(?::(?P<there>{_OP}))?|(?P<op>{_OP})")


@dataclass(frozen=True)
class Outputs:
    """Outputs that stay from F to B. `op` names the operation: `matmul`, `attention`, or a name of torch (None: `matmul` and `attention`).
    Only the model's layers `first` to `last` count (None: all), and in them the submodule `path` ("": all of the layer)."""

    op: str | None = None
    first: int | None = None
    last: int | None = None
    path: str = ""

    @staticmethod
    def parse(text: object) -> Outputs:
        """Raises:
        ValueError: `text` is no entry of `recompute.selective`.
        """
        found = _OUTPUTS.fullmatch(str(text))
        first, last = (int(number) if number else None for number in found.group("first", "last")) if found else (0, 0)
        if not found or (first is not None and last is not None and last < first):
            raise ValueError(
                f"recompute.selective={text}: allowed are matmul, attention, an operation's name (mm), layers (3, 0-5, 3.mlp), and both "
                "together (0-5:attention), or a list of these"
            )
        return Outputs(found["op"] or found["there"], first, first if last is None else last, found["path"] or "")

    def means_layer(self, number: int) -> bool:
        return self.first is None or self.last is None or self.first <= number <= self.last

    def __str__(self) -> str:
        if self.first is None:
            return self.op or ""
        layers = str(self.first) if self.last == self.first else f"{self.first}-{self.last}"
        return layers + (f".{self.path}" if self.path else "") + (f":{self.op}" if self.op else "")


FIRST, EVERY, OFF = "first", "every", "off"  # values of recompute.verify; a number is another


@dataclass(frozen=True)
class RecomputePolicy:
    """What is recomputed, and how much a stage may hold at once.

    `sets` is the number of sets for which a stage has slots: one number, or a list with one per stage. Without segments a set
    takes one slot: a kept set from its F to the end of its backward, a recomputed one from its R. An R waits until a slot is
    free. `keep` says whether sets stay in free slots, if the order does not say it. Default: `none` if no stage has slots for
    more than one set, else `auto`. `stash` limits the microbatches between F and the end of their backward; None: any number.

    `selective`: outputs that stay from F to B, so that R does not compute them; entries as `Outputs.parse` reads them.

    `keep_layers`: layers that are not recomputed, by number (3, "2-5") or by the name of their class: their saved tensors stay from F to B.
    A layer is kept likewise if it is found not to be a function of its input, its parameters, its buffers and its seed.

    `segments` is the number of parts in which a stage is recomputed, from the last to the first: a number, `sqrt` (of the stage's number of
    layers) or `layers` (each layer is a part). Only the inputs of the parts stay between F and B. A slot then holds one part of a set: `sets` may
    be a multiple of 1 / segments; a kept set takes one slot per part. With less than one set the last stage recomputes as well. `sets=None` is
    one slot. `parts` are the numbers of layers in the parts of each stage; `shares`, if known, the parts' fractions of its work
    (`of_layers`). With `mode=never` only replicas use parts: they sum the gradients of a part as soon as these are complete.

    `offload`: whether sets may go to host memory, where a stage has at most `host_sets` of them at once (None: any number).
    Such a set takes a slot from its F to the end of its OFFLOAD, and again from the start of its RELOAD. Each part of a set has
    copies of its own. `sets` is then 1 or more. `host_bytes` limits the host memory of a rank. None: the ranks of a machine
    share a third of what is free at the start. A step that needs more ends with an error.

    `verify`: on which microbatches R is compared with F: `first` (of each kind of step), `every`, `off`, or a number N (one
    microbatch every N steps, in turn). `verify` and `host_bytes` change no op: policies that differ in these alone are equal.

    Raises:
        ValueError: a value that its key may not have; the message names the key, the value and what is allowed.
    """

    mode: Mode = Mode.OVERLAP
    sets: Sets | None = None
    keep: Keep | None = None
    stash: PerStage | None = None
    last_stage: LastStage = LastStage.AUTO
    selective: tuple[Outputs, ...] = ()
    keep_layers: tuple[str, ...] = ()
    segments: int | str = 1
    parts: tuple[tuple[int, ...], ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()
    offload: Offload = Offload.NONE
    host_sets: PerStage | None = None
    host_bytes: int | None = field(default=None, compare=False, repr=False)
    verify: str | int = field(default=FIRST, compare=False, repr=False)

    def __post_init__(self) -> None:
        segments = _word_or_number(
            "recompute.segments", self.segments, (SQRT, LAYERS), f"1 or more parts, {SQRT} or {LAYERS}"
        )
        checked = {
            "mode": _choice("recompute.mode", self.mode, Mode),
            "segments": segments,
            "sets": _sets(self.sets, in_parts=segments != 1),
            "keep": None if self.keep is None else _keep(self.keep),
            "stash": None if self.stash is None else _per_stage("recompute.stash", self.stash, _WHOLE, _is_whole),
            "last_stage": _choice("recompute.last_stage", self.last_stage, LastStage),
            "offload": _choice("recompute.offload", self.offload, Offload),
            "host_bytes": None
            if self.host_bytes is None
            else _word_or_number("recompute.host_bytes", self.host_bytes, (), "a number of bytes, 1 or more"),
            "selective": tuple(
                one if isinstance(one, Outputs) else Outputs.parse(one) for one in _entries(self.selective)
            ),
            "keep_layers": tuple(map(_kept_layer, _entries(self.keep_layers))),
            "verify": _word_or_number(
                "recompute.verify",
                self.verify,
                (FIRST, EVERY, OFF),
                f"{FIRST}, {EVERY}, {OFF}, or a number N: one microbatch is proved every N steps",
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.offloads and self.mode is Mode.NEVER:
            raise ValueError(
                f"recompute.offload={self.offload}: recompute.mode=never keeps every set, and slots do not limit it; use recompute.offload=none, "
                "or leave mode=never out"
            )
        least = min(self.sets) if isinstance(self.sets, tuple) else self.sets
        if self.offloads and self.in_parts and (least is None or least < 1):
            raise ValueError(
                f"recompute.offload={self.offload}: F fills all parts of a set before they are copied, and recompute.segments={self.segments} "
                f"has slots for {'one part' if least is None else f'{least:g} sets'}; set recompute.sets to 1 or more, or use "
                "recompute.offload=none"
            )

    @staticmethod
    def of(value: str | RecomputePolicy) -> RecomputePolicy:
        """A policy from a mode's name, or the policy itself."""
        return value if isinstance(value, RecomputePolicy) else RecomputePolicy(mode=_choice("recompute", value, Mode))

    @property
    def keeps(self) -> bool:
        """Whether sets are kept where a slot is free, if the order does not say itself what is kept."""
        return self.most_sets > 1 if self.keep is None else self.keep is Keep.AUTO

    @property
    def offloads(self) -> bool:
        """Whether sets may go to host memory."""
        return self.offload is not Offload.NONE

    @property
    def most_sets(self) -> float:
        """The largest number of sets of any stage."""
        if self.sets is None:
            return 1
        return max(self.sets) if isinstance(self.sets, tuple) else self.sets

    @property
    def in_parts(self) -> bool:
        """Whether stages have parts."""
        return self.segments != 1

    def for_replicas(self, num_replicas: int) -> RecomputePolicy:
        """The policy for `num_replicas` replicas. With one replica, a stage that is not recomputed needs no parts."""
        if num_replicas > 1 or self.mode is not Mode.NEVER or not self.in_parts:
            return self
        return replace(self, segments=1, sets=None, parts=(), shares=())

    def of_layers(
        self, balance: Sequence[int], cut: CutStage | None = None, work: Sequence[float] | None = None
    ) -> RecomputePolicy:
        """The policy for stages of `balance` layers. It keeps its parts if they fit these stages. Otherwise `cut` gives the parts;
        without `cut` they have equal numbers of layers. `work` is a number per layer: the parts of a stage share its time in
        proportion to it. Without `work` they share the time by their numbers of layers.

        Raises:
            ValueError: a stage has fewer layers than `segments`, or `sets` is no multiple of 1 / segments.
        """
        if not self.in_parts or [sum(parts) for parts in self.parts] == list(balance):
            return self
        segments = [self._segments_of(stage, layers) for stage, layers in enumerate(balance)]
        parts = tuple(
            tuple(cut(stage, count)) if cut is not None else _cut(layers, count)
            for stage, (layers, count) in enumerate(zip(balance, segments))
        )
        known = replace(self, parts=parts, shares=() if work is None else _shares(parts, work))
        known.check_stages(len(balance))
        return known

    @property
    def least_layers(self) -> int:
        """Layers that each stage needs: one per segment."""
        return self.segments if isinstance(self.segments, int) else 1

    def _segments_of(self, stage: int, layers: int) -> int:
        if self.segments == LAYERS:
            return layers
        if self.segments == SQRT:
            return max(1, round(math.sqrt(layers)))
        assert isinstance(self.segments, int)
        if self.segments > layers:
            raise ValueError(
                f"recompute.segments={self.segments}: stage {stage} has {layers} layers, and each part needs one; use "
                f"recompute.segments={layers} or less, or `layers`"
            )
        return self.segments

    def num_parts(self, stage: int) -> int:
        """In how many parts `stage` is recomputed, or runs its backward.

        Raises:
            ValueError: that depends on the layers of the stage, which are not known.
        """
        if not self.in_parts:
            return 1
        if self.parts:
            return len(self.parts[stage])
        if isinstance(self.segments, str):
            raise ValueError(
                f"recompute.segments={self.segments}: how many parts that makes depends on the layers of each stage, which are not "
                "known here; give a number, as in recompute.segments=4"
            )
        return self.segments

    def share_of(self, stage: int, part: int | None) -> float:
        """The fraction of the stage's work that `part` has; if work is unknown, of its layers. None: the whole stage, 1."""
        if part is None:
            return 1.0
        if self.shares:
            return self.shares[stage][part]
        return self.parts[stage][part] / sum(self.parts[stage]) if self.parts else 1 / self.num_parts(stage)

    def places_of(self, stage: int) -> int | None:
        """Activation slots of `stage`, each for a set or, with segments, for a part of one; None: any number."""
        if self.mode is Mode.NEVER:
            return None
        if self.sets is None:
            return 1
        return round(_of_stage(self.sets, stage) * self.num_parts(stage))

    def keeps_at_once(self, stage: int) -> bool:
        """Whether `stage` keeps a set that its B reads right after F: to recompute it would free no memory for another op."""
        places = self.places_of(stage)
        return self.last_stage is LastStage.AUTO and (places is None or places >= self.num_parts(stage))

    def stash_of(self, stage: int) -> int | None:
        """Microbatches that `stage` may hold between F and the end of their backward; None: any number."""
        return _of_stage(self.stash, stage)

    def host_sets_of(self, stage: int) -> int | None:
        """Sets of `stage` that may be in host memory at once; None: any number."""
        return _of_stage(self.host_sets, stage)

    def check_layers(self, num_layers: int) -> None:
        """Raises:
        ValueError: `selective` or `keep_layers` names a layer that a model of `num_layers` layers does not have.
        """
        ends = [("keep_layers", text, named.stop) for text in self.keep_layers if (named := layer_numbers(text))]
        ends += [("selective", str(one), one.last + 1) for one in self.selective if one.last is not None]
        for key, entry, end in ends:
            if end > num_layers:
                raise ValueError(
                    f"recompute.{key}={entry}: the model has the layers 0 to {num_layers - 1}; name some of these"
                )

    def check_stages(self, num_stages: int) -> None:
        """Raises:
        ValueError: a list does not have one number for each of `num_stages` stages.
        """
        for key, value in (("sets", self.sets), ("stash", self.stash)):
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ValueError(
                    f"recompute.{key}={list(value)} has {len(value)} numbers for {num_stages} stages; give one number, or "
                    f"{num_stages} (one per stage)"
                )
        if self.parts and len(self.parts) != num_stages:
            raise ValueError(f"the policy has the parts of {len(self.parts)} stages, and there are {num_stages}")
        if not self.in_parts or self.mode is Mode.NEVER or self.sets is None:
            return
        for stage in range(num_stages):
            parts, wanted = self.num_parts(stage), _of_stage(self.sets, stage)
            places = wanted * parts
            if round(places) < 1 or abs(places - round(places)) > _NEAR:
                below, above = math.floor(places) / parts, math.ceil(places) / parts
                allowed = f"{below:.4g} or {above:.4g}" if below else f"{above:.4g}"
                raise ValueError(
                    f"recompute.sets={wanted:g}: stage {stage} has {parts} parts (recompute.segments={self.segments}), and a slot is "
                    f"for one of them, so allowed are multiples of 1/{parts}; use {allowed}"
                )


def _of_stage(value: _V | tuple[_V, ...], stage: int) -> _V:
    """The entry of `stage` in a list with one per stage, or the one value for all."""
    return value[stage] if isinstance(value, tuple) else value


_NEAR = 0.005  # a multiple of 1/3 may be written 0.333


def _word_or_number(key: str, value: Any, words: Sequence[str], allowed: str) -> Any:
    """One of `words`, or a number, 1 or more; a command line gives a number as text."""
    if value in words:
        return value
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{key}={value!r}: allowed are {allowed}")
    return int(value)


_WHOLE = "a whole number, 1 or more"


def _is_whole(number: float) -> bool:
    return isinstance(number, int) and number >= 1


def _sets(value: Any, *, in_parts: bool) -> Any:
    if value is None:
        return None if in_parts else 1
    if in_parts:
        allowed = "a number above 0, a multiple of 1 / recompute.segments"
        return _per_stage("recompute.sets", value, allowed, lambda number: 0 < number < math.inf)
    return _per_stage("recompute.sets", value, f"{_WHOLE} (B needs a slot for its set)", _is_whole)


def _per_stage(key: str, value: Any, allowed: str, fits: Callable[[float], bool]) -> Any:
    """A number, or a tuple of them, one per stage; a configuration gives whole ones as floats."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    given = tuple(value) if is_list else (value,)
    numbers = tuple(int(one) if isinstance(one, float) and one.is_integer() else one for one in given)
    known = all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)
    if not numbers or not known or not all(map(fits, numbers)):
        shown = list(numbers) if is_list else value
        raise ValueError(f"{key}={shown!r}: allowed is {allowed}, or a list with one per stage")
    return numbers if is_list else numbers[0]


def _cut(layers: int, parts: int) -> tuple[int, ...]:
    """Equal numbers of layers, the remainder to the last parts."""
    share, rest = divmod(layers, parts)
    return tuple(share + (part >= parts - rest) for part in range(parts))


def _shares(parts: Sequence[Sequence[int]], work: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Each part's share of the work of its stage; if the stage has no work, of its layers."""
    found, start = [], 0
    for sizes in parts:
        ends = list(itertools.accumulate(sizes, initial=start))
        own = [sum(work[first:last]) for first, last in itertools.pairwise(ends)]
        total, start = sum(own), ends[-1]
        found.append(tuple(one / total for one in own) if total else tuple(size / sum(sizes) for size in sizes))
    return tuple(found)


def _entries(value: Any) -> Sequence[Any]:
    """The entries of a list, or the one value; None: no entries."""
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _kept_layer(entry: object) -> str:
    text = str(entry)
    if layer_numbers(text) is None and not text.isidentifier():
        raise ValueError(
            f"recompute.keep_layers={text}: allowed are numbers of layers (3, 2-5), the name of their class (MyLayer), or a list of these"
        )
    return text


def layer_numbers(text: str) -> range | None:
    """The numbers of layers that an entry of `keep_layers` names; None where it names a kind of layer."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"recompute.keep_layers={text}: use {last}-{first}")
    return range(first, last + 1)


def _keep(value: object) -> Keep:
    if isinstance(value, int):
        raise ValueError(
            f"recompute.keep={value}: allowed are none and auto; how many sets a stage may hold is recompute.sets, and "
            f"to keep {value} beside a recomputed one, set recompute.sets={value + 1}"
        )
    return _choice("recompute.keep", str(value), Keep)


def _choice(key: str, value: str, choices: type[_T]) -> _T:
    try:
        return choices(value)
    except ValueError:
        raise not_a_choice(key, value, list(choices)) from None


def not_a_choice(key: str, value: object, choices: Sequence[str], more: str = "") -> ValueError:
    """The error for a value that is none of `choices`: what is allowed, with `more` behind it, and the nearest."""
    (nearest,) = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
    return ValueError(f"{key}={value!r}: allowed are {', '.join(choices)}{more}; did you mean {str(nearest)!r}?")
