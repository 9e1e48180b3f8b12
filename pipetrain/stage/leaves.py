"""Whose gradients a stage makes: a leaf of F's graph that is no parameter of the stage gets a gradient that nobody sees.

Such a leaf is a weight of another stage (whose own copy, on another rank, learns something else), or a tensor that is in no
`parameters()`, so neither clipped nor updated. It is refused by name. What a forward makes and drops again
(`x.detach().requires_grad_()`, for a force) is nobody's, and stays.

A `torch.utils.checkpoint` with `use_reentrant=True` hides what is used inside of it from F's graph, and so from this.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.traces import is_of_the_user

OnLayer = Callable[[int, Any], None]  # given the global number of a layer and what it returned
NameOf = Callable[[Tensor], str | None]  # what a tensor is called in the whole model; None: it is not known there

_DEEPEST = 6  # attributes of attributes that are searched
_MOST_SEEN = 100_000  # a list of all samples is no place to search


def no_names(_tensor: Tensor) -> str | None:
    """Of a model that no rank has in one piece."""
    return None


class LeafWatch:
    """Refuses foreign leaves in the graph of an F that runs within `over`.

    `anchor` is the leaf through which what the stage received enters its graph. F may also use parameters of the layers in `beside`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss_fn: Callable[..., Any] | None,
        *,
        first_layer: int,
        anchor: Tensor,
        name_of: NameOf = no_names,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        self._layers = layers
        self._beside = beside
        self._loss_fn = loss_fn
        self._first_layer = first_layer
        self._anchor = anchor
        self._name_of = name_of

    @contextmanager
    def over(self, on_layer: OnLayer | None) -> Iterator[OnLayer]:
        """Around an F: gives what F is to call after each layer, and after the loss.

        Raises ValueError: (what F calls) the layer, its leaf and what to do.
        """
        known = (*self._layers, *self._beside)
        allowed = {id(parameter) for layer in known for parameter in layer.parameters()} | {id(self._anchor)}
        walked: set[Node] = set()

        def after_layer(number: int, value: Any) -> None:
            roots = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for node in accumulating_nodes(roots, walked):
                if id(leaf_of(node)) not in allowed and self._is_somebodys(number, node, roots):
                    raise ValueError(self._complaint(number, leaf_of(node)))
            if on_layer is not None:
                on_layer(number, value)

        try:
            yield after_layer
        finally:
            walked.clear()  # the graph lives no longer than without this

    def _is_somebodys(self, number: int, node: Node, returned: Sequence[Tensor]) -> bool:
        """Whether a leaf is more than what this forward has made and only its graph holds."""
        leaf = leaf_of(node)
        if is_sharded(self._user(number)):
            return self._name_in_stage(leaf) is None and self._name_of(leaf) is not None
        if any(tensor is leaf for tensor in returned):
            known = self._name_in_stage(leaf) or self._name_of(leaf) or _path_to(leaf, self._user(number))
            return bool(known)
        del leaf
        return _references(node) > _references_of_nobody()

    def _user(self, number: int) -> Any:
        """The layer of this number, or loss_fn, which has the number after the last."""
        place = number - self._first_layer
        return self._loss_fn if place >= len(self._layers) else self._layers[place]

    def _complaint(self, number: int, leaf: Tensor) -> str:
        user = self._user(number)
        is_loss = user is self._loss_fn
        who = "loss_fn" if is_loss else f"layer {number} ({type(user).__name__})"
        owned = self._name_in_stage(leaf)
        if owned is not None and isinstance(leaf, nn.Parameter):
            return (
                f"{who} makes the parameter {owned} in its forward, so no optimizer knows it: make it in __init__, or run the "
                "layer once before the Pipeline is made"
            )
        if owned is None and (name := self._name_of(leaf)):
            instead = (
                "compute that term in a layer of its stage, and give it to pipetrain.add_loss there"
                if is_loss
                else "give the layer a parameter of its own"
            )
            return (
                f"{who} uses {name}, which is of another stage: its gradient from here would be lost. Choose a balance that puts "
                f"both on one stage, or {instead}"
            )
        found = f"buffer {owned}" if owned else _path_to(leaf, user)
        what = f"a tensor {list(leaf.shape)} that requires a gradient and is no parameter of its stage"
        home = "the last layer" if is_loss else "the layer"
        return (
            f"{who} uses {what}{f' ({found})' if found else ''}, so no optimizer knows it: make it an nn.Parameter of {home}, or "
            "use its .detach()"
        )

    def _name_in_stage(self, leaf: Tensor) -> str | None:
        for number, layer in enumerate(self._layers, start=self._first_layer):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if tensor is leaf:
                    return f"{number}.{name}"
        return None


# The walk -------------------------------------------------------------------------------------------------------------


def accumulating_nodes(roots: Iterable[Tensor], walked: set[Node]) -> Iterator[Node]:
    """The ends of the graph below `roots`, a node per leaf, but for what was `walked` before; `walked` grows."""
    todo = [get_gradient_edge(root).node for root in roots]
    while todo:
        node = todo.pop()
        if node in walked:
            continue
        walked.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node
        else:
            todo.extend(following for following, _ in node.next_functions if following is not None)


def leaf_of(node: Node) -> Tensor:
    """The leaf of an accumulating node."""
    leaf: Tensor = node.variable  # type: ignore[attr-defined]
    return leaf


