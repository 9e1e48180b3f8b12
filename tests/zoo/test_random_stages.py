"""Stages put together at random from the zoo's blocks: equal to the plain loop, or refused with the layer's name."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from entries.entry import WIDTH, dense, square
from examples import examples
from hypothesis import assume
from hypothesis import event as count
from hypothesis import strategies as st
from layer_zoo import ENTRIES, entry_named
from torch import Tensor, nn

from pipetrain.verify.beside_loop import Batch, Subject, Verdict, Way, beside, plain

# Compiling takes seconds. What is known to differ, differs.
BLOCKS = sorted(
    entry.name
    for entry in ENTRIES
    if entry.block is not None and not entry.is_documented and not entry.lacks() and "compile" not in entry.name
)
MAY_BE_REFUSED = {entry.name for entry in ENTRIES if entry.expected is Verdict.REFUSED}
# Layers with state of their own. After a BatchNorm a running mean is zero in the first step, where nothing shows then; the witness names the layer later.
MAY_CHANGE_LATER = {entry.name for entry in ENTRIES if entry.expected is Verdict.KEPT}
PLAIN = {"linear": square, "dense": dense}
COUNTS_NOT = 1e3  # in a target: its row does not count


@dataclass(frozen=True)
class Drawn:
    """Layers by name, how they are cut and run, and the batch."""

    names: tuple[str, ...]
    frozen: frozenset[int]
    balance: tuple[int, ...]
    mode: str
    schedule: str
    last_stage: str
    sets: int
    rows: tuple[int, ...]  # of each microbatch
    zeros: frozenset[int]  # the microbatches that do not count

    @property
    def way(self) -> Way:
        policy = {"last_stage": self.last_stage, "sets": self.sets, "keep": "none"}
        return Way(self.mode, len(self.balance), schedule=self.schedule, balance=self.balance, policy=policy)

    def layers(self) -> Sequence[nn.Module]:
        made = [PLAIN[name]() if name in PLAIN else entry_named(name).block() for name in self.names]  # type: ignore[misc]
        for number in self.frozen:
            made[number].requires_grad_(False)
        return made

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (torch.randn(sum(self.rows), WIDTH, generator=generator) for _ in range(2))
        starts = [0, *itertools.accumulate(self.rows)]
        for microbatch in self.zeros:
            targets[starts[microbatch] : starts[microbatch + 1]] = COUNTS_NOT
        return inputs, targets

    @property
    def subject(self) -> Subject:
        counts = how_many_count if self.zeros else None
        return Subject(self.layers, self.batch, count_fn=counts, num_microbatches=len(self.rows), num_steps=2)


def how_many_count(target: Tensor) -> int:
    return int((target[:, 0] != COUNTS_NOT).sum())


@st.composite
def drawn_stages(draw: st.DrawFn) -> Drawn:
    middle = draw(st.lists(st.one_of(st.sampled_from(BLOCKS), st.sampled_from(sorted(PLAIN))), min_size=1, max_size=4))
    names = ("linear", *middle, "linear")
    num_stages = draw(st.integers(1, 3))
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), min_size=num_stages - 1, max_size=num_stages - 1)))
    microbatches = draw(st.integers(1, 4))
    some_rows, rest = draw(st.integers(2, 3)), draw(st.integers(0, microbatches - 1))
    zeros = (
        draw(st.frozensets(st.integers(0, microbatches - 1), max_size=microbatches - 1)) if draw(st.booleans()) else ()
    )
    return Drawn(
        names,
        # The last one trains: a loss without a gradient is refused, by another name.
        draw(st.frozensets(st.integers(0, len(names) - 2), max_size=2)),
        tuple(after - before for before, after in itertools.pairwise([0, *cuts, len(names)])),
        draw(st.sampled_from(["never", "inline", "early", "overlap"])),
        draw(st.sampled_from(["gpipe", "interleaved" if num_stages > 1 else "1f1b"])),
        draw(st.sampled_from(["auto", "always"])),
        draw(st.integers(1, 2)),
        tuple(some_rows + (number < rest) for number in range(microbatches)),  # as `tensor_split` cuts them
        frozenset(zeros),
    )


def equal_or_named(drawn: Drawn) -> None:
    try:
        expected = plain(drawn.subject)
    except Exception:
        assume(False)  # these layers do not go together
    found = beside(drawn.subject, expected, drawn.way)
    count(found.result)
    assert found.result not in (Verdict.DIFFERS, Verdict.FAILED), found
    if found.result is Verdict.REFUSED and "which it did not in its first step" in found.detail:
        assert MAY_CHANGE_LATER & set(drawn.names), found
    elif found.result is Verdict.REFUSED:
        assert MAY_BE_REFUSED & set(drawn.names), found


@pytest.fixture(autouse=True)
def little_to_look_through() -> Iterator[None]:
    """Each stage looks once through all that Python holds: what is there before is no activation of its."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@examples(40, 500, drawn_stages())
def test_random_stages(drawn: Drawn) -> None:
    equal_or_named(drawn)
