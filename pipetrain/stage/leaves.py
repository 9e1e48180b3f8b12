"""Refuses leaves of F's graph that are no parameters of the stage, and losses that layers leave in attributes: gradients would be lost.

Such a leaf is a weight of another stage (its copy on the other rank would be updated differently), or a tensor outside of all
`parameters()`, which no optimizer clips or updates. It is refused by name. A leaf that a forward makes for itself
(`x.detach().requires_grad_()`, for a force) is allowed.

A `torch.utils.checkpoint` with `use_reentrant=True` hides the leaves that are used inside it from F's graph, and so from this check.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.traces import is_of_the_user, members_of, names_in

OnLayer = Callable[[int, Any], None]  # called with the global index of a layer, and its output
NameOf = Callable[[Tensor], str | None]  # what a tensor is called in the whole model; None: it is not known there

_DEEPEST = 6  # levels: an attribute, its attributes or entries, and so on
_MOST_SEEN = 100_000  # objects; then the search ends, as it may in a list of all samples


@dataclass(eq=False)
class LeafWatch:
    """Refuses foreign leaves in the graph of an F that runs within `over`. `anchor` is the leaf through which the stage's input enters the
    graph. F may also use parameters of the layers in `beside`."""

    layers: Sequence[nn.Module]
    loss_fn: Callable[..., Any] | None
    first_layer: int
    anchor: Tensor
    name_of: NameOf
    beside: Sequence[nn.Module]

    @contextmanager
    def over(self, on_layer: OnLayer | None) -> Iterator[OnLayer]:
        """Around an F; yields a function that F calls after each layer, and after the loss.

        That function raises ValueError, which names the layer, the leaf and what to do. So does the end of the block, if a tensor in an
        attribute (such as a loss for experts) has a graph that leads neither to an output nor to the loss: it would get no backward.
        """
        known = (*self.layers, *self.beside)
        allowed = {id(parameter) for layer in known for parameter in layer.parameters()} | {id(self.anchor)}
        walked: set[Node] = set()
        before = {id(tensor): tensor for _, _, tensor in self._tensors_in_attributes()}

        def after_layer(number: int, value: Any) -> None:
            roots = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for node in nodes_below([get_gradient_edge(root).node for root in roots], walked):
                # No variable may hold the leaf: `_is_somebodys` counts what refers to it.
                if leaf_of(node) is None or id(leaf_of(node)) in allowed:
                    continue
                if self._is_somebodys(number, node, roots):
                    raise ValueError(self._complaint(number, leaf_of(node)))
            if on_layer is not None:
                on_layer(number, value)

        try:
            yield after_layer
            for number, name, tensor in self._tensors_in_attributes():
                if id(tensor) not in before and tensor.grad_fn not in walked and not is_sharded(self._user(number)):
                    raise ValueError(
                        f"layer {number} ({type(self._user(number)).__name__}) leaves in its attribute {name} a tensor whose graph does not lead "
                        "to its output, so its gradient would be lost: pass a loss to pipetrain.add_loss(...) in the forward, and "
                        "store any other tensor detached, as tensor.detach()"
                    )
        finally:
            walked.clear()  # drop the nodes, so that they do not keep the graph alive
            before.clear()

    def _tensors_in_attributes(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yields (layer, attribute, tensor): each tensor with a graph that an attribute of a layer holds, itself or in a list or dict."""
        for number, layer in enumerate(self.layers, start=self.first_layer):
            for path, module in layer.named_modules():
                for name, value in members_of(module, of_modules=False):
                    held = (
                        (part for _, part in members_of(value, of_modules=False)) if type(value) in (list, dict) else ()
                    )
                    for one in (value, *held):
                        if isinstance(one, Tensor) and one.grad_fn is not None:
                            yield number, f"{path}{name}".removeprefix("."), one

    def _is_somebodys(self, number: int, node: Node, returned: Sequence[Tensor]) -> bool:
        """Whether the leaf has a name in the model, or something other than the graph of this F refers to it. If not, the forward made the
        leaf for itself."""
        leaf = leaf_of(node)
        if is_sharded(self._user(number)):
            return self._name_in_stage(leaf) is None and self.name_of(leaf) is not None
        if any(tensor is leaf for tensor in returned):
            known = self._name_in_stage(leaf) or self.name_of(leaf) or _path_to(leaf, self._user(number))
            return bool(known)
        del leaf
        return _references(node) > _references_of_nobody()

    def _user(self, number: int) -> Any:
        """The layer with this global index, or loss_fn, whose index follows that of the last layer."""
        place = number - self.first_layer
        return self.loss_fn if place >= len(self.layers) else self.layers[place]

    def _complaint(self, number: int, leaf: Tensor) -> str:
        user = self._user(number)
        is_loss = user is self.loss_fn
        who = "loss_fn" if is_loss else f"layer {number} ({type(user).__name__})"
        owned = self._name_in_stage(leaf)
        if owned is not None and isinstance(leaf, nn.Parameter):
            return (
                f"{who} makes the parameter {owned} in its forward, so no optimizer knows it: make it in __init__, or run the "
                "layer once before the Pipeline is made"
            )
        if owned is None and (name := self.name_of(leaf)):
            instead = "give the layer a parameter of its own"
            if is_loss:
                instead = "compute that term in a layer of its stage, and give it to pipetrain.add_loss there"
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
        for number, layer in enumerate(self.layers, start=self.first_layer):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if tensor is leaf:
                    return f"{number}.{name}"
        return None


