"""What a user gives to a causal language model, as its first layer and its loss get it; refused where it would be silently wrong.

    inputs   token ids `[batch, sequence]`, int64, or a dict: `input_ids`, and any of `attention_mask` and `position_ids`, as long
    targets  `[batch, sequence]`, int64: the token after each position, IGNORED where it does not count

Hugging Face style `labels` in the dict stand where the tokens stand, so they are shifted here: position i is to tell label i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipetrain.models.loss import IGNORED

_IDS, _MASK, _POSITIONS, _LABELS = "input_ids", "attention_mask", "position_ids", "labels"


@dataclass(frozen=True)
class BatchCheck:
    """Takes the batches of a model with so many tokens in its embedding, and positions for so many (None: any number).

    `what_mixes`: why its layers let packed documents see each other; None: they keep them apart.
    """

    vocabulary_size: int
    most_positions: int | None
    what_mixes: Callable[[], str | None]

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """The inputs of the first layer, and the targets of the loss.

        Values are looked at where they are on the host. None is what a rank without the first or the last stage may give.
        Raises ValueError: with what is wrong, and what to give.
        """
        if isinstance(inputs, Mapping):
            inputs, targets = self._from_dict(inputs, targets)
        ids = inputs.get(_IDS) if isinstance(inputs, Mapping) else inputs
        if isinstance(ids, Tensor):
            self._check_ids(ids)
        return inputs, targets

    def _from_dict(self, inputs: Mapping[str, Any], targets: Any) -> tuple[Any, Any]:
        unknown = sorted(set(inputs) - {_IDS, _MASK, _POSITIONS, _LABELS})
        if unknown or _IDS not in inputs:
            raise ValueError(
                f"inputs have the keys {', '.join(map(str, inputs))}: allowed are {_IDS}, which is needed, {_MASK}, {_POSITIONS} and {_LABELS}"
            )
        given = {key: value for key, value in inputs.items() if value is not None}
        labels = given.pop(_LABELS, None)
        ids, mask, positions = (given.get(key) for key in (_IDS, _MASK, _POSITIONS))
        for key, value in (*given.items(), (_LABELS, labels)):
            if isinstance(value, Tensor) and isinstance(ids, Tensor) and value.shape != ids.shape:
                raise ValueError(
                    f"{key} has the shape {list(value.shape)}, {_IDS} {list(ids.shape)}: both are [batch, sequence]"
                )
        if isinstance(mask, Tensor) and isinstance(positions, Tensor):
            _check_no_restart(mask, positions)
        if mask is None and isinstance(positions, Tensor) and _start_again(positions) and (why := self.what_mixes()):
            raise ValueError(
                f"{_POSITIONS} start again within a sample, and the layers of this model let packed documents see each other: {why}; give "
                "one document per sample, padded, with an attention_mask (data.layout=padded)"
            )
        if labels is not None and targets is not None:
            raise ValueError(
                "both `labels` and targets are given: targets are shifted already, labels are not; give one of them"
            )
        if labels is not None:
            targets = shifted(labels, positions)
        return given, targets

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"token ids are a tensor {list(ids.shape)} of {str(ids.dtype).removeprefix('torch.')}: give [batch, sequence], int64"
            )
        if self.most_positions is not None and ids.shape[1] > self.most_positions:
            raise ValueError(
                f"a sample has {ids.shape[1]} tokens, and the model has positions for {self.most_positions}: cut the samples"
            )
        if ids.device.type == "cpu" and ids.numel():
            lowest, highest = (int(value) for value in ids.aminmax())
            if lowest < 0 or highest >= self.vocabulary_size:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(
                    f"token id {wrong} is none of the model's, which are 0 to {self.vocabulary_size - 1}: its tokenizer has more tokens than "
                    "its embedding has rows; take the model's own tokenizer"
                )


def shifted(labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """Targets for `labels`, both `[batch, sequence]`: at each position the label of the next one.

    The last position has none; nor has the last of a packed document, after which positions start again: both are IGNORED.
    """
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if positions is not None:
        targets[:, :-1].masked_fill_(positions[:, 1:] != positions[:, :-1] + 1, IGNORED)
    return targets


def _check_no_restart(mask: Tensor, positions: Tensor) -> None:
    """Beside any mask transformers does not look at positions that start again, so that documents would see each other."""
    if mask.device.type == "cpu" and _start_again(positions, (mask[:, 1:] != 0) & (mask[:, :-1] != 0)):
        raise ValueError(
            f"{_POSITIONS} start again within a sample, beside an {_MASK}: transformers then lets the packed documents see each other. Leave "
            f"{_MASK} out, and make the padded tail a document of its own, with {IGNORED} as its targets"
        )


def _start_again(positions: Tensor, where: Tensor | None = None) -> bool:
    """Whether a position does not follow the one before it, `where` that counts; values on a device are not looked at."""
    if positions.device.type != "cpu":
        return False
    jumps = positions[:, 1:] != positions[:, :-1] + 1
    return bool((jumps if where is None else jumps & where).any())
