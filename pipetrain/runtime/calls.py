"""What all ranks agree on before the ops of a call run: its kind, its shapes, and where something needs a gradient."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.chain import Chain
from pipetrain.comm.failure import Monitor, PipelineError
from pipetrain.comm.forms import Form, is_plain
from pipetrain.plan.plan import Plan
from pipetrain.runtime.arguments import check_batch
from pipetrain.runtime.cut import Counted, cut, num_rows, row_counts, rows_fault, weights_of
from pipetrain.schedule.op import Op
from pipetrain.stage.segments import AnyStage

# So that a header stays within its fixed size.
_LONGEST_ERROR = 600


@dataclass(frozen=True)
class Call:
    """One call of the pipeline, as this rank knows it.

    `described` says whether messages to and from the stage before, and the stage after, carry their form. `first_backward` is
    the first stage in which something needs a gradient, as far as it matters to this rank: perhaps `num_stages` on one whose
    stages all come before it. The microbatches `idle` count nothing: their ops do nothing. `weights` is what each weighs in the
    loss of all replicas, where targets are counted or there are several replicas; else None.
    """

    num_microbatches: int
    rows: int
    signature: int
    first_backward: int
    described: tuple[bool, bool]
    idle: frozenset[int] = frozenset()
    weights: list[float] | None = None
    left: tuple[tuple[int, str, int], ...] = ()  # what ranks say of `runtime/skips.py`


class Calls:
    """Agrees with the other ranks on each call. The rank that holds stage 0 says which it is, and each adds what it knows.

    Where stages are placed in the order of the ranks one message goes down the chain, and a rank knows of the stages up to its
    own: no others matter to it. With any other placement, and where targets are counted or stages share parameters, everything goes up the chain, and then down
    to all: which microbatches count nothing is known where the last stage is, and no rank may begin without it.

    Then each rank compares with those that stand where it does in the other replicas: what counts is shared out over all, and a mistake in one
    replica's batch is raised in each.
    """

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        stages: Mapping[int, AnyStage],
        copies: Mapping[str, nn.Parameter] | None = None,
        replicas: Chain | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """`copies` are the parameters of this rank that a stage elsewhere shares, by their first name in the whole model; None:
        no two stages share any. `replicas` are the ranks with these stages in each replica, where there are several."""
        self._chain = chain
        self._replicas = replicas if replicas is not None and replicas.num_ranks > 1 else None
        self._monitor = monitor
        self._copies = {} if copies is None else copies
        self._shares = copies is not None
        self._plan = plan
        self._stages = stages
        self._signatures = Signatures(f"rank {chain.rank}" if monitor is None else monitor.name)
        self._is_in_order = all(low <= high for low, high in itertools.pairwise(plan.stage_ranks))
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
        left: Sequence[tuple[int, str, int]] = (),
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
            self._num_changes += asked.pop("changed", False)
        if count is not None and self._plan.num_stages - 1 in self._stages:
            counted = count()
            told = None if counted.problem is None else str(counted.problem)[:_LONGEST_ERROR]
            asked |= {"target_rows": counted.rows, "target_error": told, "counts": counted.counts}
        first_backward = self._look_at_parameters()

        def add(received: bytes | None) -> bytes:
            header: dict[str, Any] = (
                {"first_backward": self._plan.num_stages, "changes": 0} if received is None else json.loads(received)
            )
            header |= asked
            header["first_backward"] = min(header["first_backward"], first_backward)
            header["changes"] += self._num_changes
            if left:
                header["left"] = [*header.get("left", ()), *left]
            for name, copy in self._copies.items():
                trained = header.setdefault("trained", {}).setdefault(name, copy.requires_grad)
                if trained != copy.requires_grad:
                    header["copies_error"] = _of_two_minds(name)
            return json.dumps(header).encode()

        if self._is_in_order and count is None and not self._shares:
            header = json.loads(self._chain.down(add, what))
            changes = (header["changes"] - self._num_changes, header["changes"])
        else:
            header = json.loads(self._chain.broadcast(self._chain.up(add, what), 0, what))
            changes = (header["changes"], header["changes"])
        headers = [header] if self._replicas is None else self._compare(header, kind, what)
        problem, weights = _problem_of_all(headers), None
        if problem is None and (count is not None or len(headers) > 1):
            weights, problem = _weights_of(headers)
        if problem:
            for chain in filter(None, (self._chain, self._replicas)):
                chain.wait_sent(what)  # this rank may end with the error, and the others are to know it
            raise ValueError(problem) from (None if counted is None else counted.problem)
        header["first_backward"] = min(one["first_backward"] for one in headers)
        number = 0 if self._replicas is None else self._replicas.rank
        return self._call_of(header, changes, None if weights is None else weights[number])

    def _compare(self, header: Mapping[str, Any], kind: str, what: str) -> list[dict[str, Any]]:
        """The headers of all replicas, as the ranks with these stages know them.

        Raises:
            PipelineError: a step in which they train other parameters than this rank.
        """
        assert self._replicas is not None
        own = {**header, "trains": zlib.crc32(repr(self._trainable).encode())}
        headers = [json.loads(one) for one in self._replicas.concatenate(json.dumps(own).encode(), what)]
        odd = next((place for place, one in enumerate(headers) if one["trains"] != headers[0]["trains"]), None)
        if kind != "step" or odd is None:
            return headers
        stages = " and ".join(map(str, self._stages))
        text = f"replica {odd} trains other parameters of stage {stages} than replica 0: set requires_grad alike in all replicas"
        if self._monitor is not None:  # ranks with other stages know nothing of it
            self._monitor.fail(text)
        raise PipelineError(text)

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

    def _call_of(self, header: Mapping[str, Any], changes: tuple[int, int], weights: list[float] | None) -> Call:
        number, m = header["signature"], header["num_microbatches"]
        # A count may be so small beside the others that its share is 0.
        idle = frozenset(place for place, weight in enumerate(weights or ()) if weight == 0)
        before, after = self._told.setdefault(number, (_Told(), _Told()))
        return Call(
            num_microbatches=m,
            rows=header["rows"],
            signature=number,
            first_backward=header["first_backward"],
            described=(before.tell(changes[0], m, idle), after.tell(changes[1], m, idle)),
            idle=idle,
            weights=weights,
            left=tuple(map(tuple, header.get("left", ()))),
        )


@dataclass
class _Told:
    """What the two ends of an edge have told each other of one kind of calls: the forms of which microbatches, when the
    parameters that need a gradient had changed so many times."""

    num_changes: int | None = None
    microbatches: set[int] = field(default_factory=set)

    def tell(self, num_changes: int, num_microbatches: int, idle: frozenset[int]) -> bool:
        """Whether messages carry their form in the call that comes; if so it is told then."""
        if self.num_changes != num_changes:
            self.num_changes = num_changes
            self.microbatches.clear()
        untold = set(range(num_microbatches)) - idle - self.microbatches
        self.microbatches |= untold
        return bool(untold)


def _weights_of(headers: Sequence[Mapping[str, Any]]) -> tuple[list[list[float]], str | None]:
    """What each microbatch of each replica weighs in the loss of all, by what counts of it, or else by its rows; or what is wrong with that.

    Where nothing of the targets is cut, those of a replica weigh the same.
    """
    counts = [
        header["counts"][: header["num_microbatches"]]
        if "counts" in header
        else row_counts(header["rows"], header["num_microbatches"])
        for header in headers
    ]
    try:
        weights = iter(weights_of([count for own in counts for count in own]))
    except ValueError as error:
        return [], str(error)
    return [list(itertools.islice(weights, len(own))) for own in counts], None


def _problem_of_all(headers: Sequence[Mapping[str, Any]]) -> str | None:
    """The first replica's that has one."""
    for replica, header in enumerate(headers):
        if problem := _problem_of(header):
            return problem if len(headers) == 1 else f"{problem} (in replica {replica})"
    return None


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

    def __init__(self, name: str) -> None:
        """`name` is what that rank is called."""
        self._name = name
        self._numbers: dict[Any, int] = {}
        self._values: dict[int, str] = {}  # plain ones among the inputs of the last call of each kind

    def ask(self, kind: str, inputs: Any, most_microbatches: int, training: bool) -> dict[str, Any]:
        """What the other ranks are told of a call; a mistake in the inputs travels in it, so that every rank raises it."""
        try:
            rows = num_rows(inputs, "inputs")
            check_batch(inputs, "inputs", rows, with_graph=kind == "step")
            if not rows:
                found = f"no {'inputs' if inputs is None else 'rows'}"
                raise ValueError(
                    f"{kind} was given {found} on {self._name}, which holds the first stage: give the batch there"
                )
            wanted = most_microbatches if kind == "step" else min(most_microbatches, rows)
            if rows < wanted:
                cut(inputs, wanted)
        except (ValueError, TypeError) as error:
            return {"error": str(error)[:_LONGEST_ERROR]}
        number = self._number_of(kind, wanted, training, inputs)
        values = repr([leaf for leaf in pytree.tree_leaves(inputs) if is_plain(leaf)])
        changed = self._values.setdefault(number, values) != values
        self._values[number] = values
        return {"error": None, "rows": rows, "num_microbatches": wanted, "signature": number, "changed": changed}

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
