"""Backward in two halves is the whole one, bit for bit: what waits for W, what stays in I, and what is said of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from one_rank import make_stages, run_step, twins
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from pipetrain.config.records import ModelConfig
from pipetrain.model.transformer import transformer_layers
from pipetrain.runtime.reference import reference_step
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.slots import SavedTensorChanged
from pipetrain.stage.split_function import Deferral, SplitFunction, accumulate
from pipetrain.stage.split_linear import SplitLinear, linears_split
from pipetrain.stage.stage import Stage

WIDTH = 6
M = 4


def mean_square(output: Any, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# The layers of the cases ----------------------------------------------------------------------------------------------


class Times(nn.Module):
    """A linear layer whose weight is made in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2)


class Twice(nn.Module):
    """One linear layer, twice, with a nonlinearity between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.inner = linear()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.embedding(ids))), self.embedding.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.inside = linear(), linear()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(
            lambda given: torch.tanh(self.inside(given)), self.before(x), use_reentrant=self.use_reentrant
        )
        assert isinstance(inside, Tensor)
        return inside


class Hooked(nn.Module):
    """A hook that doubles a gradient, or is told when it has been added."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.inner, self.plain, self.after = linear(), linear(), after

    def hook(self) -> None:
        """A copy of a layer has no hooks."""
        if self.after:
            self.inner.weight.register_post_accumulate_grad_hook(_double)
        else:
            self.inner.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(torch.tanh(self.inner(x)))


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


class Penalty(nn.Module):
    """Adds the slope of its own network, which it takes inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.inner(probe)).sum(), probe, create_graph=True)
        return self.inner(x) + slope


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.func.vmap(self.inner)(x)
        return mapped


class Conv1D(nn.Module):
    """As GPT-2 of Hugging Face has it: the weight is not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, WIDTH), self.weight).view(x.shape)


class Cross(nn.Module):
    """Attention to something else: its projections are views of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x.flip(0), x.flip(1))[0]
        return attended


class PathByData(nn.Module):
    """Reads its weight in another way when the input says so, which its first does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output + self.inner.weight.sum() if bool(x[0, 0] > 100) else output


class InFull(nn.Module):
    """Switches autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            full: Tensor = self.inner(x.float())
        return full


class Transposed(nn.Module):
    """The same values with the strides of a transposed matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).t().contiguous().t()


