"""Training batches: each window once per epoch, a function of seed and step. Held-out batches: each token at most once, in order."""

import numpy as np
import pytest
import torch
from counts import num_counted

from pipetrain.data.batches import Batches, HeldoutBatches
from pipetrain.data.samples import Windows

TOKENS = np.arange(101, dtype=np.uint8)  # 25 windows of 4 and the one after


def test_windows_lie_side_by_side_and_share_one_token() -> None:
    inputs, targets = Windows(np.arange(10), 4).take(np.arange(2))
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [len(Windows(np.arange(size), 4)) for size in (10, 9, 8, 4, 0)] == [2, 2, 1, 0, 0]


def test_targets_are_the_tokens_after_the_inputs() -> None:
    inputs, targets = Batches(Windows(TOKENS, 4), 3, seed=0).batch(5)
    assert inputs.shape == targets.shape == (3, 4)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)  # of tokens that count upwards


@pytest.mark.parametrize("batch_size", [5, 4, 7, 60])
def test_each_window_once_per_epoch(batch_size: int) -> None:
    """25 windows in batches that divide them, that do not, and that are larger than the epoch."""
    batches = Batches(Windows(TOKENS, 4), batch_size, seed=0)
    row = np.concatenate([batches.indices_from(step * batch_size) for step in range(25)])
    assert all(len(batches.indices_from(step * batch_size)) == batch_size for step in range(25))
    for epoch in range(len(row) // 25):
        assert sorted(row[epoch * 25 : (epoch + 1) * 25].tolist()) == list(range(25))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(Batches(Windows(TOKENS, 4), 25, seed).indices_from(epoch * 25).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert tuple(range(25)) not in orders


def test_steps_may_be_asked_for_in_any_order() -> None:
    """So a resume goes on counting."""
    batches = Batches(Windows(TOKENS, 4), 7, seed=3)
    expected = [torch.stack(Batches(Windows(TOKENS, 4), 7, seed=3).batch(step)) for step in range(30)]
    for step in (29, 0, 17, 3):
        assert torch.equal(torch.stack(batches.batch(step)), expected[step])


def test_batches_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    Batches(Windows(TOKENS, 4), 7, seed=3).batch(40)
    assert torch.equal(torch.rand(1), expected)


def test_heldout_covers_each_token_once_and_in_order() -> None:
    batches = HeldoutBatches(Windows(TOKENS, 4), batch_size=4, max_tokens=1000)
    targets = [target for _, target in batches]
    assert [len(target) for target in targets] == [4, 4, 4, 4, 4, 4, 1]
    assert len(batches) == 7
    assert torch.cat(targets).flatten().tolist() == list(range(1, 101))
    assert num_counted(batches) == 100
    assert all(torch.equal(target, inputs + 1) for inputs, target in batches)


def test_heldout_reads_no_more_than_asked_and_spreads_it() -> None:
    batches = HeldoutBatches(Windows(TOKENS, 4), batch_size=2, max_tokens=23)
    assert num_counted(batches) == 20
    assert batches.indices.tolist() == [0, 5, 10, 15, 20]


def test_nothing_held_out() -> None:
    batches = HeldoutBatches(Windows(TOKENS[:0], 4), batch_size=2, max_tokens=100)
    assert (list(batches), len(batches)) == ([], 0)
