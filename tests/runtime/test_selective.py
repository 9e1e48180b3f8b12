"""Outputs that stay from F to B: the same bits, fewer operations in R, and the bytes that the meter says."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_rank import CPU, make_stages, run_step, twins
from parity_cases import assert_same_gradients, assert_same_tensors, mean_square
from stage_models import LAYERS, FunctionalGradInside, GradInside, M, batch, count_call, linear, meter_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import Block
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.errors import RecomputeMismatch
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.stage import Stage

WHATEVER = ["matmul", "attention", "tanh", "sigmoid", "relu", "gelu", "add", "mul", "exp", "_softmax"]


class Counted(TorchDispatchMode):
    """Counts the operations that run, by name, while `phase` has a value."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[str, Counter[str]] = {}
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.setdefault(self.phase, Counter())[func._schema.name.partition("::")[2]] += 1
        return func(*args, **kwargs or {})

    def in_recompute(self, stage: Stage) -> None:
        """Counts R of `stage` apart."""
        recompute = stage.recompute

        def counted(microbatch: int) -> None:
            self.phase = "R"
            recompute(microbatch)
            self.phase = ""

        stage.recompute = counted  # type: ignore[method-assign]


def check_equal(
    layers: Sequence[nn.Module],
    selective: Sequence[str],
    *,
    balance: Sequence[int] | None = None,
    prove: Callable[[int], bool] = lambda microbatch: microbatch == 0,
    autocast: bool = False,
    waiting: int | None = None,
    inputs: Tensor | None = None,
    loss_fn: Any = mean_square,
    compiled: Sequence[int] = (),
) -> Counter[str]:
    """One step is that of the plain loop, bit for bit, and nothing is held after it; returns what R ran."""
    reference, ours = twins(layers)
    for number in compiled:
        ours[number].compile(backend="aot_eager")
    given, targets = batch() if inputs is None else (inputs, inputs)
    meter = meter_of(ours)
    stages = make_stages(list(ours), balance or [len(layers)], loss_fn, meter, selective)
    counted = Counted()
    for stage in stages:
        counted.in_recompute(stage)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = reference_step(reference, loss_fn, given.clone(), targets, num_microbatches=M)
        with counted:
            loss = run_step(stages, given.clone(), targets, M, prove=prove, waiting=waiting)
    assert torch.equal(loss, expected)
    assert_same_gradients(ours, reference)  # type: ignore[arg-type]
    assert_same_tensors(ours.state_dict(), reference.state_dict())
    assert meter.current_bytes == 0
    return counted.ran.get("R", Counter())


# Equal bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:recompute.selective=.* keeps no")  # not all of them have all operations
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_reference(name: str) -> None:
    torch.manual_seed(0)
    layers = LAYERS[name]()
    check_equal(layers, ["matmul"], balance=[2, 4], prove=lambda microbatch: False)
    check_equal(layers, WHATEVER, balance=[6])


def block(**keys: Any) -> Block:
    torch.manual_seed(0)
    return Block(ModelConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, **keys))


def hidden() -> Tensor:
    return torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(2))


GPT2 = {"name": "gpt2", "num_key_value_heads": 4}


@pytest.mark.parametrize(("keys", "autocast"), [({"dropout": 0.2}, False), (GPT2, False), (GPT2, True)])
def test_a_block_equals_the_reference_and_r_multiplies_nothing(keys: dict[str, Any], autocast: bool) -> None:
    keys = {"num_key_value_heads": 2, **keys}
    torch.manual_seed(0)
    layers = [Block(ModelConfig(hidden_size=32, num_attention_heads=4, **keys)) for _ in range(2)]
    ran = check_equal(layers, ["matmul", "attention"], inputs=hidden(), autocast=autocast)
    assert ran["mm"] + ran["addmm"] == 0
    assert not any("attention" in op for op in ran)
    all_of_it = check_equal(layers, [], inputs=hidden(), autocast=autocast)
    assert all_of_it["mm"] + all_of_it["addmm"] >= 12 * M


