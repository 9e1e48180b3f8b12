"""What a step trains on, and which samples of it a replica takes: a function of the batch's size alone, so nobody has to say who reads what.

    a batch of 11 samples, 2 replicas of 2 microbatches      torch.tensor_split(batch, 2 x 2)
    a b c | d e f | g h i | j k                              replica r: slices 2r and 2r + 1
    replica 0       replica 1

Cut again into microbatches, the samples of a replica are its slices: the larger slices come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Batch(NamedTuple):
    """The samples of a step (or of an evaluation), from the data to the model.

    Both parts are trees: a tensor, or (nested) tuples, lists and dicts of tensors and plain values, such as token ids with a mask and
    positions. Dimension 0 of every tensor is the sample. Who passes a batch on looks at its leaves and nothing else; what they mean the
    data and the model know.
    """

    inputs: Any  # what the first layer gets
    targets: Any  # what the loss is taken against


@dataclass(frozen=True)
class Share:
    """What replica `replica` of `num_replicas` takes, where each cuts its share into `num_microbatches`."""

    replica: int
    num_replicas: int
    num_microbatches: int

    def rows_of(self, batch_size: int) -> slice:
        """The samples of a batch that are this replica's."""
        size, larger = divmod(batch_size, self.num_replicas * self.num_microbatches)
        first, end = (replica * self.num_microbatches for replica in (self.replica, self.replica + 1))  # slices
        return slice(first * size + min(first, larger), end * size + min(end, larger))
