"""Cross entropy over the positions that count."""

import math

import torch
from rounding import rounding

from pipetrain.models.loss import IGNORED, count_tokens, next_token_loss


def test_the_mean_is_over_counted_positions() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, IGNORED, 4], [IGNORED, 0, IGNORED]])
    probabilities = logits.softmax(-1)
    picked = [probabilities[0, 0, 1], probabilities[0, 2, 4], probabilities[1, 1, 0]]
    torch.testing.assert_close(next_token_loss(logits, targets), -sum(p.log() for p in picked) / 3)
    assert count_tokens(targets) == 3


def test_weighted_microbatches_add_up_to_the_batch() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 3, 5), torch.randint(5, (4, 3))
    targets[0, 1:] = IGNORED
    parts = [
        (next_token_loss(logits[i : i + 1], targets[i : i + 1]), count_tokens(targets[i : i + 1])) for i in range(4)
    ]
    torch.testing.assert_close(
        sum(loss * n for loss, n in parts) / count_tokens(targets), next_token_loss(logits, targets)
    )


def test_nothing_counted_is_a_loss_of_zero_with_a_gradient_of_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.full((2, 3), IGNORED)
    loss = next_token_loss(logits, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert count_tokens(targets) == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(8, 64, 256, dtype=torch.bfloat16)
    loss = next_token_loss(logits, torch.zeros(8, 64, dtype=torch.int64))
    assert loss.dtype == torch.float32
    # Of 512 equal terms: half an epsilon per addition, to partial sums that are half of the whole on average.
    assert abs(loss.item() - math.log(256)) <= rounding(torch.float32, terms=8 * 64) / 4 * math.log(256)
