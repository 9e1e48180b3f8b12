"""Traces: counters, caches, generators and other state that a forward changes in attributes or variables, outside of autograd and buffers.

Traces before and after a forward are compared. They cannot be restored, so a layer that changes them is kept and not recomputed.
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

_MANY = 64  # entries; longer lists and dicts are not searched
_DEEPEST = 4  # levels: an attribute, its attributes or entries, and so on
_ATOMS = (types.NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Every nn.Module has these attributes, so they are not traces of a layer. `layer_state.py` handles buffers.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NOT_LOOKED_INTO = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "pipetrain", "torchvision", "functorch"}
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NO_DATA = (types.FunctionType, type, classmethod, staticmethod, property, *_DESCRIPTORS)
_CONTAINERS = (list, dict, set, deque, weakref.WeakKeyDictionary)

Look = dict[str, Hashable]  # name of an attribute or variable -> what is compared of its value


def first_change(before: Look, now: Look) -> str | None:
    """The name of the first trace that differs between `before` and `now`; None: all are equal."""
    return next((name for name in {**before, **now} if before.get(name, _GONE) != now.get(name, _GONE)), None)


def own_traces(layer: Any) -> Look:
    """The attributes of a layer or a loss: identities and versions of tensors, values of numbers and texts."""
    return attributes_of(layer.named_modules() if isinstance(layer, nn.Module) else [("", layer)])


def attributes_of(named: Iterable[tuple[str, Any]]) -> Look:
    """The same as `own_traces` for several objects, each given with its name."""
    found: Look = {}
    seen: set[int] = set()
    for path, thing in named:
        (_note_parts if _has_attributes(thing) else _note)(path, thing, found, seen, 0)
    return found


def outer_traces(layer: Any) -> Look:
    """Numbers, texts and generators outside of a layer or loss that its code can rebind or draw from: class variables, variables of
    enclosing functions, and globals that the code names. Lists and dicts there do not count."""
    found = {
        f"{kind.__name__}.{name}": _atom(value)
        for kind in _kinds_of(layer)
        for name, value in vars(kind).items()
        if not isinstance(value, _NO_DATA) and not name.startswith(("__", "_abc_"))
    }
    for function in _code_of(layer):
        where = function.__qualname__.split("<locals>.")[-1]
        found |= {f"{where}: {name}": _atom(value) for name, value in _variables_of(function)}
    return {name: atom for name, atom in found.items() if atom is not None}


def rebound_outside(layer: Any) -> str | None:
    """A variable of an enclosing function, or a global, that the code of a layer assigns to; None: there is none."""
    for function in _code_of(layer):
        code = function.__code__
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
                return str(step.argval)
    return None


def holds_outside(layer: Any) -> bool:
    """Whether the code of a layer names a list, dict, set or generator outside of the layer. A copy of the layer would change it, too."""
    named = [value for function in _code_of(layer) for _, value in _variables_of(function)]
    in_classes = [value for kind in _kinds_of(layer) for value in vars(kind).values()]
    return any(type(value) in _CONTAINERS for value in named) or any(
        isinstance(value, (torch.Generator, random.Random)) or type(value).__module__.startswith("numpy.random")
        for value in (*named, *in_classes)
    )


def is_of_the_user(thing: Any) -> bool:
    """Whether a class or function may hold state of a layer: it is not of torch, Python's library, numpy or pipetrain."""
    top = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return thing is types.SimpleNamespace or (bool(top) and top not in _NOT_LOOKED_INTO)


# One thing ------------------------------------------------------------------------------------------------------------

_GONE = object()


def _note(name: str, thing: Any, found: Look, seen: set[int], depth: int) -> None:
    atom, size = _atom(thing), 0
    if isinstance(thing, Tensor):
        atom = id(thing), 0 if thing.is_inference() else thing._version
    found[name] = id(thing) if atom is None else atom
    if atom is not None or isinstance(thing, types.FunctionType) or id(thing) in seen or depth > _DEEPEST:
        return
    if isinstance(thing, (dict, list, tuple, deque, set, frozenset, bytearray)):
        size = len(thing)
        entries = tuple(map(repr if isinstance(thing, dict) else id, thing)) if size <= _MANY else ()
        found[name] = id(thing), size, entries
    if size <= _MANY:
        _note_parts(name, thing, found, seen, depth)


def _note_parts(name: str, thing: Any, found: Look, seen: set[int], depth: int) -> None:
    seen.add(id(thing))
    for path, part in members_of(thing, of_modules=False):
        _note(f"{name}{path}".removeprefix("."), part, found, seen, depth + 1)


def members_of(thing: Any, *, of_modules: bool) -> Iterator[tuple[str, Any]]:
    """The direct parts of an object, as pairs (`.name` or `[0]`, part). `of_modules`: also parameters, buffers and submodules."""
    if isinstance(thing, dict):  # no other Mapping, because it may read each value from a disk
        yield from ((f"[{key!r}]", value) for key, value in list(thing.items()))
    elif isinstance(thing, (list, tuple, deque, set, frozenset)):
        yield from ((f"[{number}]", value) for number, value in enumerate(thing))
    elif isinstance(thing, partial):
        yield from (("", part) for part in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from (("", part) for part in (thing.__func__, thing.__self__))
    elif isinstance(thing, types.FunctionType) and is_of_the_user(thing):
        yield from ((f".{name}", value) for name, value in _variables_of(thing))
        yield from (("", default) for default in (thing.__defaults__, thing.__kwdefaults__))
    elif _has_attributes(thing):
        held = dict(getattr(thing, "__dict__", {}))
        if isinstance(thing, nn.Module) and of_modules:
            held = {**held.pop("_parameters"), **held.pop("_buffers"), **held.pop("_modules"), **held}
        elif isinstance(thing, nn.Module):
            held = {name: value for name, value in held.items() if name not in _OF_MODULES}
        yield from ((f".{name}", value) for name, value in held.items())
        for name in ("forward", "__call__"):
            if isinstance(function := getattr(type(thing), name, None), types.FunctionType):
                yield "", function


def _has_attributes(thing: Any) -> bool:
    return isinstance(thing, nn.Module) or is_of_the_user(type(thing))


def _atom(thing: Any) -> Hashable:
    """The value to compare for an immutable object (type and value) or a generator (its state); None for anything else."""
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
    """The methods of a layer's classes without `__init__`; for a loss, also the function behind a method or a `functools.partial`."""
    found = [value for kind in _kinds_of(layer) for name, value in vars(kind).items() if name != "__init__"]
    while isinstance(layer, (partial, types.MethodType)):
        layer = layer.func if isinstance(layer, partial) else layer.__func__
    found += [layer] if is_of_the_user(layer) else []
    return [one for one in found if isinstance(one, types.FunctionType)]


def names_in(code: types.CodeType) -> list[str]:
    """Names that the code, or a function inside it, looks up: attributes, globals, and variables of enclosing functions."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in names_in(part)]
    return [*code.co_names, *code.co_freevars, *inner]


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of enclosing functions that `function` uses, and the globals that it names, with their values."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield key, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = function.__globals__
    yield from ((key, names[key]) for key in dict.fromkeys(names_in(function.__code__)) if key in names)