def test_frozen_weights_under_autocast() -> None:
    layers = [block() for _ in range(2)]
    layers[0].requires_grad_(requires_grad=False)
    layers[1].mlp.requires_grad_(requires_grad=False)
    check_equal(layers, ["matmul"], inputs=hidden(), autocast=True)


def test_a_backward_in_halves() -> None:
    ran = check_equal([block(), block()], ["matmul", "attention"], inputs=hidden(), waiting=1)
    assert ran["mm"] + ran["addmm"] == 0


@pytest.mark.parametrize("inside", [GradInside, FunctionalGradInside])
def test_layers_that_take_gradients_inside(inside: Any) -> None:
    torch.manual_seed(0)
    layers = [linear(), inside(), linear(), inside(), linear(), linear()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for proved in (lambda microbatch: False, lambda microbatch: microbatch == 0):
            check_equal(layers, ["matmul", "tanh"], balance=[2, 4], prove=proved)


# Traps -----------------------------------------------------------------------------------------------------------------


class InPlaceOn(nn.Module):
    """Changes the output of a product in place: where torch counts a version for it, where it does not, behind its back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "through a view":
            return self.second(self.first(x[:, None]).mul_(1.5)[:, 0]).sigmoid()
        y = self.first(x)
        if self.how == "plain":
            y.mul_(1.5)
        elif self.how == "data":
            y.data.mul_(1.5)
        elif self.how == "out":
            with torch.no_grad():
                torch.mul(y, 1.5, out=y.detach())
        elif self.how == "list":
            with torch.no_grad():
                torch._foreach_mul_([y.detach()], 1.5)
        return self.second(y).sigmoid()


@pytest.mark.parametrize("how", ["plain", "through a view", "data", "out", "list"])
@pytest.mark.parametrize("proved", [0, None])
def test_an_operation_writes_on_a_kept_output(how: str, proved: int | None) -> None:
    torch.manual_seed(0)
    ran = check_equal(
        [InPlaceOn(how), InPlaceOn(how)], ["matmul"], prove=lambda microbatch: microbatch == proved
    )  # what is kept is a copy, so that R need not compute it even so
    assert ran["mm"] == 0


class ByALayerAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


@pytest.mark.parametrize("inside", [GradInside, nn.Identity])
def test_another_layer_writes_on_a_kept_output(inside: Any) -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Linear(8, 8, bias=False), nn.Flatten(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_equal([linear(), inside(), wide, ByALayerAfter(), nn.Tanh(), linear()], ["matmul"])


@torch.library.custom_op("pipetrain_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws random numbers, which torch is not told."""
    return x * torch.rand_like(x)


@torch.library.custom_op("pipetrain_tests::quiet", mutates_args=())
def quiet(x: Tensor) -> Tensor:
    return x * 3


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradient(ctx: Any, gradient: Tensor) -> Tensor:
    x, output = ctx.saved_tensors
    return gradient * output / x


noisy.register_autograd(_gradient, setup_context=_save)
quiet.register_autograd(_gradient, setup_context=_save)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = quiet(noisy(self.linear(x)))
        y = y * (1 + torch.rand_like(y))
        heads = y.view(len(y), 1, 2, 4)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).flatten(1)
        return F.dropout(mixed.tanh(), 0.3)


@pytest.mark.filterwarnings("ignore:recompute.selective=.* keeps no")  # as it must not, here
def test_what_draws_random_numbers_is_never_skipped() -> None:
    torch.manual_seed(0)
    wanted = ["matmul", "attention", "native_dropout", "rand_like", "pipetrain_tests::noisy", "pipetrain_tests::quiet"]
    ran = check_equal([Draws(), Draws()], wanted, prove=lambda microbatch: False)
    assert (ran["noisy"], ran["rand_like"], ran["quiet"], ran["addmm"]) == (2 * M, 2 * M, 0, 0)


class WritesOnIt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0).tanh()


def test_a_compiled_layer_is_not_looked_into() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Linear(8, 8, bias=False), nn.Flatten(1))
    layers = [linear(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), wide, WritesOnIt(), linear()]
    ran = check_equal(layers, ["matmul"], prove=lambda microbatch: False, compiled=(1, 3))
    assert (ran["addmm"], ran["mm"]) == (M, 0)  # of the compiled layer; of what the other one wrote on there is a copy


