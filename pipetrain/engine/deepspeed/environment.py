"""DeepSpeed, imported and quiet: it reads its environment when it is imported, and prints to stdout."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.comm.courier import closing_ports


def import_deepspeed(device: torch.device) -> Any:
    """The package, set up for `device`."""
    os.environ.setdefault("LOCAL_RANK", "0")  # a run of one process has none, and DeepSpeed wants one
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # on a machine with too few GPUs for the ranks it would take one of them
    with quiet_stdout():
        deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def join_world(deepspeed: Any, timeout: timedelta) -> None:
    """Let DeepSpeed use the ranks that torch.distributed knows, with our time-out in every group that it makes.

    Its shared-memory extension would be compiled here for a minute and serves collectives that a pipeline does not use.
    """
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False, timeout=timeout)
    comm = importlib.import_module("deepspeed.comm.comm")
    # Groups of its own would wait for torch's default of 30 minutes.

    def new_group(ranks: list[int]) -> Any:
        with closing_ports():
            return dist.new_group(ranks, timeout=timeout)

    comm.cdb.new_group = new_group


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """What compilers that are started print goes to stderr, and what Python prints nowhere: stdout is for the run folder and for JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
