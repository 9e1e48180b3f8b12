"""One microbatch at one stage: the input and the output of its F, and what the stage holds from its F to its B."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pipetrain.stage.entry import Passed
from pipetrain.stage.host_set import HostSet
from pipetrain.stage.layer_state import NO_COPIES
from pipetrain.stage.meter import CountedBytes, SetSize
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral
from pipetrain.stage.tensor_copies import TensorCopies, is_dense, storage_key


class StageInput(NamedTuple):
    """The input of F. Several leaves may be one tensor: an in-place change of one leaf changes all of them.

    `seeds_of` gives the seeds of layers by their global indices. `target` and `weight` are for the stage that computes the loss. F calls
    `on_layer` with the global index and the output of each layer (`WithLosses` once losses were added); the loss has the index after the
    last layer's. `is_shared`: another stage of this rank reads the same memory, so in-place changes must not reach that memory. `fixed` are
    leaves, and `fixed_target` leaves of the target, that may never be changed in place: index -> text for the error.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: frozenset[int]
    seeds_of: Callable[[Sequence[int]], list[int]]
    target: Any = None
    weight: float = 1.0
    on_layer: Callable[[int, Any], None] | None = None
    is_shared: bool = False
    fixed: Mapping[int, str] = MappingProxyType({})
    fixed_target: Mapping[int, str] = MappingProxyType({})


class StageOutput(NamedTuple):
    """The output of F, detached: the leaves of its tree, and which of them need a gradient. Leaves that are one tensor in the layers'
    output are one tensor here, too."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: tuple[bool, ...]


def lent_storages(leaves: Sequence[Any]) -> frozenset[int]:
    """The storages that are larger than the leaf in them, such as that of a batch of which the leaf is a slice."""
    return frozenset(
        storage_key(leaf)
        for leaf in leaves
        if isinstance(leaf, Tensor) and is_dense(leaf) and leaf.nbytes < leaf.untyped_storage().nbytes()
    )


_ONE_LEAF = pytree.tree_structure(0)  # the structure of a value that is one leaf


def detached(outputs: Any, roots: list[GradientEdge | None]) -> StageOutput:
    """The output of layers without its graph. `roots` gets an edge per leaf: a stage holds edges, so the output is free once it is sent."""
    if isinstance(outputs, Tensor):
        roots.append(get_gradient_edge(outputs) if outputs.requires_grad else None)
        return StageOutput((outputs.detach(),), _ONE_LEAF, (outputs.requires_grad,))
    leaves, spec = pytree.tree_flatten(outputs)
    results, wants, done = list[Any](), list[bool](), dict[int, Tensor]()
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        if is_tensor and id(leaf) not in done:
            done[id(leaf)] = leaf.detach()
        results.append(done[id(leaf)] if is_tensor else leaf)
        wants.append(is_tensor and leaf.requires_grad)
        roots.append(get_gradient_edge(leaf) if wants[-1] else None)
    return StageOutput(tuple(results), spec, tuple(wants))


@dataclass(slots=True)
class MicrobatchKind:
    """What all microbatches of one kind (shapes, modes, which tensors need a gradient) have in common; known once one has run.

    `others` are indices of leaves that share storages with a kept set. They count the input's leaves, then the output's.
    `is_plain`: autograd may hold a kept set without slots, since no later F changes a tensor in it.
    """

    has_run: bool = False
    others: tuple[int, ...] = ()
    is_plain: bool = False
    kept_size: SetSize = field(default_factory=SetSize)
    size: SetSize = field(default_factory=SetSize)  # of a set that R fills


@dataclass(slots=True)
class Held:
    """All that a stage holds of a microbatch between its F and its B."""

    given: StageInput | None  # None for a kept set without R
    num_inputs: int
    kind: MicrobatchKind
    seeds: list[int]  # of the layers and the loss
    late: LateBoundSet | None = None  # None for a kept set that autograd holds by itself
    deferral: Deferral | None = None  # None: the backward is not split
    has_casts: bool = False
    seen: TensorCopies = NO_COPIES  # buffers as F saw them
    roots: list[GradientEdge | None] = field(default_factory=list)  # an edge per output leaf that has a gradient
    loss: tuple[torch.Size, torch.dtype] | None = None
    sink: dict[int, Tensor] = field(default_factory=dict)  # input leaf -> its gradient
    # Tensors that the meter counts, with their keys: the stashed input, and leaves that share storages with a kept set.
    counted: list[tuple[Tensor, int]] = field(default_factory=list)
    passed: dict[int, Passed] = field(default_factory=dict)  # by layer
    size: CountedBytes | None = None  # of a kept set that autograd holds
    host_set: HostSet | None = None  # the part of the set that goes to host memory
    lent: frozenset[int] = frozenset()  # storages larger than the input leaf in them
    ends: list[int] = field(default_factory=list)  # per layer, the sequence number of its last node in autograd
