"""What a rank opens does not grow with the number of ranks: single ranks of 512 start as those of 4 do.

No machine of ours holds 512 ranks. The rank that is measured is real; `played.py` says who plays the others, and how.
"""

import functools

import pytest
from played import Footprint, start_all, start_one, use_the_group

FEW = 4
PLACES = ["first", "middle", "last"]
# Bytes: some 40 kB per rank. Less than a tenth of a rank's memory with all of torch loaded, and the same with less of it loaded.
MOST_MORE = 20_000_000


def rank_at(place: str, num_ranks: int) -> int:
    return {"first": 0, "middle": num_ranks // 2, "last": num_ranks - 1}[place]


@functools.cache
def footprint(place: str, num_ranks: int) -> Footprint:
    return start_one(rank_at(place, num_ranks), num_ranks)


@pytest.mark.quick("first-512")
@pytest.mark.parametrize("num_ranks", [pytest.param(64, marks=pytest.mark.slow), 512])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_of_many_has_what_a_rank_of_four_has(place: str, num_ranks: int) -> None:
    few, many = footprint(place, FEW), footprint(place, num_ranks)
    print(f"{place} of {FEW}: {few}; of {num_ranks}: {many}")
    assert many.process_groups == few.process_groups
    assert many.connections == few.connections
    assert many.threads == few.threads
    assert many.resident_bytes <= few.resident_bytes + MOST_MORE


def test_played_neighbours_are_as_real_ones() -> None:
    """The same counts where nobody is played."""
    real = start_all(FEW)
    for place in PLACES:
        played = footprint(place, FEW)
        beside = real[rank_at(place, FEW)]
        assert played.process_groups == beside.process_groups
        assert played.connections == beside.connections
        assert played.threads == beside.threads
        assert abs(played.resident_bytes / beside.resident_bytes - 1) < 0.1


def test_the_process_group_connects_when_it_is_used() -> None:
    """For who uses torch.distributed beside the pipeline."""
    for before, after, total in use_the_group(3).values():
        assert total == 0 + 1 + 2
        assert after > before
