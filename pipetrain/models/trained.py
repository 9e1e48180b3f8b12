"""What is asked of a model that is being trained, and of its optimizer, whichever engine trains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn


class Model(Protocol):
    """A `Pipeline`, or an `nn.Module` in one piece. Names are those of the whole model."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class Beside(Protocol):
    """Work that goes on beside the steps of a pipeline, on every rank. Both methods are collective."""

    def poll(self) -> None:
        """A step is about to begin; does not wait."""
        ...

    def wait(self) -> None:
        """The pipeline is about to close."""
        ...


class Optimizer(Protocol):
    """An optimizer of torch, or what looks like one: a state per parameter, and groups of parameters."""

    @property
    def state(self) -> Mapping[Any, Mapping[str, Any]]: ...
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Sharded(Protocol):
    """An optimizer whose `state` is a share, that of some parameters: other ranks have the rest of the state of the same groups."""

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it wants the state of `parameter`, whole, when one is loaded."""
        ...
