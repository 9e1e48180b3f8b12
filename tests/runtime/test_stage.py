"""F, R and B of one stage on one process: everything that could make B use what it should not."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from one_rank import make_stages, run_step, twins
from parity_cases import mean_square
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pipetrain.runtime.reference import reference_step
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.slots import RecomputeMismatch, SavedTensorChanged

M = 4
BALANCES: Sequence[Sequence[int]] = ([6], [2, 4], [1, 3, 1, 1])


def batch(rows: int = 11, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def check_parity(
    make_layers: Callable[[], Sequence[nn.Module]],
    balance: Sequence[int],
    *,
    keep: bool,
    prove: Callable[[int], bool] = lambda microbatch: False,
) -> None:
    """Two steps: loss, gradients (which add up) and buffers equal; nothing is held afterwards."""
    torch.manual_seed(0)
    reference, ours = twins(make_layers())
    inputs, targets = batch()
    meter = meter_of(ours)
    stages = make_stages(list(ours), balance, mean_square, meter)
    for step in range(2):
        expected = reference_step(reference, mean_square, inputs.clone(), targets, num_microbatches=M, step=step)
        loss = run_step(stages, inputs.clone(), targets, M, keep=lambda microbatch: keep, prove=prove, step=step)
        assert torch.equal(loss, expected)
        for (name, theirs), parameter in zip(reference.named_parameters(), ours.parameters()):
            assert (parameter.grad is None) == (theirs.grad is None), name
            assert parameter.grad is None or torch.equal(parameter.grad, theirs.grad), name
        for (name, theirs), buffer in zip(reference.named_buffers(), ours.buffers()):
            assert torch.equal(buffer, theirs), name
        assert meter.current_bytes == 0


def meter_of(model: nn.Module) -> ActivationMeter:
    meter = ActivationMeter()
    meter.exclude([*model.parameters(), *model.buffers()])
    return meter


def one_stage(*layers: nn.Module, meter: ActivationMeter | None = None) -> Any:
    model = nn.Sequential(*layers)
    return make_stages(list(model), [len(layers)], mean_square, meter or meter_of(model))


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


# Equal numbers --------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 1, 2, 4)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).flatten(1) + x


class Checkpointed(nn.Module):
    """torch's own recomputation inside of ours."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors  # a node may read twice
        return gradient * (y + again) / 2


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SavesItsOutput.apply(torch.tanh(x))


class InPlaceInside(nn.Module):
    """Changes in place what nobody saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        return y.sigmoid_()


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear and dropout": lambda: [linear(), nn.Tanh(), linear(), nn.Dropout(0.3), linear(), nn.Sigmoid()],
    "dropout last": lambda: [linear(), nn.Tanh(), linear(), nn.ReLU(), linear(), nn.Dropout(0.3)],
    "batch norm": lambda: [linear(), nn.BatchNorm1d(8), linear(), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), linear()],
    "spectral norm": lambda: [
        nn.utils.parametrizations.spectral_norm(linear()),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(linear()),
        *(nn.Tanh(), linear(), linear()),
    ],
    "in place after a layer": lambda: [linear(), linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear()],
    "in place on the input of each stage": lambda: [nn.ReLU(inplace=True), linear(), nn.ELU(inplace=True), linear(), nn.ReLU(inplace=True), linear()],
    "in place inside": lambda: [InPlaceInside(), linear(), InPlaceInside(), linear(), InPlaceInside(), linear()],
    "recurrent": lambda: [Recurrent(), linear(), nn.Tanh(), linear(), Recurrent(), linear()],
    "attention": lambda: [linear(), Attends(), linear(), Attends(), linear(), Attends()],
    "checkpoint inside": lambda: [Checkpointed(reentrant=False), linear(), Checkpointed(reentrant=False), *(linear() for _ in range(3))],
    "reentrant checkpoint": lambda: [linear(), Checkpointed(reentrant=True), linear(), Checkpointed(reentrant=True), linear(), linear()],
    "autograd function": lambda: [Custom(), linear(), Custom(), linear(), Custom(), linear()],
}  # fmt: skip


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("balance", BALANCES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_reference(name: str, balance: Sequence[int], keep: bool) -> None:
    check_parity(LAYERS[name], balance, keep=keep)


@pytest.mark.parametrize("proved", [[0], [2], range(M)], ids=["first", "third", "every"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_proof_finds_nothing_where_nothing_is(name: str, proved: Sequence[int]) -> None:
    check_parity(LAYERS[name], [2, 4], keep=False, prove=lambda microbatch: microbatch in proved)


# A gradient inside forward --------------------------------------------------------------------------------------------


class GradInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            slope = torch.autograd.grad((y**3 * self.weight.detach()).sum(), y)[0]
        return (slope + x) * self.weight


class FunctionalGradInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: (y**2).sum())(x.detach())
        return x * slope


@pytest.mark.parametrize("inside", [GradInside, FunctionalGradInside])
@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_gradient_inside_forward_keeps_that_layer_and_warns_once(inside: Any, balance: Sequence[int]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_parity(lambda: [linear(), inside(), linear(), nn.Dropout(0.2), linear(), linear()], balance, keep=False)
    (warning,) = caught
    assert f"layer 1 ({inside.__name__}) takes a gradient inside its forward" in str(warning.message)


# Early end of R -------------------------------------------------------------------------------------------------------


# Not in the layer: there R would put it back as it was.
CALLS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def count_call(layer: nn.Module) -> int:
    """The number of this call, from 1; those in R count, too."""
    CALLS[layer] = CALLS.get(layer, 0) + 1
    return CALLS[layer]


class Counts(nn.Module):
    """Counts its calls; saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        count_call(self)
        return x + 1