class OtherProducts(nn.Module):
    """Multiplies once more in each R."""

    def __init__(self, *, shape: bool) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(8, 8), shape

    def forward(self, x: Tensor) -> Tensor:
        if count_call(self) > M:
            with torch.no_grad():
                x = x + (self.linear(x[:1]) if self.shape else x @ x.t()).sum() * 0
        return self.linear(x).tanh()


@pytest.mark.parametrize("shape", [False, True])
def test_another_order_of_products_is_refused(shape: bool) -> None:
    meter = ActivationMeter()
    stages = make_stages([OtherProducts(shape=shape)], [1], mean_square, meter, ["matmul"])
    op = "addmm" if shape else "mm"
    with pytest.raises(
        RecomputeMismatch, match=rf"layer 0 \(OtherProducts\): the recompute computes aten.{op}.default of \["
    ) as raised:
        run_step(stages, *batch(), M)
    assert "where F computed aten.addmm.default of [8] float32 and [3, 8] float32" in str(raised.value)
    del raised
    for stage in stages:
        stage.drop()
    assert meter.current_bytes == 0


# Bytes -----------------------------------------------------------------------------------------------------------------


class Measured(nn.Module):
    """Of a product's output, `[rows, 8]`, nothing is saved; of the other's, `[rows, 16]`, all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.other(self.one(x).tanh()) + 1).exp())


def test_kept_outputs_are_counted_beside_the_slots() -> None:
    rows, number = 8, 4
    meter = ActivationMeter()
    model = nn.Sequential(Measured())
    meter.exclude(model.parameters())
    (stage,) = make_stages(list(model), [1], mean_square, meter, ["matmul", "exp"])
    seen = []
    run_step(
        [stage],
        torch.randn(rows, 8),
        torch.randn(rows, 8),
        1,
        before_recompute=lambda *_: seen.append(meter.current_bytes),
    )
    given, kept = rows * 8 * number, rows * (16 + 8 + 8 + 8) * number  # the products', exp's
    assert seen == [given + kept]
    assert stage.kept_bytes == {0: kept}
    assert stage.stash_bytes == {0: given}
    whole = make_stages(list(model), [1], mean_square, meter)[0]
    run_step([whole], torch.randn(rows, 8), torch.randn(rows, 8), 1)
    assert stage.set_bytes == whole.set_bytes
    assert meter.current_bytes == 0


def test_an_output_that_r_never_comes_to_is_not_kept() -> None:
    meter = ActivationMeter()
    (stage,) = make_stages([linear()], [1], lambda output, _: output.sum(), meter, ["matmul"])
    run_step([stage], *batch(), 1)
    assert stage.kept_bytes == {0: 0}


# Names -----------------------------------------------------------------------------------------------------------------


def kept_in(selective: Sequence[str], layers: Sequence[nn.Module], inputs: Tensor) -> Counter[str]:
    return check_equal(layers, selective, inputs=inputs, prove=lambda microbatch: False)


def test_layers_modules_and_operations_by_name() -> None:
    layers, given = [block(), block(), block()], hidden()
    products = 7 * M  # of a block, in each R
    everything = 3 * products
    assert kept_in([], layers, given)["mm"] == everything
    assert kept_in(["0-1:matmul"], layers, given)["mm"] == everything - 2 * products
    assert kept_in(["1.mlp"], layers, given)["mm"] == everything - 3 * M
    assert kept_in(["0-2.attention.query:mm", "1.mlp.gate"], layers, given)["mm"] == everything - 4 * M
    ran = kept_in(["0", "aten::silu"], layers, given)
    assert (ran["mm"], ran["silu"]) == (everything - products, 0)
    assert ran["_scaled_dot_product_flash_attention_for_cpu"] == 2 * M


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("matmull", "recompute.selective=matmull: there is no operation 'matmull'; did you mean 'matmul'?"),
        ("linear", "recompute.selective=linear: linear is made of other operations"),
        ("view", "recompute.selective=view: view is a view or a cast"),
        ("_to_copy", "recompute.selective=_to_copy: _to_copy is a view or a cast"),
        ("native_batch_norm", "recompute.selective=native_batch_norm: native_batch_norm is a view or a cast, or changes something"),
        ("3.atention", "recompute.selective=3.atention: layer 3 has no module 'atention'; did you mean 'attention'?"),
        ("3-4.mlp.gat", "recompute.selective=3-4.mlp.gat: layers 3 to 4 has no module 'mlp.gat'; did you mean 'mlp.gate'?"),
        ("pipetrain_tests::nosy", "there is no operation 'pipetrain_tests::nosy'"),
    ],
)  # fmt: skip
def test_a_name_that_matches_nothing(entry: str, message: str) -> None:
    wanted = RecomputePolicy(selective=entry).selective
    with pytest.raises(ValueError, match="^.*" + message.replace("?", r"\?")):
        Stage(0, [block(), block()], first_layer=3, device=CPU, meter=ActivationMeter(), selective=wanted)


class Attends(nn.Module):
    """With dropout torch has no fused attention on a CPU."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).view(len(x), 1, 2, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout).flatten(1)