class Scale(SplitFunction):
    """x * weight, with two kernels for its backward, as a user has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sign = 1.0
        return x * weight

    @staticmethod
    def backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.saved_tensors[1] * ctx.sign if ctx.needs_input_grad[0] else None, None

    @staticmethod
    def backward_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, (gradient * ctx.saved_tensors[0] * ctx.sign).sum(0)


class Scaled(nn.Module):
    def __init__(self, *, made: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scale.apply(x, self.weight * 1.0 if self.made else self.weight)
        return scaled


# Beside the plain loop ------------------------------------------------------------------------------------------------


@dataclass
class Waited:
    """Parameters that had a gradient in some W, by identity."""

    seen: set[int]

    def names(self, model: nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if id(parameter) in self.seen}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Waited:
    found, run = Waited(set()), Deferral.run

    def watched(self: Deferral) -> None:
        found.seen.update(key for key, count in self._left.items() if count)
        run(self)

    monkeypatch.setattr(Deferral, "run", watched)
    return found


Batch = tuple[Any, Any]


def rows(*shape: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    shape = shape or (M * 2, WIDTH)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


@dataclass(frozen=True)
class Case:
    """`deferred`: the names of what waits, as ends of the names; `says`: the lines for what does not."""

    name: str
    layers: Callable[[], Sequence[nn.Module]]
    deferred: str
    says: str = ""
    batch: Callable[[], Batch] = rows
    loss: Callable[[Any, Any], Tensor] = mean_square
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def train_both(case: Case, *, keep: bool, waiting: int, balance: Sequence[int]) -> tuple[nn.Sequential, list[str]]:
    """Two steps whose gradients add up, and a third after a change of the weights: all equal those of the plain loop."""
    torch.manual_seed(0)
    model, reference = twins(case.layers())
    for layer in (*model, *reference):
        if isinstance(layer, Hooked):
            layer.hook()
    meter = ActivationMeter()
    meter.exclude(model.parameters())
    stages = make_stages(list(model), balance, case.loss, meter)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            if step == 2:
                for parameter in (*model.parameters(), *reference.parameters()):
                    parameter.data *= 0.5
                    parameter.grad = None
            inputs, targets = case.batch()
            with case.around():
                options = {"keep": lambda _: keep, "prove": lambda i, step=step: step == i == 0, "waiting": waiting}
                loss = run_step(stages, copy.deepcopy(inputs), targets, M, step=step, **options)
                expected = reference_step(
                    reference, case.loss, copy.deepcopy(inputs), targets, num_microbatches=M, step=step
                )
            assert torch.equal(loss, expected)
            assert_same_gradients(model, reference)
            assert meter.current_bytes == 0
            for stage in stages:
                stage.end_step()
    return model, [str(one.message) for one in said]


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), f"{name} by {(ours.grad - theirs.grad).abs().max()}"
            assert ours.grad.stride() == theirs.grad.stride(), name


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in names)
    return layer


def tokens() -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 7, (M * 2, 5), generator=generator)
    return ids, ids.roll(-1, 1)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def transformer(name: str) -> list[nn.Module]:
    config = ModelConfig(name=name, num_blocks=1, hidden_size=8, num_heads=2, dropout=0.1, max_sequence_length=8)
    return [build() for build in transformer_layers(config, 7)]


def sequences() -> Batch:
    return rows(M * 2, 3, WIDTH)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(linear(), nn.Tanh()), backend="eager", fullgraph=True)  # type: ignore[return-value]


_STAYS = "gradients of its weights stay in I and do not wait for W: "
_MADE = "its weight is made from a parameter in its forward, or is one of a kind of its own"
_HOOKS = "its weight has hooks, which would run in I"
GPT2 = "1.mlp.up 1.mlp.down 2.logits " + (
    _QKV := "1.attention.query 1.attention.key 1.attention.value 1.attention.output "
)

CASES = [
    Case("plain", lambda: [linear(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH, bias=False)], "0 3"),
    Case("gpt2", lambda: transformer("gpt2"), GPT2, batch=tokens, loss=cross_entropy),
    Case(
        "llama",
        lambda: transformer("llama"),
        _QKV + "1.mlp.gate 1.mlp.up 1.mlp.down 2.logits",
        batch=tokens,
        loss=cross_entropy,
    ),
    Case(
        "attention's in-projection",
        lambda: [linear(), nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)],
        "0 1.self_attn.in_proj_weight 1.self_attn.in_proj_bias 1.self_attn.out_proj 1.linear1 1.linear2",
        batch=sequences,
    ),
    Case(
        "attention to something else",
        lambda: [linear(), Cross()],
        "0 1.attention.out_proj",
        f"layer 1 (Cross): {_STAYS}{_MADE}",
        batch=sequences,
    ),
    Case("addmm", lambda: [Conv1D(), nn.Tanh(), Conv1D()], "0 2", batch=sequences),
    Case("four dimensions", lambda: [linear(), nn.Tanh(), linear()], "0 2", batch=lambda: rows(M * 2, 2, 3, WIDTH)),
    Case(
        "a vector",
        lambda: [nn.Flatten(0, -1), linear()],
        "",
        f"layer 1 (Linear): {_STAYS}it multiplies other than plain tensors of one dtype",
        batch=lambda: rows(M, WIDTH),
        loss=lambda output, target: mean_square(output, target[0]),
    ),
    Case("a weight made of another", lambda: [Times(), nn.Tanh(), linear()], "2", f"layer 0 (Times): {_STAYS}{_MADE}"),
    Case(
        "weight_norm",
        lambda: [weight_norm(linear()), nn.Tanh(), linear()],
        "2",
        f"layer 0 (ParametrizedLinear): {_STAYS}{_MADE}",
    ),
    Case("a linear layer used twice", lambda: [Twice(), nn.Tanh(), linear()], "0.inner 2"),
    Case("a shared bias", lambda: [SharedBias(), nn.Tanh(), linear()], "0.first 0.second 2"),
    Case(
        "embedding and head tied",
        lambda: [Tied()],
        "0.inner",
        f"layer 0 (Tied): {_STAYS}its weight is read by EmbeddingBackward0, too",
        batch=tokens,
        loss=cross_entropy,
    ),
    Case("autocast", lambda: [linear(), nn.Tanh(), linear()], "0 2", around=autocast),
    Case("autocast, used twice", lambda: [Twice(), nn.LayerNorm(WIDTH), Twice()], "0.inner 2.inner", around=autocast),
    Case("autocast, gpt2", lambda: transformer("gpt2"), GPT2, batch=tokens, loss=cross_entropy, around=autocast),
    Case("autocast switched off inside", lambda: [linear(), InFull(), linear()], "0 1.inner 2", around=autocast),
    Case(
        "autocast, tied",
        lambda: [Tied()],
        "0.inner",
        f"layer 0 (Tied): {_STAYS}its weight is read by EmbeddingBackward0, too",
        batch=tokens,
        loss=cross_entropy,
        around=autocast,
    ),
    Case(
        "autocast that keeps no casts",
        lambda: [linear(), nn.Tanh(), linear()],
        "",
        "; ".join(
            f"layer {n} (Linear): {_STAYS}it runs under an autocast that does not keep a cast of its weight"
            for n in (0, 2)
        ),
        around=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ),
    Case("a hook", lambda: [Hooked(after=False)], "0.plain", f"layer 0 (Hooked): {_STAYS}{_HOOKS}"),
    Case("a hook after", lambda: [Hooked(after=True)], "0.plain", f"layer 0 (Hooked): {_STAYS}{_HOOKS}"),
    Case(
        "nested checkpoint",
        lambda: [Checkpointed(use_reentrant=False), linear()],
        "0.before 1",
        f"layer 0 (Checkpointed): {_STAYS}it runs under torch.utils.checkpoint, or other hooks for saved tensors",
    ),
    Case(
        "nested checkpoint, reentrant", lambda: [linear(), Checkpointed(use_reentrant=True), linear()], "0 1.before 2"
    ),
    Case(
        "a compiled layer",
        lambda: [linear(), compiled(), linear()],
        "0 2",
        f"layer 1 (OptimizedModule): {_STAYS}it is compiled, at least in part",
    ),
    Case("torch.func", lambda: [Mapped(), linear()], "1", f"layer 0 (Mapped): {_STAYS}it runs under torch.func"),
    Case("a gradient inside a forward", lambda: [linear(), Penalty(), linear()], "0 2", "*"),
    Case("frozen weights", lambda: [frozen(linear(), "weight"), nn.Tanh(), frozen(linear(), "bias")], "2"),
    Case("a frozen stage", lambda: [frozen(linear(), "weight", "bias"), nn.Tanh(), linear()], "2"),
    Case("a function of one's own", lambda: [Scaled(), nn.Tanh(), linear()], "0 2"),
    Case(
        "a function of one's own, of what is made",
        lambda: [Scaled(made=True), nn.Tanh(), linear()],
        "2",
        f"layer 0 (Scaled): {_STAYS}a weight of it is no plain parameter, or has hooks",
    ),
    Case("in place after it", lambda: [linear(), nn.ReLU(inplace=True), linear()], "0 2", batch=sequences),
    Case("a column-major input", lambda: [nn.Sequential(nn.Tanh(), Transposed()), linear()], "1"),
]


def names_of(case: Case, model: nn.Module) -> set[str]:
    """The weights and biases that `case.deferred` names, or their modules."""
    named = set(case.deferred.split())
    learning = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name for name in learning if {name, name.removesuffix(".weight").removesuffix(".bias")} & named}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_to_the_whole_backward(case: Case, keep: bool, waited: Waited) -> None:
    layers = len(case.layers())
    for waiting, balance in ((1, [layers]), (M, [1] * layers)):
        waited.seen.clear()
        model, said = train_both(case, keep=keep, waiting=waiting, balance=balance)
        assert waited.names(model) == names_of(case, model)
        if case.says != "*":
            assert said == (case.says.split("; ") if case.says else [])


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.permutations(range(3)),
    st.sampled_from(["linear", "without bias", "addmm"]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 1 << 16),
)
@settings(deadline=None, max_examples=150)
def test_one_product_is_that_of_torch(
    shape: list[int], width: int, outputs: int, order: list[int], kind: str, needs: bool, dtype: torch.dtype, seed: int
) -> None:
    """Any shape and strides: the same bits, forward and backward, in halves and whole."""
    torch.manual_seed(seed)
    shape = [*shape, width] if kind != "addmm" else [shape[0], width]
    order = sorted(range(len(shape)), key=lambda place: order[place % 3])
    inverse = sorted(range(len(shape)), key=lambda place: order[place])
    x = torch.randn([shape[place] for place in order], dtype=dtype).permute(inverse).requires_grad_(needs)
    weight = nn.Parameter(torch.randn(*((width, outputs) if kind == "addmm" else (outputs, width)), dtype=dtype))
    bias = None if kind == "without bias" else nn.Parameter(torch.randn(outputs, dtype=dtype))
    expected = torch.addmm(bias, x, weight) if kind == "addmm" else F.linear(x, weight, bias)  # type: ignore[arg-type]
    found = SplitLinear.apply(x, weight, bias, kind != "addmm")
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    gradient = torch.randn_like(expected)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None and leaf.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient)
    ):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


# One stage by hand ----------------------------------------------------------------------------------------------------


def one_stage(*layers: nn.Module) -> Stage:
    (stage,) = make_stages(layers, [len(layers)], mean_square, ActivationMeter())
    return stage


def test_only_what_w_needs_is_held_and_only_until_then() -> None:
    """Of a set of 4 tensors (the batch, two inputs of linear layers, the loss's) I leaves the inputs and what W multiplies them by."""
    model = [linear(), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)]
    stage, meter = one_stage(*model), ActivationMeter()
    meter.exclude(parameter for layer in model for parameter in layer.parameters())
    stage._meter = stage._weights._meter = meter
    inputs, targets = rows()
    one = inputs.nbytes
    seen: list[int] = []
    run_w = stage.backward_weights
    stage.backward_weights = lambda microbatch: (
        seen.append(meter.current_bytes),
        run_w(microbatch),
        seen.append(meter.current_bytes),
    )  # type: ignore[assignment, func-returns-value, method-assign]
    run_step([stage], inputs, targets, 1, keep=lambda _: True, waiting=0)
    assert seen == [4 * one, 0]
    assert stage.set_bytes[0] >= 4 * one


