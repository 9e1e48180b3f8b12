"""Values between the host and its device: to it without a wait, and back in the one way in which a step waits for its device."""

from __future__ import annotations

from collections.abc import Callable

import torch
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
    doing = f"{monitor.name} waits for its device to give {what}"
    monitor.wait_polling(lambda: device.has_ended(end), lambda: doing)
    return copy


def bring(tensor: Tensor, where: torch.device, device: Device) -> Tensor:
    """`tensor` on the device, for what the current stream gets from now on; whoever gave it may overwrite it at once.

    `Tensor.to` would have the host wait until the stream has done what it was given, the optimizer's step for one: the driver
    copies from memory that it knows, and from any other only when its turn has come.
    """
    if not device.runs_ahead or where.type == "cpu" or not _is_plain(tensor):
        return tensor.to(where)
    staged = device.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    staged.copy_(tensor.detach())
    there = torch.empty_like(tensor, device=where)
    device.copy(there, staged)
    return there


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is bytes of the host, one after the other; of another one torch knows best what has to be kept."""
    known = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
    return known and not tensor.is_conj() and not tensor.is_neg()
