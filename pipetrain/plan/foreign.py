"""`pipetrain plan --for=torchtitan|megatron|deepspeed`: the best plan that another runtime can run, in its own words.

A peer has no R of its own: what it recomputes is a part of B. So its layers are those of the profile, some with a longer B and a smaller
set, under schedules that keep all sets. Op times are the profile's; only orders, cuts, recomputation and memory are the peer's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipetrain.plan.balance import balance_by_work
from pipetrain.plan.footprint import Footprint, RankMemory
from pipetrain.plan.plan import Plan
from pipetrain.plan.planner import lean_draft
from pipetrain.plan.profile import LayerProfile, Profile
from pipetrain.plan.space import PlanProblem, promising_layouts
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.schedule.bound import bound
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import ALWAYS_SPLIT
from pipetrain.schedule.make import make
from pipetrain.schedule.placement import stage_ranks_of
from pipetrain.schedule.policy import Mode, RecomputePolicy
from pipetrain.schedule.recompute import keep_all
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.simulate import simulate

Balance = tuple[int, ...]
Groups = tuple[tuple[range, ...], ...]  # per stage: layers that are recomputed together, by their numbers in the model

_NEVER = RecomputePolicy(mode=Mode.NEVER)
# Stages x microbatches of all schedules that are made: some ten seconds; and what of that the order of F and B alone takes.
_MOST_MADE, _OF_DRAFT = 60_000, 0.2


@dataclass(frozen=True)
class Option:
    """One plan of a peer: `order` is our family of that order, `name` the peer's word for it, as `cut` for the balance and `recompute` for
    the `groups`, which are recomputed in B.
    """

    order: str
    name: str
    num_replicas: int
    num_ranks: int
    num_microbatches: int
    balance: Balance
    cut: str
    recompute: str
    groups: Groups

    @property
    def plan(self) -> Plan:
        ranks = stage_ranks_of("v" if self.order == "zbv" else "loop", len(self.balance), self.num_ranks)
        return Plan(self.balance, ranks, self.num_microbatches, self.num_replicas)


@dataclass(frozen=True)
class Peer:
    """A runtime. `orders`: (our family, stages per rank, its name). `cuts` cut a profile's layers into so many stages,
    `recomputes` what it may recompute of a balance, each with its words. `lines` are to be typed, for samples,
    tokens per sample and tensor ranks.
    """

    title: str
    orders: tuple[tuple[str, int, str], ...]
    cuts: Callable[[Profile, int], Iterator[tuple[str, Balance]]]
    recomputes: Callable[[Balance], Iterator[tuple[str, Groups]]]
    lines: Callable[[Option, int, int, int], Iterator[str]]
    cannot: tuple[str, ...]
    receives_all: bool = False  # stages of torch allocate a buffer for each message of a step
    shards_gradients: bool = False  # FSDP: whole gradients of a stage from its first B to its last, then a share


@dataclass(frozen=True)
class ForeignPlan:
    """The best plan of a peer. `csv` is its order of ops, which torch's runtime reads."""

    option: Option
    step_seconds: float
    memory: tuple[RankMemory, ...]
    lines: tuple[str, ...]
    csv: str

    @property
    def peak_bytes(self) -> int:
        """The fullest rank's."""
        return max(rank.total for rank in self.memory)


