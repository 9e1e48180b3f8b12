"""The tensors of a rank under the whole model's names, and of all ranks on rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed import Store

from pipetrain.group.courier import Courier
from pipetrain.group.failure import Monitor
from pipetrain.group.pair import make_pair
from pipetrain.transport.forms import Form, compact, form_of
from pipetrain.transport.gloo import receive_message, send_message

Layers = Mapping[int, nn.Module]  # by global index


def named_parameters(layers: Layers) -> Iterator[tuple[str, nn.Parameter]]:
    """In the order and under the names of `nn.Sequential(*layers)`; a parameter that two layers share once."""
    seen: set[int] = set()
    for number, layer in sorted(layers.items()):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{number}.{name}", parameter


def state_dict(layers: Layers) -> dict[str, Any]:
    return {
        f"{number}.{name}": value
        for number, layer in sorted(layers.items())
        for name, value in layer.state_dict().items()
    }


def load_state_dict(layers: Layers, state: Mapping[str, Any]) -> None:
    """Load this rank's part of `state`, which may be the whole model's.

    Raises:
        ValueError: a tensor of this rank is missing in `state`, or has another shape.
    """
    for number, layer in sorted(layers.items()):
        own = layer.state_dict()
        missing = [name for name in own if f"{number}.{name}" not in state]
        if missing:
            raise ValueError(f"the state has no {number}.{missing[0]} (and {len(missing) - 1} more of layer {number})")
        part = {name: state[f"{number}.{name}"] for name in own}
        for name, value in own.items():
            if isinstance(value, Tensor) and part[name].shape != value.shape:
                raise ValueError(
                    f"{number}.{name} is {list(part[name].shape)} in the state, the model has {list(value.shape)}"
                )
        layer.load_state_dict(part)


class Gatherer:
    """Brings every rank's tensors to rank 0, over a connection per rank that lives as long as the call."""

    def __init__(self, store: Store | None, rank: int, num_ranks: int, monitor: Monitor) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._monitor = monitor
        self._calls = itertools.count()

    def gather(self, own: Mapping[str, Any]) -> dict[str, Any] | None:
        """`own` of every rank, merged, on the CPU of rank 0; None on the others. Collective."""
        call = next(self._calls)
        tensors = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
        if self._store is None:
            return tensors
        if self._rank > 0:
            self._send(tensors, f"gather/{call}/{self._rank}")
            return None
        merged = dict(tensors)
        for rank in range(1, self._num_ranks):
            merged.update(self._receive(f"gather/{call}/{rank}", rank))
        return merged

    def _send(self, tensors: dict[str, Any], name: str) -> None:
        assert self._store is not None
        pair = make_pair(self._store, name, 1, self._monitor.timeout_seconds)
        courier = Courier(name, "rank 0", self._monitor)
        values = list(tensors.values())
        dense = [compact(value) if isinstance(value, Tensor) else value for value in values]
        # The names travel where a message between stages has the structure of its tree.
        form = form_of(values, dense, [False] * len(values), "\n".join(tensors))
        left: list[bool] = []

        def job() -> Callable[[], None]:
            send_message(pair, 0, form, [value for value in dense if isinstance(value, Tensor)])
            return lambda: left.append(True)

        courier.submit(name, job)
        self._monitor.wait(lambda: bool(left), lambda: f"rank {self._rank} waits for rank 0 to take its state")
        courier.close()

    def _receive(self, name: str, rank: int) -> dict[str, Any]:
        assert self._store is not None
        pair = make_pair(self._store, name, 0, self._monitor.timeout_seconds)
        courier = Courier(name, f"rank {rank}", self._monitor)
        arrived: list[tuple[Form, list[Tensor]]] = []

        def job() -> Callable[[], None]:
            message = receive_message(pair, 1)
            return lambda: arrived.append(message)

        courier.submit(name, job)
        self._monitor.wait(lambda: bool(arrived), lambda: f"rank 0 waits for the state of rank {rank}")
        courier.close()
        form, tensors = arrived.pop()
        queue = iter(tensors)
        names = form.spec.split("\n") if form.leaves else []
        return {name: next(queue) if hasattr(leaf, "shape") else leaf for name, leaf in zip(names, form.leaves)}
