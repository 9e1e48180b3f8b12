"""A layer that is no function of its input, parameters, buffers and seed is kept: it runs once, and the layers around it are recomputed."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import assert_equal_gradients
from parity_cases import mean_square
from torch import Tensor, nn

from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.errors import RecomputeMismatch
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.recompute import checksum
from pipetrain.stage.stage import Stage

M = 4
ALWAYS = RecomputePolicy(last_stage="always")


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


class Counts(nn.Module):
    """Each forward is a little stronger than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * x * (1 + 0.1 * self.calls)


def step_of(layers: list[nn.Module], recompute: Any = ALWAYS) -> tuple[Tensor, list[str], nn.Sequential]:
    """Two steps; the last loss, and what was said."""
    model = nn.Sequential(*layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Pipeline(model, mean_square, num_microbatches=M, recompute=recompute) as pipeline:
            for _ in range(2):
                loss = pipeline.step(*batch())
    return loss, [str(one.message) for one in caught], model


def assert_equal_to_the_loop(make: Callable[[], list[nn.Module]]) -> list[str]:
    torch.manual_seed(0)
    found, said, ours = step_of(make())
    torch.manual_seed(0)
    theirs = nn.Sequential(*make())
    for step in range(2):
        expected = reference_step(theirs, mean_square, *batch(), num_microbatches=M, step=step)
    assert torch.equal(found, expected)
    assert_equal_gradients(ours, theirs)
    return said


def test_a_kept_layer_is_not_run_again() -> None:
    layers = [nn.Linear(4, 4), Counts(), nn.Tanh(), nn.Linear(4, 4)]
    _, said, _ = step_of(layers)
    assert layers[1].calls == 2 * M
    (line,) = said
    assert line.startswith("layer 1 (Counts) changes its attribute calls in each forward: its saved tensors (")
    assert line.endswith(" bytes per microbatch) are kept from F to B and not recomputed")


@pytest.mark.parametrize("where", ["first", "middle", "last", "two in a row", "in place after it"])
def test_the_layers_around_it_are_as_in_the_loop(where: str) -> None:
    layers: dict[str, Callable[[], list[nn.Module]]] = {
        "in place after it": lambda: [nn.Linear(4, 4), Counts(), nn.ReLU(inplace=True), nn.Sigmoid(), nn.Linear(4, 4)],
        "first": lambda: [Counts(), nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4)],
        "middle": lambda: [nn.Linear(4, 4), nn.Dropout(0.2), Counts(), nn.Linear(4, 4), nn.Sigmoid()],
        "last": lambda: [nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), Counts()],
        "two in a row": lambda: [nn.Linear(4, 4), Counts(), Counts(), nn.Linear(4, 4)],
    }
    assert len(assert_equal_to_the_loop(layers[where])) == (2 if where == "two in a row" else 1)


