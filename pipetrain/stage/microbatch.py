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

    `seeds_of` returns the seeds of the layers with these global indices. `target` and `weight` are for the stage that computes the loss.
    After each layer, F calls `on_layer(global index, output)`; the output is a `WithLosses` once a layer has added a loss. The loss has the
    index after the last layer. `is_shared`: another stage of this rank reads the same memory, so layers that change it get a clone. Leaves
    in `fixed`, and leaves of the target in `fixed_target`, may never be changed in place; the values are texts for the error.
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
    """The output of layers without its graph. `roots` gets each leaf's edge, or None. As stages hold edges only, sent outputs are freed."""
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

    `others`: which leaves share storages with a kept set. Leaves are numbered: first the input's, then the output's.
    `is_plain`: F of a kept microbatch may run without hooks, because no later F changes a tensor that autograd saves.
    """

    has_run: bool = False
    others: tuple[int, ...] = ()
    is_plain: bool = False
    kept_size: SetSize = field(default_factory=SetSize)  # of a kept set
    size: SetSize = field(default_factory=SetSize)  # of a set that R fills


@dataclass(slots=True)
class Held:
    """All that a stage holds of a microbatch between its F and its B."""

    given: StageInput | None  # None for a kept set without R
    num_inputs: int
    kind: MicrobatchKind
    seeds: list[int]  # of the layers and the loss
    late: LateBoundSet | None = None  # None if F ran without hooks: autograd holds the kept set
    deferral: Deferral | None = None  # None: the backward is not split
    has_casts: bool = False
    seen: TensorCopies = NO_COPIES  # buffers as F saw them
    roots: list[GradientEdge | None] = field(default_factory=list)  # per output leaf, its edge; None: no gradient
    loss: tuple[torch.Size, torch.dtype] | None = None
    sink: dict[int, Tensor] = field(default_factory=dict)  # input leaf -> its gradient
    # Tensors that the meter counts, with their keys: the stashed input, and leaves that share storages with a kept set.
    counted: list[tuple[Tensor, int]] = field(default_factory=list)
    passed: dict[int, Passed] = field(default_factory=dict)  # by layer
    size: CountedBytes | None = None  # of a kept set, if F ran without hooks
    host_set: HostSet | None = None  # the storages of the set that go to host memory
    lent: frozenset[int] = frozenset()  # `lent_storages` of the input, which stay on the device
    ends: list[int] = field(default_factory=list)  # per layer, the sequence number of its last node in autograd