def best_foreign(
    name: str, problem: PlanProblem, budget_bytes: int | None = None, *, sequence_length: int = 1, tensor: int = 1
) -> ForeignPlan:
    """The fastest plan of the peer `name` within the budget. Plans are tried by a lower bound of their steps, up to a fixed work.

    Raises:
        ValueError: no plan of the peer fits.
    """
    pricing, limit = Pricing(problem, PEERS[name]), float("inf") if budget_bytes is None else budget_bytes
    best: ForeignPlan | None = None
    smallest, work = float("inf"), 0.0
    options = sorted((pricing.least_seconds(one), number, one) for number, one in enumerate(foreign_options(pricing)))
    for seconds, _, option in options:
        if work > _MOST_MADE or (best is not None and seconds >= best.step_seconds):
            break
        size = len(option.balance) * option.num_microbatches
        if (least := pricing.least_bytes(option)) <= limit:
            held, work = pricing.memory(option, pricing.draft(option)), work + size * _OF_DRAFT
            least = max(rank.total for rank in held)
        if least <= limit:
            tried, work = pricing.plan(option, sequence_length, tensor), work + size
            least = tried.peak_bytes
            if least <= limit and (best is None or tried.step_seconds < best.step_seconds):
                best = tried
        smallest = min(smallest, least)
    if best is None:
        raise ValueError(
            f"--for={name}: no plan of {PEERS[name].title} fits plan.memory_budget_bytes={budget_bytes}: one rank needs {int(smallest)} at "
            "least; use more stages or tensor ranks, or a larger budget"
        )
    return best


def foreign_options(pricing: Pricing) -> Iterator[Option]:
    """All options; with several stages per rank, p divides m."""
    peer, profile = pricing.peer, pricing.problem.profile
    for (order, per_rank, name), layout in itertools.product(peer.orders, promising_layouts(pricing.problem)):
        replicas, ranks, count = layout
        stages = ranks * per_rank
        if stages > profile.num_layers or (per_rank > 1 and (ranks == 1 or count % ranks)):
            continue
        for balance, cut in {balance: cut for cut, balance in [*peer.cuts(profile, stages)][::-1]}.items():
            for recompute, groups in peer.recomputes(balance):
                if order not in ALWAYS_SPLIT or not any(groups):
                    yield Option(order, name, replicas, ranks, count, balance, cut, recompute, groups)


