"""Runs the step that every schedule must equal: a loop over microbatches in one process, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.runtime.cut import counts_of, cut, num_rows, weights_of
from pipetrain.stage.microbatch import AddedLosses
from pipetrain.stage.seeding import generators_restored, mix, seed_generators


def reference_step(
    model: Iterable[nn.Module],
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    num_microbatches: int,
    seed: int = 0,
    step: int = 0,
    count_fn: Callable[[Any], int | float] | None = None,
    loss_reduction: str = "mean",
) -> Tensor:
    """Run forward and backward of each microbatch in turn; gradients are added to `.grad` of the model's parameters.

    Returns the loss, 0-dim and detached: the sum over microbatches, in order, of `loss_fn(out_i, target_i) * (n_i / N)`;
    n_i is the number of rows of the microbatch, or `count_fn(target_i)`. A microbatch with n_i = 0 is not run.
    With `loss_reduction="sum"` the factor is 1, not n_i / N. What layers give to `add_loss` is added to `loss_fn(out_i, target_i)`:

        class Experts(nn.Module):                                       # one layer of the pipeline
            def forward(self, x):
                share = self.gate(x).softmax(-1)
                add_loss(0.01 * (share.mean(0) ** 2).sum())             # instead of a self.aux that loss_fn reads
                return sum(share[:, [n]] * expert(x) for n, expert in enumerate(self.experts))
    """
    layers = list(model)
    device = next((parameter.device for layer in layers for parameter in layer.parameters()), torch.device("cpu"))
    microbatches, labels = cut(inputs, num_microbatches), cut(targets, num_microbatches, "targets")
    # Count rows before the cut: in a microbatch, a tensor that was wrapped in Whole looks like any other. This count is independent of the
    # pipeline's, so that it does not repeat a mistake of the pipeline.
    share, rest = divmod(num_rows(inputs, "inputs") or num_microbatches, num_microbatches)
    counts: list[int | float] = [share + (index < rest) for index in range(num_microbatches)]
    if count_fn is not None:
        counts = counts_of(labels, count_fn)
    weights, total = weights_of(counts), None
    if loss_reduction == "sum":
        weights = [float(weight > 0) for weight in weights]
    with generators_restored(device):
        for index, (value, label, weight) in enumerate(zip(microbatches, labels, weights)):
            if weight == 0:
                continue
            with AddedLosses() as added:
                for number, layer in enumerate(layers):
                    seed_generators(mix(seed, step, index, number), device)
                    value = layer(value)
                seed_generators(mix(seed, step, index, len(layers)), device)
                loss = loss_fn(value, label)
            loss = (added.added_to(loss) if added.of_layer else loss) * weight
            torch.autograd.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
    assert total is not None  # weights_of refuses a batch in which nothing counts
    return total
