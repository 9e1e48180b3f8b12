"""What a step trains on."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """The samples of a step (or of an evaluation), from the data to the model.

    Both parts are trees: a tensor, or (nested) tuples, lists and dicts of tensors and plain values, such as token ids with a mask and
    positions. Dimension 0 of every tensor is the sample. Who passes a batch on looks at its leaves and nothing else; what they mean the
    data and the model know.
    """

    inputs: Any  # what the first layer gets
    targets: Any  # what the loss is taken against
