"""What a sample is: a window of one long row of tokens, or whole documents.

    stream   tokens   a b c d e f g h i j          targets are the tokens after the inputs, and windows share one token:
             window 0 a b c d e                    inputs a b c d  targets b c d e
             window 1         e f g h i            inputs e f g h  targets f g h i     (j is left over)

    padded   document a b c                        inputs a b c .  targets b c x x     mask 1 1 1 0       x: does not count (-100)
    packed   documents a b c and d e, room for 8   inputs a b c d e . . .   targets b c x e x x x x
                                                   positions 0 1 2 0 1 0 1 2, and no mask

Packed, a model that looks at positions sees where each document begins; the filling at the end is a document of its own. Which tokens are
filling follows from lengths: a token that also ends texts may fill.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pipetrain.data.batch import Batch
from pipetrain.data.token_file import Ids, TokenPart

IGNORED = -100  # the target of a position that does not count

Indices = Sequence[int] | NDArray[np.int64]


class Samples(Protocol):
    """Samples by number. `num_tokens`: positions that count in the loss, over all of them or some."""

    sequence_length: int

    def __len__(self) -> int: ...

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Token ids and targets `[samples, sequence_length]`, int64; documents with a mask, or with positions."""
        ...

    def num_tokens(self, indices: NDArray[np.int64]) -> int: ...


class Windows:
    """Samples of one long row of tokens, in the smallest integer type; on disk or in memory."""

    def __init__(self, tokens: Ids, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self._windows = windows_of(tokens, sequence_length)

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        wide = torch.from_numpy(self._windows[indices].astype(np.int64))
        return Batch(inputs=wide[:, :-1].contiguous(), targets=wide[:, 1:].contiguous())

    def num_tokens(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.sequence_length


def windows_of(tokens: Ids, sequence_length: int) -> Ids:
    """All windows `[windows, sequence_length + 1]`, a view of `tokens [tokens]`."""
    if len(tokens) <= sequence_length:
        return np.empty((0, sequence_length + 1), tokens.dtype)
    return sliding_window_view(tokens, sequence_length + 1)[::sequence_length]


class Documents:
    """Samples of whole documents, as `packed` has them; without it one each, and a mask in place of positions.

    No document is longer than `sequence_length`.
    """

    def __init__(
        self, part: TokenPart, documents: NDArray[np.int64], packed: Packed | None, *, room: int, pad: int
    ) -> None:
        self.sequence_length = room
        self._part = part
        self._pad = pad
        self._with_mask = packed is None
        order, ends = packed if packed is not None else (np.arange(len(documents)), np.arange(1, len(documents) + 1))
        self._documents = documents[order]
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        shape = (len(indices), self.sequence_length)
        ids, targets = np.full(shape, self._pad, np.int64), np.full(shape, IGNORED, np.int64)
        where = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for document in self._documents_of(int(index)):
                at = self._put(document, ids[row], targets[row], where[row], at)
            if not self._with_mask:
                where[row, at:] = np.arange(self.sequence_length - at)
        name = "attention_mask" if self._with_mask else "position_ids"
        return Batch({"input_ids": torch.from_numpy(ids), name: torch.from_numpy(where)}, torch.from_numpy(targets))

    def num_tokens(self, indices: NDArray[np.int64]) -> int:
        return sum(self._num_targets(document) for index in indices for document in self._documents_of(int(index)))

    def _put(self, document: int, ids: NDArray[Any], targets: NDArray[Any], where: NDArray[Any], at: int) -> int:
        """One document from position `at` on; returns where it ends."""
        first, last = self._range(document)
        end = at + last - first
        tokens = self._part.tokens[first:last]
        ids[at:end] = tokens
        targets[at : end - 1] = tokens[1:]
        if self._part.counted is not None:
            targets[at : end - 1][self._part.counted[first + 1 : last] == 0] = IGNORED
        where[at:end] = 1 if self._with_mask else np.arange(last - first)
        return end

    def _num_targets(self, document: int) -> int:
        first, last = self._range(document)
        return last - first - 1 if self._part.counted is None else int(self._part.counted[first + 1 : last].sum())

    def _documents_of(self, sample: int) -> NDArray[np.int64]:
        return self._documents[self._ends[sample - 1] if sample else 0 : self._ends[sample]]

    def _range(self, document: int) -> tuple[int, int]:
        return int(self._part.ends[document - 1]) if document else 0, int(self._part.ends[document])


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
