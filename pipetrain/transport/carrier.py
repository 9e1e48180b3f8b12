"""Which library carries the messages between stages."""

from __future__ import annotations

import torch
import torch.distributed as dist

AUTO = "auto"  # gloo on a CPU, NCCL on GPUs
GLOO, NCCL, PINNED = "gloo", "nccl", "pinned"
PER_EDGE, PER_PAIR = "edge", "pair"  # what there is a communicator of NCCL for, in each direction


def carrier_of(edges: str, device: torch.device) -> str:
    """What `edges` (`auto`, `nccl` or `pinned`) means where ranks compute on `device`: `gloo`, `nccl` or `pinned`.

    Raises:
        ValueError: it cannot be had here; with the key and what to use instead.
    """
    if edges == PINNED:
        return PINNED
    if device.type == "cpu":
        if edges == NCCL:
            raise ValueError(
                "transport.edges=nccl: NCCL carries messages between GPUs, and the ranks compute on the CPU; use transport.edges=auto"
            )
        return GLOO
    if not dist.is_nccl_available():
        raise ValueError(
            f"transport.edges={edges}: this build of torch has no NCCL, which carries messages between GPUs; install one that has, "
            "or use transport.edges=pinned (make_plan(..., edges='pinned')), which takes them through memory of the host"
        )
    return NCCL
