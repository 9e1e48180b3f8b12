"""The loss of a step: added up on the last rank of a replica, known on every rank."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipetrain.comm.device import Fetch
from pipetrain.comm.failure import PipelineError


class LossNotFinite(PipelineError):
    """The loss of a step is not finite. Every rank raises it after the whole step, and the pipeline can go on.

    `microbatch` is the first whose own loss is not finite, counted over all replicas; `loss` the sum over all. Gradients are of no use then, and
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


def told(losses: Mapping[int, Tensor], first: int, fetch: Fetch) -> bytes:
    """The weighted losses of the microbatches of a replica, whose own first is number `first`; for `added_up`.

    float64 holds any of the dtypes exactly. All go to the host at once: one wait for the step.
    """
    ordered = sorted(losses.items())
    if not ordered:
        return json.dumps([None, []]).encode()
    there = ordered[0][1].device
    values = fetch(torch.stack([loss.to(there).double() for _, loss in ordered]), "the loss of the step").tolist()
    numbers = [first + number for number, _ in ordered]
    return json.dumps([_DTYPES.index(ordered[0][1].dtype), list(zip(numbers, values))]).encode()


def added_up(parts: Iterable[bytes]) -> bytes:
    """The sum of what `told` gave in each replica, microbatch by microbatch in their own dtype, for the other ranks: see `checked`."""
    found = [json.loads(part) for part in parts]
    dtype = next(dtype for dtype, _ in found if dtype is not None)
    losses = [pair for _, pairs in found for pair in pairs]
    total, *others = torch.tensor([loss for _, loss in losses], dtype=torch.float64).to(_DTYPES[dtype]).unbind()
    for loss in others:
        total = total + loss
    bad = next((number for number, loss in losses if not math.isfinite(loss)), -1)
    return _SUM.pack(float(total), dtype, bad)


def checked(data: bytes, step: int) -> Tensor:
    """The loss, 0-dim on the host, of what `added_up` gave.

    Raises:
        LossNotFinite: the loss of a microbatch is not finite.
    """
    total, dtype, bad = _SUM.unpack(data)
    if bad >= 0:
        raise LossNotFinite(step, bad, total)
    return torch.tensor(total, dtype=_DTYPES[dtype])
