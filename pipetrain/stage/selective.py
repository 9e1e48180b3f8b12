"""Keeps outputs of operations in F (matrix products, attention, or what the user names), so that R need not run these operations.

Slots that F fills would save no time, because R would still run the operations that made the tensors. So F and R run their layers
under a `TorchDispatchMode`, below autograd. In R this mode *returns* kept outputs, and autograd makes nodes and saves tensors as in F.

    F   op(...) -> output    [1] kept: an alias of the output, with the same memory and version counter
    R   op(...)              [2] not run: returns an alias of the layer's next kept output, in F's order
    B                        [3] kept outputs are dropped when B begins; those that autograd saved stay in their slots

F's order leaves out operations whose outputs are not wanted. It never has casts, because F casts weights that R finds already cast.
Random operations always run again, or later ones would draw other numbers. Before F writes to the memory of a kept output, that output
is copied, and the copy is kept. (Torch's `create_selective_checkpoint_contexts` finds writes by version counters, which misses some: a
3-dimensional product returns an `_unsafe_view` with the same memory and another counter.) Kept *layers* are in `stage.py` and `microbatch.py`.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.stage.casts import has_compiled
from pipetrain.stage.meter import ActivationMeter, CountedBytes
from pipetrain.stage.tensor_copies import copy_of, is_dense, storage_key

# The operations that the words `matmul` and `attention` stand for, by torch's names.
OPS_OF: Mapping[str, frozenset[str]] = {
    "matmul": frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")),
    "attention": frozenset((
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward", "_efficient_attention_forward",
    )),
}  # fmt: skip
# Operations of attention for which torch uses no fused kernel.
_SOFTMAX = frozenset(("_softmax", "_safe_softmax"))


class Wanted(Protocol):
    """An entry of `recompute.selective`. `op`: an operation's name, a word of `OPS_OF`, or None for both words. The entry applies to the
    layers `first` to `last` (None: to all), and in them to the submodule `path` ("": to the whole layer). `str` gives the user's text."""

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
    """Properties of an operation of torch. `can_be_kept`: it returns new memory, writes to no argument, and is no cast."""

    name: str  # `mm`, or `library::name` where it is not torch's own
    arguments: tuple[str, ...]
    writes: tuple[str, ...]  # names of the arguments that it changes in place
    can_be_kept: bool
    draws: bool  # it may draw random numbers
    is_foreign: bool  # not torch's own, so it is unknown whether it draws

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place = self.arguments.index(name)
        return args[place] if place < len(args) else kwargs.get(name)

    def draws_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments may draw random numbers."""
        return self.draws and ("dropout_p" not in self.arguments or bool(self.argument("dropout_p", args, kwargs)))


@cache
def operation_of(func: Any) -> Operation | None:
    """The properties of an operation that torch dispatches; None if `func` is not an ordinary operation."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    schema = func._schema
    library, _, name = schema.name.partition("::")
    arguments = tuple(one.name for one in schema.arguments)
    writes = tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    aliases = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
    # batch_norm writes its statistics, which its schema does not say.
    is_new = bool(schema.returns) and not aliases and "running_mean" not in arguments
    draws = torch.Tag.nondeterministic_seeded in func.tags
    is_foreign = library != "aten"
    return Operation(
        schema.name if is_foreign else name, arguments, writes, is_new and name != "_to_copy", draws, is_foreign
    )


@dataclass(eq=False)
class _Rule:
    """The operations that an entry of the user's list keeps: those of one word of `OPS_OF`, or those of one name."""

    wanted: Wanted
    names: frozenset[str]  # of operations
    layers: Set[int]  # by their index in the stage; the loss has the index after the last layer's
    modules: Sequence[nn.Module]  # the submodules to which the entry is limited; empty: whole layers
    is_all_here: bool  # the entry names layers, all in this stage, and has no other rule
    is_met: bool  # the rule has kept an output, or one of its layers is compiled

    def why_unmet(self, stage: str, unfused: Set[int]) -> str | None:
        """A warning that the rule keeps nothing in `stage`; None: another stage, or the entry's other rule, may keep something."""
        if self.names & OPS_OF["attention"] and self.layers & unfused:
            return (
                f"recompute.selective={self.wanted} keeps no attention in {stage}: torch runs it there as products and a softmax, as with "
                "dropout and masks that no fused kernel takes, so R computes it; keep `matmul`, or the operations that `pipetrain profile` "
                "names"
            )
        if not self.is_all_here and (self.wanted.op is None or self.wanted.op in OPS_OF):
            return None
        return (
            f"recompute.selective={self.wanted} keeps nothing in {stage}: none of its layers there runs such an operation, or it draws "
            "random numbers; `pipetrain profile` names what runs"
        )


