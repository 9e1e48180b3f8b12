"""What all ranks agree on before the ops of a call run: its kind, its shapes, and where something needs a gradient."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.group.chain import Chain
from pipetrain.plan.plan import Plan
from pipetrain.runtime.cut import cut, num_rows
from pipetrain.runtime.given_batch import check_batch
from pipetrain.schedule.op import Op
from pipetrain.stage.stage import Stage
from pipetrain.transport.forms import Form

# So that a header stays within its fixed size.
_LONGEST_ERROR = 600


@dataclass(frozen=True)
class Call:
    """One call of the pipeline, as this rank knows it.

    `described` says whether messages to and from the stage before, and the stage after, carry their form. `first_backward` is
    the first stage in which something needs a gradient, as far as it matters to this rank: perhaps `num_stages` on one whose
    stages all come before it.
    """

    num_microbatches: int
    rows: int
    signature: int
    first_backward: int
    described: tuple[bool, bool]


class Calls:
    """Agrees with the other ranks on each call. The rank that holds stage 0 says which it is, and each adds what it knows.

    Where stages are placed in the order of the ranks one message goes down the chain, and a rank knows of the stages up to its
    own: no others matter to it. With any other placement everything goes up the chain, and then down to all.
    """

    def __init__(self, chain: Chain, plan: Plan, stages: Mapping[int, Stage]) -> None:
        self._chain = chain
        self._plan = plan
        self._stages = stages
        self._signatures = Signatures(chain.rank)
        self._is_in_order = all(low <= high for low, high in pairwise(plan.stage_ranks))
        self._forms: dict[int, dict[Op, Form]] = {}
        # How often the parameters that need a gradient had changed, before this rank and with it, at the last such call.
        self._described_at: dict[int, tuple[int, int]] = {}
        self._trainable: dict[int, list[bool]] = {}  # of this rank's stages, which parameters need a gradient
        self._num_changes = 0

    def forms(self, call: Call) -> dict[Op, Form]:
        """The forms of the messages of such a call, to be filled where it is described."""
        return self._forms.setdefault(call.signature, {})

    def agree(self, kind: str, step: int, inputs: Any, *, is_training: bool, mistake: str | None = None) -> Call:
        """The call of this `kind` (`step`, `evaluate`, `call`) at `step`, with the inputs of the rank that holds stage 0.
        Collective.

        Raises:
            ValueError: these inputs cannot be cut; the same on every rank.
            PipelineError: another rank failed, or called something else.
        """
        what, asked = f"{kind} {step}", dict[str, Any]()
        if 0 in self._stages:
            asked = {"error": mistake[:_LONGEST_ERROR]} if mistake else {}
            asked = asked or self._signatures.ask(kind, inputs, self._plan.num_microbatches, is_training)
        first_backward = self._look_at_parameters()

        def add(received: bytes | None) -> bytes:
            header = (
                {"first_backward": self._plan.num_stages, "changes": 0} if received is None else json.loads(received)
            )
            header |= asked
            header["first_backward"] = min(header["first_backward"], first_backward)
            header["changes"] += self._num_changes
            return json.dumps(header).encode()

        if self._is_in_order:
            header = json.loads(self._chain.down(add, what))
            changes = (header["changes"] - self._num_changes, header["changes"])
        else:
            whole = self._chain.up(add, what)
            header = json.loads(self._chain.broadcast(whole, 0, what))
            changes = (header["changes"], header["changes"])
        if header["error"]:
            raise ValueError(header["error"])
        return self._call_of(header, changes)

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

    def _call_of(self, header: Mapping[str, Any], changes: tuple[int, int]) -> Call:
        number = header["signature"]
        before, after = self._described_at.get(number, (None, None))
        self._described_at[number] = changes
        return Call(
            num_microbatches=header["num_microbatches"],
            rows=header["rows"],
            signature=number,
            first_backward=header["first_backward"],
            described=(before != changes[0], after != changes[1]),
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
