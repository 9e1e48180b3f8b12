"""The families of schedules: each is a short generator, whose docstring shows its order.

A generator orders F and B, or F, I and W, of each rank. Passes add recomputation, messages and waits. To add a family, write
its generator and put it into `FAMILIES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.placement import ranks_named_in, spelling_of, stage_ranks_of
from pipetrain.schedule.policy import not_a_choice


@dataclass(frozen=True)
class Shape:
    """The input of a generator: stage s lives on rank `stage_ranks[s]`.

    `alternate_last`: the last stage, whose gradient needs no message, runs F0 B0 F1 B1 ... `warmup`: forwards in flight, for
    1f1b alone. Stages below `first_backward` need no B; passes remove a B that a generator gives them. `num_parts`: segments of
    each stage (empty: 1). The families order whole B; a CSV file may order the B of segments.
    """

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    alternate_last: bool = True
    warmup: int | Sequence[int] | None = None
    first_backward: int = 0
    num_parts: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return ranks_named_in(self.stage_ranks)

    def parts_of(self, stage: int) -> int:
        """In how many parts `stage` is recomputed."""
        return self.num_parts[stage] if self.num_parts else 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on `rank`, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)


ComputeLanes = list[list[Op]]
Generator = Callable[[Shape], ComputeLanes]


def gpipe(shape: Shape) -> ComputeLanes:
    """All forwards, then all backwards (Huang et al. 2019); the last stage alternates F and B.

    rank 0  F0 F1 F2 .  .  B0 .  B1 .  B2
    rank 1     F0 F1 F2 B0 .  B1 .  B2
    rank 2        F0 B0 F1 B1 F2 B2

    A rank with several stages runs the F of one stage after the other, then their B in reverse. So all lanes follow one order:
    F stage by stage, then B from the last stage. In this order no op waits for a later one, so any placement works.
    """
    lanes: ComputeLanes = []
    microbatches = range(shape.num_microbatches)
    for rank in range(shape.num_ranks):
        forwards, backwards = list[Op](), list[Op]()
        for stage in shape.stages_of(rank):
            if shape.alternate_last and stage == shape.num_stages - 1:
                forwards += [Op(stage, kind, i) for i in microbatches for kind in (Kind.F, Kind.B)]
            else:
                forwards += [Op(stage, Kind.F, i) for i in microbatches]
                backwards = [Op(stage, Kind.B, i) for i in microbatches] + backwards
        lanes.append(forwards + backwards)
    return lanes


def inference(shape: Shape) -> ComputeLanes:
    """Forwards only.

    rank 0  F0 F1 F2
    rank 1     F0 F1 F2
    rank 2        F0 F1 F2
    """
    return [
        [
            Op(stage, Kind.F, microbatch)
            for stage in shape.stages_of(rank)
            for microbatch in range(shape.num_microbatches)
        ]
        for rank in range(shape.num_ranks)
    ]


def one_forward_one_backward(shape: Shape) -> ComputeLanes:
    """One forward, one backward in turns after a warm-up (Narayanan et al. 2019, PipeDream-Flush of 2021).

        rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3        3 in flight
        rank 1     F0 F1 .  B0 F2 B1 F3 B2 .  B3           2 in flight
        rank 2        F0 B0 F1 B1 F2 B2 F3 B3              1 in flight

    Stage s of p has min(m, p - s) forwards in flight. `warmup` may ask for more, up to those of GPipe.
    More forwards in flight hide the time of slow hops.
    """
    _one_stage_per_rank(shape, "1f1b")
    in_flight, microbatches = in_flight_of(shape), range(shape.num_microbatches)
    lanes = []
    for stage in map(shape.stage_ranks.index, range(shape.num_ranks)):
        forwards, backwards = ([Op(stage, kind, i) for i in microbatches] for kind in (Kind.F, Kind.B))
        lanes.append(merge_in_turns(forwards, backwards, in_flight[stage]))
    return lanes


def merge_in_turns(forwards: Sequence[Op], backwards: Sequence[Op], in_flight: int) -> list[Op]:
    """`in_flight` forwards, then a backward and a forward in turns, then the backwards that are left."""
    lane = list(forwards[:in_flight])
    for number, backward in enumerate(backwards):
        lane.append(backward)
        lane += forwards[in_flight + number : in_flight + number + 1]
    return lane


def in_flight_of(shape: Shape) -> tuple[int, ...]:
    """Forwards in flight per stage: min(m, p - s) on stage s of p (the classic number), or what `warmup` asks for.

    A single number w is for stage 0. Stage s has 1 + (w - 1) (p - 1 - s) / (p - 1), rounded up, at least its classic number and
    at most m. So each edge has the same number of tensors in transfer. With w = p these are the classic numbers. With w =
    (m-1)(p-1) + 1 every stage but the last has all m in flight, as in GPipe. (An edge has as many tensors in
    transfer as its two stages' numbers differ by. With equal numbers there would be none, and the step would be longer.)

    Raises:
        ValueError: w is below 1 or above GPipe's; or in a list a stage has less than its classic number, more than in GPipe, or
            more than the stage before it. (With more, stages s and s + 1 would wait for each other.)
    """
    stages, microbatches, warmup = shape.num_stages, shape.num_microbatches, shape.warmup
    classic = tuple(min(microbatches, stages - stage) for stage in range(stages))
    if warmup is None:
        return classic
    edges = max(1, stages - 1)
    most = max(stages, (microbatches - 1) * edges + 1)
    if isinstance(warmup, int):
        if not 1 <= warmup <= most:
            raise ValueError(f"pipeline.warmup={warmup}: allowed are 1 to {most}, or a list with one number per stage")
        spread = (1 - (-(warmup - 1) * (stages - 1 - stage) // edges) for stage in range(stages))
        return tuple(min(microbatches, max(least, count)) for least, count in zip(classic, spread))
    counts = tuple(warmup)
    if len(counts) != stages:
        raise ValueError(f"pipeline.warmup={list(counts)} has {len(counts)} numbers for {stages} stages")
    for stage, (count, least) in enumerate(zip(counts, classic)):
        most = 1 if shape.alternate_last and stage == stages - 1 else microbatches
        if not least <= count <= most:
            raise ValueError(f"pipeline.warmup={list(counts)}: stage {stage} may have {least} to {most}")
        if stage > 0 and count > counts[stage - 1]:
            raise ValueError(
                f"pipeline.warmup={list(counts)}: stage {stage} may have at most as many as stage {stage - 1}"
            )
    return counts


def _one_stage_per_rank(shape: Shape, family: str) -> None:
    if shape.num_ranks != shape.num_stages:
        other = "interleaved" if spelling_of(shape.stage_ranks) == "loop" else "gpipe"
        raise ValueError(
            f"pipeline.schedule={family!r} holds one stage per rank, not {shape.num_stages} stages on {shape.num_ranks} ranks; "
            f"set pipeline.schedule={other}"
        )


def interleaved(shape: Shape) -> ComputeLanes:
    """1F1B over several stages per rank (Narayanan et al. 2021, section 2.2); here 2 ranks with 2 stages each.

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    A rank runs p forwards on its first stage, then those of the same microbatches on its next stage, and so on. It runs
    backwards likewise, from its last stage. Rank r of p with v > 1 stages runs 2 (p - r - 1) + (v - 1) p forwards before it
    alternates F and B. If p does not divide m, the order is that of the next multiple of p, without the missing microbatches.
    """
    ranks = shape.num_ranks
    if spelling_of(shape.stage_ranks) != "loop":
        raise ValueError(
            f"pipeline.placement={spelling_of(shape.stage_ranks)}: pipeline.schedule='interleaved' goes round the ranks, so it needs "
            "pipeline.placement=loop; for other placements use pipeline.schedule=gpipe"
        )
    per_rank, rest = divmod(shape.num_stages, ranks)
    if rest:
        raise ValueError(
            f"pipeline.schedule='interleaved' needs the same number of stages on each rank, {shape.num_stages} stages do "
            f"not fit {ranks} ranks; use {per_rank * ranks} or {(per_rank + 1) * ranks} stages"
        )
    lanes = []
    for rank in range(ranks):
        stages = shape.stages_of(rank)
        forwards = [Op(stage, Kind.F, microbatch) for stage, microbatch in _in_groups(stages, shape)]
        backwards = [Op(stage, Kind.B, microbatch) for stage, microbatch in _in_groups(stages[::-1], shape)]
        ahead = (ranks - rank - 1) * (2 if per_rank > 1 else 1) + (per_rank - 1) * ranks
        lane = merge_in_turns(forwards, backwards, ahead + 1)
        lanes.append([op for op in lane if (op.microbatch or 0) < shape.num_microbatches])
    return lanes


def _in_groups(stages: Sequence[int], shape: Shape) -> list[tuple[int, int]]:
    """(stage, microbatch) for groups of as many microbatches as ranks, the last group filled up."""
    size = shape.num_ranks
    starts = range(0, shape.num_microbatches, size)
    return [(stage, start + offset) for start in starts for stage in stages for offset in range(size)]


def zero_bubble_h1(shape: Shape) -> ComputeLanes:
    """1F1B that delays each W; every stage may hold as many sets as stage 0 (Qi et al. 2023, ZB-H1, section 2.1).

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1     F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Stage s of p has min(m, p - s) forwards in flight. It runs the W of microbatch i after the I of microbatch i + s. So no
    stage holds more than p sets.
    """
    _one_stage_per_rank(shape, "zb-h1")
    lanes = []
    for stage in map(shape.stage_ranks.index, range(shape.num_ranks)):
        microbatches, in_flight = range(shape.num_microbatches), shape.num_stages - stage
        order = [(Kind.F, i) for i in microbatches[:in_flight]]
        for i in microbatches:
            order.append((Kind.I, i))
            order += [(Kind.W, i - stage)] if i >= stage else []
            order += [(Kind.F, i + in_flight)] if i + in_flight in microbatches else []
        order += [(Kind.W, i) for i in microbatches[-stage:] if stage]
        lanes.append([Op(stage, kind, i) for kind, i in order])
    return lanes


def zero_bubble_v(shape: Shape) -> ComputeLanes:
    """Two stages per rank in V-shaped placement; if f = i = w, the fill is the only bubble (Qi et al. 2023, ZB-V, section 6).

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 2I3 1I2 1I3 1W2 2W3 1W3

    Rank r of p runs F of its first stage 2 (p - r) - 1 times. It alternates F of both stages r times, then runs F I W of its second
    stage p - r times. Then it alternates F I W of both stages until no F is left. The I that remain follow, some with their W. The
    last r W of each stage come at the end. If m is less than 2p, the order is that of 2p, without the missing microbatches.
    A rank holds at most 2p sets at once, each of half of its layers.
    """
    ranks = shape.num_ranks
    if shape.stage_ranks != stage_ranks_of("v", 2 * ranks, ranks):
        raise ValueError(
            f"pipeline.placement={spelling_of(shape.stage_ranks)} with {shape.num_stages} stages on {ranks} ranks: "
            "pipeline.schedule='zbv' has two stages per rank in V-shaped placement; set pipeline.stages_per_rank=2 and pipeline.placement=v"
        )
    turns = max(shape.num_microbatches, 2 * ranks) - ranks
    lanes = []
    for rank in range(ranks):
        down, up = shape.stages_of(rank)
        down_f, up_all = (down, Kind.F), [(up, kind) for kind in (Kind.F, Kind.I, Kind.W)]
        down_backward = [(down, Kind.I), (down, Kind.W)]
        phases = [
            (2 * (ranks - rank) - 1, [down_f]),
            (rank, [(up, Kind.F), down_f]),
            (ranks - rank, up_all),
            (turns, [down_f, *down_backward, *up_all]),
            (rank, [(up, Kind.I), (down, Kind.I)]),
            (ranks - rank, down_backward),
            (rank, [(up, Kind.W), (down, Kind.W)]),
        ]
        done: Counter[tuple[int, Kind]] = Counter()
        lane = []
        for times, pattern in phases:
            for stage, kind in pattern * times:
                lane.append(Op(stage, kind, done[stage, kind]))
                done[stage, kind] += 1
        lanes.append([op for op in lane if (op.microbatch or 0) < shape.num_microbatches])
    return lanes


FAMILIES: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zbv": zero_bubble_v,
    "inference": inference,
}
WITH_WARMUP = ("1f1b",)
ALWAYS_SPLIT = ("zb-h1", "zbv")  # their backwards are I and W
AUTO = "auto"  # no family: `search/` finds an order for the costs


def generator_of(family: str) -> Generator:
    """The generator of a family.

    Raises:
        ValueError: no family has this name; the message says the nearest.
    """
    if family in FAMILIES:
        return FAMILIES[family]
    raise not_a_choice("pipeline.schedule", family, [*FAMILIES, AUTO], ", a path ending in .csv or MODULE:FUNCTION")
