"""What decoder layers get beside the hidden state: masks, rotary tables, positions. A *frame* is all of that for one microbatch.

The base model's own forward makes it: it is run with recorders in place of its decoder layers, and what each is called with is what it
needs, whatever the family. On the first stage it runs on token ids, and the first recorder gets the embedding; on any other it runs on
zeros in the shape of the hidden state, without any weights. A frame belongs to its stage: its first layer makes it, in F and again in R,
all use it, and it is never sent. So a mask is one tensor per (stage, microbatch), whatever the number of layers that save it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from pipetrain.models.hf.parts import AsGiven, Call, Parts, has_part, hollowed, masks_decided


@dataclass(frozen=True)
class Frame:
    """What each decoder layer of a model is called with for one microbatch, but for the hidden state."""

    calls: tuple[Call, ...]
    hidden_key: int | str

    def run(self, number: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Decoder layer `number` on a hidden state `[batch, sequence, width]`; returns the next one."""
        args, kwargs = self.calls[number]
        if isinstance(self.hidden_key, int):
            args = (*args[: self.hidden_key], hidden, *args[self.hidden_key + 1 :])
        else:
            kwargs = {**kwargs, self.hidden_key: hidden}
        output = layer(*args, **kwargs)
        following: Tensor = output[0] if isinstance(output, tuple) else output
        return following


Given = dict[str, Tensor]
"""What decoder layers need of a batch beside the hidden state, under the names of a base model's forward. It travels from stage to stage.

attention_mask: `[batch, sequence]`, 1 where there is a token. position_ids: `[batch, sequence]`, int64. Without them every position is a
token's, and they count from 0. past_key_values: the cache of a stage, to whose keys and values these tokens are added.
"""


def given_in(tree: Mapping[str, Any]) -> Given:
    return {name: tree[name] for name in ("attention_mask", "position_ids") if tree.get(name) is not None}


class FrameMaker(nn.Module):
    """The base model without decoder layers and weights; makes frames. In eval mode always: it draws no random numbers."""

    def __init__(self, owner: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        children = {name: child for name, child in owner.named_children() if name != parts.list_name}
        memo = {id(config): config for config in (getattr(owner, "config", None),)}
        self.owner = hollowed(
            owner,
            {parts.list_name: None}
            | {
                # A copy: what a table of positions changes as it grows is this stage's own.
                name: AsGiven() if has_part(child) else copy.deepcopy(child, memo)
                for name, child in children.items()
            },
        )
        for module in self.owner.modules():
            module._non_persistent_buffers_set = set(module._buffers)
        self.train(False)

    def train(self, mode: bool = True) -> FrameMaker:  # noqa: ARG002
        super().train(False)
        return self

    @torch.no_grad()
    def forward(self, hidden: Tensor, given: Given) -> Frame:
        """The frame of a microbatch whose hidden state is like `hidden`, of which only shape, dtype and device are looked at."""
        zeros = hidden.new_zeros(()).expand(hidden.shape)
        return run_to_layers(self.owner, self.parts, given, inputs_embeds=zeros)[1]


def run_to_layers(owner: nn.Module, parts: Parts, given: Given, **inputs: Tensor) -> tuple[Tensor, Frame]:
    """The hidden state that the owner's forward gives its first decoder layer, and the frame. It is run no further than to the last layer."""
    calls: list[Call] = []

    def recorder(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        if len(calls) == parts.num_decoder_layers:
            raise _AllCalled
        hidden = parts.hidden_in(calls[-1])
        return (hidden,) if parts.returns_tuple else hidden

    run = object.__new__(type(owner))  # of this call alone: a layer leaves no trace in its modules
    run.__dict__ = {**vars(owner), parts.list_name: [recorder] * parts.num_decoder_layers}
    (tensor,) = inputs.values()
    try:
        with masks_decided(packed="position_ids" in given, waits=may_look(tensor.device)):
            run(**inputs, **given, use_cache="past_key_values" in given)
    except _AllCalled:
        return parts.hidden_in(calls[0]), _frame_of(calls, parts, owner.config)
    raise AssertionError(f"{type(owner).__name__} called {len(calls)} of {parts.num_decoder_layers} decoder layers")


def may_look(device: torch.device) -> bool:
    """Whether values may decide how masks are made. On a device that runs ahead each look is a wait of the host, in each F and R."""
    return device.type == "cpu"


class _AllCalled(BaseException):
    """The last decoder layer has been called; what follows in the owner's forward belongs to the head."""


def _frame_of(calls: list[Call], parts: Parts, config: Any) -> Frame:
    """The frame that these calls make: without the hidden state, with masks as floats where attention would make floats of them."""
    hidden, is_sdpa = parts.hidden_in(calls[0]), config._attn_implementation == "sdpa"
    made: dict[int, Tensor] = {}

    def kept(value: Any) -> Any:
        if value is hidden:
            return None
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 4 and is_sdpa:
            if id(value) not in made:
                made[id(value)] = as_bias(value, hidden)
            return made[id(value)]
        return value

    return Frame(
        tuple(
            (tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}) for args, kwargs in calls
        ),
        parts.hidden_key,
    )


def as_bias(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask `[batch, 1, queries, keys]`, True where attention looks, as what is added to attention's scores: 0 or -inf, in the queries' dtype.

    `scaled_dot_product_attention` does this to a bool mask in every layer, and each layer saves its own.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


class StageCache(DynamicCache):  # type: ignore[misc]  # transformers has no types for it
    """The cache of the model's own `generate`, except that the caller sets how many tokens came before.

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
