"""A value of the device on the host: the one way in which a step waits for its device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipetrain.group.failure import Monitor
from pipetrain.transport.device import Device

Fetch = Callable[[Tensor, str], Tensor]  # a tensor of the device, and what it is; gives it on the host


def fetch(tensor: Tensor, what: str, device: Device, monitor: Monitor) -> Tensor:
    """`tensor` in the host's memory, once all that the current stream was given so far has run.

    `.item()` would sit in the driver until then, or for ever where another rank is gone: nobody could say which. Here the
    host asks again and again whether the copy has happened, and looks meanwhile whether another rank has failed.

    Raises:
        PipelineError: another rank failed or is gone, or `timeout_seconds` passed.
    """
    if not device.runs_ahead:
        return tensor
    copy = device.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    device.copy(copy, tensor)
    end = device.record(device.current())
    device.waited(what)
    monitor.wait_polling(lambda: device.has_ended(end), lambda: f"rank {monitor.rank} waits for its device: {what}")
    return copy
