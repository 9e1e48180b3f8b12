"""Makes all ranks agree: on the arguments when a pipeline is made; on the kind, shapes and trained weights of each call."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.comm.chain import Everyone
from pipetrain.comm.device import identity_of
from pipetrain.comm.failure import PipelineError
from pipetrain.comm.forms import Form, is_plain
from pipetrain.comm.group import Group
from pipetrain.comm.transport import NCCL, carrier_of
from pipetrain.plan.plan import Plan
from pipetrain.runtime.cut import Counted, checked_rows, cut, row_counts, rows_fault, weights_of
from pipetrain.schedule.op import Op
from pipetrain.stage.layer_state import PARAMETERS, modules_below, tensors_below
from pipetrain.stage.segments import AnyStage

_REQUIRES_GRAD = attrgetter("requires_grad")
_LONGEST_ERROR = 600  # so that a header stays within its fixed size


@dataclass
class Introduction:
    """Each rank sends this to the others when a pipeline is made. If `problem` is set, the other fields have no meaning."""

    seed: int = 0
    model: str = ""  # fingerprint of the model
    plan: str = ""
    schedule: str = ""
    counts: bool = False  # whether this rank was given a count_fn
    loss_reduction: str = "mean"
    carrier: str = ""  # of messages between stages
    gpu: str = ""  # this rank's GPU if NCCL carries messages: then no other rank may use it; else empty
    problem: str = ""

    def tell(self, plan: Plan, schedule: str, group: Group) -> None:
        """Fill in what this rank runs; `schedule` is the text of `Programs.describe`."""
        self.plan, self.schedule = repr(plan), schedule
        if group.size > 1:
            self.carrier = carrier_of(plan.edges, group.device)
            self.gpu = identity_of(group.device) if self.carrier == NCCL else ""


@contextmanager
def introduced(group: Group) -> Iterator[Introduction]:
    """Run a block in which this rank makes its part and fills in its introduction; then `introduce` it. Collective.

    Raises ValueError, the same on every rank: a block raised ValueError or TypeError, or `introduce` found a difference.
    """
    own, problem = Introduction(), None
    try:
        yield own
    except (ValueError, TypeError) as error:
        own.problem, problem = str(error), error
    try:
        introduce(own, group.everyone, group.rank)
    except ValueError as agreed:
        raise agreed from problem


def introduce(own: Introduction, everyone: Everyone, own_rank: int) -> None:
    """Send rank 0's introduction to all ranks. Each rank compares it with its own and sends the difference to all ranks. Collective.

    Raises ValueError, the same on every rank. It is that of the lowest rank with a mistake: the rank's `problem`, its difference from
    rank 0, or its sharing a GPU with a lower rank.
    """
    what = "the other ranks' plans"
    first = Introduction(**json.loads(everyone.broadcast(json.dumps(asdict(own)).encode(), what)))
    found = json.dumps([own_rank, _mistake(own_rank, own, first), own.gpu]).encode()
    rank_on: dict[str, int] = {}  # by GPU
    for rank, error, gpu in map(json.loads, everyone.concatenate(found, what)):
        if gpu and (other := rank_on.setdefault(gpu, rank)) != rank:
            error = error or (
                f"ranks {other} and {rank} are both on {gpu}, and NCCL connects no two ranks of one GPU: start no more ranks on a machine than "
                "it has GPUs, or use transport.backend=pinned (make_plan(..., edges='pinned'))"
            )
        if error:
            raise ValueError(error)


def _mistake(rank: int, own: Introduction, first: Introduction) -> str:
    if own.problem:
        return own.problem
    if own.counts != first.counts:
        here, there = ("a count_fn", "none") if own.counts else ("no count_fn", "one")
        return f"rank {rank} was given {here}, rank 0 {there}: give every rank the same loss_fn and count_fn"
    if own.carrier != first.carrier:
        return (
            f"messages between stages go over {own.carrier} on rank {rank} and over {first.carrier} on rank 0, because only one of "
            "them has a GPU: start as many ranks on each machine as it has GPUs, or say device='cpu' on every rank"
        )
    for key in ("model", "plan", "schedule", "seed", "loss_reduction"):
        mine, theirs = getattr(own, key), getattr(first, key)
        if mine != theirs:
            return f"rank {rank} was given another {key} than rank 0: {mine}, not {theirs}"
    return ""


# Each call ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of the pipeline, as this rank knows it.

    `described`: whether messages carry their form (shapes and dtypes, `comm/forms.py`); one flag for the edges before this rank's stages,
    one for those after.
    `first_backward` is the first stage with a parameter that needs a gradient. A rank may know only the stages up to its own. If none of
    them needs a gradient, it may have `num_stages` here instead of a later stage: it runs no backward anyway. Ops of the microbatches `idle` do nothing.
    `weights` has the weight of each microbatch in the loss of all replicas; None if there is one replica and its targets are not counted.
    """

    num_microbatches: int
    rows: int  # of the inputs
    signature: int  # the same for calls of the same kind and shapes
    first_backward: int
    described: tuple[bool, bool]
    forms: dict[Op, Form]  # of messages in calls with this signature; messages that carry their form fill them in
    idle: frozenset[int] = frozenset()
    weights: list[float] | None = None
    left: tuple[tuple[int, str, int], ...] = ()  # tensors that a stage leaves for other stages (`runtime/skips.py`)


