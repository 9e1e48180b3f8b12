"""A user's own layers beside the plain loop, in every mode; and which of them the pipeline does not recompute, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.config.target import load_target
from pipetrain.models.spec import ModelSpec, spec_of
from pipetrain.monitor.draw.table import Table
from pipetrain.runtime.cut import cut, num_rows
from pipetrain.schedule.policy import Mode
from pipetrain.stage.stage import LossFn
from pipetrain.verify.beside_loop import (
    NUM_MICROBATCHES,
    SEED,
    Found,
    Subject,
    Trace,
    Verdict,
    Way,
    beside,
    differences,
    forking,
    plain,
    seed_everything,
)

NUM_STEPS = 2
MOST_STAGES = 4
PATIENCE_SECONDS = 120.0  # for one way; on a machine with nothing else to do it takes less than one
START_SECONDS = 600.0  # for a process to load torch, likewise
_Made = tuple[Sequence[nn.Module], LossFn, Any, Any]  # with inputs and targets: what a user's functions gave


@dataclass(frozen=True)
class OwnLayers:
    """Where they come from: `module:function`, for the layers and, where those do not bring it, for the batch."""

    layers: str
    batch: str | None = None


@dataclass(frozen=True)
class OwnReport:
    """`names` of the layers, and what came of each way."""

    names: tuple[str, ...]
    ways: tuple[tuple[Way, Found], ...]

    @property
    def is_right(self) -> bool:
        """Whether every way gave the numbers of the plain loop."""
        return all(found.result in (Verdict.EQUAL, Verdict.KEPT) for _, found in self.ways)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        ways = [
            {"mode": way.mode, "stages": way.num_stages, "result": found.result.value, "detail": found.detail}
            for way, found in self.ways
        ]
        layers = [
            {"layer": number, "kind": kind, "result": found.result.value, "detail": found.detail}
            for number, (kind, found) in enumerate(zip(self.names, self.layers))
        ]
        return {"layers": layers, "ways": ways}

    @property
    def layers(self) -> tuple[Found, ...]:
        """What the pipeline said of each layer, in any of the ways: that it is kept, or refused; of others, nothing."""
        told = [(Verdict.KEPT, text) for _, found in self.ways for text in found.kept]
        told += [(found.result, found.detail) for _, found in self.ways if found.result is Verdict.REFUSED]
        return tuple(
            next((Found(*one) for one in told if f"layer {number} (" in one[1]), Found(Verdict.EQUAL))
            for number in range(len(self.names))
        )


def verify_own(own: OwnLayers, *, quick: bool = False) -> OwnReport:
    """Every mode over one to four stages (`quick`: `overlap` over two). Raises ValueError: there is no such function, it raises, what it gives is
    no model or no batch, or the plain loop fails itself."""
    names = _checked(own)
    modes = [Mode.OVERLAP] if quick else list(Mode)
    stages = [min(2, len(names))] if quick else range(1, min(MOST_STAGES, len(names)) + 1)
    ways = [Way(mode.value, number) for number in stages for mode in modes]
    return OwnReport(names, tuple(try_apart(functools.partial(attempt_own, own), ways)))


def try_apart(
    attempt: Callable[[Way], Found], ways: Sequence[Way], seconds: float = PATIENCE_SECONDS
) -> Iterator[tuple[Way, Found]]:
    """What `attempt` finds, way by way, in another process: after one that hangs the others are left out."""
    left = list(ways)
    while left:  # a new process takes over from one that died
        ours, theirs = forking().Pipe(duplex=False)
        process = forking().Process(target=_work, args=(theirs, attempt, left), daemon=True)
        process.start()
        theirs.close()
        ours.poll(START_SECONDS)
        try:
            ours.recv()
            while left:
                if not ours.poll(seconds):
                    yield left[0], Found(Verdict.FAILED, f"hangs: nothing came for {seconds:g} s")
                    yield from ((way, Found(Verdict.FAILED, f"not tried, as {left[0]} hung")) for way in left[1:])
                    return
                found = ours.recv()
                yield left.pop(0), found
        except EOFError:
            process.join()
            yield left.pop(0), Found(Verdict.FAILED, f"its process died (exit code {process.exitcode})")
        finally:
            process.kill()
            process.join()
            ours.close()


def _work(end: Connection, attempt: Callable[[Way], Found], ways: Sequence[Way]) -> None:
    os.dup2(2, 1)  # what a layer prints must not come between what the command does
    torch.set_num_threads(1)  # with more, the order of summation is no longer fixed
    end.send(None)  # it has started
    for way in ways:
        end.send(attempt(way))


def attempt_own(own: OwnLayers, way: Way) -> Found:
    """One way beside the plain loop, which runs once."""
    subject, expected = _plain_of(own)
    saving = dataclasses.replace(subject, layers=lambda: _saving_outputs(subject.layers()))
    return beside(saving, expected, way)


class _Saved(torch.autograd.Function):
    """The identity, with its input saved: the pipeline then compares it in R with that of F, and names the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient


