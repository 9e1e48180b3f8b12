"""`pipetrain profile` measures the link behind each stage but the last, which rank 0 gives, and copies to host memory."""

import math

import torch
from ranks import run_ranks

from pipetrain.plan.profile import Links
from pipetrain.trainer.links import measure_copies, measure_links


def links() -> Links | None:
    return measure_links(3)


def test_rank_0_has_a_link_behind_each_stage_but_the_last() -> None:
    found, *others = run_ranks(3, links)
    assert others == [None, None]
    assert len(found.edges) == 2
    assert all(link.bytes_per_second > 0 and link.latency_seconds >= 0 for link in found.edges)
    assert all(link.seconds(2**20) < link.seconds(2**22) for link in found.edges)
    assert 1.0 <= found.contention < math.inf


def test_copies_to_host_memory_are_measured_alone_and_both_ways_at_once() -> None:
    found = measure_copies(torch.device("cpu"))
    alone = found.down_bytes_per_second, found.up_bytes_per_second
    assert 0 < found.both_bytes_per_second <= min(alone)
