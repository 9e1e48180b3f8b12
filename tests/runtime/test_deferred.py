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
from one_rank import assert_equal_gradients, make_stages, run_step, twins
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from waiting_layers import (
    WIDTH,
    Batch,
    Checkpointed,
    Conv1D,
    Cross,
    Hooked,
    InFull,
    M,
    Mapped,
    Penalty,
    Scaled,
    SharedBias,
    Tied,
    Times,
    Transposed,
    Twice,
    autocast,
    linear,
    mean_square,
    rows,
)

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import transformer_layers
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.stage import split_backward
from pipetrain.stage.errors import LayerRefused
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.split_linear import SplitLinear


@dataclass
class Waited:
    """Parameters that had a gradient in some W, by identity."""

    seen: set[int]

    def names(self, model: nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if id(parameter) in self.seen}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Waited:
    found, accumulate = Waited(set()), split_backward.accumulate

    def watched(parameter: nn.Parameter, gradient: Tensor) -> None:
        found.seen.add(id(parameter))
        accumulate(parameter, gradient)

    monkeypatch.setattr(split_backward, "accumulate", watched)
    return found


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
            assert_equal_gradients(model, reference)
            assert meter.current_bytes == 0
            for stage in stages:
                stage.end_step()
    return model, [str(one.message) for one in said]


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
    config = ModelConfig(
        name=name, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, dropout=0.1, max_position_embeddings=8
    )
    return [build() for build in transformer_layers(config, 7)]


def sequences() -> Batch:
    return rows(M * 2, 3, WIDTH)


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(linear(), nn.Tanh()), backend="eager", fullgraph=True)  # type: ignore[return-value]


def stays(number: int, layer: str, why: str) -> str:
    return f"layer {number} ({layer}): gradients of its weights stay in I and do not wait for W: {why}"


TEXT: dict[str, Any] = {"batch": tokens, "loss": cross_entropy}
_MADE = "its weight is computed in its forward, or is of a subclass of nn.Parameter"
_HOOKS = "its weight has hooks, which would run in I"
GPT2 = "1.mlp.up 1.mlp.down 2.logits " + (
    _QKV := "1.attention.query 1.attention.key 1.attention.value 1.attention.output "
)

CASES = [
    Case("plain", lambda: [linear(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH, bias=False)], "0 3"),
    Case("gpt2", lambda: transformer("gpt2"), GPT2, **TEXT),
    Case("llama", lambda: transformer("llama"), _QKV + "1.mlp.gate 1.mlp.up 1.mlp.down 2.logits", **TEXT),
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
        stays(1, "Cross", _MADE),
        batch=sequences,
    ),
    Case("addmm", lambda: [Conv1D(), nn.Tanh(), Conv1D()], "0 2", batch=sequences),
    Case(
        "a vector",
        lambda: [nn.Flatten(0, -1), linear()],
        "",
        stays(1, "Linear", "it multiplies tensors that are not plain, or of different dtypes"),
        batch=lambda: rows(M, WIDTH),
        loss=lambda output, target: mean_square(output, target[0]),
    ),
    Case("a weight made of another", lambda: [Times(), nn.Tanh(), linear()], "2", stays(0, "Times", _MADE)),
    Case("a linear layer used twice", lambda: [Twice(), nn.Tanh(), linear()], "0.inner 2"),
    Case("a shared bias", lambda: [SharedBias(), nn.Tanh(), linear()], "0.first 0.second 2"),
    Case(
        "embedding and head tied",
        lambda: [Tied()],
        "0.inner",
        stays(0, "Tied", "EmbeddingBackward0 reads one of them, too"),
        **TEXT,
    ),
    Case("autocast", lambda: [linear(), nn.Tanh(), linear()], "0 2", around=autocast),
    Case("autocast, used twice", lambda: [Twice(), nn.LayerNorm(WIDTH), Twice()], "0.inner 2.inner", around=autocast),
    Case("autocast, gpt2", lambda: transformer("gpt2"), GPT2, **TEXT, around=autocast),
    Case("autocast switched off inside", lambda: [linear(), InFull(), linear()], "0 1.inner 2", around=autocast),
    Case(
        "autocast that keeps no casts",
        lambda: [linear(), nn.Tanh(), linear()],
        "",
        "; ".join(
            stays(n, "Linear", "it runs under an autocast that does not keep a cast of its weight") for n in (0, 2)
        ),
        around=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ),
    Case("a hook", lambda: [Hooked(after=False)], "0.plain", stays(0, "Hooked", _HOOKS)),
    Case("a hook after", lambda: [Hooked(after=True)], "0.plain", stays(0, "Hooked", _HOOKS)),
    Case(
        "a hook on a node",
        lambda: [Hooked(on_node=True), linear()],
        "0.plain 1",
        stays(0, "Hooked", "a hook on the node that accumulates its gradient would run in I"),
    ),
    Case(
        "nested checkpoint",
        lambda: [Checkpointed(use_reentrant=False), linear()],
        "0.before 1",
        stays(0, "Checkpointed", "it runs under torch.utils.checkpoint, or other hooks for saved tensors"),
    ),
    Case(
        "nested checkpoint, reentrant", lambda: [linear(), Checkpointed(use_reentrant=True), linear()], "0 1.before 2"
    ),
    Case(
        "a compiled layer",
        lambda: [linear(), compiled(), linear()],
        "0 2",
        stays(1, "OptimizedModule", "it is compiled, at least in part"),
    ),
    Case("torch.func", lambda: [Mapped(), linear()], "1", stays(0, "Mapped", "it runs under torch.func")),
    Case("a gradient inside a forward", lambda: [linear(), Penalty(), linear()], "0 2", "*"),
    Case("frozen weights", lambda: [frozen(linear(), "weight"), nn.Tanh(), frozen(linear(), "bias")], "2"),
    Case("a function of one's own", lambda: [Scaled(), nn.Tanh(), linear()], "0 2"),
    Case(
        "a function of one's own, of what is made",
        lambda: [Scaled(made=True), nn.Tanh(), linear()],
        "2",
        stays(0, "Scaled", "one of its weights is not a plain parameter, or has hooks"),
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


def test_a_gradient_inside_that_begins_later_is_refused_by_name() -> None:
    """Torch's own nodes of that gradient's graph would make other sums than the halves."""

    class Later(Penalty):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if begun else self.inner(x)

    begun: list[bool] = []
    plan = make_plan(3, num_ranks=1, num_microbatches=M, split_backward=True)
    with Pipeline([linear(), Later(), linear()], mean_square, plan=plan, recompute="never") as pipeline:
        pipeline.step(*rows())
        begun.append(True)
        with pytest.raises(
            LayerRefused, match=r"layer 1 \(Later\) takes a gradient inside its forward, which it did not"
        ):
            pipeline.step(*rows())


class Fused(TorchDispatchMode):
    """Whether a product and a sum ran as one operation: on some CPUs two give the same bits."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


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
    with Fused() as theirs_is:  # type: ignore[no-untyped-call]
        expected = torch.addmm(bias, x, weight) if kind == "addmm" else F.linear(x, weight, bias)  # type: ignore[arg-type]
    with Fused() as ours_is:  # type: ignore[no-untyped-call]
        found = SplitLinear.apply(x, weight, bias, kind != "addmm")
    assert ours_is.found == theirs_is.found
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    gradient = torch.randn_like(expected)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None and leaf.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient)
    ):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
