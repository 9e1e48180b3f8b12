"""The loss of a step: added up on the last rank, known on every rank."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from pipetrain.group.failure import PipelineError
from pipetrain.transport.fetch import Fetch


class LossNotFinite(PipelineError):
    """The loss of a step is not finite. Every rank raises it after the whole step, and the pipeline can go on.

    `microbatch` is the first whose own loss is not finite; `loss` the sum over all. Gradients are of no use then, and
    buffers that a forward changes (running means) have seen the batch.
    """

    def __init__(self, step: int, microbatch: int, loss: float) -> None:
        super().__init__(
            f"the loss of microbatch {microbatch} in step {step} is not finite (the sum is {loss}): look at that batch, lower "
            "the learning rate, or clip the gradients"
        )
        self.step = step
        self.microbatch = microbatch
        self.loss = loss


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SUM = struct.Struct("<dii")  # the sum, its dtype, the first microbatch that is not finite (or -1)


def summed(losses: Mapping[int, Tensor], fetch: Fetch) -> bytes:
    """The weighted losses of the microbatches, added in order, for the other ranks: see `checked`.

    float64 holds a sum of any of the dtypes exactly. The sum and what is finite go to the host together: one wait for the step.
    """
    ordered = sorted(losses.items())
    total = ordered[0][1]
    for _, loss in ordered[1:]:
        total = total + loss
    finite = torch.stack([torch.isfinite(loss).to(total.device) for _, loss in ordered])
    said = fetch(torch.cat([total.reshape(1).double(), finite.double()]), "the loss of the step").tolist()
    bad = next((number for (number, _), is_finite in zip(ordered, said[1:]) if not is_finite), -1)
    return _SUM.pack(said[0], _DTYPES.index(total.dtype), bad)


def checked(data: bytes, step: int) -> Tensor:
    """The loss, 0-dim on the host, of what `summed` gave.

    Raises:
        LossNotFinite: the loss of a microbatch is not finite.
    """
    total, dtype, bad = _SUM.unpack(data)
    if bad >= 0:
        raise LossNotFinite(step, bad, total)
    return torch.tensor(total, dtype=_DTYPES[dtype])
