"""Under autocast: numbers as in the plain loop, and no weights in the sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from one_rank import assert_equal_gradients, make_stages, run_step, twins
from pairwise import pairwise
from parity_cases import mean_square
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from waiting_layers import autocast

from pipetrain.runtime.reference import reference_step
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.stage import Stage

M, ROWS, WIDTH = 4, 8, 64
HALF, FULL = 2, 4  # bytes of a number


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def linear(*, frozen: bool = False, width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, width).requires_grad_(not frozen)


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = linear(frozen=True), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class OnItsOwn(nn.Module):
    """Multiplies by its weights without modules, in the middle once at full precision."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=not frozen)
        self.two = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.one)
        with torch.autocast("cpu", enabled=False):
            x = torch.tanh(x.float() @ self.one)
        return torch.matmul(torch.addmm(self.two[0], x, self.two), self.one)


class Inside(nn.Module):
    """Under an autocast of its own."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.inner = linear(frozen=frozen)

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            return self.inner(torch.tanh(self.inner(x))).float()


class Cast(nn.Module):
    """Casts a weight by itself, and changes the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + (x.to(torch.bfloat16) @ self.weight.to(torch.bfloat16).mul_(0.5)).float()


class Convolved(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 1, 3, padding=1).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None])[:, 0]


class Forgets(nn.Module):
    """Clears autocast's cache at the given calls."""

    def __init__(self, at: Callable[[int], bool]) -> None:
        super().__init__()
        self.inner, self.at, self.calls = linear(), at, itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.at(next(self.calls)):
            torch.clear_autocast_cache()
        return torch.tanh(self.inner(x))


LAYERS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "trained": lambda: [linear(), nn.Tanh(), linear(), linear()],
    "frozen": lambda: [linear(), nn.Tanh(), linear(frozen=True), linear(frozen=True), nn.Tanh(), linear()],
    "adapted": lambda: [Adapted(), nn.Tanh(), Adapted(), Adapted()],
    "by hand": lambda: [linear(), OnItsOwn(frozen=False), OnItsOwn(frozen=True), linear()],
    "autocast inside": lambda: [linear(), Inside(frozen=False), Inside(frozen=True), linear()],
    "cast by the layer": lambda: [linear(), Cast(), Cast(), linear()],
    "convolved": lambda: [linear(), Convolved(frozen=False), Convolved(frozen=True), linear()],
    "attention": lambda: [linear(), nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0).requires_grad_(False), linear()],
}


@pytest.mark.parametrize(
    ("name", "how", "around"),
    [row for row in pairwise([*LAYERS], ["recomputed", "kept"], ["autocast", "no autocast"]) if not row.marks],
    ids=str,
)
def test_numbers_are_those_of_the_plain_loop(name: str, how: str, around: str) -> None:
    """Also over several steps in one autocast, with no optimizer in between; the gradients add up."""
    torch.manual_seed(0)
    reference, ours = twins(LAYERS[name]())
    stages = make_stages(list(ours), [2, len(ours) - 2], mean_square, ActivationMeter())
    with torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"):
        for step in range(3):
            expected = reference_step(reference, mean_square, *batch(), num_microbatches=M, step=step)
            loss = run_step(
                stages,
                *batch(),
                M,
                keep=lambda _: how == "kept",
                prove=lambda i, step=step: step == 0 and not i,
                step=step,
            )
            assert torch.equal(loss, expected)
    assert_equal_gradients(ours, reference)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_weights_that_change_between_steps(frozen: bool) -> None:
    """In one autocast that spans the steps: of a trained weight plain torch goes on with the old cast, of a frozen one not."""
    torch.manual_seed(0)
    models = twins([linear(), nn.Tanh(), linear(frozen=frozen), linear()])
    reference, ours = models
    stages = make_stages(list(ours), [2, 2], mean_square, ActivationMeter())
    with autocast():
        for step in range(3):
            expected = reference_step(reference, mean_square, *batch(), num_microbatches=M, step=step)
            loss = run_step(stages, *batch(), M, step=step)
            assert torch.equal(loss, expected), f"step {step}"
            for model in models:
                with torch.no_grad():
                    model[2].weight.add_(0.25)
                model[2].bias.data = model[2].bias.data + 1
    assert_equal_gradients(ours, reference)


def test_the_cast_of_a_layer_under_its_own_autocast_ends_with_the_step() -> None:
    """With a split backward. A change through `.data` between two steps leaves version and address as they were."""
    torch.manual_seed(0)
    models = twins([linear(), Inside(frozen=False), linear()])
    reference, ours = models
    stages = make_stages(list(ours), [1, 2], mean_square, ActivationMeter())
    for step in range(2):
        expected = reference_step(reference, mean_square, *batch(), num_microbatches=M, step=step)
        assert torch.equal(run_step(stages, *batch(), M, step=step, waiting=0), expected), f"step {step}"
        for model in models:
            model[1].inner.weight.data.add_(0.25)
    assert_equal_gradients(ours, reference)