# The walk -------------------------------------------------------------------------------------------------------------


def nodes_below(roots: Iterable[Node], walked: set[Node]) -> Iterator[Node]:
    """`roots` and the nodes that their backward leads to. Nodes in `walked` are skipped; the others are added to it."""
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in walked:
            walked.add(node)
            yield node
            todo.extend(following for following, _ in node.next_functions if following is not None)


def leaf_of(node: Node) -> Any:
    """The leaf whose gradient the node accumulates; None if it is no AccumulateGrad node."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]


def is_sharded(user: Any) -> bool:
    """Whether `fully_shard` was applied in a layer: gathered parameters, which are other leaves, then replace its own in F."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = user.modules() if fsdp is not None and isinstance(user, nn.Module) else ()
    return any(isinstance(module, fsdp.FSDPModule) for module in modules)  # type: ignore[union-attr]


def _references(node: Node) -> int:
    return sys.getrefcount(leaf_of(node))


@functools.cache
def _references_of_nobody() -> int:
    """What `_references` counts for a leaf that nothing but a graph holds."""
    return _references(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


# Its name -------------------------------------------------------------------------------------------------------------


def _path_to(wanted: Tensor, user: Any) -> str:
    """Where a layer or a function holds a tensor, such as `scale of MyLayer`; empty if it is not found."""
    found = next(paths(user, lambda thing: thing is wanted), None)
    return f"{found[0]} of {_name_of_thing(user)}" if found and found[0] else ""


def first_named(
    function: Callable[..., Any], is_wanted: Callable[[Any], bool], passed_over: Iterable[Any]
) -> tuple[str, Any] | None:
    """The name and object of the first result of `named_paths`; None: there is none. Objects in `passed_over` are not searched."""
    found = next(named_paths(function, is_wanted, {id(thing) for thing in passed_over}), None)
    return found and (f"{found[0]} of {_name_of_thing(function)}", found[1])


def named_paths(
    function: Callable[..., Any], is_wanted: Callable[[Any], bool], seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """As `paths`, but only through attributes that the code of `function` names. If `function` is a method of a user's object that holds
    the model too, the layers are found only if its code has `self.model`."""
    return paths(function, is_wanted, seen, names=_names_in_code(function))


# Methods that return parts of a module. Code that calls one may use any part without naming it.
_ALL_MODULES = frozenset({"modules", "children", "named_modules", "named_children", "parameters", "named_parameters"})


def _names_in_code(root: Any) -> set[str]:
    """Names in the code of `root` and of the functions that it can reach: its globals, the variables of its closure, members of these."""
    names: set[str] = set()
    kinds: set[type] = set()
    seen: set[int] = set()
    todo = [root, *(getattr(type(root), name, None) for name in ("forward", "__call__"))]
    while todo:
        found: list[Any] = []
        for thing in todo:
            seen.add(id(thing))
            if isinstance(thing, types.FunctionType):
                names.update(names_in(thing.__code__))
                found += (part for _, part in members_of(thing, of_modules=True))
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


def _name_of_thing(thing: Any) -> str:
    name = str(getattr(thing, "__qualname__", type(thing).__name__))
    return name.removesuffix(".<lambda>").removesuffix(".<locals>").split("<locals>.")[-1]


def paths(
    root: Any, is_wanted: Callable[[Any], bool], seen: set[int] | None = None, *, names: Set[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Pairs (path, object) of objects below `root` that `is_wanted` accepts; a path is `model[0]`. Objects in `seen` are skipped, others added.
    With `names`, only these attributes are followed, but all parts of modules if `names` has one of `_ALL_MODULES`."""
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
            for name, part in members_of(thing, of_modules=True):
                if is_followed(thing, name):
                    yield from walk(part, path + name, depth - 1)

    yield from walk(root, "", _DEEPEST)


_NOT_WALKED = (Tensor, type, types.ModuleType, str, bytes, int, float, complex, types.NoneType)
