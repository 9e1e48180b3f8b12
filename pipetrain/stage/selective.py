"""Outputs that stay from F to B, so that R need not compute them: of products of matrices, of attention, of what a user names.

To fill a slot in F would save no time, for R would still run the operation that made the tensor. So R runs its layers under a
mode below autograd that *returns* what is kept: autograd makes the node and saves as in F, and nothing is computed.

    F   op(...) -> output    [1] kept: an alias that shares memory and version with what the layers go on with
    R   op(...)              [2] not run: gets an alias of what is kept, in the order of the kept operations of its layer
    B                        [3] what is kept goes when B begins; what was saved of it stays in its slot

Only operations of this kind are numbered: under autocast F casts weights and R finds the casts. Never skipped is what draws random
numbers: what comes after it would draw others. An operation that writes into memory of a kept output makes the copy kept,
not the memory (`_unsafe_view` gives memory away without its version, so versions alone do not tell).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.stage.casts import has_compiled
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.tensor_copies import copy_of_storage, is_dense, storage_key, view_into

# What the two words stand for, as torch names what runs.
OPS_OF: Mapping[str, frozenset[str]] = {
    "matmul": frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")),
    "attention": frozenset(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_flash_attention_forward",
            "_efficient_attention_forward",
        )
    ),
}  # fmt: skip
# What attention is made of where torch has no fused operation for it.
_SOFTMAX = frozenset(("_softmax", "_safe_softmax"))
# F and R differ in these under autocast, and they cost next to nothing.
_CASTS = frozenset(("_to_copy",))
_Ops = Callable[[Any], bool]


class Wanted(Protocol):
    """An entry of `recompute.selective`: an operation's name, or a word of `OPS_OF`, or None for all of them; in the layers from
    `first` to `last` (None: in all), there in the submodule `path` ("": in all of the layer). Its text is as the user wrote it."""

    @property
    def op(self) -> str | None: ...
    @property
    def first(self) -> int | None: ...
    @property
    def last(self) -> int | None: ...
    @property
    def path(self) -> str: ...


# Which operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """What matters here of one operation of torch's."""

    name: str  # `mm`, or `library::name` where it is not torch's own
    can_be_kept: bool  # it gives new memory and writes into none
    draws: bool  # it may draw random numbers: never kept, but where its argument `dropout` says that it does not
    dropout: tuple[int, str] | None  # the place and name of that argument
    is_foreign: bool  # torch does not say of it whether it draws
    writes: tuple[tuple[int, str], ...]  # the places and names of the arguments that it changes in place

    def draws_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call may draw random numbers."""
        if not self.draws:
            return False
        if self.dropout is None:
            return True
        number, name = self.dropout
        return bool(args[number] if number < len(args) else kwargs.get(name, 0.0))


_operations: dict[Any, Operation | None] = {}


def operation_of(func: Any) -> Operation | None:
    """What is known of an operation that torch dispatches; None: it is none of a plain kind."""
    if func not in _operations:
        _operations[func] = _looked_up(func)
    return _operations[func]


def _looked_up(func: Any) -> Operation | None:
    schema = getattr(func, "_schema", None)
    if not isinstance(func, torch._ops.OpOverload) or schema is None:
        return None
    arguments = list(enumerate(schema.arguments))
    aliases = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
    unsaid = any(
        one.name == "running_mean" for one in schema.arguments
    )  # batch_norm writes its statistics all the same
    dropout = next(((n, one.name) for n, one in arguments if one.name == "dropout_p"), None)
    library, _, name = func._schema.name.partition("::")
    return Operation(
        name if library == "aten" else schema.name,
        can_be_kept=not aliases and not unsaid and name not in _CASTS and bool(schema.returns),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        dropout=dropout,
        is_foreign=library != "aten",
        writes=tuple((n, one.name) for n, one in arguments if one.alias_info is not None and one.alias_info.is_write),
    )


@dataclass(frozen=True, eq=False)
class _Entry:
    """One of the entries of a selection: what it keeps, and in which layers of the stage."""

    wanted: Wanted
    names: frozenset[str]
    layers: frozenset[int]
    is_all_here: bool  # no other stage has some of its layers

    def told(self, stage: str, *, unfused: bool) -> str | None:
        """Why the user should know that it keeps nothing in `stage`; None: it may be meant."""
        if self.names & OPS_OF["attention"] and unfused:
            return (
                f"recompute.selective={self.wanted} keeps no attention in {stage}: torch runs it there as products and a softmax, as with "
                "dropout and with masks that it cannot fuse, so R computes it; keep `matmul`, or the operations that `pipetrain profile` "
                "names"
            )
        if not self.is_all_here and (self.wanted.op is None or self.wanted.op in OPS_OF):
            return None  # other stages may have them
        return (
            f"recompute.selective={self.wanted} keeps nothing in {stage}: none of its layers there runs such an operation, or it draws "
            "random numbers; `pipetrain profile` names what runs"
        )


class Selection:
    """What is kept in the layers of one stage."""

    def __init__(self, wanted: Sequence[Wanted], layers: Sequence[nn.Module], first_layer: int) -> None:
        """Raises:
        ValueError: an entry that names no operation, or no module of its layer; with the nearest that there is.
        """
        self._everywhere: list[set[str]] = [set() for _ in range(len(layers) + 1)]  # per layer; the last is the loss
        self._inside: dict[int, set[str]] = {}  # a submodule's identity -> what is kept in it
        self._open: list[set[str]] = []  # of the submodules that run now
        self._compiled = {number for number, layer in enumerate(layers) if has_compiled(layer)}
        self._unmet: list[_Entry] = []  # entries that have kept nothing yet
        self._unfused: set[int] = set()  # layers that run attention in pieces
        self.is_watched = True  # until the first forward has ended
        for one in wanted:
            names = _ops_named(one)
            self._add(one, names, layers, first_layer)
            self._unmet += self._entries(one, frozenset(names), len(layers), first_layer)

    def _add(self, one: Wanted, names: set[str], layers: Sequence[nn.Module], first_layer: int) -> None:
        if one.first is None or one.last is None:
            for everywhere in self._everywhere:
                everywhere |= names
            return
        own = [
            number for number in range(one.first - first_layer, one.last - first_layer + 1) if 0 <= number < len(layers)
        ]
        if not one.path:
            for number in own:
                self._everywhere[number] |= names
            return
        modules = [found for number in own if (found := _submodule(layers[number], one.path)) is not None]
        if own and not modules and len(own) == one.last - one.first + 1:  # else another stage may have it
            raise ValueError(_no_such_module(one, [layers[number] for number in own]))
        for module in modules:
            self._inside.setdefault(id(module), set()).update(names)

    def _entries(self, one: Wanted, names: frozenset[str], num_layers: int, first_layer: int) -> list[_Entry]:
        """To be told of where they keep nothing; a word for several kinds is an entry for each."""
        own, is_all_here = set(range(num_layers)), False
        if one.first is not None and one.last is not None:
            asked = set(range(one.first - first_layer, one.last - first_layer + 1))
            own, is_all_here = own & asked, asked <= own
        if not own or own & self._compiled:
            return []
        kinds = [names & ops for ops in OPS_OF.values() if names & ops] if one.op is None else [names]
        return [_Entry(one, kind, frozenset(own), is_all_here and len(kinds) == 1) for kind in kinds]

    def see(self, layer: int, name: str, *, kept: bool) -> None:
        """An operation runs in the first forward."""
        if kept:
            self._unmet = [one for one in self._unmet if name not in one.names or layer not in one.layers]
        elif name in _SOFTMAX:
            self._unfused.add(layer)

    def kept_nothing(self, stage: str) -> list[str]:
        """A line for each entry that kept nothing in the first forward of `stage`; once."""
        self.is_watched = False
        found = [one.told(stage, unfused=bool(one.layers & self._unfused)) for one in self._unmet]
        self._unmet.clear()
        return [line for line in found if line is not None]

    @staticmethod
    def of(wanted: Sequence[Wanted], layers: Sequence[nn.Module], first_layer: int) -> Selection | None:
        """None: nothing is wanted."""
        return Selection(wanted, layers, first_layer) if wanted else None

    def is_seen(self, layer: int) -> bool:
        """Whether the operations of a layer pass the mode: what torch.compile made runs as it was compiled."""
        return layer not in self._compiled

    def has(self, layer: int, name: str) -> bool:
        """Whether the output of an operation is to be kept that runs now in `layer`."""
        return name in self._everywhere[layer] or any(name in names for names in self._open)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within it, it is known which submodules run. Nothing is left on the modules themselves."""
        self._open.clear()
        if not self._inside:
            yield
            return
        before = torch_module.register_module_forward_pre_hook(self._enter)
        after = torch_module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._inside:
            self._open.append(self._inside[id(module)])

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._inside and self._open:
            self._open.pop()


