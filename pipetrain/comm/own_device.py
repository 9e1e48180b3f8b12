"""The device of this process."""

from __future__ import annotations

import os
import socket
import warnings

import torch

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues of a process, read when CUDA starts; 8 where it is not set
_NUM_QUEUES = 32  # the most that there are


def choose_device(device: torch.device | str | None, *, shares_gpus: bool = False) -> torch.device:
    """`device`, or this rank's GPU where each rank of this machine can have one of its own, or the CPU. A GPU is made current.

    With `shares_gpus` several ranks may have one GPU, in turn: where there is any, each rank has one.

    Raises:
        ValueError: `device` is neither the CPU nor a GPU.
    """
    set_variables_of_gpus()
    chosen: torch.device | None
    if device is not None:
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError):
            chosen = None
        if chosen is None or chosen.type not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r}: allowed are 'cpu', 'cuda' and 'cuda:N'")
    else:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        needed = 1 if shares_gpus else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        chosen = torch.device("cuda", local % num_gpus) if 0 < needed <= num_gpus else torch.device("cpu")
    if chosen.type == "cuda":
        _check_hardware_queues()
        chosen = torch.device("cuda", chosen.index or 0)
        torch.cuda.set_device(chosen)
    return chosen


def set_variables_of_gpus() -> None:
    """Sets what CUDA and NCCL read when they start, unless the user has set it.

    As many hardware queues as there can be; and transfers in the order in which the host launches them, over all
    communicators (NCCL 2.26 and later): the order that the schedule is proved in.
    """
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(_QUEUES, str(_NUM_QUEUES))


def _check_hardware_queues() -> None:
    """Streams that share a hardware queue wait for each other: nothing hangs, but little runs at the same time."""
    given = os.environ.get(_QUEUES)
    if given is None:
        warnings.warn(
            f"CUDA has started with 8 hardware queues before there was a pipeline, whose streams may then wait for each other: set "
            f"{_QUEUES}={_NUM_QUEUES} in the environment, or make the Pipeline before anything is put on a GPU",
            stacklevel=2,
        )
    elif not given.isdigit() or int(given) < _NUM_QUEUES:
        warnings.warn(
            f"{_QUEUES}={given}: with so few hardware queues a pipeline's streams wait for each other; set it to {_NUM_QUEUES}",
            stacklevel=2,
        )


def identity_of(gpu: torch.device) -> str:
    """A GPU as all processes of all machines call it."""
    properties = torch.cuda.get_device_properties(gpu)
    return f"the GPU {properties.uuid} ({properties.name}) of {socket.gethostname()}"