@pytest.mark.parametrize(
    ("entry", "dropout", "message"),
    [
        ("attention", 0.3, "recompute.selective=attention keeps no attention in stage 0: torch runs it there as products"),
        ("0-1:attention", 0.3, "recompute.selective=0-1:attention keeps no attention in stage 0"),
        ("0-1", 0.3, "recompute.selective=0-1 keeps no attention in stage 0"),
        ("silu", 0.0, "recompute.selective=silu keeps nothing in stage 0: none of its layers there runs such an operation"),
        ("1:mm", 0.0, "recompute.selective=1:mm keeps nothing in stage 0"),
    ],
)  # fmt: skip
def test_an_entry_that_keeps_nothing_is_told(entry: str, dropout: float, message: str) -> None:
    layers = [Attends(dropout), Attends(dropout)]
    (stage,) = make_stages(layers, [2], mean_square, ActivationMeter(), [entry])
    with pytest.warns(UserWarning, match="keeps") as told:
        run_step([stage], *batch(), M)
    assert [str(one.message)[: len(message)] for one in told] == [message]
    assert "\n" not in str(told[0].message)


@pytest.mark.parametrize("entry", ["attention", "0-1:attention", "0-4:attention", "0-1", "matmul", "addmm"])
def test_an_entry_that_keeps_something_is_not(entry: str) -> None:
    (stage,) = make_stages([Attends(0.0), Attends(0.0)], [2], mean_square, ActivationMeter(), [entry])
    run_step([stage], *batch(), M)
    assert stage.kept_bytes[0] > 0


@pytest.mark.parametrize("entry", ["attention", "0-4:attention", "0-4", "0-4.mlp"])
def test_what_other_stages_may_have_is_not_missed(entry: str) -> None:
    (stage,) = make_stages([linear(), linear()], [2], mean_square, ActivationMeter(), [entry])
    run_step([stage], *batch(), M)


# In a pipeline --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "schedule", "segments"), [("inline", "gpipe", 2), ("overlap", "interleaved", 1)])
def test_a_pipeline_keeps_outputs_and_says_so(mode: str, schedule: str, segments: int) -> None:
    torch.manual_seed(0)
    reference, ours = twins([Block(ModelConfig(hidden_size=32, num_attention_heads=4, dropout=0.1)) for _ in range(4)])
    given, kept = hidden(), []
    for selective in (None, "matmul"):
        policy = RecomputePolicy(mode, selective=selective, segments=segments, last_stage="always")  # type: ignore[arg-type]
        with Pipeline(
            list(ours), mean_square, num_microbatches=M, schedule=schedule, recompute=policy, stages_per_rank=2
        ) as pipeline:
            for step in range(2):
                expected = reference_step(reference, mean_square, given, given, num_microbatches=M, step=step)
                assert torch.equal(pipeline.step(given, given), expected)
            assert_same_gradients(pipeline, reference)
            kept.append((pipeline.report.kept_bytes, pipeline.report.set_bytes))
            reference.zero_grad()
            ours.zero_grad()
    (none, whole), (some, again) = kept
    assert none == 0 < some < again == whole
