"""Random models of layers with a profile, and the search of all plans of a small one. Loads no torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from pipetrain.plan.footprint import Footprint
from pipetrain.plan.profile import LOSS, LayerProfile, Link, Profile
from pipetrain.plan.space import Choice, PlanProblem, limits_of
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.policy import Mode
from pipetrain.schedule.search.list_order import ListRule, OrderProblem, Prefers, list_by

SHAPES = (1.0, 2.0, float("inf"))


def layer(number: int, seconds: float, inner: int, border: int, weights: int, kind: str = "Block") -> LayerProfile:
    return LayerProfile(
        (number,),
        kind,
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        recompute_seconds=seconds,
        recompute_last_seconds=0.9 * seconds,
        selective_seconds=0.0,
        saved_bytes=inner + border,
        inner_bytes=inner,
        saves_input=True,
        saves_output=False,
        input_bytes=border,
        output_bytes=border,
        parameter_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=2 * weights,
    )


def random_profile(chance: random.Random, num_layers: int) -> Profile:
    """Layers that differ in time by a factor of four and in bytes by one of ten, a heavy last one in half of the models, and a link."""
    border = chance.randint(20, 200)
    layers = [
        layer(number, chance.uniform(0.5, 2.0), chance.randint(200, 2000), border, chance.randint(10, 3000))
        for number in range(num_layers)
    ]
    if chance.random() < 0.5:
        layers[-1] = replace(layers[-1], forward_seconds=4.0, backward_seconds=8.0, inner_bytes=4000)
    loss = layer(num_layers, 0.1, chance.randint(10, 300), border, 0, LOSS)
    return Profile(layers=(*layers, loss), link=Link(chance.choice((0.0, 0.05)), 1e4))


def random_problem(seed: int, most_layers: int = 8, most_ranks: int = 3, most_microbatches: int = 6) -> PlanProblem:
    chance = random.Random(seed)
    ranks = min(most_ranks, chance.choice((1, 2, 2, 3, 3, 3)))
    microbatches = chance.randint(1, most_microbatches)
    profile = random_profile(chance, chance.randint(max(2, ranks), most_layers))
    held = {"pipeline.num_microbatches": microbatches, "parallel.num_replicas": 1}
    return PlanProblem(profile, microbatches, ranks, num_microbatches=microbatches, held=held)


IN_SPACE = {"pipeline.schedule": AUTO, "pipeline.split_backward": False, "recompute.segments": 1}  # of `every_plan`


def every_plan(problem: PlanProblem) -> Iterator[tuple[float, int]]:
    """Seconds and bytes of every plan of `auto` for whole stages and whole backwards: all balances, all numbers of slots per stage, and the rules
    of the list with each preference."""
    profile, stages, most = problem.profile, problem.num_ranks, problem.num_microbatches
    for cut in itertools.combinations(range(1, profile.num_layers), stages - 1):
        balance = tuple(b - a for a, b in itertools.pairwise((0, *cut, profile.num_layers)))
        costs = costs_of_layers(profile, balance)
        start = Choice(1, stages, most, AUTO, balance, Mode.NEVER, 1, (), None, None)
        for limits in {limits_of(problem, start, shape) for shape in SHAPES}:
            slots = itertools.product(*(range(1, limit + 1) for limit in limits))
            ways = [(Mode.NEVER, None), *((Mode.OVERLAP, own) for own in slots)]
            for mode, own in ways:
                choice = replace(start, mode=mode, slots=own, stash=limits)
                policy = choice.policy(problem, profile)
                held = Footprint(profile, balance, policy, most, problem.holdings)
                peak = max(rank.total for rank in held.of_limits(limits, own))
                order = OrderProblem(costs, most, policy)
                yield min(list_by(order, ListRule(limits, one)).seconds for one in Prefers), peak