def test_recompute_ends_when_the_last_slot_is_full() -> None:
    early, late = Counts(), Counts()
    stage, last = make_stages([linear(), early, linear(), late, linear()], [4, 1], mean_square, ActivationMeter())
    run_step([stage, last], *batch(), M)
    assert CALLS[early] == 2 * M
    assert CALLS[late] == M, "a layer after the last saved tensor ran again"


def test_no_gradient_no_recompute() -> None:
    frozen = linear().requires_grad_(False)
    counts = Counts()
    first, second = make_stages([frozen, counts, linear()], [2, 1], mean_square, ActivationMeter())
    run_step([first, second], *batch(), M)
    assert CALLS[counts] == M
    assert frozen.weight.grad is None


# Refused: what was changed --------------------------------------------------------------------------------------------


class ChangesSaved(nn.Module):
    """Saves y for backward, then changes it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y * y
        y.add_(1)
        return z + y


class ChangesLater(nn.Module):
    """Its output is saved by itself and changed by the next layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (lambda: [linear(), ChangesSaved(), linear()], r"layer 1 \(ChangesSaved\): a tensor \[3, 8\]"),
        (lambda: [linear(), ChangesLater(), AddsInPlace()], r"layer 1 \(ChangesLater\): a tensor \[3, 8\]"),
    ],
)
def test_change_of_a_saved_tensor_in_forward(layers: Any, named: str, keep: bool) -> None:
    with pytest.raises(SavedTensorChanged, match=rf"{named} .* changed in place later in the same forward"):
        run_step(one_stage(*layers()), *batch(12), M, keep=lambda microbatch: keep)


def test_change_of_a_saved_tensor_between_forward_and_backward() -> None:
    """A kept set: what was saved is the user's own tensor, changed before B."""
    held: list[Tensor] = []

    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            held.append(y)
            return y * y

    stages = one_stage(linear(), Remembers(), linear())

    def change(microbatch: int) -> bool:
        if len(held) == M:
            held[0].detach().add_(1)
        return True

    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Remembers\).*before B read it"):
        run_step(stages, *batch(), M, keep=change)


def test_change_of_a_recomputed_tensor_before_backward() -> None:
    held: list[Tensor] = []

    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            held.append(y)
            return y * y

    (stage,) = one_stage(linear(), Remembers(), linear())
    recompute = stage.recompute

    def recompute_and_change(microbatch: int) -> None:
        recompute(microbatch)
        held[-1].detach().add_(1)

    stage.recompute = recompute_and_change
    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Remembers\).*before B read it"):
        run_step([stage], *batch(), M)


def test_change_of_a_parameter_between_forward_and_recompute() -> None:
    first, second = linear(), linear()
    stages = one_stage(first, second)

    def change(stage: int, microbatch: int) -> None:
        if microbatch == 1:
            second.bias.data.copy_(second.bias)  # not seen: .data has a version of its own
            with torch.no_grad():
                second.weight.add_(1)

    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Linear\) weight changed between F and R"):
        run_step(stages, *batch(), M, before_recompute=change)


def test_change_of_a_parameter_between_forward_and_backward_of_a_kept_set() -> None:
    first, second = linear(), linear()
    stages = one_stage(first, second)
    calls: list[int] = []

    def keep(microbatch: int) -> bool:
        calls.append(microbatch)
        if len(calls) == M + 1:
            with torch.no_grad():
                second.weight.add_(1)
        return True

    with pytest.raises(SavedTensorChanged, match=r"layer 1 \(Linear\)"):
        run_step(stages, *batch(), M, keep=keep)


class ChangesInputSecondTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mul_(2) if self.calls > 1 else x * 2


def test_input_changed_in_place_from_the_second_microbatch_on() -> None:
    with pytest.raises(SavedTensorChanged, match=r"layer 0 \(ChangesInputSecondTime\) changes the input of stage 0"):
        run_step(one_stage(ChangesInputSecondTime(), linear()), *batch(), M)


# Refused: another path ------------------------------------------------------------------------------------------------