def _saving_outputs(layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """`layers`, each with its output saved: one whose output nobody saves could return anything in R."""

    def saved(leaf: Any) -> Any:
        wanted = isinstance(leaf, Tensor) and leaf.requires_grad
        return _Saved.apply(leaf) if wanted else leaf  # type: ignore[no-untyped-call]

    for layer in layers:
        layer.register_forward_hook(lambda _, __, output: pytree.tree_map(saved, output))
    return layers


@functools.lru_cache(maxsize=1)
def _plain_of(own: OwnLayers) -> tuple[Subject, Trace]:
    subject = _subject(own)
    return subject, plain(subject)


# What the user gives --------------------------------------------------------------------------------------------------


def _checked(own: OwnLayers) -> tuple[str, ...]:
    """The kinds of the layers, once everything has been made and the plain loop has run. Raises ValueError: see `verify_own`."""
    torch.set_num_threads(1)  # with more, the order of summation is no longer fixed
    with contextlib.redirect_stdout(sys.stderr):  # what a layer prints must not come between what the command does
        subject = _subject(own)
        traces = []
        for _ in range(2):
            try:
                traces.append(plain(subject))
            except Exception as error:
                raise ValueError(f"{own.layers}: the plain loop fails itself: {_line(error)}") from error
        names = tuple(type(layer).__name__ for layer in subject.layers())
    for what, _ in differences(traces[0], traces[1]):
        raise ValueError(
            f"{own.layers}: two plain loops from one seed differ in {what}: draw weights and batches from torch's, numpy's or "
            "Python's own generators, which are seeded before each call, and let layers begin anew each time"
        )
    return names


def _subject(own: OwnLayers) -> Subject:
    made = functools.partial(_made, own)
    _, _, inputs, _ = made(0)
    rows = num_rows(inputs, "inputs")
    # Two rows in each where there are as many: BatchNorm refuses one.
    microbatches = NUM_MICROBATCHES if rows is None else max(1, min(NUM_MICROBATCHES, rows // 2))
    cut(inputs, microbatches)
    return Subject(
        lambda: made(0)[0],
        lambda step: made(step)[2:],
        lambda: made(0)[1],
        max_norm=None,
        num_microbatches=microbatches,
        num_steps=NUM_STEPS,
    )


def _called(place: str) -> Any:
    """What the function `module:function` returns. Raises ValueError: there is no such module or function, or it raises."""
    function = load_target(place)
    if not callable(function):
        raise ValueError(f"{place}: is a {type(function).__name__}, and no function")
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{place}() raised {_line(error)}") from error


def _made(own: OwnLayers, step: int) -> _Made:
    """Raises ValueError: what a function gave is no model, or no batch."""
    seed_everything(SEED)
    given = _called(own.layers)
    is_model = isinstance(given, ModelSpec) or not isinstance(given, tuple)
    if is_model or all(isinstance(part, nn.Module) for part in given):
        given = (given, None)
    if len(given) not in (2, 4):
        raise ValueError(
            f"{own.layers} returned a tuple of {len(given)}: allowed are layers, (layers, loss_fn) and (layers, loss_fn, inputs, targets)"
        )
    model, loss_fn, *batch = given
    if own.batch is not None:
        seed_everything(step)
        batch = _called(own.batch)
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ValueError(
                f"{own.batch} returned a {type(batch).__name__}: it must return the pair (inputs, targets)"
            )
    if not batch:
        raise ValueError(
            f"{own.layers} gives layers without a batch to train on: let it return (layers, loss_fn, inputs, targets), or "
            f"add --batch MODULE:FUNCTION, whose function returns (inputs, targets)"
        )
    try:
        spec = spec_of(model)
    except TypeError as error:
        raise ValueError(f"{own.layers}: {error}") from None
    inputs, targets = batch
    return spec.build(0, spec.num_layers, seed=SEED), loss_fn or spec.loss_fn or mean_of_squares, inputs, targets


def mean_of_squares(output: Any, _: Any) -> Tensor:
    """The loss where none is given: of every tensor of real or complex numbers in `output`, the mean of its squares."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    means = [leaf.abs().square().mean() for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return torch.stack([mean.float() for mean in means]).sum()


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# Said -----------------------------------------------------------------------------------------------------------------

_TOLD = {Verdict.EQUAL: "recomputed", Verdict.KEPT: "kept", Verdict.REFUSED: "cannot be recomputed"}


def own_table(report: OwnReport) -> str:
    """A line per layer and one per way that is not equal."""
    cells = [
        (str(number), kind, f"{_TOLD[found.result]}{f': {found.detail}' if found.detail else ''}")
        for number, (kind, found) in enumerate(zip(report.names, report.layers))
    ]
    table = Table(("layer", "kind", "recomputation"), cells, left=frozenset({0, 1, 2})).as_text()
    same: dict[tuple[Verdict, str], list[str]] = {}
    for way, found in report.ways:
        same.setdefault((found.result, found.detail), []).append(str(way))
    right = (Verdict.EQUAL, Verdict.KEPT)
    wrong = [f"{'; '.join(ways)}: {result}: {detail}" for (result, detail), ways in same.items() if result not in right]
    equal = sum(found.result in right for _, found in report.ways)
    verdict = f"{equal} of {len(report.ways)} ways to run it equal the plain loop bit for bit"
    return "\n".join([table, "", *wrong, verdict])
