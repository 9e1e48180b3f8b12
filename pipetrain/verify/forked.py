"""Processes that start at once: they are forked from one that has loaded what takes each seconds, and has done nothing else."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.context import ForkServerContext
from typing import Final

START_METHOD: Final = "forkserver"
# A first optimizer, and a first backward, load what torch.compile needs.
_LOADED = ["torch", "torch._dynamo", "pipetrain.runtime.pipeline"]


def forking() -> ForkServerContext:
    """Where processes are made; CUDA may be used in them, as nothing of it is in the one that forks."""
    context = mp.get_context(START_METHOD)
    context.set_forkserver_preload(_LOADED)
    return context