@pytest.mark.filterwarnings("ignore")
def test_the_next_layer_begins_to_change_its_input_in_place() -> None:
    """R begins with a copy of the kept layer's output, so the gradients stay those of an operation that returns a new tensor."""

    class Begins(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if later[0] else x * 2

    later = (torch.zeros(1),)
    model = nn.Sequential(nn.Linear(4, 4), Counts(), Begins(), nn.Sigmoid(), nn.Linear(4, 4))
    found = []
    with Pipeline(model, mean_square, num_microbatches=M, recompute=ALWAYS) as pipeline:
        for changes in (0, 1):
            later[0].fill_(changes)
            pipeline.zero_grad()
            model[1].calls = 0
            pipeline.step_index = 0
            pipeline.step(*batch())
            found.append([parameter.grad for parameter in pipeline.parameters()])
    assert all(map(torch.equal, *found))


class Energy(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = x.detach().requires_grad_()
        return place, torch.tanh(place).square().sum()


class Force(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        place, energy = given
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return force + place


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [8, 7, 5])
def test_a_gradient_through_the_layer_before_with_uneven_microbatches(rows: int) -> None:
    """Kinds of microbatches: the second is looked at when both layers are known to be kept."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), Energy(), Force(), nn.Linear(4, 4))
    theirs = copy.deepcopy(ours)
    inputs, targets = (part[:rows] for part in batch())
    with Pipeline(ours, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        for step in range(2):
            found = pipeline.step(inputs, targets)
            assert torch.equal(
                found, reference_step(theirs, mean_square, inputs, targets, num_microbatches=3, step=step)
            )


def test_a_layer_of_jit_is_kept() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * x

    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), torch.jit.script(Plain()), nn.Linear(4, 4)]

    (line,) = assert_equal_to_the_loop(layers)
    assert "is compiled by torch.jit" in line


# By hand --------------------------------------------------------------------------------------------------------------


class Marked(nn.Linear):
    """Tells how often it runs, in an object that nothing else looks at."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(id(self))
        return super().forward(x)


RUNS: list[int] = []


@pytest.mark.parametrize(
    ("keep_layers", "kept"),
    [((), set()), (1, {1}), ("1-2", {1, 2}), (["0", "3"], {0, 3}), ("Marked", {0, 1, 2, 3})],
    ids=str,
)
def test_layers_that_are_named_run_once(keep_layers: Any, kept: set[int]) -> None:
    RUNS.clear()
    layers: list[nn.Module] = [Marked() for _ in range(4)]
    policy = RecomputePolicy(last_stage="always", keep_layers=keep_layers)
    _, said, _ = step_of([*layers, nn.Linear(4, 4)], policy)
    assert not said, "who has named it need not be told"
    assert {number for number, layer in enumerate(layers) if RUNS.count(id(layer)) == 2 * M} == kept


@pytest.mark.parametrize(
    ("keep_layers", "said"),
    [
        (7, "recompute.keep_layers=7: the model has the layers 0 to 1; name some of these"),
        ("3-2", "recompute.keep_layers=3-2: use 2-3"),
        ("Linaer", "recompute.keep_layers=Linaer: no layer is of that class; did you mean 'Linear'?"),
        ("0.mlp", "recompute.keep_layers=0.mlp: allowed are numbers of layers"),
    ],
)
def test_what_names_no_layer(keep_layers: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        step_of([nn.Linear(4, 4), nn.Linear(4, 4)], RecomputePolicy(last_stage="always", keep_layers=keep_layers))


# What begins later ----------------------------------------------------------------------------------------------------


class DriftsLater(nn.Module):
    """From some step on each forward gives other values, by a number that nobody sees on the first microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        strength, calls = float(LATER[0]), LATER[1].add_(1)
        return torch.sigmoid(x * (1 + strength * calls))


LATER = (torch.zeros(()), torch.zeros(()))


@pytest.mark.parametrize("segments", [1, 2])
def test_a_layer_that_begins_to_differ_is_named_in_the_same_step(segments: int) -> None:
    LATER[0].zero_()
    model = nn.Sequential(nn.Linear(4, 4), DriftsLater(), nn.Linear(4, 4), nn.Linear(4, 4))
    policy = RecomputePolicy(last_stage="always", segments=segments)
    with Pipeline(model, mean_square, num_microbatches=M, recompute=policy) as pipeline:
        for _ in range(2):
            pipeline.step(*batch())
        LATER[0].fill_(0.1)
        with pytest.raises(
            RecomputeMismatch, match=r"layer 1 \(DriftsLater\): the recompute saves .* first step.*keep_layers"
        ):
            pipeline.step(*batch())


class Iterates(nn.Module):
    """Takes the next number of an iterator, which no look at attributes tells from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * next(self.numbers))


class LateBuffer(nn.Module):
    """Registers a buffer in its first forward, and changes it in each."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(4))
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x + self.seen


def test_a_layer_with_an_iterator_is_kept() -> None:
    _, said, _ = step_of([nn.Linear(4, 4), Iterates(), nn.Linear(4, 4)])
    assert ["layer 1 (Iterates) computes other values when it runs again" in line for line in said] == [True]


def test_a_late_buffer_is_seen_where_nothing_needs_a_gradient() -> None:
    """The layer saves nothing, so that no value tells; R of the next layer would get another input than F."""
    _, said, _ = step_of([LateBuffer(), nn.Linear(4, 4)])
    assert ["layer 0 (LateBuffer) changes its attribute seen in each forward" in line for line in said] == [True]


class Warm(nn.Module):
    """Has a running mean in an attribute from some step on, which no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if WARM.is_set():
            self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
        return x * self.scale


WARM = threading.Event()


@pytest.mark.parametrize("verify", ["first", 2])
def test_an_attribute_that_begins_to_change_is_named_in_the_same_step(verify: str | int) -> None:
    WARM.clear()
    model = nn.Sequential(nn.Linear(4, 4), Warm(), nn.Linear(4, 4))
    policy = RecomputePolicy(last_stage="always", verify=verify)
    with Pipeline(model, mean_square, num_microbatches=M, recompute=policy) as pipeline:
        for _ in range(3):
            pipeline.step(*batch())
        WARM.set()
        with pytest.raises(
            RecomputeMismatch,
            match=r"layer 1 \(Warm\): the recompute would change its attribute mean again.*keep_layers",
        ):
            pipeline.step(*batch())


def test_no_checksum_is_taken_on_another_device_than_a_cpu() -> None:
    """A kernel of a GPU may give other bits from run to run, and reading a checksum there would stop the host."""
    places = [torch.device("cpu"), torch.device("meta")]
    stages = [Stage(0, [nn.Linear(2, 2)], first_layer=0, device=one, meter=ActivationMeter()) for one in places]
    assert [stage._may_witness() for stage in stages] == [True, False]


def test_without_verify_nobody_looks() -> None:
    LATER[0].zero_()
    model = nn.Sequential(nn.Linear(4, 4), DriftsLater(), nn.Linear(4, 4))
    policy = RecomputePolicy(last_stage="always", verify="off")
    with Pipeline(model, mean_square, num_microbatches=M, recompute=policy) as pipeline:
        pipeline.step(*batch())
        LATER[0].fill_(0.1)
        pipeline.step(*batch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_checksum_sees_values_and_their_order(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 0], [0, 1, 1]]).to(dtype)
    other = tensor.clone()
    other[0, 0] = 0
    swapped = tensor.flip(1)
    before, version = tensor.clone(), tensor._version
    sums = [checksum([one]) for one in (tensor, tensor.clone(), other, swapped)]
    assert torch.equal(tensor, before), "who looks leaves it as it is"
    assert tensor._version == version
    assert sums[0] == sums[1]
    assert sums[0] not in sums[2:]


def test_a_checksum_of_many_numbers_sees_their_order() -> None:
    tensor = torch.randn(3, 1 << 16)
    rows, last = tensor[[1, 0, 2]], tensor.clone()
    last.view(-1)[-2:] = tensor.view(-1)[-2:].flip(0)
    longer = torch.cat([tensor.view(-1), torch.ones(7)])
    sums = {checksum([one]) for one in (tensor, rows, last, longer, longer.flip(0))}
    assert len(sums) == 5


class Interrupted(nn.Linear):
    """Ctrl-C comes while a copy of it is tried."""

    def forward(self, x: Tensor) -> Tensor:
        if id(self) not in ORIGINALS:
            raise KeyboardInterrupt
        return super().forward(x)


ORIGINALS: tuple[int, ...] = ()


def test_an_interrupt_ends_a_trial() -> None:
    global ORIGINALS
    layers = [nn.Linear(4, 4), Interrupted(4, 4)]
    ORIGINALS = tuple(map(id, layers))
    with pytest.raises(KeyboardInterrupt):
        step_of(layers)
