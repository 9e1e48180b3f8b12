"""Ranks that agree outside of the pipeline: after restarts, and when one is gone."""

import datetime
import os

import pytest
import torch.distributed as dist
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, run_outcomes
from torch.distributed import TCPStore

from pipetrain.comm.group import join_group
from pipetrain.comm.torch_distributed import store_of_this_attempt


def test_a_restart_does_not_see_what_ranks_wrote_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a new rank connects to the address of one that was killed, and the run hangs."""
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun's own store, which outlives the ranks
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stores = []
    for attempt in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(store_of_this_attempt(datetime.timedelta(seconds=PATIENCE_SECONDS)))
    stores[0].set("address", "of a rank that was killed")
    assert not stores[1].check(["address"])
    stores[1].set("address", "of the new one")
    assert stores[2].get("address") == b"of the new one"


def agree_with_one_that_leaves() -> None:
    with join_group(timeout_seconds=NEVER_SECONDS) as group:
        if dist.get_rank() == 1:
            os._exit(0)
        group.largest(1)


def test_a_rank_that_is_lost_between_two_steps_is_said_in_one_line() -> None:
    first, _ = run_outcomes(2, agree_with_one_that_leaves)
    assert first.error is not None
    line = first.error.strip().splitlines()[-1]
    assert "rank 1 is gone: rank 0 lost its connection in what all ranks agree on between two steps (" in line
    assert "see its own output" in line
