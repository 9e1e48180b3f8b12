"""The zoo's own gradients: autograd.Functions, torch.func, gradients inside a forward, hooks, checkpoint, compile, autocast."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from entries.entry import WIDTH, Entry, block, dense, square, stack
from pipetrain.verify.beside_loop import Verdict

# Functions ------------------------------------------------------------------------------------------------------------


class _Exp(torch.autograd.Function):
    """Saves its input and its output, and reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (_, y), (x, again) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (y + again) / 2 + 0 * x


class _ScaledByAttribute(torch.autograd.Function):
    """Keeps a tensor on its context instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Any:
        ctx.x, ctx.scale, ctx.name = x * scale, scale, "scaled"  # its node has a method of that name
        return x.square() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient * ctx.x, None


class _WithMore(torch.autograd.Function):
    """Gives a tensor, the indices of its largest entries, which have no gradient, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        indices = x.argmax(1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(x)
        return x.sigmoid(), indices, x.shape[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 - x.sigmoid())


class _InPlace(torch.autograd.Function):
    """Changes its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        x.mul_(3.0).add_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient * 3.0


class _ReadsModule(torch.autograd.Function):
    """Its backward reads what its module holds by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Any:
        ctx.module = module
        module.scale = 1.0 + float(x.detach().abs().mean())
        return x * module.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.module.scale, None


class SavesBoth(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Exp.apply(torch.tanh(x))  # type: ignore[no-untyped-call]


class KeepsOnContext(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _ScaledByAttribute.apply(x, 0.3)  # type: ignore[no-untyped-call]


class GivesMore(nn.Module):
    def forward(self, x: Tensor) -> Any:
        y, indices, width = _WithMore.apply(x)  # type: ignore[no-untyped-call]
        return y * width + indices[:, None]


class ChangesDirty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        return _InPlace.apply(self.inner(x))  # type: ignore[no-untyped-call]


class ScaledInBackward(nn.Module):
    """F writes a number, B reads it: with several microbatches between the two, that of another one."""

    def forward(self, x: Tensor) -> Any:
        return _ReadsModule.apply(x, self)  # type: ignore[no-untyped-call]


# torch.func -----------------------------------------------------------------------------------------------------------


class FunctionalSlope(nn.Module):
    """`torch.func.grad` of its own network, by `torch.func.vmap` for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.inner(row)).sum()))
        return slope(x) + self.inner(x)


class PerRow(nn.Module):
    """`torch.func.vmap` of its own network."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        return torch.func.vmap(lambda row: torch.tanh(self.inner(row)))(x)


class Directional(nn.Module):
    """`torch.func.jvp` of its own network."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        both: Any = torch.func.jvp(lambda value: torch.tanh(self.inner(value)), (x,), (torch.ones_like(x),))
        return both[0] + both[1]


# Gradients inside a forward -------------------------------------------------------------------------------------------


class Penalised(nn.Module):
    """Adds the slope of its own network by `autograd.grad` with `create_graph`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.inner(probe)).sum(), probe, create_graph=True)
        return self.inner(x) + slope


class EnergyLayer(nn.Module):
    """`[rows, WIDTH]` to the same and an energy of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        positions = x + 0
        return positions, torch.tanh(self.inner(positions)).square().sum(1)


class ForceLayer(nn.Module):
    """The gradient of an energy by positions, which goes back through the layer that made the energy."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        positions, energy = given
        (force,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return positions - 0.1 * force


def _energy_and_force() -> list[nn.Module]:
    """Over one and three stages both are on one, over two and four they are not."""
    return [square(), EnergyLayer(), ForceLayer(), dense(), square()]


class TriesGradient(nn.Module):
    """Has a fallback for where it cannot take a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        probe = x.detach().requires_grad_()
        try:
            (slope,) = torch.autograd.grad(torch.tanh(self.inner(probe)).sum(), probe)
        except Exception:
            slope = torch.zeros_like(x)
        return self.inner(x) + slope


class SwallowsErrors(nn.Module):
    """`try` around its last op."""

    def forward(self, x: Tensor) -> Any:
        try:
            return torch.sin(x) * torch.cos(x)
        except Exception:
            return x


class LocalLoss(nn.Module):
    """Trains its own part by `backward()` in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            (self.inner(x.detach()) - x.detach()).square().mean().backward()
        return self.inner(x)


def _penalty_of_output(output: Tensor, target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(torch.tanh(output).sum(), output, create_graph=True)
    return ((output - target) ** 2).mean() + slope.square().mean()


# Hooks ----------------------------------------------------------------------------------------------------------------


def _halve(_: nn.Module, gradients: Any, __: Any) -> Any:
    return (gradients[0] * 0.5,)


class Hooked(nn.Module):
    """Hooks before, after and behind it, which change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()
        self.inner.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,))
        self.inner.register_forward_hook(lambda _, __, output: torch.tanh(output))
        self.inner.register_full_backward_hook(_halve)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class HooksTensor(nn.Module):
    """Scales the gradient of a tensor, and that of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()
        self.inner.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return torch.tanh(hidden)


class UpdatesAtOnce(nn.Module):
    """An optimizer in a hook, which changes the weight as soon as its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()
        self.inner.weight.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    @staticmethod
    def _update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(x))


class CountsCalls(nn.Module):
    """A hook that counts forwards in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()
        calls: list[int] = []
        self.inner.register_forward_hook(lambda *_: calls.append(1))
        self.num_calls = calls.__len__

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(x))


def _calls_counted(layers: Any) -> list[int]:
    return [layer.num_calls() for layer in layers if isinstance(layer, CountsCalls)]


class RetainsGradient(nn.Module):
    """Wants the gradient of a tensor in its middle, to look at it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = square()
        self.middles: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        middle = torch.tanh(self.inner(x))
        if middle.requires_grad:
            middle.retain_grad()
            self.middles = [middle]
        return middle * 2


def _retained(layers: Any) -> list[bool]:
    found = [layer for layer in layers if isinstance(layer, RetainsGradient)]
    return [middle.grad is not None for layer in found for middle in layer.middles]


# Checkpoint, compile, autocast, complex -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """torch's own recomputation inside of ours."""

    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH))


