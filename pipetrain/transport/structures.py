"""The structure of a tree as text: how tuples, lists, dicts and named tuples lie in each other, for the other end of a message."""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAF = "*"
_PLAIN_KEYS = {"str": str, "int": int, "float": float, "bool": bool, "NoneType": type(None)}


@lru_cache(maxsize=64)
def spec_text(spec: pytree.TreeSpec) -> str:
    """A tree's structure as text; never empty.

    Raises:
        TypeError: a type or a key that cannot be named, with what to return instead.
    """
    try:
        return json.dumps(_written(spec))
    except _Foreign as foreign:
        try:  # a node that the user has registered, and has given a name for this
            return pytree.treespec_dumps(spec)
        except (NotImplementedError, TypeError, ValueError):
            raise TypeError(str(foreign)) from None


@lru_cache(maxsize=64)
def structure(text: str) -> pytree.TreeSpec:
    """The structure of a tree, from `spec_text`."""
    record = json.loads(text)
    is_written_here = record == _LEAF or isinstance(record, dict)
    return _read(record) if is_written_here else pytree.treespec_loads(text)


def leaf_names(spec: pytree.TreeSpec, root: str) -> list[str]:
    """What each leaf of a tree is called where the tree is called `root`: `output[1]['mask']`."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [root + pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


class _Foreign(Exception):
    """A type of node that is not known here."""


def _written(spec: pytree.TreeSpec) -> Any:
    if spec.type is None:
        return _LEAF
    kind, context = _kind_of(spec.type, spec.context)
    return {"kind": kind, "context": context, "children": [_written(child) for child in spec.children()]}


def _kind_of(type_: Any, context: Any) -> tuple[str, Any]:
    if type_ in (tuple, list):
        return type_.__name__, None
    if type_ in (dict, OrderedDict):
        return type_.__name__, [_written_key(key) for key in context]
    if type_ is defaultdict:
        factory, keys = context
        return "defaultdict", [None if factory is None else _name_of(factory), [_written_key(key) for key in keys]]
    if type_ is deque:
        return "deque", context
    if type_ is namedtuple:  # of pytree: any class that namedtuple made
        return "namedtuple", _name_of(context)
    if type_ is torch.Size or type_.__module__ == "torch.return_types":
        return "class", _name_of(type_)
    raise _Foreign(
        f"a {_called(type_)}, whose structure cannot be told to another rank: return a tuple, list or dict, or register it "
        "with a serialized_type_name in torch.utils._pytree"
    )


def _written_key(key: Any) -> Any:
    if type(key) is tuple:
        return ["tuple", [_written_key(part) for part in key]]
    if type(key).__name__ in _PLAIN_KEYS and type(key) is _PLAIN_KEYS[type(key).__name__]:
        return [type(key).__name__, repr(key) if type(key) is float else key]
    raise TypeError(
        f"a dict with the key {key!r} of type {_called(type(key))}: take strings, numbers or tuples of them as keys"
    )


def _name_of(thing: Any) -> list[str]:
    """Where a class or function can be imported from, on each rank."""
    name = [thing.__module__, thing.__qualname__]
    try:
        found = _imported(name)
    except (ImportError, AttributeError):
        found = None
    if found is not thing:
        raise TypeError(
            f"a {_called(thing)}, which other ranks cannot import by its name: define it at the top level of a module, or "
            "return a tuple or dict"
        )
    return name


def _called(thing: Any) -> str:
    return thing.__name__ if thing.__module__ == "builtins" else f"{thing.__module__}.{thing.__qualname__}"


def _imported(name: Sequence[str]) -> Any:
    thing: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        thing = getattr(thing, part)
    return thing


def _read(record: Any) -> pytree.TreeSpec:
    if record == _LEAF:
        return pytree.tree_structure(0)
    type_, context = _type_of(record["kind"], record["context"])
    return pytree.TreeSpec(type_, context, [_read(child) for child in record["children"]])


def _type_of(kind: str, context: Any) -> tuple[Any, Any]:
    """What `_kind_of` was given."""
    if kind == "defaultdict":
        factory, keys = context
        return defaultdict, [None if factory is None else _imported(factory), [_read_key(key) for key in keys]]
    if kind == "namedtuple":
        return namedtuple, _imported(context)
    if kind == "class":
        return _imported(context), None
    if kind in ("dict", "OrderedDict"):
        context = [_read_key(key) for key in context]
    return {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict, "deque": deque}[kind], context


def _read_key(record: Any) -> Any:
    kind, value = record
    if kind == "tuple":
        return tuple(_read_key(part) for part in value)
    return float(value) if kind == "float" else value
