"""What a step holds, on the layers of a small GPT: recomputation must be worth it, and the meter must be right."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from one_rank import CPU, make_stages, run_step
from parity_cases import mean_square
from ranks import run_ranks
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import transformer_layers
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.op import Kind, Op
from pipetrain.stage.meter import ActivationMeter, SetSize
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.seeding import layer_seeds
from pipetrain.stage.stage import Stage

QUICKSTART = ModelConfig(num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
SEQUENCE = 128
BATCH = 16
BOUNDARY_BYTES = BATCH // 8 * SEQUENCE * QUICKSTART.hidden_size * 4  # one tensor between stages


def tokens(batch: int) -> Tensor:
    return torch.randint(256, (batch, SEQUENCE), generator=torch.Generator().manual_seed(0))


class Flow:
    """The activations between stages of one rank: those it has begun to send, and those it has asked for."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._coming: set[Op] = set()
        self._monitor = pipeline._group.monitor
        transport = self._transport = pipeline._runner.transport
        post, take = transport.post, transport.take

        def noted_post(op: Op) -> None:
            if op.kind is Kind.RECV_F:
                self._coming.add(op)
            post(op)

        def noted_take(op: Op) -> Any:
            self._coming.discard(op)
            return take(op)

        transport.post, transport.take = noted_post, noted_take  # type: ignore[method-assign]

    def settle(self, op: Op, step: int) -> None:  # noqa: ARG002
        """Ahead of each F, R and B: wait until they have left and come. So a peak does not depend on how fast messages are."""
        if op.kind.computes:
            self._monitor.wait(self._has_settled, lambda: f"activations do not keep up with {op}")

    def _has_settled(self) -> bool:
        arrived, unsent = self._transport._arrived, set(self._transport._unsent)
        return all(op in arrived for op in self._coming) and not any(op.kind is Kind.SEND_F for op in unsent)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def peaks(mode: str) -> tuple[int, int]:
    """This rank's peak, and what it says `never` would have held."""
    layers = transformer_layers(QUICKSTART, 256)
    with Pipeline(layers, cross_entropy, num_microbatches=8, recompute=mode, balance=[2, 2, 2]) as pipeline:
        flow = Flow(pipeline)
        pipeline.before_ops(flow.settle)
        ids = tokens(BATCH)
        for _ in range(2):
            pipeline.step(ids, ids)
            pipeline.zero_grad()
        report = pipeline.report
        assert pipeline._parts.meter.current_bytes == 0
        return report.peak_activation_bytes, report.peak_activation_bytes_never


def peaks_of_modes() -> list[tuple[int, int]]:
    return [peaks(mode) for mode in ("never", "inline", "overlap")]


def test_recomputation_frees_memory() -> None:
    """As much as it says that it does: sets and stashes. What is on its way is more: an output, or the inputs that come early."""
    on_its_way = (BOUNDARY_BYTES, BOUNDARY_BYTES, 2 * BOUNDARY_BYTES)
    # The first stage keeps token ids, the middle one its inputs, and the last one holds one set in every mode.
    for (never, *modes), most, more in zip(run_ranks(3, peaks_of_modes), (0.15, 0.35, 1.01), on_its_way):
        assert all(held <= most * never[0] for held, _ in modes)
        assert [never[0] - estimated for _, estimated in modes] == [more] * 2
        (inline, _), (overlap, _) = modes
        assert overlap <= 1.05 * inline


# The meter against a count of its own ---------------------------------------------------------------------------------


def bytes_alive(known: set[int], roots: Iterable[GradientEdge] = ()) -> int:
    """Bytes of the storages that any Python tensor holds now, or a node below `roots`, and that were not `known` before."""
    return sum(size for key, size in storages(*saved_below(roots)).items() if key not in known)


def storages(*besides: Tensor) -> dict[int, int]:
    gc.collect()
    return {
        thing.untyped_storage()._cdata: thing.untyped_storage().nbytes()
        for thing in (*gc.get_objects(), *besides)
        if issubclass(type(thing), Tensor)
        and thing.layout is torch.strided  # sparse ones of other tests have no storage
    }


def saved_below(roots: Iterable[GradientEdge]) -> list[Tensor]:
    """The tensors that nodes of a graph without hooks hold, of which Python knows nothing."""
    todo, walked, found = [root.node for root in roots], set[Any](), list[Any]()
    while todo:
        node = todo.pop()
        if node not in walked:
            walked.add(node)
            todo += [following for following, _ in node.next_functions if following is not None]
            found += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [thing for thing in found if isinstance(thing, Tensor)]


def given(microbatch: int, ids: Tensor) -> StageInput:
    leaves, spec = pytree.tree_flatten(ids)
    return StageInput(tuple(leaves), spec, frozenset(), lambda layers: layer_seeds(0, 0, microbatch, layers), ids, 0.25)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_the_meter_agrees_with_the_live_storages(keep: bool) -> None:
    """After F of four microbatches and R of one: what the meter counts is what is alive, within 2 %."""
    torch.manual_seed(0)
    layers = [make() for make in transformer_layers(QUICKSTART, 256)]
    meter = ActivationMeter()
    meter.exclude([value for layer in layers for value in (*layer.parameters(), *layer.buffers())])
    stage = Stage(0, layers, first_layer=0, device=CPU, meter=meter, loss_fn=cross_entropy)
    microbatches = tokens(8).clone().chunk(4)
    stage.forward(0, given(0, microbatches[0]), keep=keep)  # what is made once and stays: tables of angles
    if not keep:
        stage.recompute(0)
    stage.backward(0, ())
    assert meter.current_bytes == 0
    microbatches = tuple(part.clone() for part in microbatches)
    known = set(storages()) - {part.untyped_storage()._cdata for part in microbatches}
    for number, part in enumerate(microbatches):
        stage.forward(number, given(number, part), keep=keep)
    if not keep:
        stage.recompute(0)
    graphs = (root for held in stage._held.values() for root in held.roots if root is not None)
    assert meter.current_bytes == pytest.approx(bytes_alive(known, graphs if keep else ()), rel=0.02)
    gc.collect()  # to look at a graph makes cycles
    assert meter.peak_bytes >= meter.current_bytes > 1_000_000
    for number in range(4):
        if number and not keep:
            stage.recompute(number)
        stage.backward(number, ())
    assert meter.current_bytes == 0


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.tanh()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.x