class Halved(nn.Module):
    """bfloat16 inside, by autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _wide()

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


class Doubled(nn.Module):
    """float64 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _wide().double()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.double()).to(x.dtype)


class Spectrum(nn.Module):
    """Through complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


def _lacks_compiler() -> str:
    return "" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "no C++ compiler on this machine"


def _compiled(backend: str) -> nn.Module:
    module: nn.Module = torch.compile(dense(), backend=backend)  # type: ignore[assignment]
    return module


ENTRIES: tuple[Entry, ...] = (
    block("Function that saves input and output", SavesBoth),
    block("Function with tensors on its context", KeepsOnContext),
    block("Function with other outputs", GivesMore),
    block("Function that changes its input", ChangesDirty),
    block(
        "Function whose backward reads what F wrote",
        ScaledInBackward,
        Verdict.DIFFERS,
        "gradient",
    ),
    block("torch.func.grad", FunctionalSlope, Verdict.KEPT),
    block("torch.func.vmap", PerRow),
    block("torch.func.jvp", Directional),
    block("a gradient penalty", Penalised, Verdict.KEPT),
    stack(
        "an energy, and a force through the layer before",
        _energy_and_force,
        Verdict.KEPT,
        stages=(1, 3),
        on_ranks=False,
    ),
    stack(
        "a force through a layer of another stage",
        _energy_and_force,
        Verdict.REFUSED,
        "(ForceLayer)",
        stages=(2, 4),
        on_ranks=False,
    ),
    block("a gradient with a fallback", TriesGradient, Verdict.KEPT),
    block("a fallback around the last op", SwallowsErrors),
    block("a gradient in loss_fn", dense, Verdict.KEPT, loss=lambda: _penalty_of_output),
    block("backward() in a forward", LocalLoss, Verdict.REFUSED, "(LocalLoss)", on_ranks=False),
    block("hooks of modules", Hooked),
    block("hooks of tensors and parameters", HooksTensor),
    block("an optimizer in a hook", UpdatesAtOnce, Verdict.REFUSED, "(UpdatesAtOnce)", on_ranks=False),
    block(
        "a hook that counts forwards", CountsCalls, Verdict.DIFFERS, "looked at", look=_calls_counted, on_ranks=False
    ),
    block("retain_grad", RetainsGradient, Verdict.KEPT, look=_retained, on_ranks=False),
    block("checkpoint inside", lambda: Checkpointed(_wide())),
    block("reentrant checkpoint inside", lambda: Checkpointed(_wide(), reentrant=True)),
    block(
        "checkpoint with BatchNorm inside",
        lambda: Checkpointed(nn.Sequential(square(), nn.BatchNorm1d(WIDTH))),
        Verdict.DIFFERS,
        "running_mean",
    ),
    block("torch.compile without code", lambda: _compiled("aot_eager"), stages=(1, 2)),
    block("torch.compile", lambda: _compiled("inductor"), stages=(2,), slow=True, lacks=_lacks_compiler),
    block("autocast inside", Halved),
    block("float64 inside", Doubled),
    block("complex numbers inside", Spectrum),
)
