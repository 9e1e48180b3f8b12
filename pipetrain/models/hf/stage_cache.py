"""transformers' cache of keys, values and states, of which a stage fills its own layers."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin


class StageCache(DynamicCache):  # type: ignore[misc]  # transformers has no types for it
    """A cache as the model's own `generate` has, but that it is told how many tokens came before.

    transformers reads that off the first layer, and the size of a mask off the first of its kind; a later stage fills neither.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self._length = 0

    def at(self, length: int) -> StageCache:
        """This cache, with so many tokens in it, padding too."""
        self._length = length
        return self

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys that such a layer gives, and the place of the first of them."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):  # a linear one asks for a layer of attention
            layer = next(other for other in self.layers if isinstance(other, CacheLayerMixin))
        if not getattr(layer, "is_sliding", False):
            return self._length + query_length, 0
        kept = min(self._length, layer.sliding_window - 1)
        return kept + query_length, self._length - kept

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a linear layer has a state of tokens before; any one: whether there were any."""
        return self._length > 0 if layer_idx is None else super().has_previous_state(layer_idx, state_idx)