class HoldsOutside(nn.Linear):
    """What its Function holds is in no saved tensor, so that the graph of R would hold it a second time."""

    def forward(self, x: Tensor) -> Tensor:
        return _Outside.apply(super().forward(x))


@pytest.mark.filterwarnings("ignore:layer 0.*holds 65536 bytes")
@pytest.mark.parametrize("kind", [nn.Linear, HoldsOutside])
def test_all_that_r_leaves_is_its_set(kind: type[nn.Linear]) -> None:
    meter, x = ActivationMeter(), torch.randn(64, 256)
    layers = [kind(256, 256), nn.Linear(256, 256), nn.Tanh()]
    meter.exclude([weight for layer in layers for weight in layer.parameters()])
    stage = Stage(0, layers, first_layer=0, device=CPU, meter=meter)
    for number in range(3):
        stage.forward(number, given(number, x), keep=False, prove=not number)
        known, counted = set(storages()), meter.current_bytes
        stage.recompute(number)
        assert number == 0 or bytes_alive(known) == meter.current_bytes - counted > 0
        stage.backward(number, (x,))


# Memory outside of saved tensors is told of; what a layer keeps once is not -----------------------------------------


M, ROWS, WIDTH = 4, 64, 1024  # a microbatch of 16 rows: 65,536 bytes


def warnings_of(layers: Sequence[nn.Module]) -> list[str]:
    x = torch.randn(ROWS, WIDTH)
    stages = make_stages(list(layers), [len(layers)], mean_square, ActivationMeter())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            run_step(stages, x, x, M, prove=lambda microbatch, step=step: not microbatch and not step, step=step)
    return [str(warning.message) for warning in caught]


class HoldsEach(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.each: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.each.append(y.detach() * 2)
        return y


class HoldsTable(nn.Linear):
    """Makes a table at its first call and keeps it."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(WIDTH, 64).sum(1).repeat(64)
        return super().forward(x) + self.table[:WIDTH]


class _HoldsLittle(_Outside):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x[:1, :1].clone()
        return x * 2


class HoldsLittle(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _HoldsLittle.apply(super().forward(x))


def test_held_in_the_context_of_a_function() -> None:
    (message,) = warnings_of([nn.Linear(WIDTH, WIDTH), HoldsOutside(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    assert re.search(r"layer 1 \(HoldsOutside\) holds 65536 bytes per microbatch outside of its saved tensors", message)


def test_held_by_the_layer() -> None:
    (message,) = warnings_of([HoldsEach(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    assert message.startswith("layer 0 (HoldsEach) changes its attribute each in each forward: its saved tensors (")


def test_what_is_no_leak() -> None:
    assert warnings_of([HoldsTable(WIDTH, WIDTH), HoldsLittle(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) == []


# The meter by itself ------------------------------------------------------------------------------------------------


def test_a_storage_counts_once_and_weights_do_not() -> None:
    meter = ActivationMeter()
    weight = torch.zeros(100)
    meter.exclude([weight])
    assert meter.hold(weight[:5]) == 0
    base = torch.zeros(10)
    keys = [meter.hold(base), meter.hold(base[2:4]), meter.hold(base.view(2, 5).t())]
    assert meter.current_bytes == 40
    other = meter.hold(torch.zeros(3, dtype=torch.float64))
    assert (meter.current_bytes, meter.peak_bytes) == (64, 64)
    for key in [*keys[:2], other]:
        meter.release(key)
    assert meter.current_bytes == 40
    meter.start_step()
    meter.release(keys[2])
    meter.release(0)
    assert (meter.current_bytes, meter.peak_bytes) == (0, 40)


def test_what_all_sets_share_counts_once() -> None:
    """A table that a layer makes once is in every set; the third set is not looked at any more."""
    meter, size, table = ActivationMeter(), SetSize(), torch.zeros(100)
    first = size.counted(meter, [table, table[:5], torch.zeros(10)])
    del first
    sets = [size.counted(meter, [table, torch.zeros(10)]), size.counted(meter, ())]
    assert meter.current_bytes == 400 + 2 * 40
    del sets[1]
    assert meter.current_bytes == 400 + 40
    del sets[0]
    assert (meter.current_bytes, meter.peak_bytes) == (0, 480)


def test_what_is_on_its_way_is_told_apart() -> None:
    meter, sent, kept = ActivationMeter(), torch.zeros(10), torch.zeros(100)
    sends, keeps = meter.hold(sent, on_its_way=True), meter.hold(kept)
    assert (meter.current_bytes, meter.stage_bytes) == (440, 400)
    both = meter.hold(sent)  # the stage that gave it holds it, too
    assert (meter.current_bytes, meter.stage_bytes, meter.peak_stage_bytes) == (440, 440, 440)
    meter.release(sends, on_its_way=True)
    assert (meter.current_bytes, meter.stage_bytes) == (440, 440)
    meter.release(both)
    meter.release(keeps)
    assert (meter.current_bytes, meter.stage_bytes, meter.peak_bytes, meter.peak_stage_bytes) == (0, 0, 440, 440)