def test_casts_are_no_part_of_a_set() -> None:
    """Under autocast x and the gradient wait in half the bytes, and the weight's cast is the step's."""
    sizes = {}
    for name, around in (("full", nullcontext), ("autocast", autocast)):
        stage = one_stage(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        stage._meter.exclude(parameter for layer in stage.layers for parameter in layer.parameters())
        with around(), warnings.catch_warnings():
            warnings.simplefilter("error")
            run_step([stage], *rows(M * 2, 64), M, keep=lambda _: False, waiting=1)
        sizes[name] = stage.set_bytes[0]
    assert sizes["autocast"] <= sizes["full"]


def test_a_step_that_fails_holds_nothing() -> None:
    stage = one_stage(linear())
    meter = stage._meter
    with pytest.raises(ZeroDivisionError):
        run_step([stage], *rows(), M, keep=lambda _: True, waiting=M, before_w=lambda: 1 // 0)
    assert meter.current_bytes > 0
    stage.drop()
    assert meter.current_bytes == 0
    stage.end_step()


def test_w_is_missed_at_the_end_of_a_step() -> None:
    stage = one_stage(linear())
    with pytest.raises(ZeroDivisionError):
        run_step([stage], *rows(), M, keep=lambda _: True, waiting=M, before_w=lambda: 1 // 0)
    with pytest.raises(AssertionError, match="stage 0 has had no W of microbatches 0, 1, 2, 3"):
        stage.end_step()


def test_what_waits_may_not_change() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(torch.tanh(x))
            return kept[-1]

    def change() -> None:
        kept[0].data.view(-1)[:1]
        kept[0].detach().mul_(2)

    stage = one_stage(linear(), Keeps(), linear())
    with pytest.raises(
        SavedTensorChanged, match=r"layer 2 \(Linear\): a tensor \[2, 6\] that W needs was changed in place after I"
    ):
        run_step([stage], *rows(), M, keep=lambda _: True, waiting=M, before_w=change)


def test_another_path_later_gives_the_whole_gradient_all_the_same() -> None:
    """The weight is read in another way by a microbatch that was not the first: at most the order of a sum differs."""
    inputs, targets = rows()
    inputs[-2] = 1000.0
    torch.manual_seed(0)
    model, reference = twins([PathByData()])
    run_step(
        make_stages(list(model), [1], mean_square, ActivationMeter()),
        inputs,
        targets,
        M,
        keep=lambda _: True,
        waiting=M,
    )
    reference_step(reference, mean_square, inputs, targets, num_microbatches=M)
    torch.testing.assert_close(*(next(one.parameters()).grad for one in (model, reference)), rtol=1e-6, atol=0)


def test_nothing_of_torch_is_replaced_outside_of_a_layer() -> None:
    linear_of_torch, addmm = F.linear, torch.addmm
    inside: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.append(F.linear is linear_of_torch)
            return x

    for waiting in (None, 0):
        run_step([one_stage(Looks(), linear())], *rows(), M, keep=lambda _: False, waiting=waiting)
    assert inside == [True] * 2 * M + [False] * 2 * M
    with linears_split(), linears_split():
        assert F.linear is not linear_of_torch
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).grad_fn is None
    assert (F.linear, torch.addmm) == (linear_of_torch, addmm)


def test_a_gradient_is_added_as_autograd_adds_it() -> None:
    """The first becomes `.grad`, with the strides and the dtype of the parameter."""
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    gradient = torch.ones(3, 2).t()
    for count in (1, 2):
        with torch.no_grad():
            accumulate(parameter, gradient)
        assert parameter.grad is not None
        assert (parameter.grad.dtype, parameter.grad.stride()) == (torch.bfloat16, (3, 1))
        assert torch.equal(parameter.grad, torch.full((2, 3), float(count), dtype=torch.bfloat16))


def test_a_function_of_one_s_own_may_have_a_third_kernel_for_the_whole() -> None:
    calls: list[str] = []

    class Kernels(SplitFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            calls.append("whole")
            return gradient, (gradient * ctx.saved_tensors[0]).sum(0)

        @staticmethod
        def backward_input(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            calls.append("input")
            return gradient, None

        @staticmethod
        def backward_weight(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
            calls.append("weight")
            return None, (gradient * ctx.saved_tensors[0]).sum(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = Kernels.apply(x, self.weight)
            return output

    for waiting, expected in ((None, ["whole"] * 2), (2, ["input"] * 2 + ["weight"] * 2)):
        calls.clear()
        run_step([one_stage(linear(), Layer())], *rows(), 2, keep=lambda _: True, waiting=waiting)
        assert calls == expected
