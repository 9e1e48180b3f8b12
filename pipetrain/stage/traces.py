"""Traces: state of a forward outside of autograd and buffers (counters, caches, generators), in attributes or variables of the layer's code.

Traces before and after a forward are compared. They cannot be restored, so a layer that leaves traces is not run a second time.
"""

from __future__ import annotations

import dis
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_MANY = 64  # entries of a longer list or dict are not looked into
_DEEPEST = 4
_ATOMS = (types.NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Of nn.Module itself: not state of a layer. Buffers are looked after by themselves.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NOT_LOOKED_INTO = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "pipetrain", "torchvision", "functorch"}
_NO_DATA = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    type,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)

_CONTAINERS = (list, dict, set, deque, weakref.WeakKeyDictionary)

Look = dict[str, Hashable]  # what is where, by its name


def first_change(before: Look, now: Look) -> str | None:
    """The name of the first trace that differs between two snapshots of them; None: all are equal."""
    return next((name for name in {**before, **now} if before.get(name, _GONE) != now.get(name, _GONE)), None)


def own_traces(layer: Any) -> Look:
    """The attributes of a layer or a loss: identities and versions of tensors, values of numbers and texts."""
    return attributes_of(layer.named_modules() if isinstance(layer, nn.Module) else [("", layer)])


def modules_of_the_user(layer: Any) -> list[tuple[str, nn.Module]]:
    """The modules below a layer of classes that are neither torch's nor ours, with their names."""
    modules = layer.named_modules() if isinstance(layer, nn.Module) else ()
    return [(name, module) for name, module in modules if is_of_the_user(type(module))]


def attributes_of(named: Iterable[tuple[str, Any]]) -> Look:
    """As `own_traces`, of some things with their names."""
    found: Look = {}
    seen: set[int] = set()
    for path, thing in named:
        if is_of_the_user(type(thing)) or isinstance(thing, nn.Module):
            _note_namespace(path, thing, found, seen, 0)
        else:
            _note(path, thing, found, seen, 0)
    return found


def outer_traces(layer: Any) -> Look:
    """What the code of a layer, or a loss, can rebind or draw from outside of it: numbers, texts and generators in its class, in functions
    around it, among the globals that it names. A list or a dict out there is not its state."""
    found: Look = {}
    for kind in _kinds_of(layer):
        for name, value in vars(kind).items():
            if not isinstance(value, _NO_DATA) and not name.startswith(("__", "_abc_")):
                _note_variable(f"{kind.__name__}.{name}", value, found)
    for function in _code_of(layer):
        for name, value in _variables_of(function):
            _note_variable(f"{function.__qualname__.split('<locals>.')[-1]}: {name}", value, found)
    return found


def rebound_outside(layer: Any) -> str | None:
    """A variable of a function around the code of a layer, or of its file, that the code gives another value."""
    for function in _code_of(layer):
        code = function.__code__
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
                return str(step.argval)
    return None


def holds_outside(layer: Any) -> bool:
    """Whether the code of a layer names a list, a dict or a set outside of it, in which a copy of it would write, too."""
    return any(type(value) in _CONTAINERS for function in _code_of(layer) for _, value in _variables_of(function))


def is_of_the_user(thing: Any) -> bool:
    """Whether a class or function may hold state of a layer: not a class of torch, of Python or of ours."""
    top = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return thing is types.SimpleNamespace or (bool(top) and top not in _NOT_LOOKED_INTO)


# One thing ------------------------------------------------------------------------------------------------------------

_GONE = object()


def _note(name: str, thing: Any, found: Look, seen: set[int], depth: int) -> None:
    atom = _atom(thing)
    if atom is not None:
        found[name] = atom
        return
    found[name] = id(thing)
    if id(thing) in seen or depth > _DEEPEST:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        found[name] = (id(thing), 0 if thing.is_inference() else thing._version)
    elif isinstance(thing, dict):
        found[name] = (id(thing), len(thing), tuple(map(repr, thing)) if len(thing) <= _MANY else ())
        _note_all(((f"{name}[{key!r}]", value) for key, value in thing.items()), len(thing), found, seen, depth)
    elif isinstance(thing, (list, tuple, deque, set, frozenset, bytearray)):
        found[name] = (id(thing), len(thing), *(() if len(thing) > _MANY else map(id, thing)))
        if not isinstance(thing, (set, frozenset, bytearray)):
            _note_all(((f"{name}[{n}]", item) for n, item in enumerate(thing)), len(thing), found, seen, depth)
    elif isinstance(thing, partial):
        _note_all([(name, thing.func), (name, thing.args), (name, thing.keywords)], 0, found, seen, depth)
    elif isinstance(thing, types.MethodType):
        _note(name, thing.__self__, found, seen, depth)
    elif isinstance(thing, (nn.Module, types.SimpleNamespace)) or (
        is_of_the_user(type(thing)) and hasattr(thing, "__dict__")
    ):
        _note_namespace(name, thing, found, seen, depth)


def _note_all(named: Any, count: int, found: Look, seen: set[int], depth: int) -> None:
    if count <= _MANY:
        for name, item in named:
            _note(name, item, found, seen, depth + 1)


def _note_namespace(name: str, thing: Any, found: Look, seen: set[int], depth: int) -> None:
    seen.add(id(thing))
    left_out = _OF_MODULES if isinstance(thing, nn.Module) else frozenset()
    for key, value in list(vars(thing).items()):
        if key not in left_out:
            _note(f"{name}.{key}" if name else key, value, found, seen, depth + 1)


def _atom(thing: Any) -> Hashable:
    """What tells an unchangeable thing, or the state of a generator, from another; None for anything else."""
    if type(thing) in _ATOMS:
        return type(thing), thing if thing == thing else "nan"
    if isinstance(thing, torch.Generator):
        return hash(tuple(thing.get_state().tolist()))
    if isinstance(thing, random.Random):
        return hash(thing.getstate())
    if type(thing).__module__.startswith("numpy.random"):
        state = thing.get_state() if hasattr(thing, "get_state") else getattr(thing, "bit_generator", thing).state
        return str(state), str(state[1].tolist() if isinstance(state, tuple) else "")
    return None


def _kinds_of(layer: Any) -> list[type]:
    things = list(layer.modules()) if isinstance(layer, nn.Module) else [layer]
    return list(dict.fromkeys(kind for thing in things for kind in type(thing).__mro__ if is_of_the_user(kind)))


def _code_of(layer: Any) -> list[types.FunctionType]:
    """The methods of its classes; or what it is itself."""
    methods = [value for kind in _kinds_of(layer) for name, value in vars(kind).items() if name != "__init__"]
    return [*(one for one in methods if isinstance(one, types.FunctionType)), *_functions_in(layer)]


def _functions_in(thing: Any) -> Iterator[types.FunctionType]:
    """What is called where a function, a method or a partial is."""
    if isinstance(thing, partial):
        yield from _functions_in(thing.func)
    elif isinstance(thing, types.MethodType):
        yield from _functions_in(thing.__func__)
    elif isinstance(thing, types.FunctionType) and is_of_the_user(thing):
        yield thing


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Those of functions around it, and the globals that it names."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield key, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = function.__globals__
    yield from ((key, names[key]) for key in function.__code__.co_names if key in names)


def _note_variable(name: str, value: Any, found: Look) -> None:
    atom = _atom(value)
    if atom is not None:
        found[name] = atom