@dataclass(frozen=True)
class Pricing:
    """Times and bytes of a peer's options."""

    problem: PlanProblem
    peer: Peer

    def samples(self, option: Option) -> int:
        """Of the largest microbatch."""
        return -(-self.problem.batch // (option.num_replicas * option.num_microbatches))

    def given(self, option: Option) -> Profile:
        """The layers, in microbatches of the option's size."""
        return self.problem.profile.at(self.samples(option))

    def profile(self, option: Option) -> Profile:
        """The layers as the peer runs them: R of the groups inside B, and until then only the input of a group held."""
        profile = self.given(option)
        layers = {number: replace(profile.layer(number), numbers=(number,)) for number in range(profile.num_layers)}
        for group in itertools.chain.from_iterable(option.groups):
            for number in group:
                layers[number] = _in_backward(layers[number], keeps_input=number == group.start)
        loss = [profile.layer(profile.num_layers)] if profile.has_loss else []
        return replace(profile, layers=(*layers.values(), *loss), smaller=())

    def costs(self, option: Option) -> Costs:
        return costs_of_layers(self.profile(option), option.balance, num_replicas=option.num_replicas)

    def spec(self, option: Option) -> ScheduleSpec:
        ranks, count, replicas = option.plan.stage_ranks, option.num_microbatches, option.num_replicas
        return ScheduleSpec(option.order, ranks, count, _NEVER, costs=self.costs(option), num_replicas=replicas)

    def draft(self, option: Option) -> Schedule:
        """Its order of F and B alone: no order holds less."""
        return keep_all(lean_draft(self.spec(option)))

    def plan(self, option: Option, sequence_length: int, tensor: int) -> ForeignPlan:
        schedule = make(self.spec(option))
        seconds, memory = simulate(schedule, self.costs(option)).step_seconds, self.memory(option, schedule)
        lines = tuple(self.peer.lines(option, self.samples(option), sequence_length, tensor))
        return ForeignPlan(option, seconds, memory, lines, write_csv(schedule))

    def least_seconds(self, option: Option) -> float:
        """A lower bound of the step."""
        costs, ranks, is_split = self.costs(option), option.plan.stage_ranks, option.order in ALWAYS_SPLIT
        return bound(costs, option.num_microbatches, policy=_NEVER, placement=ranks, split_backward=is_split)

    def least_bytes(self, option: Option) -> float:
        """A lower bound of the fullest rank: weights, their state, and sets of its first stage, one fewer in flight on each later rank."""
        sets = costs_of_layers(self.profile(option), option.balance).set_bytes
        flights = (min(option.num_microbatches, option.num_ranks - rank) for rank in range(option.num_ranks))
        return max(one * own + memory.total for one, own, memory in zip(flights, sets, self._own(option)))

    def memory(self, option: Option, schedule: Schedule) -> tuple[RankMemory, ...]:
        """Per rank, with what the peer holds in its own way."""
        profile, given, count = self.profile(option), self.given(option), option.num_microbatches
        holdings = replace(self.problem.holdings, proves=False)
        held = self._own(option, Footprint(profile, option.balance, _NEVER, count, holdings).of_schedule(schedule))
        if not self.peer.receives_all:
            return tuple(held)
        received = [count * _messages(given, option, stage) for stage in range(len(option.balance))]
        messages = [sum(received[stage] for stage in option.plan.stages_of(rank)) for rank in range(option.num_ranks)]
        return tuple(replace(own, message_buffers=number) for own, number in zip(held, messages))

    def _own(self, option: Option, held: Sequence[RankMemory] = ()) -> list[RankMemory]:
        """What is `held` per rank, with weights as layers compute with them, float32 gradients, each replica's share of masters and moments, and
        what one R of a group brings back.
        """
        given, holdings, shards = self.given(option), self.problem.holdings, option.num_replicas
        low, size = holdings.has_masters or holdings.casts, 2 if holdings.has_masters else 4
        found = []
        for rank, ours in enumerate(held or [RankMemory()] * option.num_ranks):
            stages = option.plan.stages_of(rank)
            sizes = [sum(given.layer(n).parameter_bytes for n in option.plan.layers_of(s)) // size for s in stages]
            numbers, gradients = sum(sizes), 4 * sum(sizes)
            if self.peer.shards_gradients and shards > 1:
                # With one group of microbatches, the B of one stage of a rank end before those of its next begin.
                whole = max(sizes) if option.num_microbatches <= option.num_ranks else numbers
                gradients = 4 * whole + gradients // shards
            groups = [group for stage in stages for group in option.groups[stage]]
            moments = [sum(given.layer(n).inner_bytes + given.layer(n).input_bytes for n in group) for group in groups]
            own = replace(
                ours,
                weights=(2 if low else 4) * numbers,
                gradients=gradients,
                masters=4 * numbers // shards if low else 0,
                optimizer_state=8 * numbers // shards,
                backward_transients=ours.backward_transients + max(moments, default=0),
            )
            found.append(own)
        return found


def _in_backward(layer: LayerProfile, *, keeps_input: bool) -> LayerProfile:
    seconds = layer.backward_seconds + layer.recompute_seconds
    return replace(layer, backward_seconds=seconds, inner_bytes=0, saves_input=keeps_input, saves_output=False)


def _messages(profile: Profile, option: Option, stage: int) -> int:
    """Bytes of one microbatch that a stage receives: an input and a gradient."""
    numbers = option.plan.layers_of(stage)
    ends = [numbers.start] if stage else []
    ends += [numbers.stop] if numbers.stop < profile.num_layers else []
    return sum(profile.layer(number).input_bytes for number in ends)


# What peers can do: cuts, recomputation, words ---------------------------------------------------------------------------


def _any_cut(profile: Profile, stages: int) -> Iterator[tuple[str, Balance]]:
    """Stages of equal work, with and without R."""
    layers = [profile.layer(number) for number in range(profile.num_layers)]
    for share in (0.0, 1.0):
        work = [one.forward_seconds + one.backward_seconds + share * one.recompute_seconds for one in layers]
        yield "layers per stage", balance_by_work(work, stages)


def _deepspeed_cuts(profile: Profile, stages: int) -> Iterator[tuple[str, Balance]]:
    layers = [profile.layer(number) for number in range(profile.num_layers)]
    share, rest = divmod(len(layers), stages)
    yield "uniform", tuple(share + (stage < rest) for stage in range(stages))
    yield "parameters", least_difference([one.parameter_bytes for one in layers], stages)
    inner = [float(one.kind not in (layers[0].kind, layers[-1].kind)) for one in layers]
    kind = layers[len(layers) // 2].kind
    # A regular expression for names of classes, whatever their case.
    yield f"type:{kind}", least_difference(inner, stages)


def least_difference(weights: Sequence[float], stages: int) -> Balance:
    """DeepSpeed's cut: stage by stage the least difference between the largest and smallest sum so far; of equal ones the last."""
    sums = list(itertools.accumulate(weights, initial=0.0))
    count = len(weights)
    best: list[tuple[float, float, float, Balance] | None] = [(0.0, -math.inf, math.inf, ()), *[None] * count]
    for _ in range(stages):
        new: list[tuple[float, float, float, Balance] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end):
                if (before := best[start]) is not None:
                    own = sums[end] - sums[start]
                    most, least = max(before[1], own), min(before[2], own)
                    if (known := new[end]) is None or most - least <= known[0]:
                        new[end] = (most - least, most, least, (*before[3], end - start))
        best = new
    found = best[count]
    assert found is not None
    return found[3]


def layer_groups(balance: Balance, size: int, count: int = 10**9, *, decoder: bool = True) -> Groups:
    """The first `count` layers of each stage, `size` together; `decoder`: without embedding and head."""
    found, start, last = [], 0, sum(balance) - 1
    for layers in balance:
        first, end = max(start, int(decoder)), min(start + layers, last if decoder else last + 1)
        end = min(end, first + count)
        found.append(tuple(range(one, min(one + size, end)) for one in range(first, end, size)))
        start += layers
    return tuple(found)


def _titan_recomputes(balance: Balance) -> Iterator[tuple[str, Groups]]:
    yield "None", ((),) * len(balance)
    yield "FullAC.Config()", layer_groups(balance, 1)


def _titan_lines(option: Option, samples: int, sequence_length: int, tensor: int) -> Iterator[str]:
    last, parts = sum(option.balance) - 1, []
    for stage in range(len(option.balance)):
        named = [
            {0: ["tok_embeddings"], last: ["norm", "lm_head"]}.get(n, [f"layers.{n - 1}"])
            for n in option.plan.layers_of(stage)
        ]
        parts.append(list(itertools.chain.from_iterable(named)))
    yield f"training.num_tokens_per_microbatch_per_dp_rank = {samples * sequence_length}"
    yield f"parallelism.data_parallel_shard_degree = {option.num_replicas}"
    yield f"parallelism.tensor_parallel_degree = {tensor}"
    yield f"parallelism.pipeline_parallel_degree = {option.num_ranks}"
    yield f"parallelism.pipeline_parallel_schedule = {json.dumps(option.name)}"
    if option.name == _BY_CSV:
        yield "parallelism.pipeline_parallel_schedule_csv = the file that --csv writes"
    yield f"parallelism.num_pp_microbatches = {option.num_microbatches}"
    yield f"parallelism.module_fqns_per_model_part = {json.dumps(parts)}"
    yield f"activation_checkpoint = {option.recompute}"


def _megatron_recomputes(balance: Balance) -> Iterator[tuple[str, Groups]]:
    yield "", ((),) * len(balance)
    full = "--recompute-granularity full --recompute-method"
    most = max(balance)
    for count in sorted({most // 4, most // 2, 3 * most // 4} - {0, most}):
        yield f"{full} block --recompute-num-layers {count}", layer_groups(balance, 1, count)
    yield f"{full} uniform --recompute-num-layers 1", layer_groups(balance, 1)


def _megatron_lines(option: Option, samples: int, sequence_length: int, tensor: int) -> Iterator[str]:
    last, stages = sum(option.balance) - 1, []
    for stage in range(len(option.balance)):
        numbers = option.plan.layers_of(stage)
        layers = len(numbers) - (numbers.start == 0) - (numbers.stop == last + 1)
        stages.append("E" * (numbers.start == 0) + (f"t*{layers}" if layers else "") + "L" * (numbers.stop == last + 1))
    batch = samples * option.num_microbatches * option.num_replicas
    yield f"--seq-length {sequence_length} --micro-batch-size {samples} --global-batch-size {batch}"
    yield f"--tensor-model-parallel-size {tensor}" + (" --sequence-parallel" if tensor > 1 else "")
    yield f'--pipeline-model-parallel-size {option.num_ranks} --pipeline-model-parallel-layout "{"|".join(stages)}"'
    yield "--use-distributed-optimizer"
    if option.recompute:
        yield option.recompute


def _deepspeed_recomputes(balance: Balance) -> Iterator[tuple[str, Groups]]:
    yield "0", ((),) * len(balance)
    for size in (1, 2, 4):
        if size <= max(balance):
            yield str(size), layer_groups(balance, size, decoder=False)


def _deepspeed_lines(option: Option, samples: int, sequence_length: int, tensor: int) -> Iterator[str]:  # noqa: ARG001
    yield f'"train_micro_batch_size_per_gpu": {samples}, "gradient_accumulation_steps": {option.num_microbatches}, "zero_optimization": {{"stage": 1}}'
    yield (
        f'PipelineModule(layers, num_stages={option.num_ranks}, partition_method="{option.cut}", '
        f"activation_checkpoint_interval={option.recompute})"
    )


# The name that torchtitan wants with a CSV, which torch's _PipelineScheduleRuntime runs.
_BY_CSV = "PipelineScheduleMulti"
_NO_R = "an R of its own: what is recomputed is recomputed inside B, when the gradient is there"
PEERS = {
    "torchtitan": Peer(
        title="torchtitan (main of 21 August 2026, after 0.2.2)",
        orders=(
            ("1f1b", 1, "1F1B"),
            ("interleaved", 2, "Interleaved1F1B"),
            ("interleaved", 4, "Interleaved1F1B"),
            ("zb-h1", 1, _BY_CSV),
            ("zbv", 2, "ZBVZeroBubble"),
        ),
        cuts=_any_cut,
        recomputes=_titan_recomputes,
        lines=_titan_lines,
        cannot=(
            _NO_R,
            "other recomputation in one stage than in the next: activation_checkpoint is for the whole model",
        ),
        receives_all=True,
        shards_gradients=True,
    ),
    "megatron": Peer(
        title="Megatron-LM (main of 22 August 2026, core 0.20.0)",
        orders=(("1f1b", 1, "1F1B"), ("interleaved", 2, "interleaved"), ("interleaved", 4, "interleaved")),
        cuts=_any_cut,
        recomputes=_megatron_recomputes,
        lines=_megatron_lines,
        cannot=(
            _NO_R,
            "another order than 1F1B and interleaved",
            "another --recompute-num-layers in one stage than in the next",
        ),
    ),
    "deepspeed": Peer(
        title="DeepSpeed 0.19.8",
        orders=(("1f1b", 1, "1F1B"),),
        cuts=_deepspeed_cuts,
        recomputes=_deepspeed_recomputes,
        lines=_deepspeed_lines,
        cannot=(
            _NO_R,
            "another order than 1F1B, or several stages per rank",
            "a number of layers per stage: only equal numbers, equal parameters, or equal numbers of layers of a class",
            "another activation_checkpoint_interval in one stage than in the next",
            "tensor ranks of its own: the model has to bring them",
        ),
    ),
}