class Moves(nn.Module):
    """Its frozen weight changes in each forward, as an average of other weights does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(frozen=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.add_(0.25)
        out: Tensor = self.inner(x)
        return out


def test_a_frozen_weight_that_changes_within_a_step() -> None:
    torch.manual_seed(0)
    reference, ours = twins([linear(), Moves(), linear()])
    stages = make_stages(list(ours), [1, 2], mean_square, ActivationMeter())
    with autocast():
        expected = reference_step(reference, mean_square, *batch(), num_microbatches=M)
        assert torch.equal(run_step(stages, *batch(), M, keep=lambda _: True), expected)
    assert_equal_gradients(ours, reference)


def sets_of(layers: Sequence[nn.Module], *, keep: bool = False) -> tuple[dict[int, int], ActivationMeter]:
    """Bytes of each set of one stage."""
    model = nn.Sequential(*layers)
    meter = ActivationMeter()
    meter.exclude(model.parameters())
    (stage,) = make_stages(list(model), [len(model)], mean_square, meter)
    run_step([stage], *batch(), M, keep=lambda _: keep)
    return stage.set_bytes, meter


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_set_holds_no_weights(frozen: bool, keep: bool) -> None:
    """Activations alone: of a linear layer its input where its weight learns, of a tanh its output, of the loss its own."""
    rows = ROWS // M
    layers = [linear(), nn.Tanh(), linear(frozen=frozen), nn.Tanh(), linear(frozen=frozen)]
    with autocast():
        found, meter = sets_of(layers, keep=keep)
    numbers = rows * WIDTH
    # The cast of the input, two outputs of tanh (which are the inputs of the layers behind), and of the loss what it squares.
    assert set(found.values()) == {numbers * (3 * HALF + FULL)}, found
    assert meter.current_bytes == 0
    assert not meter._left_out, "casts that are gone must not be left out"


@pytest.mark.parametrize("name", ["adapted", "by hand", "convolved"])
def test_sets_are_smaller_than_their_weights(name: str) -> None:
    layers = LAYERS[name]()
    with autocast():
        found, _ = sets_of(layers)
    assert max(found.values()) < WIDTH * WIDTH * FULL


class Counts(TorchDispatchMode):
    """How often a weight is cast, in whatever tensor it is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.casts += args[0].untyped_storage()._cdata == self.weight.untyped_storage()._cdata
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_weight_is_cast_once_per_step(frozen: bool) -> None:
    layers = [linear(), nn.Tanh(), linear(frozen=frozen)]
    (stage,) = make_stages(layers, [3], mean_square, ActivationMeter())
    with Counts(layers[2].weight) as counted:  # type: ignore[arg-type]
        for step in range(2):
            with autocast():
                run_step([stage], *batch(), M, step=step)
            assert counted.casts == step + 1


@pytest.mark.parametrize("at", [lambda n: n == M, lambda n: n % 2 == 1, lambda n: n > M], ids=["in F", "often", "in R"])
def test_no_forward_gets_a_cast_that_a_recompute_has_made(at: Callable[[int], bool]) -> None:
    """On a GPU a cast that R made on its own stream would be read by F on another."""
    made: dict[int, str] = {}  # storage -> phase
    phase = ["F"]
    read: list[tuple[str, str]] = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
                held.append(found)
                made[found.untyped_storage()._cdata] = phase[0]
            for one in args:
                if isinstance(one, Tensor) and one.untyped_storage()._cdata in made:
                    read.append((phase[0], made[one.untyped_storage()._cdata]))
            return found

    held: list[Tensor] = []  # so that no identity is given twice
    torch.manual_seed(0)
    (stage,) = make_stages([linear(), Forgets(at), linear()], [3], mean_square, ActivationMeter())
    with autocast(), Watches():
        in_1f1b_order(stage, phase)
    assert ("R", "F") in read, "R reads what F has cast"
    assert ("F", "R") not in read


def in_1f1b_order(stage: Stage, phase: list[str]) -> None:
    """F0 F1 R0 B0 F2 R1 B1 ...: F runs again after R has."""
    run, recompute = stage.forward, stage.recompute

    def backward(microbatch: int) -> None:
        phase[0] = "R"
        recompute(microbatch)
        phase[0] = "B"
        stage.backward(microbatch, ())
        phase[0] = "F"

    def forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        output = run(microbatch, *args, **kwargs)
        if microbatch:
            backward(microbatch - 1)
        return output

    stage.forward = forward  # type: ignore[method-assign]
    run_step([stage], *batch(), M, has_backward=False)
    backward(M - 1)
    stage.end_step()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_casts_as_it_was_compiled() -> None:
    torch.manual_seed(0)
    reference, ours = twins([linear(), torch.compile(linear(frozen=True), backend="eager"), linear()])
    stages = make_stages(list(ours), [1, 2], mean_square, ActivationMeter())
    with autocast():
        expected = reference_step(reference, mean_square, *batch(), num_microbatches=M)
        assert torch.equal(run_step(stages, *batch(), M), expected)
    assert_equal_gradients(ours, reference)
