"""Which documents share a sample: as many as fit, by best fit with the longest first, so that little is left over.

Best-fit decreasing puts each document into the fullest sample that still has room for it; it needs at most 11/9 of the least number of samples
(Johnson et al. 1974). Documents of one length are put at once, so it takes as long as there are lengths, however many documents.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Packed(NamedTuple):
    """Sample i has the documents `order[ends[i - 1]]` to `order[ends[i] - 1]`."""

    order: NDArray[np.int64]
    ends: NDArray[np.int64]


def pack_documents(lengths: NDArray[Any], room: int) -> Packed:
    """Samples of at most `room` tokens from documents of so many each, all from 1 to `room`. The same for the same lengths."""
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= room), "every document fits"
    sample_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[by_length], prepend=-1))
    samples = _Samples()
    for group in np.split(by_length, starts[1:]):
        if len(group):
            sample_of[group] = samples.put(len(group), int(lengths[group[0]]), room)
    return Packed(np.argsort(sample_of, kind="stable"), np.cumsum(np.bincount(sample_of, minlength=0)))


class _Samples:
    """Samples by the room that they have left."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # in which there is a sample, ascending
        self._with_room: dict[int, list[NDArray[np.int64]]] = {}
        self._count = 0

    def put(self, count: int, length: int, room: int) -> NDArray[np.int64]:
        """The samples that `count` documents of one `length` go to."""
        given: list[NDArray[np.int64]] = []
        while count and (at := bisect.bisect_left(self._rooms, length)) < len(self._rooms):
            left = self._rooms[at]
            samples = self._take(left, count)
            self._add(left - length, samples)
            given.append(samples)
            count -= len(samples)
        if count:
            each = room // length  # a new sample is the fullest with room for the next one, until it is full
            new = self._count + np.arange(-(-count // each), dtype=np.int64)
            self._count += len(new)
            given.append(np.repeat(new, each)[:count])
            in_last = count - each * (len(new) - 1)
            self._add(room - each * length, new[:-1])
            self._add(room - in_last * length, new[-1:])
        return np.concatenate(given)

    def _take(self, room: int, most: int) -> NDArray[np.int64]:
        found = np.concatenate(self._with_room.pop(room))
        if len(found) > most:
            self._with_room[room] = [found[most:]]
        else:
            self._rooms.remove(room)
        return found[:most]

    def _add(self, room: int, samples: NDArray[np.int64]) -> None:
        if not len(samples) or not room:
            return
        if room not in self._with_room:
            bisect.insort(self._rooms, room)
            self._with_room[room] = []
        self._with_room[room].append(samples)
