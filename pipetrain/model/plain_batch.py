"""What the built-in models take of a batch: token ids alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def plain_batch(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Token ids and targets of a batch whose inputs may be a dict with a mask; a rank without the first stage gives None.

    Filling at the end of a sample needs no mask: attention looks back, and there nothing counts.

    Raises:
        ValueError: documents side by side, or filling in front, which these models would take for what came before.
    """
    if not isinstance(inputs, Mapping):
        return inputs, targets
    if inputs.get("position_ids") is not None:
        raise ValueError(
            "data.layout=packed (that of chats where nothing else is said): in the built-in models the documents of a sample would see each "
            "other; use data.layout=padded, or model=hf"
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask: the built-in models take samples that are filled up at their end alone; use model=hf"
        )
    return inputs["input_ids"], targets
