"""One microbatch at one stage: what F gets and gives, and what is held of it until its B."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from pipetrain.stage.kept import Passed
from pipetrain.stage.layer_state import NOTHING_SEEN, Seen
from pipetrain.stage.meter import CountedBytes, SetSize
from pipetrain.stage.slots import LateBoundSet
from pipetrain.stage.split_backward import Deferral


@dataclass(frozen=True)
class StageInput:
    """What F gets: the leaves of a tree, which of them need a gradient, and the seeds of layers for this microbatch.

    The same tensor may stand in several leaves: what changes one in place changes all. `is_shared`: another stage of this rank
    reads the same memory, so that a change in place must not reach it. `fixed` are leaves that may not be changed in place at
    all: what they are, and why; `fixed_target` are those of the target. `seeds_of` is given the global indices of layers.
    `target` and `weight` are for the stage that computes the loss.
    F calls `on_layer` with the global index and the output of each layer. The output is `WithLosses` if losses were added so far.
    The index of the loss is the one after the last layer's.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: frozenset[int]
    seeds_of: Callable[[Sequence[int]], list[int]]
    target: Any = None
    weight: float = 1.0
    on_layer: Callable[[int, Any], None] | None = None
    is_shared: bool = False
    fixed: Mapping[int, str] = field(default_factory=dict)
    fixed_target: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOutput:
    """What F gives, detached: the leaves of the output tree and which of them need a gradient. If two leaves of the layers' output
    are one tensor, so are these two."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: tuple[bool, ...]


@dataclass(slots=True)
class MicrobatchKind:
    """What is known of all microbatches of one kind (shapes, modes, what needs a gradient), once one has run.

    `others` are indices of leaves whose storages a kept set holds, too: the input's leaves come first, then the output's.
    `is_plain`: autograd may hold a kept set without slots, since no later F changes a tensor in it.
    """

    has_run: bool = False
    others: tuple[int, ...] = ()
    is_plain: bool = False
    kept_size: SetSize = field(default_factory=SetSize)
    size: SetSize = field(default_factory=SetSize)  # of what R brings


@dataclass(slots=True)
class Held:
    """What a stage holds of a microbatch between its F and its B."""

    given: StageInput | None  # None for a kept set without R: nothing will run again
    num_inputs: int
    has_input_gradient: bool
    kind: MicrobatchKind
    seeds: list[int]  # of the layers and the loss
    late: LateBoundSet | None = None  # None for a kept set that autograd holds by itself
    deferral: Deferral | None = None  # None: B will run, and not I and W
    has_casts: bool = False
    seen: Seen = NOTHING_SEEN  # the state that F saw
    roots: list[GradientEdge | None] = field(default_factory=list)  # an edge per output leaf that has a gradient
    loss: tuple[torch.Size, torch.dtype] | None = None
    sink: dict[int, Tensor] = field(default_factory=dict)  # input leaf -> its gradient
    # The stashed input, and what of a kept set others hold, too: by their keys in the meter.
    counted: list[tuple[Tensor, int]] = field(default_factory=list)
    passed: dict[int, Passed] = field(default_factory=dict)  # by layer
    size: CountedBytes | None = None  # of a kept set that autograd holds
    ends: list[int] = field(default_factory=list)  # of its layers, as autograd counts nodes