def is_sharded(user: Any) -> bool:
    """Whether `fully_shard` puts gathered parameters, which are leaves of their own, in the place of a layer's."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (
        fsdp is not None and isinstance(user, nn.Module) and any(isinstance(m, fsdp.FSDPModule) for m in user.modules())
    )


def _references(node: Node) -> int:
    return sys.getrefcount(node.variable)  # type: ignore[attr-defined]


@functools.cache
def _references_of_nobody() -> int:
    """What `_references` counts for a leaf that a graph holds and nothing else."""
    root = torch.zeros((), requires_grad=True) * 1
    (node,) = accumulating_nodes([root], set())
    return _references(node)


# Its name -------------------------------------------------------------------------------------------------------------


def _path_to(wanted: Tensor, user: Any) -> str:
    """Where a layer, or a function, has a tensor: `its attribute scale`; nothing where it is not found."""
    found = next(paths(user, lambda thing: thing is wanted), None)
    return f"{found[0]} of {_name_of_thing(user)}" if found and found[0] else ""


def first_named(
    function: Callable[..., Any], is_wanted: Callable[[Any], bool], passed_over: Iterable[Any]
) -> tuple[str, Any] | None:
    """The first thing of a kind that `named_paths` finds, and what it is called; not through anything that is `passed_over`."""
    found = next(named_paths(function, is_wanted, {id(thing) for thing in passed_over}), None)
    return found and (f"{found[0]} of {_name_of_thing(function)}", found[1])


def named_paths(
    function: Callable[..., Any], is_wanted: Callable[[Any], bool], seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """As `paths`, along attributes that code of `function` names: a method of a trainer that has the whole model comes to a layer only where it
    says `self.model`, or goes through all modules of what it names."""
    return paths(function, is_wanted, seen, names=_names_in_code(function))


# What gives parts of a module that the code does not name.
_ALL_MODULES = frozenset({"modules", "children", "named_modules", "named_children", "parameters", "named_parameters"})


def _names_in_code(root: Any) -> set[str]:
    """All names in a function's code, and in that of functions that it names: beside it, or of the objects that it names."""
    names: set[str] = set()
    kinds: set[type] = set()
    seen: set[int] = set()
    todo = [root, *(getattr(type(root), name, None) for name in ("forward", "__call__"))]
    while todo:
        found: list[Any] = []
        for thing in todo:
            seen.add(id(thing))
            if isinstance(thing, types.FunctionType):
                names.update(_names_in(thing.__code__))
                found += (part for _, part in _parts(thing))
            elif isinstance(thing, types.MethodType):
                found += (thing.__func__, thing.__self__)
            elif isinstance(thing, functools.partial):
                found += (thing.func, *thing.args, *thing.keywords.values())
            elif not isinstance(thing, _NOT_WALKED):
                kinds.add(type(thing))
        bases = {base for kind in kinds for base in kind.__mro__ if is_of_the_user(base)}
        members = [member for base in bases for name, member in vars(base).items() if name in names]
        found += (getattr(member, "fget", getattr(member, "__func__", member)) for member in members)
        todo = [thing for thing in found if id(thing) not in seen]
    return names


def _names_in(code: types.CodeType) -> list[str]:
    """Those that are looked up, in functions inside of it too: attributes, globals, variables of functions around it."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_in(part)]
    return [*code.co_names, *code.co_freevars, *inner]


def _name_of_thing(thing: Any) -> str:
    return (
        str(getattr(thing, "__qualname__", type(thing).__name__))
        .removesuffix(".<lambda>")
        .removesuffix(".<locals>")
        .split("<locals>.")[-1]
    )


def paths(
    root: Any, is_wanted: Callable[[Any], bool], seen: set[int] | None = None, *, names: Set[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """What of a kind something holds, with how that is written behind its name; not through what is `seen`, which grows.

    With `names`, only attributes of these names are followed, and all parts of a module if they say so.
    """
    seen = set() if seen is None else seen
    has_all = names is None or bool(names & _ALL_MODULES)

    def is_followed(thing: Any, name: str) -> bool:
        is_attribute = name.startswith(".") and not name[1:].isdigit()
        return not is_attribute or names is None or name[1:] in names or (has_all and isinstance(thing, nn.Module))

    def walk(thing: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if is_wanted(thing):
            yield path.removeprefix("."), thing
        if depth and len(seen) < _MOST_SEEN and id(thing) not in seen and not isinstance(thing, _NOT_WALKED):
            seen.add(id(thing))
            for name, part in _parts(thing):
                if is_followed(thing, name):
                    yield from walk(part, path + name, depth - 1)

    yield from walk(root, "", _DEEPEST)


_NOT_WALKED = (Tensor, type, types.ModuleType, str, bytes, int, float, complex, types.NoneType)


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What something holds, with how that is written behind its name."""
    if isinstance(thing, dict):  # not any Mapping: one may read each value from a disk
        yield from ((f"[{key!r}]", value) for key, value in list(thing.items()))
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", value) for number, value in enumerate(thing))
    elif isinstance(thing, functools.partial):
        yield from (("", part) for part in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from (("", part) for part in (thing.__func__, thing.__self__))
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing) if is_of_the_user(thing) else ()
    elif isinstance(thing, nn.Module) or is_of_the_user(type(thing)):
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                yield from ((f".{key}", part) for key, part in list(value.items()))
            else:
                yield f".{name}", value
        for name in ("forward", "__call__"):
            if isinstance(function := getattr(type(thing), name, None), types.FunctionType):
                yield "", function


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    names = function.__globals__
    yield from ((f".{name}", names[name]) for name in dict.fromkeys(_names_in(code)) if name in names)
    yield "", function.__defaults__
    yield "", function.__kwdefaults__
