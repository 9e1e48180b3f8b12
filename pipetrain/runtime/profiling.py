"""Measures each layer of a model alone on this device: seconds of F, R and B, bytes saved for B, and seconds of each operation.

    layer, then a dummy that saves one number   seconds of F, of R through the whole layer, and of B
    the same, with outputs kept (selective R)   extra seconds of R for intercepting its operations
    the layer with a split backward             seconds of I and W; bytes held from I to W
    the layer alone                             seconds of R up to the layer's last saved tensor; bytes of its set
    the layer under a mode that measures time   per operation: seconds, bytes of its outputs, how many of these are saved

Layers that look the same are measured once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.models.spec import ModelSpec
from pipetrain.plan.profile import LOSS, LayerProfile, OpProfile, SavedTensor
from pipetrain.schedule.policy import Outputs
from pipetrain.stage.host_set import LEAST_BYTES
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import StageInput, StageOutput
from pipetrain.stage.seeding import generators_restored, layer_seeds
from pipetrain.stage.selective import OPS_OF, operation_of
from pipetrain.stage.stage import LossFn, Stage
from pipetrain.stage.tensor_copies import is_dense, storage_key

ROUNDS = 9
_LARGEST = 10
_ADAM_MOMENTS = 2
_Say = Callable[[str], None]


def profile_layers(
    spec: ModelSpec,
    inputs: Any,
    targets: Any = None,
    *,
    device: torch.device,
    loss_fn: LossFn | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    say: _Say = lambda _: None,
) -> tuple[LayerProfile, ...]:
    """Measure every layer of the model on one microbatch; times are medians of `rounds`.

    `inputs` and `targets` are as `Pipeline.step` takes them. One layer at a time is on the device. `autocast` makes the context in which a
    training step runs. Optimizer bytes are those of AdamW: two moments of each trained weight.
    """
    measured: dict[Any, LayerProfile] = {}
    outputs: dict[Any, Any] = {}
    value = inputs
    with generators_restored(device):
        for number in range(spec.num_layers):
            kind = spec.size.kinds[number] if spec.size.kinds else None
            is_first = number == 0  # its input needs no gradient
            look: Any = (is_first, kind, _form(value)) if kind else None
            if look not in measured:
                (layer,) = spec.build(number, number + 1, seed=seed, device=device)
                weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
                look = look or (is_first, type(layer).__qualname__, repr(layer), weights, _form(value))
            if look not in measured:
                say(f"layer {number} ({type(layer).__name__})")
                bench = _Bench(layer, device, rounds, autocast)
                measured[look] = bench.measure(number, value, needs_gradient=number > 0)
                outputs[look] = bench.output
            else:
                known = measured[look]
                measured[look] = replace(known, numbers=(*known.numbers, number))
            value = outputs[look]
        fn = loss_fn or spec.loss_fn
        if fn is not None:
            bench = _Bench(_Loss(fn, targets), device, rounds, autocast)
            measured[LOSS] = bench.measure(spec.num_layers, value, needs_gradient=True, kind=LOSS)
    return tuple(measured.values())


def _form(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    return f"{[(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]} {spec}"


class _Loss(nn.Module):
    """The loss as a layer."""

    def __init__(self, loss_fn: LossFn, targets: Any) -> None:
        super().__init__()
        self._loss_fn, self._targets = loss_fn, targets

    def forward(self, output: Any) -> Tensor:
        return self._loss_fn(output, self._targets)


class _SavesLittle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_zeros(1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return gradients[0]


class _End(nn.Module):
    """Makes R run to the end of the layer before it, as if more layers followed."""

    def forward(self, value: Any) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        number = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
        if number is not None:
            leaves[number] = _SavesLittle.apply(leaves[number])  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(leaves, spec)


@dataclass
class _Bench:
    """Measures one layer."""

    layer: nn.Module
    device: torch.device
    rounds: int
    autocast: Callable[[], AbstractContextManager[Any]]
    output: Any = None  # of the layer, detached

    def measure(self, number: int, value: Any, *, needs_gradient: bool, kind: str | None = None) -> LayerProfile:
        given = self._given(number, value, needs_gradient=needs_gradient)
        layer, times = self.layer, []
        through, alone = self._stage(number, [layer, _End()]), self._stage(number, [layer])
        keeping, split = self._stage(number, [layer, _End()], [Outputs()]), self._stage(number, [layer])
        with self.autocast():
            # The first round is verified and not counted. Later rounds add to its gradients, as later microbatches do in a step.
            for turn in range(1 + self.rounds):
                turns = [self._turn(stage, given, turn) for stage in (through, alone, keeping)]
                *halves, deferred = self._halves(split, given, turn)
                times.append((*turns[0], turns[1][1], turns[2][1], *halves))
            trace = self._trace(given)
        forward, recompute, backward, ends_early, keeps, first, second = map(statistics.median, zip(*times[1:]))
        set_bytes = trace.own_bytes() if alone.kept else alone.set_bytes.get(self.rounds, 0)
        saves_input = bool(trace.saved_keys & trace.inputs.keys())
        saves_output = bool(trace.saved_keys & trace.outputs.keys())
        input_bytes, output_bytes = sum(trace.inputs.values()), sum(trace.outputs.values())
        ops = trace.ops()
        spared = sum(op.seconds for op in ops if op.word is not None)
        trained_bytes = sum(one.nbytes for one in layer.parameters() if one.requires_grad)
        return LayerProfile(
            numbers=(number,),
            kind=kind or type(layer).__name__,
            forward_seconds=forward,
            backward_seconds=backward,
            recompute_seconds=recompute,
            recompute_last_seconds=ends_early,
            selective_seconds=keeps + spared - recompute,
            saved_bytes=set_bytes + (input_bytes if saves_input else 0),
            inner_bytes=set_bytes - (output_bytes if saves_output else 0),
            saves_input=saves_input,
            saves_output=saves_output,
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            parameter_bytes=sum(one.nbytes for one in layer.parameters()),
            gradient_bytes=trained_bytes,
            optimizer_bytes=_ADAM_MOMENTS * trained_bytes,
            largest=trace.largest(),
            ops=ops,
            input_gradient_seconds=first,
            weight_gradient_seconds=second,
            deferred_bytes=deferred,
            staying_bytes=trace.own_bytes(LEAST_BYTES),
            is_kept=bool(alone.kept),
        )

    def _stage(self, number: int, layers: Sequence[nn.Module], selective: Sequence[Outputs] = ()) -> Stage:
        meter = ActivationMeter()
        meter.exclude([*self.layer.parameters(), *self.layer.buffers()])
        return Stage(0, layers, first_layer=number, device=self.device, meter=meter, selective=selective)

    def _given(self, number: int, value: Any, *, needs_gradient: bool) -> StageInput:
        leaves, spec = pytree.tree_flatten(value)
        moved = tuple(leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        floats = [n for n, leaf in enumerate(moved) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        wants = frozenset(floats if needs_gradient else ())
        return StageInput(moved, spec, wants, lambda layers: layer_seeds(0, 0, 0, [layer + number for layer in layers]))

    def _halves(self, stage: Stage, given: StageInput, turn: int) -> tuple[float, float, int]:
        """Seconds of I and W of one microbatch, and the bytes held from I to W."""
        before = stage.meter.current_bytes
        output = stage.forward(turn, given, keep=True, split=True)
        gradients = self._gradients(output)
        start = self._now()
        stage.backward(turn, gradients)
        middle, deferred = self._now(), stage.meter.current_bytes - before
        stage.backward_weights(turn)
        end = self._now()
        stage.end_step()
        return middle - start, end - middle, deferred

    @staticmethod
    def _gradients(output: StageOutput) -> list[Tensor | None]:
        pairs = zip(output.leaves, output.wants_gradient)
        return [torch.ones_like(leaf) if wanted else None for leaf, wanted in pairs]

    def _turn(self, stage: Stage, given: StageInput, turn: int) -> tuple[float, float, float]:
        """Seconds of F, R and B of one microbatch."""
        start = self._now()
        output = stage.forward(turn, given, keep=False, prove=not turn)
        forward = self._now()
        stage.recompute(turn)
        recompute = self._now()
        gradients = self._gradients(output)
        self.output = pytree.tree_unflatten(list(output.leaves), output.spec)
        before = self._now()
        stage.backward(turn, gradients)
        end = self._now()
        stage.end_step()
        return forward - start, recompute - forward, end - before

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _trace(self, given: StageInput) -> _Trace:
        """The operations of one forward; the time of each is the median over up to three runs."""
        traces = []
        for _ in range(min(3, self.rounds)):
            pairs = enumerate(given.leaves)
            leaves = [leaf.detach().requires_grad_() if n in given.wants_gradient else leaf for n, leaf in pairs]
            trace = _Trace(self.layer, self._now)
            with saved_tensors_hooks(trace.pack, lambda tensor: tensor), trace:
                output = self.layer(pytree.tree_unflatten(leaves, given.spec))
            trace.inputs, trace.outputs = _sizes(leaves), _sizes(pytree.tree_leaves(output))
            traces.append(trace)
        last = traces[-1]
        for number, call in enumerate(last.calls):
            call.seconds = statistics.median(trace.calls[number].seconds for trace in traces)
        return last


@dataclass
class _Call:
    """One operation that ran."""

    op: str
    path: str
    num_saved: int  # tensors saved before it ran
    can_be_kept: bool
    seconds: float
    sizes: dict[int, int]  # bytes of its outputs' storages


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation, its time, its outputs, and the tensors that autograd saves."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, layer: nn.Module, now: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = now
        self._paths = {id(module): path for path, module in layer.named_modules()}
        self._weights = {storage_key(one) for one in (*layer.parameters(), *layer.buffers())}
        self._open: list[str] = [""]
        self._alive: list[Tensor] = []  # so that no storage's identity is used again
        self._saved: list[Tensor] = []
        self._num_saved = 0
        self.calls: list[_Call] = []
        self.saved_keys: set[int] = set()
        self.inputs: dict[int, int] = {}  # bytes of the storages of the layer's inputs
        self.outputs: dict[int, int] = {}  # bytes of the storages of the layer's outputs

    def __enter__(self) -> _Trace:
        def enter(module: nn.Module, _: Any) -> None:
            self._open.append(self._paths.get(id(module), self._open[-1]))

        def leave(*_: Any) -> None:
            self._open.pop()

        self._hooks = (
            torch_module.register_module_forward_pre_hook(enter),
            torch_module.register_module_forward_hook(leave, always_call=True),
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        start = self._now()
        given = func(*args, **kwargs)
        seconds = self._now() - start
        leaves = pytree.tree_leaves(given)
        self._alive += [one.detach() for one in leaves if isinstance(one, Tensor)]
        can_be_kept = operation is not None and operation.can_be_kept and not operation.draws_with(args, kwargs)
        name = str(func) if operation is None else operation.name
        call = _Call(name, self._open[-1], self._num_saved, can_be_kept, seconds, _sizes(leaves))
        self.calls.append(call)
        return given

    def pack(self, tensor: Tensor) -> Tensor:
        self._num_saved += 1
        if is_dense(tensor) and storage_key(tensor) not in self._weights:
            self._saved.append(tensor.detach())
            self.saved_keys.add(storage_key(tensor))
        return tensor

    def own_bytes(self, below: float = math.inf) -> int:
        """Bytes of saved storages, without those of the layer's inputs. With `below`, only storages of fewer bytes: OFFLOAD leaves small
        ones on the device."""
        sizes = {storage_key(one): one.untyped_storage().nbytes() for one in self._saved}
        return sum(size for key, size in sizes.items() if size < below and key not in self.inputs)

    def largest(self) -> tuple[SavedTensor, ...]:
        """The largest saved tensors, one per storage."""
        makers: dict[int, _Call] = {}
        for call in self.calls:
            for key in call.sizes:
                makers.setdefault(key, call)
        found: dict[int, SavedTensor] = {}
        for tensor in self._saved:
            key = storage_key(tensor)
            maker = None if key in self.inputs else makers.get(key)
            op, seconds = ("input", 0.0) if maker is None else (maker.op, maker.seconds)
            size, dtype = tensor.untyped_storage().nbytes(), str(tensor.dtype).removeprefix("torch.")
            found.setdefault(key, SavedTensor(op, tuple(tensor.shape), dtype, size, seconds))
        return tuple(sorted(found.values(), key=lambda one: -one.bytes)[:_LARGEST])

    def ops(self) -> tuple[OpProfile, ...]:
        """The operations whose outputs could be kept, grouped by submodule and name."""
        groups: dict[tuple[str, str], list[_Call]] = {}
        for call in self.calls:
            if call.can_be_kept and call.sizes:
                groups.setdefault((call.path, call.op), []).append(call)
        found = []
        for (path, op), calls in groups.items():
            tail = [call for call in calls if call.num_saved >= self._num_saved]
            sizes = [(key, size) for call in calls for key, size in call.sizes.items()]
            unsaved = [(key, size) for key, size in sizes if key not in self.saved_keys]
            found.append(
                OpProfile(
                    op=op,
                    word=next((word for word, names in OPS_OF.items() if op in names), None),
                    path=path,
                    calls=len(calls),
                    seconds=sum(call.seconds for call in calls),
                    output_bytes=sum(size for _, size in sizes),
                    unsaved_bytes=sum(size for _, size in unsaved),
                    border_bytes=sum(size for key, size in unsaved if key in self.outputs),
                    tail_seconds=sum(call.seconds for call in tail),
                    tail_bytes=sum(size for call in tail for size in call.sizes.values()),
                )
            )
        return tuple(found)


def _sizes(leaves: Sequence[Any]) -> dict[int, int]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_dense(leaf)]
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