class Calls:
    """Agrees with the other ranks on each call: the rank of stage 0 describes the call, and each rank adds what it knows of its stages.

    If stages are placed in the order of the ranks, one message passes from the first rank to the last: a rank needs to know only the stages
    up to its own. With any other placement, counted targets or shared parameters, a message passes from the last rank to the first, and its
    result to all. Counted targets need this because only the last stage's rank knows which microbatches have no weight in the loss.

    Then ranks with the same stages in all replicas exchange what they know. Microbatches are weighted by their counts in all replicas.
    If one replica finds an error in its batch, all replicas raise it.
    """

    def __init__(
        self, group: Group, plan: Plan, stages: Mapping[int, AnyStage], copies: Mapping[str, nn.Parameter] | None
    ) -> None:
        """`copies` are this rank's parameters that a stage on another rank shares, by their name in the lower stage; None: no two
        stages share a parameter."""
        self._chain, self._replicas, self._monitor = group.chain, group.replicas, group.monitor
        self._copies = copies or {}
        self._most_microbatches, self._num_stages = plan.num_microbatches, plan.num_stages
        self._stages = stages
        is_in_order = all(low <= high for low, high in itertools.pairwise(plan.stage_ranks))
        self._goes_down = is_in_order and copies is None
        # On the rank of stage 0: kind and shapes of a call -> signature; signature -> plain values in the inputs of the latest such call.
        self._signatures: dict[Any, int] = {}
        self._values: dict[int, str] = {}
        self._forms: dict[int, dict[Op, Form]] = {}
        # Key: signature, and 0 for the edges before this rank's stages or 1 for those after. Value: `_num_changes` at the latest call, and
        # the microbatches whose forms both ends know.
        self._told: dict[tuple[int, int], tuple[int, frozenset[int]]] = {}
        self._trainable: dict[int, list[bool]] = {}  # of this rank's stages, which parameters need a gradient
        self._num_changes = 0  # of `requires_grad` of parameters, and of plain values in the inputs

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
        """Agree on the call of this `kind` (`step`, `evaluate`, `call`) at `step`: every rank returns it, or every rank raises. Collective.

        `inputs`, and `mistake`, an error that the caller has found, are read on the rank of stage 0. `count` counts the targets on the rank
        of the last stage. `left` are tensors that this rank's stages leave for other stages.

        Raises ValueError, the same on every rank: `mistake`, inputs or targets that cannot be cut or counted, or a shared parameter that
        only one stage trains; PipelineError: another rank failed, called something else, or trains other parameters.
        """
        what, own, counted = f"{kind} {step}", dict[str, Any](), None
        if 0 in self._stages:
            own = self._header_of(kind, inputs, is_training=is_training, mistake=mistake)
        if count is not None and self._num_stages - 1 in self._stages:
            counted = count()
            told = None if counted.problem is None else str(counted.problem)[:_LONGEST_ERROR]
            own |= {"target_rows": counted.rows, "target_error": told, "counts": counted.counts}
        first_backward = self._look_at_parameters()

        def add(received: bytes | None) -> bytes:
            header: dict[str, Any] = {"first_backward": self._num_stages, "changes": 0, "left": [], "trained": {}}
            header |= own if received is None else json.loads(received) | own
            header["first_backward"] = min(header["first_backward"], first_backward)
            header["changes"] += self._num_changes
            header["left"] += left
            for name, copy in self._copies.items():
                if header["trained"].setdefault(name, copy.requires_grad) != copy.requires_grad:
                    header["copies_error"] = (
                        f"{name} is one parameter in two stages, frozen in one of them and trained in the other: set requires_grad alike on the "
                        "ranks of both"
                    )
            return json.dumps(header).encode()

        if self._goes_down and count is None:
            header = json.loads(self._chain.down(add, what))
            changes = (header["changes"] - self._num_changes, header["changes"])
        else:
            header = json.loads(self._chain.broadcast(self._chain.up(add, what), 0, what))
            changes = (header["changes"], header["changes"])
        headers = [header] if self._replicas.num_ranks == 1 else self._compare(header, kind, what)
        problem, weights = _first_problem(headers), None
        if problem is None and (count is not None or len(headers) > 1):
            weights, problem = _weights_of(headers)
        if problem:
            for chain in (self._chain, self._replicas):
                chain.wait_sent(what)  # this process may exit with the error before the others have it
            raise ValueError(problem) from (None if counted is None else counted.problem)
        if len(headers) > 1:
            header["first_backward"] = min(one["first_backward"] for one in headers)
        return self._call_of(header, changes, None if weights is None else weights[self._replicas.rank])

    def _header_of(self, kind: str, inputs: Any, *, is_training: bool, mistake: str | None) -> dict[str, Any]:
        """Return the header of a call, for all ranks. If the call has a mistake, the header has an error, which every rank then raises."""
        most = self._most_microbatches
        try:
            if mistake:
                raise ValueError(mistake)
            rows = checked_rows(inputs, "inputs", with_graph=kind == "step")
            if not rows:
                found = "inputs" if inputs is None else "rows"
                where = f"on {self._monitor.name}, which holds the first stage"
                raise ValueError(f"{kind} was given no {found} {where}: give the batch there")
            wanted = most if kind == "step" else min(most, rows)
            if rows < wanted:
                cut(inputs, wanted)
        except (ValueError, TypeError) as error:
            return {"error": str(error)[:_LONGEST_ERROR]}
        leaves, spec = pytree.tree_flatten(inputs)
        key, plain = [kind, wanted, is_training, str(spec)], list[Any]()
        for device in ("cpu", "cuda"):
            key += (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                key.append((leaf.shape, leaf.dtype, leaf.stride()))
            else:
                key.append(type(leaf))
                if is_plain(leaf):
                    plain.append(leaf)
        number = self._signatures.setdefault(tuple(key), len(self._signatures))
        values = repr(plain)
        self._num_changes += self._values.setdefault(number, values) != values
        self._values[number] = values
        return {"error": None, "rows": rows, "num_microbatches": wanted, "signature": number}

    def _compare(self, header: Mapping[str, Any], kind: str, what: str) -> list[dict[str, Any]]:
        """Exchange headers with the ranks of the same stages in the other replicas; returns one per replica. Raises PipelineError: in a step,
        replicas train different parameters of these stages."""
        own = {**header, "trains": zlib.crc32(repr(self._trainable).encode())}
        headers = [json.loads(one) for one in self._replicas.concatenate(json.dumps(own).encode(), what)]
        odd = next((place for place, one in enumerate(headers) if one["trains"] != headers[0]["trains"]), None)
        if kind == "step" and odd is not None:
            stages = " and ".join(map(str, self._stages))
            text = f"replica {odd} trains other parameters of stage {stages} than replica 0: set requires_grad alike in all replicas"
            self._monitor.fail(text)  # ranks with other stages know nothing of it
            raise PipelineError(text)
        return headers

    def _look_at_parameters(self) -> int:
        """Count a change if `requires_grad` of this rank's parameters is not as in the last call. Returns the first of this rank's stages
        with a parameter that needs a gradient, `num_stages` if there is none."""
        trainable, first = dict[int, list[bool]](), self._num_stages
        for index, stage in self._stages.items():
            trainable[index] = list(map(_REQUIRES_GRAD, tensors_below(modules_below(stage.layers), PARAMETERS)))
            first = min(first, index) if any(trainable[index]) else first
        self._num_changes += trainable != self._trainable
        self._trainable = trainable
        return first

    def _call_of(self, header: Mapping[str, Any], changes: tuple[int, int], weights: list[float] | None) -> Call:
        number, m = header["signature"], header["num_microbatches"]
        # A weight is 0 if the count is 0, or if it is so small beside the other counts that the weight rounds to 0.
        idle = frozenset() if weights is None else frozenset(n for n, weight in enumerate(weights) if weight == 0)
        run, described = frozenset(range(m)) - idle, list[bool]()
        for edges, num_changes in zip(((number, 0), (number, 1)), changes):
            told_at, told = self._told.get(edges, (num_changes, frozenset[int]()))
            if told_at != num_changes:
                told = frozenset()
            self._told[edges] = num_changes, told | run
            described.append(not run <= told)
        before, after = described
        left, forms = tuple(map(tuple, header["left"])), self._forms.setdefault(number, {})
        return Call(m, header["rows"], number, header["first_backward"], (before, after), forms, idle, weights, left)


def _weights_of(headers: Sequence[Mapping[str, Any]]) -> tuple[list[list[float]], str | None]:
    """Return the weight of each microbatch of each replica in the loss of all replicas, and the error in the counts or None. A weight is
    the microbatch's part of all counts, or of all rows if targets are not counted."""
    counts = [  # targets without rows give a count per microbatch of the plan; this call may have fewer
        one["counts"][: one["num_microbatches"]]
        if "counts" in one
        else row_counts(one["rows"], one["num_microbatches"])
        for one in headers
    ]
    try:
        weights = iter(weights_of([count for own in counts for count in own]))
    except ValueError as error:
        return [], str(error)
    return [list(itertools.islice(weights, len(own))) for own in counts], None


def _first_problem(headers: Sequence[Mapping[str, Any]]) -> str | None:
    """The error of the first replica that has one: in its inputs, else in its counted targets, else in parameters that its stages share."""
    for replica, header in enumerate(headers):
        problem: str | None = header["error"] or rows_fault(header.get("target_rows"), header["rows"])
        problem = problem or header.get("target_error") or header.get("copies_error")
        if problem:
            return problem if len(headers) == 1 else f"{problem} (in replica {replica})"
    return None