_Met = tuple[Operation, Sequence[_Rule]]  # an operation that writes, or that has an output to keep; the rules for it


class Selection:
    """The outputs to keep in the layers of one stage."""

    def __init__(self, wanted: Sequence[Wanted], layers: Sequence[nn.Module], first_layer: int) -> None:
        """Raises ValueError: an entry names an unknown operation or module, or one that cannot be kept; the message says what to name."""
        # The mode sees no operations of compiled code.
        self.compiled = {number for number, layer in enumerate(layers) if has_compiled(layer)}
        self._rules = [rule for one in wanted for rule in self._rules_of(one, layers, first_layer)]
        self._open: list[nn.Module] = []  # submodules that rules name and whose forward runs now
        self._unfused: set[int] = set()  # layers that run attention without a fused kernel
        self.is_watched = True  # until the first F with an R has ended: then rules that kept nothing warn
        # Per layer: id of an operation -> `_Met`, or None: run it as it is. By id, because hashing an operation is slow.
        self._met: list[dict[int, _Met | None]] = [{} for _ in range(len(layers) + 1)]

    def _rules_of(self, one: Wanted, layers: Sequence[nn.Module], first_layer: int) -> list[_Rule]:
        kinds = _ops_named(one)
        here, own, is_all_here = set(range(len(layers))), set(range(len(layers) + 1)), False
        modules: list[nn.Module] = []
        if one.first is not None and one.last is not None:
            asked = set(range(one.first - first_layer, one.last - first_layer + 1))
            own, is_all_here = asked & here, asked <= here
            modules = [module for n in own for path, module in layers[n].named_modules() if path == one.path]
            if is_all_here and not modules:
                raise ValueError(_no_such_module(one, [layers[number] for number in own]))
            if not modules:
                return []  # other stages have the layers
        inside, is_met = modules if one.path else [], bool(own & self.compiled)
        return [_Rule(one, kind, own, inside, is_all_here and len(kinds) == 1, is_met) for kind in kinds]

    def kept_nothing(self, stage: str) -> list[str]:
        """A warning for each rule that kept nothing in the first forward of `stage`, which has ended."""
        self.is_watched = False
        lines = [rule.why_unmet(stage, self._unfused) for rule in self._rules if not rule.is_met]
        return [line for line in lines if line is not None]

    @contextmanager
    def under(self, layer: int, run: Callable[..., Any]) -> Iterator[None]:
        """A context around a layer: operations whose outputs are wanted, or that write, are called through `run`."""
        if layer in self.compiled:
            yield
            return
        self._open.clear()

        def leave(*_: Any) -> None:
            del self._open[-1:]

        with ExitStack() as hooks:  # removes these hooks at its end
            for module in {module for rule in self._rules if layer in rule.layers for module in rule.modules}:
                hooks.enter_context(module.register_forward_pre_hook(lambda module, _: self._open.append(module)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            with _Mode(self._met[layer], partial(self._meet, layer), run):
                yield

    def _meet(self, layer: int, func: Any) -> _Met | None:
        operation, rules = operation_of(func), list[_Rule]()
        if operation is not None:
            if operation.name in _SOFTMAX:
                self._unfused.add(layer)
            if operation.can_be_kept:
                rules = [rule for rule in self._rules if layer in rule.layers and operation.name in rule.names]
        met = (operation, rules) if operation is not None and (rules or operation.writes) else None
        self._met[layer][id(func)] = met  # the cache of `operation_of` holds `func`, so no other object gets its id
        return met

    def keeps(self, met: _Met, args: Any, kwargs: Any) -> bool:
        """Whether the output of an operation that runs now is to be kept."""
        operation, rules = met
        rules = [rule for rule in rules if not rule.modules or any(module in self._open for module in rule.modules)]
        if not rules or operation.draws_with(args, kwargs):
            return False
        for rule in rules:
            rule.is_met = True
        return True


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `run` instead of each operation of a layer that has a `_Met` in `met`; `meet` fills `met`."""

    supports_higher_order_operators = True  # such operators run unchanged

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled layer runs under it, and True would load torch._dynamo, which takes a second

    def __init__(
        self, met: Mapping[int, _Met | None], meet: Callable[[Any], _Met | None], run: Callable[..., Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met, self._meet, self._run = met, meet, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This runs for each operation of each layer, so it has as few lines as possible.
        try:
            met = self._met[id(func)]
        except KeyError:
            met = self._meet(func)
        if met is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._run(met, func, args, kwargs or {})


def beside_mode(pack: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A function that runs `pack` outside of dispatch modes, under which `detach` takes eight times as long."""

    def run(tensor: Tensor) -> None:
        with torch._C._DisableTorchDispatch():
            pack(tensor)

    return run


def _ops_named(one: Wanted) -> list[frozenset[str]]:
    """The names of the operations of an entry: one set, or one per word of `OPS_OF`. Raises ValueError: unknown, or cannot be kept."""
    if one.op is None or one.op in OPS_OF:
        return [OPS_OF[one.op]] if one.op else [*OPS_OF.values()]
    name = re.sub(r"^aten(\.|::)", "", one.op)
    library, _, short = name.rpartition("::")
    known = set(torch._C._dispatch_get_all_op_names())  # TorchScript's own are not among them
    packet = getattr(getattr(torch.ops, library or "aten"), short, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        ours = sorted({op[len("aten::") :].partition(".")[0] for op in known if op.startswith("aten::")})
        (near,) = difflib.get_close_matches(name, [*OPS_OF, *ours], n=1, cutoff=0.0)
        raise ValueError(f"recompute.selective={one}: there is no operation {name!r}; did you mean {near!r}?")
    overloads = [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]
    functional = [op for op in overloads if op.name() in known and (found := operation_of(op)) and found.can_be_kept]
    if not functional:
        raise ValueError(
            f"recompute.selective={one}: {name} is a view or a cast, or changes something in place, so R cannot leave it out; "
            "name an operation that computes new values"
        )
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if all(has_kernel(op.name(), "CompositeImplicitAutograd") for op in functional):
        raise ValueError(
            f"recompute.selective={one}: {name} is made of other operations, and only these run; `pipetrain profile` names those "
            f"of this model, and {' and '.join(OPS_OF)} stand for the costly ones"
        )
    return [frozenset((name,))]


def _no_such_module(one: Wanted, layers: Sequence[nn.Module]) -> str:
    paths = sorted({path for layer in layers for path, _ in layer.named_modules() if path})
    near = difflib.get_close_matches(one.path, paths, n=1, cutoff=0.0)
    where = f"layer {one.first}" if one.last in (None, one.first) else f"layers {one.first} to {one.last}"
    hint = f"did you mean {near[0]!r}?" if near else "it has none: name the layer alone"
    return f"recompute.selective={one}: {where} has no module {one.path!r}; {hint}"


# Their outputs ---------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A kept output, of which R gets aliases. `held`: its tensors, each with its version. `counted`: their entry in the meter."""

    output: Any
    held: list[tuple[Tensor, int]]
    counted: CountedBytes


@dataclass(eq=False)
class _Call:
    """One operation of F whose output a rule wants."""

    func: Any
    shapes: tuple[Any, ...]
    num_slots: int  # slots that F had made before it; if these are all that R fills, R ends before it
    kept: _Kept | None = None  # None: R computes it

    def has_changed(self) -> bool:
        return self.kept is not None and any(tensor._version != version for tensor, version in self.kept.held)


class KeptOutputs:
    """The outputs that F of one microbatch keeps for its R."""

    def __init__(self, selection: Selection, meter: ActivationMeter) -> None:
        self._selection = selection
        self._calls: dict[int, list[_Call]] = defaultdict(list)  # by layer, in the order of F
        self._next: dict[int, int] = defaultdict(int)  # by layer: the index in `_calls` of the next call in R
        self._meter = meter
        self._by_storage: dict[int, _Call] = {}

    def in_forward(
        self, layer: int, value: Any, num_slots: Callable[[], int], *, is_free: bool
    ) -> AbstractContextManager[object]:
        """A context around a layer in F, whose input is `value`. `num_slots()` is the number of tensors that F has saved so far."""
        if is_free or layer in self._selection.compiled:  # its writes are not seen: copy kept outputs in its input
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    self._before_write(leaf)
        run = partial(self._run_in_forward, layer, num_slots)
        return nullcontext() if is_free else self._selection.under(layer, run)

    def in_recompute(self, layer: int, fail: Callable[[str], NoReturn]) -> AbstractContextManager[object]:
        """A context around a layer in R; `fail` is called if R runs other operations than F."""
        return self._selection.under(layer, partial(self._run_in_recompute, layer, fail))

    def _run_in_forward(
        self, layer: int, num_slots: Callable[[], int], met: _Met, func: Any, args: Any, kwargs: Any
    ) -> Any:
        operation, _ = met
        for name in operation.writes:
            for one in _as_tuple(operation.argument(name, args, kwargs)):
                if isinstance(one, Tensor):
                    self._before_write(one)
        if not self._selection.keeps(met, args, kwargs):
            return func(*args, **kwargs)
        call = _Call(func, _shapes(args, kwargs), num_slots())
        self._calls[layer].append(call)
        state = _generators() if operation.is_foreign else []
        output = func(*args, **kwargs)
        has_drawn = operation.is_foreign and not all(map(torch.equal, state, _generators()))
        if not has_drawn and all(map(_is_plain, _as_tuple(output))):
            self._keep(call, _with(output, _alias))
        return output

    def _run_in_recompute(
        self, layer: int, fail: Callable[[str], NoReturn], met: _Met, func: Any, args: Any, kwargs: Any
    ) -> Any:
        if not self._selection.keeps(met, args, kwargs):
            return func(*args, **kwargs)
        if not self.left(layer):
            fail(f"computes {func}, which F did not")
        call, shapes = self._calls[layer][self._next[layer]], _shapes(args, kwargs)
        self._next[layer] += 1
        if call.func is not func or call.shapes != shapes:
            fail(f"computes {func} of {_told(shapes)} where F computed {call.func} of {_told(call.shapes)}")
        if call.kept is None:
            return func(*args, **kwargs)
        if call.has_changed():
            fail(f"finds the output of {func} changed in place after F")
        return _with(call.kept.output, _alias)

    def _keep(self, call: _Call, output: Any) -> None:
        tensors = [value for value in _as_tuple(output) if isinstance(value, Tensor)]
        held = [(tensor, tensor._version) for tensor in tensors]
        call.kept = _Kept(output, held, CountedBytes(self._meter, 0, tensors))
        self._by_storage.update((storage_key(tensor), call) for tensor in tensors)

    def _before_write(self, tensor: Tensor) -> None:
        """F is about to change `tensor` in place: if a kept output lies in this memory, keep a copy instead."""
        call = self._by_storage.pop(storage_key(tensor), None)
        if call is not None and call.kept is not None:
            output, call.kept = _with(call.kept.output, copy_of), None
            self._keep(call, output)

    def end_forward(self, whole: Set[int], num_slots: int) -> None:
        """End F: drop outputs that R will not use. R runs no layer in `whole`, and ends when the first `num_slots` slots are full."""
        for layer, calls in self._calls.items():
            for call in calls:
                if layer in whole or call.num_slots >= num_slots or call.has_changed():
                    call.kept = None

    def left(self, layer: int) -> int:
        """How many operations with wanted outputs F ran in `layer` and R has not reached yet."""
        return len(self._calls[layer]) - self._next[layer]

    def sizes(self) -> dict[int, int]:
        """Bytes of the kept outputs that the meter counts, by storage."""
        kept = [call.kept for calls in self._calls.values() for call in calls if call.kept is not None]
        tensors = [tensor for one in kept for tensor, _ in one.held]
        sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        return {key: size for key, size in sizes.items() if not self._meter.is_left_out(key)}

    def drop(self) -> None:
        """Drop all kept outputs."""
        for calls in self._calls.values():
            for call in calls:  # the traceback of an error may hold the call
                call.kept = None
        self._calls.clear()
        self._by_storage.clear()


def _as_tuple(output: Any) -> Sequence[Any]:
    return output if isinstance(output, (tuple, list)) else (output,)


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense `Tensor` (not of a subclass), or is neither a tensor nor a container."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and is_dense(value)
    return not isinstance(value, (list, tuple, dict))


def _with(output: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, (tuple, list)):
        return type(output)(copy(value) if isinstance(value, Tensor) else value for value in output)
    return copy(output)


def _alias(tensor: Tensor) -> Tensor:
    """An alias without a graph, with the memory and the version counter of `tensor`. Below autograd, `detach` alone makes a new counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _generators() -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.default_generator.get_state(), *on_device]


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((value.shape, value.dtype) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _told(shapes: Sequence[Any]) -> str:
    return " and ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes) or "nothing"
