"""The structure of a tree as text: how tuples, lists, dicts and named tuples lie in each other, for the other end of a message.

Reading it runs nothing that the text chooses: of classes it takes named tuples alone, and those of `torch.return_types`.
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict, namedtuple
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

_KINDS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
_PLAIN_KEYS = (str, int, float, bool, type(None))


@lru_cache(maxsize=64)
def spec_text(spec: pytree.TreeSpec) -> str:
    """A tree's structure as text.

    Raises:
        TypeError: a type or a key that another rank cannot read, with what to return instead.
    """
    try:
        return json.dumps(_written(spec))
    except NotImplementedError as error:
        try:  # a node that torch can write, or that the user has registered with a name for this
            return pytree.treespec_dumps(spec)
        except (NotImplementedError, TypeError, ValueError):
            raise TypeError(str(error)) from None


@lru_cache(maxsize=64)
def structure(text: str) -> pytree.TreeSpec:
    """The structure of a tree, from `spec_text`."""
    record = json.loads(text)
    return _read(record) if record is None or isinstance(record, dict) else pytree.treespec_loads(text)


def leaf_names(spec: pytree.TreeSpec, root: str) -> list[str]:
    """What each leaf of a tree is called where the tree is called `root`: `output[1]['mask']`."""
    indexed = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [root + pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(indexed)[0]]


def _written(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return None
    kind, context = spec.type, spec.context
    record: dict[str, Any] = {"children": [_written(child) for child in spec.children()]}
    if kind in (tuple, list):
        return {"kind": kind.__name__, **record}
    if kind in (dict, OrderedDict):
        return {"kind": kind.__name__, "keys": [_written_key(key) for key in context], **record}
    if kind is namedtuple:  # of pytree: any class that namedtuple made
        name = [context.__module__, context.__qualname__]
        if _imported(name) is not context:
            raise TypeError(
                f"a {'.'.join(name)}, which other ranks cannot import by its name: define it at the top level of a module, or "
                "return a tuple or dict"
            )
        return {"kind": "namedtuple", "name": name, **record}
    if kind.__module__ == "torch.return_types":
        return {"kind": "torch.return_types", "name": kind.__name__, **record}
    raise NotImplementedError(
        f"a {kind.__name__}, whose structure cannot be told to another rank: return a tuple, list or dict, or register it "
        "with a serialized_type_name in torch.utils._pytree"
    )


def _written_key(key: Any) -> Any:
    if type(key) is tuple:
        return [_written_key(part) for part in key]
    if type(key) not in _PLAIN_KEYS:
        raise TypeError(
            f"a dict with the key {key!r} of type {type(key).__qualname__}: take strings, numbers or tuples of them as keys"
        )
    return key


def _imported(name: list[str]) -> Any:
    """The class of named tuples of that name; None: there is none."""
    try:
        thing: Any = importlib.import_module(name[0])
        for part in name[1].split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return None
    return thing if isinstance(thing, type) and issubclass(thing, tuple) and hasattr(thing, "_fields") else None


def _read(record: Any) -> pytree.TreeSpec:
    if record is None:
        return pytree.tree_structure(0)
    kind, children = record["kind"], [_read(child) for child in record["children"]]
    if kind == "namedtuple":
        return pytree.TreeSpec(namedtuple, _imported(record["name"]), children)
    if kind == "torch.return_types":
        return pytree.TreeSpec(getattr(torch.return_types, record["name"]), None, children)
    return pytree.TreeSpec(_KINDS[kind], list(map(_read_key, record["keys"])) if "keys" in record else None, children)


def _read_key(key: Any) -> Any:
    return tuple(map(_read_key, key)) if isinstance(key, list) else key
