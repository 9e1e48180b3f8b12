"""What the host pays for a step beside plain torch: thread CPU time, all systems in turn in one process."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import Block
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.seeding import layer_seeds
from pipetrain.stage.stage import Stage

from ..cost.run import Nothing
from ..result import Options, Result, Table, Target

CLAIM = "a step that recomputes costs the host less than torch's checkpoint, and one that keeps little more than plain torch"
WIDTH, NUM_BLOCKS, NUM_MICROBATCHES, ROWS, SEQUENCE = 32, 6, 8, 2, 8
# In units of plain torch: 2F + B for what recomputes, F + B for what keeps.
MOST_RECOMPUTED, MOST_KEPT, MOST_KEPT_STAGE, MOST_EMPTY_STAGE = 1.45, 1.2, 1.1, 3.0
MOST_CALLS, MOST_FUNCTIONS, MOST_FILES, DEEPEST = 900, 90, 16, 12


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    steps = 5 if options.quick else 40
    settings = {"rounds": options.rounds, "steps": steps, "blocks": NUM_BLOCKS, "width": WIDTH}
    result = Result("host", CLAIM, settings=settings)
    whole = [interleaved(_steps(), steps) for _ in range(options.rounds)]
    stages = [interleaved(_stages(_blocks, (ROWS, SEQUENCE, WIDTH)), steps) for _ in range(options.rounds)]
    empty = [interleaved(_stages(lambda: nn.Sequential(Nothing()), (1,)), 8 * steps) for _ in range(options.rounds)]
    calls = calls_of_a_step()
    result.tables += [
        _table(
            f"a step of {NUM_BLOCKS} blocks of width {WIDTH}, {NUM_MICROBATCHES} microbatches, through Pipeline", whole
        ),
        _table("F, R and B of one microbatch, of the stage alone", stages),
        _table("the same of a stage that multiplies once", empty),
        _table_of_calls(calls),
    ]
    result.targets += [
        Target("recomputed, over 2F + B", _ratio(whole, "recomputed", "2F + B"), MOST_RECOMPUTED),
        Target("recomputed, over torch's checkpoint, worst round", _worst(whole, "recomputed", "checkpoint"), 1.0),
        Target("kept, over F + B", _ratio(whole, "kept", "F + B"), MOST_KEPT),
        Target("kept, over F + B, the stage alone", _ratio(stages, "kept", "F + B"), MOST_KEPT_STAGE),
        Target("recomputed, over F + B, an empty stage", _ratio(empty, "recomputed", "F + B"), MOST_EMPTY_STAGE),
        Target("calls in a step of one small stage", calls["calls"], MOST_CALLS),
        Target("functions that are called", calls["functions"], MOST_FUNCTIONS),
        Target("files that they are in", calls["files"], MOST_FILES),
        Target("how deep they call each other", calls["depth"], DEEPEST),
    ]
    result.data = {"steps": whole, "stages": stages, "empty": empty, "calls": calls}
    return result


def interleaved(systems: dict[str, Callable[[], float]], times: int) -> dict[str, float]:
    """Seconds of each system, the lower quartile of `times` turns."""
    for step in systems.values():
        for _ in range(4):  # the first microbatches of a kind are looked at
            step()
    taken: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(times):
        for name, step in systems.items():
            taken[name].append(step())
    return {name: statistics.quantiles(values, n=4)[0] for name, values in taken.items()}


def _timed(step: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        start = time.thread_time()
        step()
        return time.thread_time() - start

    return timed


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    config = ModelConfig(
        name="gpt2",
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_hidden_layers=NUM_BLOCKS,
        dropout=0.1,
        max_position_embeddings=SEQUENCE,
        intermediate_size=4 * WIDTH,
    )
    return nn.Sequential(*(Block(config) for _ in range(NUM_BLOCKS)))


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


# Steps ----------------------------------------------------------------------------------------------------------------


def _steps() -> dict[str, Callable[[], float]]:
    inputs, targets = torch.randn(2, NUM_MICROBATCHES * ROWS, SEQUENCE, WIDTH)
    microbatches = list(zip(inputs.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))

    def plain(forwards: int) -> Callable[[], None]:
        model = _blocks()

        def step() -> None:
            for x, y in microbatches:
                for _ in range(forwards - 1):
                    model(x)
                (_mean_square(model(x), y) / NUM_MICROBATCHES).backward()

        return step

    def checkpointed() -> Callable[[], None]:
        model = _blocks()

        def step() -> None:
            for x, y in microbatches:
                output = checkpoint(model, x.detach().requires_grad_(), use_reentrant=False)
                (_mean_square(output, y) / NUM_MICROBATCHES).backward()

        return step

    def ours(recompute: RecomputePolicy) -> Callable[[], object]:
        pipeline = Pipeline(_blocks(), _mean_square, num_microbatches=NUM_MICROBATCHES, recompute=recompute)
        return lambda: pipeline.step(inputs, targets)

    return {
        "2F + B": _timed(plain(2)),
        "F + B": _timed(plain(1)),
        "checkpoint": _timed(checkpointed()),
        "recomputed": _timed(ours(RecomputePolicy("inline", last_stage="always"))),
        "kept": _timed(ours(RecomputePolicy("never"))),
    }


# A stage alone --------------------------------------------------------------------------------------------------------


def _stages(make: Callable[[], nn.Sequential], shape: Sequence[int]) -> dict[str, Callable[[], float]]:
    given, gradient = torch.randn(2, *shape)

    def plain(forwards: int) -> Callable[[], None]:
        model = make()

        def run() -> None:
            for _ in range(forwards):
                output = model(given.detach().requires_grad_())
            torch.autograd.backward([output], [gradient])

        return run

    return {
        "2F + B": _timed(plain(2)),
        "F + B": _timed(plain(1)),
        "recomputed": _timed(_ours(make(), given, gradient, keep=False)),
        "kept": _timed(_ours(make(), given, gradient, keep=True)),
    }


def _ours(model: nn.Sequential, given: Tensor, gradient: Tensor, *, keep: bool) -> Callable[[], None]:
    meter = ActivationMeter()
    meter.exclude(model.parameters())
    stage = Stage(0, list(model), first_layer=0, device=given.device, meter=meter)
    spec = pytree.tree_flatten(given)[1]
    turns = 0

    def run() -> None:
        nonlocal turns
        turns += 1
        stage.forward(
            0, StageInput((given,), spec, frozenset({0}), lambda layers: layer_seeds(0, 0, turns, layers)), keep=keep
        )
        if not keep:
            stage.recompute(0)
        stage.backward(0, (gradient,))
        if turns % NUM_MICROBATCHES == 0:
            stage.end_step()

    return run


# Calls ----------------------------------------------------------------------------------------------------------------


def calls_of_a_step() -> dict[str, int]:
    """Of pipetrain's functions in a later step of one stage: `Linear(16, 16)` and `Tanh` four times, 4 microbatches, recomputed."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    policy = RecomputePolicy("overlap", last_stage="always")
    inputs, targets = torch.randn(2, 8, 16)
    found: dict[Any, int] = {}
    depth = deepest = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event in ("call", "return") and "/pipetrain/" in code.co_filename:
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)
            if event == "call":
                found[code] = found.get(code, 0) + 1

    with Pipeline(layers, _mean_square, num_microbatches=4, recompute=policy) as pipeline:
        for _ in range(4):
            pipeline.step(inputs, targets)
        sys.setprofile(note)
        pipeline.step(inputs, targets)
        sys.setprofile(None)
    return {
        "calls": sum(found.values()),
        "functions": len(found),
        "files": len({code.co_filename for code in found}),
        "depth": deepest,
    }


# Said -----------------------------------------------------------------------------------------------------------------


def _ratio(rounds: Sequence[dict[str, float]], name: str, floor: str) -> float:
    return statistics.median(one[name] / one[floor] for one in rounds)


def _worst(rounds: Sequence[dict[str, float]], name: str, floor: str) -> float:
    return max(one[name] / one[floor] for one in rounds)


def _table(title: str, rounds: Sequence[dict[str, float]]) -> Table:
    rows = []
    for name in rounds[0]:
        own = [one[name] for one in rounds]
        ratios = [f"{_ratio(rounds, name, floor):.2f}" for floor in ("2F + B", "F + B")]
        rows.append((name, f"{statistics.median(own) * 1e3:.3f}", *ratios))
    return Table(title, ("", "ms", "over 2F + B", "over F + B"), tuple(rows))


def _table_of_calls(calls: dict[str, int]) -> Table:
    title = "pipetrain's own functions in a step of one stage (4 x Linear(16, 16) and Tanh, 4 microbatches, overlap)"
    return Table(title, ("calls", "functions", "files", "deep"), (tuple(map(str, calls.values())),))
