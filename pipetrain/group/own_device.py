"""The device of this process."""

from __future__ import annotations

import os

import torch


def choose_device(device: torch.device | str | None) -> torch.device:
    """`device`, or this rank's GPU where each rank of this machine can have one of its own, or the CPU. A GPU is made current.

    Raises:
        ValueError: `device` is neither the CPU nor a GPU.
    """
    if device is not None:
        chosen = _device_of(device)
    else:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        enough = torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        chosen = torch.device("cuda", local) if enough else torch.device("cpu")
    if chosen.type == "cuda":
        # Before CUDA starts: with one hardware queue the streams of the lanes would wait for each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        chosen = torch.device("cuda", chosen.index or 0)
        torch.cuda.set_device(chosen)
    return chosen


def _device_of(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: allowed are 'cpu', 'cuda' and 'cuda:N'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: allowed are 'cpu', 'cuda' and 'cuda:N'")
    return chosen
