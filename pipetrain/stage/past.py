"""A rank's cache for generation token by token: its layers keep tensors of earlier tokens in it, such as keys and values.

A layer whose output at one position depends on earlier positions needs this method:

    def forward_cached(self, value, past):        # `value`: the new positions only; in eval and inference mode
        keys, values = past.extend(self, keys, values)      # keys and values of the earlier and the new positions

`past` has the positions of the new tokens and the number of earlier ones. (Libraries read this number from the cache of the model's
first layer, which another rank may hold.) A layer may have a method `prepare_cached(past)`, which computes tensors that depend on
positions alone. The runtime calls it while the value is still being received.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")

# These layers compute each position by itself, so they need no cache.
_BY_POSITION = (nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU)
# Memory for at least this many more positions is allocated at once, so that not every token copies all earlier keys and values.
_FIRST_ROOM = 64


def goes_on(layer: nn.Module) -> bool:
    """Whether a layer can run on new positions alone: it has `forward_cached`, or it computes each position by itself."""
    return hasattr(layer, "forward_cached") or isinstance(layer, _BY_POSITION)


def run_cached(layer: Any, value: Any, past: Past) -> Any:
    """The output for the new positions, of a layer for which `goes_on` returned True."""
    return layer.forward_cached(value, past) if hasattr(layer, "forward_cached") else layer(value)


def set_trainable(layers: Iterable[nn.Module]) -> None:
    """Replace inference tensors in buffers and attributes of layers by plain copies: no backward takes inference tensors."""
    done: dict[int, Tensor] = {}
    for module in (module for layer in layers for module in layer.modules()):
        for kept in (module._buffers, vars(module)):
            changed = {name: _plain(value, done) for name, value in kept.items()}
            kept.update({name: value for name, value in changed.items() if value is not kept[name]})


def _plain(value: Any, done: dict[int, Tensor], depth: int = 0) -> Any:
    """`value` with plain tensors in place of inference tensors; the same object if it has none. Searches two levels of containers."""
    if isinstance(value, Tensor):
        return done.setdefault(id(value), value.clone()) if value.is_inference() else value
    if type(value) in (tuple, list, dict) and depth < 2:
        of = list(value.values()) if type(value) is dict else value
        items = [_plain(item, done, depth + 1) for item in of]
        if any(new is not old for new, old in zip(items, of)):
            return dict(zip(value, items)) if type(value) is dict else type(value)(items)
    return value


class Past:
    """The cache of one rank's layers for the earlier tokens of some samples. This call of the model adds `new` positions.

    Samples of different lengths are padded in front. `padding` has the number of padding positions of each sample. `length` counts the
    positions before this call, with padding.
    """

    def __init__(self, padding: Sequence[int], device: torch.device) -> None:
        self.length = 0
        self.new = 0
        self.device = device
        self._padding = tuple(padding)
        self._kept: dict[Hashable, Any] = {}
        self._made: dict[Hashable, Any] = {}  # for this call

    def begin(self, new: int) -> None:
        """Begin a call of `new` positions."""
        self.new = new
        self._made.clear()

    def end(self) -> None:
        """End the call: all layers of the rank have run on the new positions, which count as earlier ones from now on."""
        self.length += self.new
        self.new = 0
        self._made.clear()

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sample, with those of this call and without padding."""
        return self.length + self.new - min(self._padding)

    @property
    def positions(self) -> Tensor:
        """The position of each new token in its sample, `[rows, new]`, int64; 0 for padding."""
        return self.once("positions", self._positions)

    def _positions(self) -> Tensor:
        columns = torch.arange(self.length, self.length + self.new, device=self.device)
        return (columns - self._pads()).clamp_(min=0)

    @property
    def mask(self) -> Tensor | None:
        """Which positions are tokens and not padding, `[rows, length + new]`, bool; None if no sample has padding."""
        if not any(self._padding):
            return None
        return self.once("mask", lambda: torch.arange(self.length + self.new, device=self.device) >= self._pads())

    def _pads(self) -> Tensor:
        """The number of padding positions of each sample, `[rows, 1]`, int64."""
        return self.kept("padding", lambda: torch.tensor(self._padding, device=self.device)[:, None])

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """A value that layers share in one call, such as their mask. The first layer that asks for it makes it."""
        return _of(self._made, key, make)

    def kept(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """A value that stays from call to call, under a unique `key`. It is made when it is asked for first."""
        return _of(self._kept, key, make)

    def extend(self, key: Hashable, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values `[rows, heads, new, size]`; return all of them `[rows, heads, length + new, size]`."""
        rooms = self.kept(key, lambda: (_Room(), _Room()))
        return rooms[0].extend(self.length, keys), rooms[1].extend(self.length, values)


def _of(made: dict[Hashable, Any], key: Hashable, make: Callable[[], _T]) -> _T:
    if key not in made:
        made[key] = make()
    found: _T = made[key]
    return found


class _Room:
    """Memory for a tensor that grows along dimension 2. If it is too small, memory for at least twice the earlier positions replaces it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def extend(self, start: int, new: Tensor) -> Tensor:
        end = start + new.shape[2]
        if self._memory is None or end > self._memory.shape[2]:
            rows, heads, _, size = new.shape
            wider = new.new_empty(rows, heads, max(2 * start, end + _FIRST_ROOM), size)
            if self._memory is not None:
                wider[:, :, :start] = self._memory[:, :, :start]
            self._memory = wider
        self._memory[:, :, start:end] = new
        return self._memory[:, :, :end]
