"""What it costs to run a backward in two halves, and what waits between them: a block of a transformer, on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.config.records import ModelConfig
from pipetrain.models.size import Style
from pipetrain.models.transformer import Block
from pipetrain.schedule.op import Kind
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.seeding import seed_generators
from pipetrain.stage.stage import Stage

from ..result import Options, Result, Table, Target

CLAIM = "a backward in two halves costs 5 % more than a whole one, and between them no more waits than the set was"
MOST_OF_B = 1.05
ROWS, SEQUENCE_LENGTH = 4, 256
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Halves:
    """Of one block: seconds of each B, I and W, in turns; bytes of the set, of what waits for W, and the most between the two."""

    style: str
    seconds: dict[str, tuple[float, ...]]
    set_bytes: int
    waiting_bytes: int
    peak_bytes: int

    def median(self, kind: Kind) -> float:
        return statistics.median(self.seconds[kind])

    @property
    def ratio(self) -> float:
        """(I + W) / B, the median over turns: what runs side by side meets the machine in the same state."""
        turns = zip(self.seconds[Kind.B], self.seconds[Kind.I], self.seconds[Kind.W])
        return statistics.median((i + w) / b for b, i, w in turns)


def run(options: Options) -> Result:
    config = ModelConfig(hidden_size=64 if options.quick else 512, num_attention_heads=8, dropout=0.1)
    settings = {"rounds": options.rounds, "model": asdict(config), "rows": ROWS, "sequence_length": SEQUENCE_LENGTH}
    result = Result("split", CLAIM, settings=settings)
    torch.set_num_threads(1)
    measured = [measure_halves(style, config, turns=3 if options.quick else 10 * options.rounds) for style in Style]
    result.tables.append(_table(measured, config))
    for one in measured:
        result.targets.append(Target(f"{one.style}: (I + W) / B", one.ratio, MOST_OF_B))
        result.targets.append(
            Target(f"{one.style}: most bytes in I / bytes of the set", one.peak_bytes / one.set_bytes, 1.05)
        )
    result.data = {"blocks": [asdict(one) for one in measured]}
    return result


def measure_halves(style: str, config: ModelConfig, *, turns: int) -> Halves:
    """A stage of one block in the middle of a model; B, and I and W, by turns. Seconds are those of the thread."""
    torch.manual_seed(0)
    block, meter = Block(ModelConfig(**{**asdict(config), "name": style})), ActivationMeter()
    meter.exclude(block.parameters())
    stage = Stage(0, [block], first_layer=0, device=CPU, meter=meter)
    seconds: dict[str, list[float]] = {Kind.B: [], Kind.I: [], Kind.W: []}
    set_bytes = waiting = peak = 0
    for _ in range(turns + 1):
        for split in (False, True):
            gradient = _forward(stage, config, split=split)
            set_bytes = meter.current_bytes
            meter.start_step()
            taken = _seconds(lambda: stage.backward(0, [gradient]))  # noqa: B023  # called at once
            seconds[Kind.I if split else Kind.B].append(taken)
            if split:
                waiting, peak = meter.current_bytes, meter.peak_bytes
                seconds[Kind.W].append(_seconds(lambda: stage.backward_weights(0)))
    # The first turn is the one in which everything is looked at.
    return Halves(style, {kind: tuple(all_of[1:]) for kind, all_of in seconds.items()}, set_bytes, waiting, peak)


def _forward(stage: Stage, config: ModelConfig, *, split: bool) -> Tensor:
    """F, which keeps its set; gives a gradient for its output."""
    hidden = torch.randn(ROWS, SEQUENCE_LENGTH, config.hidden_size)
    leaves, spec = pytree.tree_flatten(hidden)
    seed_generators(0, CPU)
    stage.forward(0, StageInput(tuple(leaves), spec, frozenset({0}), list), keep=True, split=split)
    return torch.randn_like(hidden)


def _seconds(call: Callable[[], object]) -> float:
    """Of this thread, so that what else the machine does counts little."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _table(measured: list[Halves], config: ModelConfig) -> Table:
    rows = []
    for one in measured:
        b, i, w = (one.median(kind) * 1e3 for kind in (Kind.B, Kind.I, Kind.W))
        sizes = (f"{number / 1e6:.1f}" for number in (one.set_bytes, one.peak_bytes, one.waiting_bytes))
        rows.append((one.style, f"{b:.2f}", f"{i:.2f}", f"{w:.2f}", f"{one.ratio:.3f}", f"{w / (i + w):.0%}", *sizes))
    title = f"one block, hidden {config.hidden_size}, {ROWS} x {SEQUENCE_LENGTH} tokens, one thread; medians of {len(measured[0].seconds[Kind.B])}, ms and MB"
    return Table(title, ("", "B", "I", "W", "(I + W) / B", "deferred", "set", "most in I", "waits for W"), tuple(rows))
