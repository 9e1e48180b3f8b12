"""Which modules of a causal language model are which of our layers, found by running it.

A model of `n` decoder layers is `n + 2` layers of ours: 0 is what runs before the first decoder layer, n + 1 what runs after the
last. Names and the order in which modules are declared do not tell (OPT declares its last norm first), so the model's own forward
runs once on tensors without memory, and what it calls is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Parts:
    """Names of modules: the list of decoder layers, and what owns tensors before and after them, in the order of the calls."""

    layers: str
    num_decoder_layers: int
    embedding: tuple[str, ...]
    head: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Layers of ours."""
        return self.num_decoder_layers + 2

    def modules_of(self, number: int) -> tuple[str, ...]:
        """The modules that own the tensors of our layer `number`."""
        if number == 0:
            return self.embedding
        if number == self.num_layers - 1:
            return self.head
        return (f"{self.layers}.{number - 1}",)

    def layer_of(self, name: str) -> int | None:
        """The number of our layer that a tensor or module of this name belongs to; None: of none (rotary tables)."""
        for number in (0, self.num_layers - 1):
            if any(f"{name}.".startswith(f"{module}.") for module in self.modules_of(number)):
                return number
        prefix = f"{self.layers}."
        return int(name.removeprefix(prefix).split(".", 1)[0]) + 1 if name.startswith(prefix) else None


class Elsewhere(nn.Module):
    """Stands for the modules of our layer `number`, which is on another stage."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"layer {self.number} is on another stage")


def held_layers(model: PreTrainedModel) -> range:
    """Which of our layers a model has: all, or what `pruned_model` left of it."""
    layers = model.get_submodule(decoder_list(model))
    gone = {module.number for module in model.modules() if isinstance(module, Elsewhere)}
    held = [number for number in range(len(layers) + 2) if number not in gone]
    return range(held[0], held[-1] + 1)


def decoder_list(model: PreTrainedModel) -> str:
    """The name of the list of decoder layers.

    Raises:
        ValueError: there is none, or more than one.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    shallow = [name for name in lists if name.count(".") == min(other.count(".") for other in lists)]
    if len(shallow) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(shallow)} lists of {count} layers, one is needed: such a model cannot be cut"
        )
    return str(shallow[0])


def parts_of(model: PreTrainedModel) -> Parts:
    """The parts of a whole model on the meta device.

    Raises:
        ValueError: its forward cannot be followed: the model cannot be cut.
    """
    name = decoder_list(model)
    layers = model.get_submodule(name)
    owners = {
        owner: module
        for owner, module in model.named_modules()
        if not f"{owner}.".startswith(f"{name}.") and any(True for _ in module.parameters(recurse=False))
    }
    calls = _Calls(owners)
    try:
        calls.follow(model, layers, returns_tuples=False)
    except _CannotFollow:  # Falcon's decoder layers return tuples, of which it takes the first entry
        calls = _Calls(owners)
        calls.follow(model, layers, returns_tuples=True)
    both = set(calls.before) & set(calls.after)
    never = owners.keys() - set(calls.before) - set(calls.after)
    if both or never:
        why = (
            f"{min(both)} runs before and after its layers"
            if both
            else f"its forward never calls {min(never)} by itself"
        )
        raise ValueError(f"{type(model).__name__} cannot be cut: {why}")
    return Parts(name, len(layers), tuple(calls.before), tuple(calls.after))


class _CannotFollow(ValueError):
    """The model's forward fails on tensors without memory."""


class _Calls:
    """The owners of tensors that a forward calls before its decoder layers and after the first of them, in order, each once."""

    def __init__(self, owners: Mapping[str, nn.Module]) -> None:
        self.before: dict[str, None] = {}
        self.after: dict[str, None] = {}
        self._owners = owners
        self._now = self.before

    def follow(self, model: PreTrainedModel, layers: nn.Module, *, returns_tuples: bool) -> None:
        """Runs `model` with stand-ins for its decoder layers.

        Raises:
            ValueError: it cannot be run so.
        """
        real = list(layers.children())
        hooks = [
            module.register_forward_pre_hook(lambda *_, owner=owner: self._note(owner))
            for owner, module in self._owners.items()
        ]
        for number in range(len(real)):
            layers[number] = _PassedOn(self._passed, returns_tuples)  # type: ignore[operator]
        ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        try:
            with torch.no_grad(), _nothing_packed():
                model(input_ids=ids, use_cache=False)
        except Exception as error:
            raise _CannotFollow(
                f"{type(model).__name__} cannot be cut: its forward cannot be followed ({type(error).__name__}: {error})"
            ) from error
        finally:
            for number, layer in enumerate(real):
                layers[number] = layer  # type: ignore[operator]
            for hook in hooks:
                hook.remove()

    def _note(self, owner: str) -> None:
        self._now[owner] = None

    def _passed(self) -> None:
        self._now = self.after


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """transformers asks the positions whether they restart, which those without memory cannot answer."""
    from transformers import masking_utils

    asks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asks


class _PassedOn(nn.Module):
    """In place of a decoder layer: gives back the hidden state, and says that it was reached."""

    def __init__(self, reached: Callable[[], None], returns_tuples: bool) -> None:
        super().__init__()
        self._reached = reached
        self._returns_tuples = returns_tuples

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        self._reached()
        return (hidden,) if self._returns_tuples else hidden
