"""What each replica reads of a batch: its slices of `torch.tensor_split`, and no other row."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipetrain.data.batch import Batch, Share
from pipetrain.data.batches import Batches
from pipetrain.data.samples import Windows

BATCHES = [
    (size, replicas, parts) for replicas, parts in ((1, 3), (2, 2), (2, 4), (3, 2), (4, 1)) for size in range(8, 18)
]


@pytest.mark.parametrize(("batch_size", "num_replicas", "num_microbatches"), BATCHES)
def test_shares_are_the_slices_of_tensor_split(batch_size: int, num_replicas: int, num_microbatches: int) -> None:
    whole = torch.arange(batch_size)
    slices = torch.tensor_split(whole, num_replicas * num_microbatches)
    for replica in range(num_replicas):
        own = whole[Share(replica, num_replicas, num_microbatches).rows_of(batch_size)]
        mine = slices[replica * num_microbatches : (replica + 1) * num_microbatches]
        assert [part.tolist() for part in own.tensor_split(num_microbatches)] == [part.tolist() for part in mine]


class Watched(Windows):
    """Samples that remember which of them were read."""

    def __init__(self) -> None:
        super().__init__(np.arange(1000, dtype=np.uint16), 4)
        self.read: list[int] = []

    def take(self, indices: NDArray[np.int64]) -> Batch:
        self.read += indices.tolist()
        return super().take(indices)


def test_a_replica_reads_its_rows_and_no_other() -> None:
    whole, watched = Batches(Watched(), 11, seed=3).batch(30), Watched()  # over the end of an epoch
    parts = [Batches(watched, 11, seed=3).batch(30, Share(replica, 2, 2)) for replica in range(2)]
    assert [len(part.inputs) for part in parts] == [6, 5]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert watched.read == Batches(watched, 11, seed=3).indices_from(30 * 11).tolist()
