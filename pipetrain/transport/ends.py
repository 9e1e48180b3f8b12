"""Which library carries the messages: gloo on a CPU, NCCL on a GPU."""

from __future__ import annotations

import torch
from torch.distributed import Store

from pipetrain.group.failure import Monitor
from pipetrain.transport.gloo import GlooEdges
from pipetrain.transport.lanes import CudaLanes, Lanes
from pipetrain.transport.transport import Edges


def make_edges(store: Store, lanes: Lanes, monitor: Monitor, device: torch.device) -> Edges:
    if device.type == "cuda":
        from pipetrain.transport.nccl import NcclEdges  # only where torch was built with NCCL

        assert isinstance(lanes, CudaLanes)
        return NcclEdges(store, lanes, monitor, device)
    return GlooEdges(store, lanes, monitor)
