"""What all ranks agree on before the ops of a call run: its kind, its shapes, and where something needs a gradient."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.group.chain import Chain
from pipetrain.plan.plan import Plan
from pipetrain.runtime.counting import Counted
from pipetrain.runtime.cut import cut, num_rows, rows_fault
from pipetrain.runtime.given_batch import check_batch
from pipetrain.runtime.segmented import AnyStage
from pipetrain.schedule.op import Op
from pipetrain.transport.forms import Form

# So that a header stays within its fixed size.
_LONGEST_ERROR = 600


@dataclass(frozen=True)
class Call:
    """One call of the pipeline, as this rank knows it.

    `described` says whether messages to and from the stage before, and the stage after, carry their form. `first_backward` is
    the first stage in which something needs a gradient, as far as it matters to this rank: perhaps `num_stages` on one whose
    stages all come before it. No rank runs the microbatches `skipped`: they count nothing. `weights` is what each weighs in the
    loss, on the rank of the last stage where targets are counted; else None.
    """

    num_microbatches: int
    rows: int
    signature: int
    first_backward: int
    described: tuple[bool, bool]
    skipped: frozenset[int] = frozenset()
    weights: list[float] | None = None


class Calls:
    """Agrees with the other ranks on each call. The rank that holds stage 0 says which it is, and each adds what it knows.

    Where stages are placed in the order of the ranks one message goes down the chain, and a rank knows of the stages up to its
    own: no others matter to it. With any other placement, and where targets are counted or stages share parameters, everything goes up the chain, and then down
    to all: which microbatches count nothing is known where the last stage is, and no rank may begin without it.
    """

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        stages: Mapping[int, AnyStage],
        copies: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """`copies` are the parameters of this rank that a stage elsewhere shares, by their first name in the whole model; None:
        no two stages share any."""
        self._chain = chain
        self._copies = {} if copies is None else copies
        self._shares = copies is not None
        self._plan = plan
        self._stages = stages
        self._signatures = Signatures(chain.rank)
        self._is_in_order = all(low <= high for low, high in pairwise(plan.stage_ranks))
        self._forms: dict[int, dict[Op, Form]] = {}
        self._told: dict[int, tuple[_Told, _Told]] = {}  # by signature: over the edges before, and after
        self._trainable: dict[int, list[bool]] = {}  # of this rank's stages, which parameters need a gradient
        self._num_changes = 0

    def forms(self, call: Call) -> dict[Op, Form]:
        """The forms of the messages of such a call, to be filled where it is described."""
        return self._forms.setdefault(call.signature, {})

    def agree(
        self,
        kind: str,
        step: int,
        inputs: Any,
        *,
        is_training: bool,
        count: Callable[[], Counted] | None = None,
        mistake: str | None = None,
    ) -> Call:
        """The call of this `kind` (`step`, `evaluate`, `call`) at `step`, with the inputs of the rank that holds stage 0 and the
        targets of the one that holds the last, which `count` counts; on every rank or on none. Collective.

        Raises:
            ValueError: these inputs or targets cannot be cut or counted; the same on every rank.
            PipelineError: another rank failed, or called something else.
        """
        what, asked, counted = f"{kind} {step}", dict[str, Any](), None
        if 0 in self._stages:
            asked = {"error": mistake[:_LONGEST_ERROR]} if mistake else {}
            asked = asked or self._signatures.ask(kind, inputs, self._plan.num_microbatches, is_training)
        if count is not None and self._plan.num_stages - 1 in self._stages:
            counted = count()
            asked |= _header_of(counted)
        first_backward = self._look_at_parameters()

        def add(received: bytes | None) -> bytes:
            header: dict[str, Any] = (
                {"first_backward": self._plan.num_stages, "changes": 0} if received is None else json.loads(received)
            )
            header |= asked
            header["first_backward"] = min(header["first_backward"], first_backward)
            header["changes"] += self._num_changes
            for name, copy in self._copies.items():
                trained = header.setdefault("trained", {}).setdefault(name, copy.requires_grad)
                if trained != copy.requires_grad:
                    header["copies_error"] = _of_two_minds(name)
            return json.dumps(header).encode()

        if self._is_in_order and count is None and not self._shares:
            header = json.loads(self._chain.down(add, what))
            changes = (header["changes"] - self._num_changes, header["changes"])
        else:
            whole = self._chain.up(add, what)
            header = json.loads(self._chain.broadcast(whole, 0, what))
            changes = (header["changes"], header["changes"])
        problem = _problem_of(header)
        if problem:
            self._chain.wait_sent(what)  # this rank may end with the error, and the others are to know it
            raise ValueError(problem) from (None if counted is None else counted.problem)
        return self._call_of(header, changes, counted)

    def _look_at_parameters(self) -> int:
        """Count it where other parameters need a gradient than at the last call; returns the first of this rank's stages in
        which one does, `num_stages` where there is none."""
        trainable = {
            index: [parameter.requires_grad for layer in stage.layers for parameter in layer.parameters()]
            for index, stage in self._stages.items()
        }
        self._num_changes += trainable != self._trainable
        self._trainable = trainable
        return min((index for index, flags in trainable.items() if any(flags)), default=self._plan.num_stages)

    def _call_of(self, header: Mapping[str, Any], changes: tuple[int, int], counted: Counted | None) -> Call:
        number, m = header["signature"], header["num_microbatches"]
        skipped = frozenset(header.get("skipped", ()))
        before, after = self._told.setdefault(number, (_Told(), _Told()))
        return Call(
            num_microbatches=m,
            rows=header["rows"],
            signature=number,
            first_backward=header["first_backward"],
            described=(before.tell(changes[0], m, skipped), after.tell(changes[1], m, skipped)),
            skipped=skipped,
            weights=None if counted is None else counted.weights(m),
        )


@dataclass
class _Told:
    """What the two ends of an edge have told each other of one kind of calls: the forms of which microbatches, when the
    parameters that need a gradient had changed so many times."""

    num_changes: int | None = None
    microbatches: set[int] = field(default_factory=set)

    def tell(self, num_changes: int, num_microbatches: int, skipped: frozenset[int]) -> bool:
        """Whether messages carry their form in the call that comes; if so it is told then."""
        if self.num_changes != num_changes:
            self.num_changes = num_changes
            self.microbatches.clear()
        untold = set(range(num_microbatches)) - skipped - self.microbatches
        self.microbatches |= untold
        return bool(untold)


def _header_of(counted: Counted) -> dict[str, Any]:
    """What the other ranks are told of the targets; a mistake in them travels as one in the inputs does."""
    problem = None if counted.problem is None else str(counted.problem)[:_LONGEST_ERROR]
    return {"target_rows": counted.rows, "target_error": problem, "skipped": [] if problem else counted.skipped}


def _problem_of(header: Mapping[str, Any]) -> str | None:
    """What is wrong with the inputs, else with the targets where they are counted."""
    fault: str | None = header["error"] or rows_fault(header.get("target_rows"), header["rows"])
    return fault or header.get("target_error") or header.get("copies_error")


def _of_two_minds(name: str) -> str:
    return (
        f"{name} is one parameter in two stages, frozen in one of them and trained in the other: set requires_grad alike on the "
        "ranks of both"
    )


class Signatures:
    """Numbers the kinds of calls whose messages have the same forms; on the rank that holds stage 0."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[Any, int] = {}

    def ask(self, kind: str, inputs: Any, most_microbatches: int, training: bool) -> dict[str, Any]:
        """What the other ranks are told of a call; a mistake in the inputs travels in it, so that every rank raises it."""
        try:
            rows = num_rows(inputs, "inputs")
            check_batch(inputs, "inputs", rows, with_graph=kind == "step")
            if not rows:
                found = f"no {'inputs' if inputs is None else 'rows'}"
                raise ValueError(
                    f"{kind} was given {found} on rank {self._rank}, which holds the first stage: give the batch there"
                )
            wanted = most_microbatches if kind == "step" else min(most_microbatches, rows)
            if rows < wanted:
                cut(inputs, wanted)
        except (ValueError, TypeError) as error:
            return {"error": str(error)[:_LONGEST_ERROR]}
        number = self._number_of(kind, wanted, training, inputs)
        return {"error": None, "rows": rows, "num_microbatches": wanted, "signature": number}

    def _number_of(self, kind: str, num_microbatches: int, training: bool, inputs: Any) -> int:
        leaves, spec = pytree.tree_flatten(inputs)
        shapes = tuple(
            (leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves
        )
        autocast = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        )
        key = (kind, num_microbatches, training, autocast, shapes, str(spec))
        return self._numbers.setdefault(key, len(self._numbers))