class OtherPath(nn.Module):
    """Runs `paths[0]` in F and `paths[1]` in R."""

    def __init__(self, *paths: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.paths = paths

    def forward(self, x: Tensor) -> Tensor:
        return self.paths[count_call(self) > M](x)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            (torch.sigmoid, torch.tanh),
            r"saves a tensor \[3, 8\] float32 made by TanhBackward, in F it was .* made by SigmoidBackward",
        ),
        ((lambda x: x * x, lambda x: x[:, :4] * x[:, 4:]), r"saves a tensor \[3, 4\] .*in F it was a tensor \[3, 8\]"),
        ((lambda x: x.exp(), lambda x: x.double().exp()), r"saves a tensor \[3, 8\] float64 .*in F it was .* float32"),
        ((lambda x: x * 2, lambda x: x.exp() * 2), r"saves a tensor \[3, 8\] float32 made by ExpBackward"),
        ((lambda x: x * 2, lambda x: (x * 2) * torch.ones(3, 8)), r"saves a tensor \[3, 8\] float32, in F it was"),
        (
            (lambda x: x.exp().sin(), lambda x: x.exp()),
            r"ended without saving a tensor \[3, 8\] float32 made by ExpBackward",
        ),
        ((lambda x: x.exp(), lambda x: x * 2), r"ended without saving a tensor \[3, 8\] float32 made by ExpBackward"),
    ],
    ids=["op", "shape", "dtype", "more", "one more without a gradient", "fewer", "none"],
)
def test_recompute_on_another_path(paths: Any, message: str) -> None:
    with pytest.raises(RecomputeMismatch, match=rf"layer 1 \(OtherPath\): the recompute {message}"):
        run_step(one_stage(linear(), OtherPath(*paths), linear()), *batch(12), M)


def test_recompute_that_ends_too_early() -> None:
    layers = [linear(), OtherPath(lambda x: x.exp(), lambda x: x.detach())]
    stages = make_stages([*layers, linear()], [2, 1], mean_square, ActivationMeter())
    with pytest.raises(RecomputeMismatch, match=r"layer 1 \(OtherPath\).*ended without saving a tensor \[3, 8\]"):
        run_step(stages, *batch(12), M)


# Buffers and casts ----------------------------------------------------------------------------------------------------


class Scales(nn.Module):
    """Multiplies by how often it ran: R must see what F saw, and not count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * x * self.count


def test_recompute_sees_the_buffers_of_its_forward() -> None:
    check_parity(lambda: [linear(), Scales(), linear(), Scales(), linear(), linear()], [2, 4], keep=False)


def test_what_a_recompute_reads_of_buffers_lives_until_its_backward() -> None:
    """On a GPU R has been launched, and not run, when `recompute` returns: memory that the host lets go of then is given to a later F."""
    seen: list[StorageWeakRef] = []

    class Notes(nn.Module):
        """What it reads of its buffer is not saved for B: only the state that F saw holds it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.count, Tensor)
            seen.append(StorageWeakRef(self.count.untyped_storage()))
            self.count += 1
            return x + self.count

    alive: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            alive.append(not seen[-1].expired())
            return gradient

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Looks.apply(x)

    run_step(one_stage(linear(), Notes(), Looking(), linear()), *batch(), M)
    assert len(seen) == 2 * M
    assert alive == [True] * M
    assert [ref.expired() for ref in seen] == [False] * M + [True] * M, "what stood in goes with B"


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_autocast(keep: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_parity(lambda: [linear() for _ in range(6)], [2, 4], keep=keep)
        assert torch.is_autocast_cache_enabled()


def test_recompute_of_a_weight_used_twice_under_autocast() -> None:
    """F casts a shared weight once and uses the cached cast again; the numbers must not depend on that."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(self.linear(x)))

    with torch.autocast("cpu", torch.bfloat16):
        check_parity(lambda: [Twice(), linear(), Twice(), linear(), Twice(), linear()], [2, 4], keep=False)


# Loss and failure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "found"),
    [(lambda out, target: (out - target) ** 2, r"a tensor of shape \[3, 8\]"), (lambda out, target: 1.5, "float")],
)
def test_loss_that_is_no_scalar(loss: Any, found: str) -> None:
    stages = make_stages([linear()], [1], loss, ActivationMeter())
    with pytest.raises(ValueError, match=f"loss_fn returned {found}: it must return a 0-dim tensor"):
        run_step(stages, *batch(12), M)


class Breaks(nn.Module):
    """Raises at its n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        if count_call(self) == self.at:
            raise KeyError("broken on purpose")
        return x * x


@pytest.mark.parametrize("at", [1, 3, M + 1, 2 * M], ids=["first F", "third F", "first R", "last R"])
@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_nothing_is_held_after_a_failure(at: int, keep: bool) -> None:
    if keep and at > M:
        return
    breaks = Breaks(at)
    meter = ActivationMeter()
    stages = make_stages([linear(), linear(), breaks, linear(), linear()], [2, 3], mean_square, meter)
    try:
        run_step(stages, *batch(), M, keep=lambda microbatch: keep)
    except KeyError:
        pass
    else:
        raise AssertionError("the layer did not break")
    for stage in stages:
        stage.drop()
    assert meter.current_bytes == 0