def _ops_named(one: Wanted) -> set[str]:
    if one.op is None:
        return set().union(*OPS_OF.values())
    if one.op in OPS_OF:
        return set(OPS_OF[one.op])
    name = re.sub(r"^aten(\.|::)", "", one.op)
    library, _, short = name.rpartition("::")
    packet = getattr(getattr(torch.ops, library or "aten"), short, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise ValueError(f"recompute.selective={one}: there is no operation {name!r}{_nearest_op(name)}")
    ours = [op for overload in packet.overloads() if (op := getattr(packet, overload)).name() in _registered()]  # type: ignore[no-untyped-call]
    functional = [op for op in ours if (operation := operation_of(op)) and operation.can_be_kept]
    if not functional:
        raise ValueError(
            f"recompute.selective={one}: {name} is a view or a cast, or changes something in place, so R cannot leave it out; "
            "name what computes"
        )
    if all(map(_is_composite, functional)):
        raise ValueError(
            f"recompute.selective={one}: {name} is made of other operations, which are what runs; `pipetrain profile` names those "
            f"of this model, {' and '.join(OPS_OF)} are words for the dear ones"
        )
    return {name}


def _registered() -> set[str]:
    """The operations that torch dispatches; scripts know more."""
    return set(torch._C._dispatch_get_all_op_names())


def _is_composite(overload: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def _nearest_op(name: str) -> str:
    known = {
        op.partition("::")[2].partition(".")[0]
        for op in torch._C._dispatch_get_all_op_names()
        if op.startswith("aten::")
    }
    near = difflib.get_close_matches(name, [*OPS_OF, *sorted(known)], n=1, cutoff=0.0)
    return f"; did you mean {near[0]!r}?"


def _submodule(layer: nn.Module, path: str) -> nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _no_such_module(one: Wanted, layers: Sequence[nn.Module]) -> str:
    paths = sorted({path for layer in layers for path, _ in layer.named_modules() if path})
    near = difflib.get_close_matches(one.path, paths, n=1, cutoff=0.0)
    where = f"layer {one.first}" if one.last in (None, one.first) else f"layers {one.first} to {one.last}"
    hint = f"did you mean {near[0]!r}?" if near else "it has none: name the layer alone"
    return f"recompute.selective={one}: {where} has no module {one.path!r}; {hint}"


# Their outputs ---------------------------------------------------------------------------------------------------------


class _Output:
    """One tensor that an operation of F gave; counted for as long as it is kept."""

    __slots__ = ("_meter", "key", "tensor", "version")

    def __init__(self, tensor: Tensor, meter: ActivationMeter) -> None:
        self._meter = meter
        self._hold(_alias(tensor))

    def _hold(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.key = self._meter.hold(tensor)

    def has_changed(self) -> bool:
        return self.tensor._version != self.version

    def copy(self) -> None:
        """Keep a copy instead, which is its own: whoever gets it may change it in place."""
        self.let_go()
        self._hold(view_into(copy_of_storage(self.tensor), self.tensor))

    def let_go(self) -> None:
        self._meter.release(self.key)
        self.key = 0

    def __del__(self) -> None:
        if self.key:
            self.let_go()


@dataclass(eq=False)
class _Call:
    """One operation of F, in the order in which its layer ran them."""

    func: Any
    shapes: tuple[Any, ...]
    num_slots: int  # of the set when it ran: R is complete before it comes to it again, or not
    outputs: tuple[Any, ...] = ()  # an `_Output` per tensor, other values as they are; none: R computes it
    is_one: bool = True  # what was given is a tensor and no tuple
    is_kept: bool = False


@dataclass
class _Layer:
    calls: list[_Call] = field(default_factory=list)
    next: int = 0  # that R comes to


class KeptOutputs:
    """What F of one microbatch keeps for its R. `name_of` a layer, in an error."""

    def __init__(self, selection: Selection, meter: ActivationMeter, device: torch.device | None = None) -> None:
        self.selection = selection
        self._meter = meter
        self._layers: dict[int, _Layer] = {}
        self._by_storage: dict[int, list[_Output]] = {}
        self._is_cuda = device is not None and device.type == "cuda"

    # F ----------------------------------------------------------------------------------------------------------------

    def in_forward(
        self, layer: int, num_slots: Callable[[], int], *, keeps: bool = True
    ) -> AbstractContextManager[object]:
        """Around a layer in F, which has saved so many tensors by now. Where it `keeps` nothing, writes are watched all the same."""
        if not self.selection.is_seen(layer):
            return nullcontext()
        return self._mode(_InForward(self, layer, num_slots, keeps=keeps))

    @contextmanager
    def _mode(self, mode: TorchDispatchMode) -> Iterator[None]:
        with self.selection.following(), mode:
            yield

    def is_wanted(self, layer: int, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return (
            operation.can_be_kept
            and self.selection.has(layer, operation.name)
            and not operation.draws_with(args, kwargs)
        )

    def run_and_keep(self, layer: int, operation: Operation, func: Any, args: Any, kwargs: Any, num_slots: int) -> Any:
        """Run an operation of F, and keep what it gives."""
        call = _Call(func, _shapes(args, kwargs), num_slots)
        self._layers.setdefault(layer, _Layer()).calls.append(call)
        state = self._generators() if operation.is_foreign else ()
        given = func(*args, **kwargs)
        has_drawn = any(not torch.equal(*pair) for pair in zip(state, self._generators())) if state else False
        values = given if isinstance(given, tuple) else (given,)
        tensors = [value for value in values if isinstance(value, Tensor)]
        nested = any(isinstance(value, (list, tuple, dict)) for value in values)
        if has_drawn or nested or not tensors or not all(type(one) is Tensor and is_dense(one) for one in tensors):
            return given
        call.outputs = tuple(self._kept(value) if isinstance(value, Tensor) else value for value in values)
        call.is_one, call.is_kept = not isinstance(given, tuple), True
        return given

    def _generators(self) -> tuple[Tensor, ...]:
        own = torch.default_generator.get_state()
        return (own, torch.cuda.get_rng_state()) if self._is_cuda else (own,)

    def _kept(self, tensor: Tensor) -> _Output:
        output = _Output(tensor, self._meter)
        self._by_storage.setdefault(storage_key(output.tensor), []).append(output)
        return output

    def before_write(self, tensor: Tensor) -> None:
        """F is about to change this in place: what is kept of its memory is a copy from now on."""
        for output in self._by_storage.pop(storage_key(tensor), ()):
            output.copy()

    def forget_all_of(self, storages: Set[int]) -> None:
        """These were changed in place where nobody saw it: R computes what was kept of them."""
        for layer in self._layers.values():
            for call in layer.calls:
                if any(storage_key(output.tensor) in storages for output in _outputs(call)):
                    self._forget(call)

    def forget_layer(self, layer: int) -> None:
        """F gives the layer up, and runs it again."""
        for call in self._layers.pop(layer, _Layer()).calls:
            self._forget(call)

    def end_forward(self, whole: Set[int], num_slots: int) -> None:
        """F is done. R does not run the layers that are `whole` under the mode, and ends when the slots up to `num_slots` are full."""
        for layer in [layer for layer in self._layers if layer in whole]:
            self.forget_layer(layer)
        for own in self._layers.values():
            for call in own.calls:
                changed = any(output.has_changed() for output in _outputs(call))
                if changed or call.num_slots >= num_slots:
                    self._forget(call)

    # R ----------------------------------------------------------------------------------------------------------------

    def in_recompute(self, layer: int, fail: Callable[[str], NoReturn]) -> AbstractContextManager[object]:
        """Around a layer in R; `fail` is told where R goes another way than F."""
        if not self.selection.is_seen(layer):
            return nullcontext()
        return self._mode(_InRecompute(self, layer, fail))

    def next_call(self, layer: int, func: Any, args: Any, kwargs: Any, fail: Callable[[str], NoReturn]) -> Any:
        """What R gets instead of running `func`: a value, or `_COMPUTE`."""
        own = self._layers.get(layer)
        if own is None or own.next >= len(own.calls):
            fail(f"computes {func}, which F did not")
        call = own.calls[own.next]
        own.next += 1
        if call.func is not func or call.shapes != _shapes(args, kwargs):
            fail(
                f"computes {func} of {_told(_shapes(args, kwargs))} where F computed {call.func} of {_told(call.shapes)}"
            )
        if not call.is_kept:
            return _COMPUTE
        if any(output.has_changed() for output in _outputs(call)):
            fail(f"finds the output of {func} changed in place after F")
        values = tuple(_alias(value.tensor) if isinstance(value, _Output) else value for value in call.outputs)
        return values[0] if call.is_one else values

    def check_write(self, tensor: Tensor, fail: Callable[[str], NoReturn]) -> None:
        """R is about to change this in place."""
        if storage_key(tensor) in self._by_storage:
            fail("changes an output in place that it left as it was in F")

    def left(self, layer: int) -> int:
        """How many of the operations that F ran in `layer` R has not come to."""
        own = self._layers.get(layer)
        return 0 if own is None else len(own.calls) - own.next

    # --------------------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of distinct storages that are kept and counted."""
        return sum(self._sizes().values())

    def bytes_in(self, storages: Set[int]) -> int:
        """Of those, what lies in these storages."""
        return sum(size for key, size in self._sizes().items() if key in storages)

    def tensors(self) -> list[Tensor]:
        return [output.tensor for layer in self._layers.values() for call in layer.calls for output in _outputs(call)]

    def _sizes(self) -> dict[int, int]:
        return {
            output.key: output.tensor.untyped_storage().nbytes()
            for layer in self._layers.values()
            for call in layer.calls
            for output in _outputs(call)
            if output.key
        }

    def drop(self) -> None:
        """Keep nothing any more."""
        for layer in list(self._layers):
            self.forget_layer(layer)

    def _forget(self, call: _Call) -> None:
        for output in _outputs(call):
            output.let_go()
            same = self._by_storage.get(storage_key(output.tensor), [])
            if output in same:
                same.remove(output)
                if not same:
                    del self._by_storage[storage_key(output.tensor)]
        call.outputs, call.is_kept = (), False


def _outputs(call: _Call) -> list[_Output]:
    return [output for output in call.outputs if isinstance(output, _Output)]


def _alias(tensor: Tensor) -> Tensor:
    """A tensor without a graph that shares memory and version counter; below autograd torch would give it a counter of its own."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((value.shape, value.dtype) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _told(shapes: Sequence[Any]) -> str:
    return " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes) or "nothing"


# The modes -------------------------------------------------------------------------------------------------------------

_COMPUTE = object()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # they pass as they are

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled layer runs under it, and to be skipped would load torch._dynamo: a second

    def __init__(self, kept: KeptOutputs, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept_outputs = kept
        self._layer = layer


class _InForward(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: KeptOutputs, layer: int, num_slots: Callable[[], int], *, keeps: bool) -> None:
        super().__init__(kept, layer)
        self._selection = kept.selection
        self._num_slots = num_slots
        self._keeps = keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation is None:
            return func(*args, **kwargs)
        for tensor in _written(operation, args, kwargs):
            self._kept_outputs.before_write(tensor)
        kept = self._keeps and self._kept_outputs.is_wanted(self._layer, operation, args, kwargs)
        if self._selection.is_watched:
            self._selection.see(self._layer, operation.name, kept=kept)
        if kept:
            return self._kept_outputs.run_and_keep(self._layer, operation, func, args, kwargs, self._num_slots())
        return func(*args, **kwargs)


class _InRecompute(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: KeptOutputs, layer: int, fail: Callable[[str], NoReturn]) -> None:
        super().__init__(kept, layer)
        self._fail = fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation is None:
            return func(*args, **kwargs)
        for tensor in _written(operation, args, kwargs):
            self._kept_outputs.check_write(tensor, self._fail)
        if self._kept_outputs.is_wanted(self._layer, operation, args, kwargs):
            found = self._kept_outputs.next_call(self._layer, func, args, kwargs, self._fail)
            if found is not _COMPUTE:
                return found
        return func(*args, **kwargs)


def _written(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for number, name in operation.writes:
        value = args[number] if number < len(args) else kwargs.get(name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                yield one
