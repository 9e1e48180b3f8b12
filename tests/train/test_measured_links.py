"""`pipetrain profile` measures the link behind each stage but the last; rank 0 has them."""

from ranks import run_ranks

from pipetrain.plan.profile import Link
from pipetrain.trainer.links import measure_links


def links() -> list[Link] | None:
    return measure_links(3)


def test_rank_0_has_a_link_behind_each_stage_but_the_last() -> None:
    found, *others = run_ranks(3, links)
    assert others == [None, None]
    assert len(found) == 2
    assert all(link.bytes_per_second > 0 and link.latency_seconds >= 0 for link in found)
    assert all(link.seconds(2**20) < link.seconds(2**22) for link in found)
