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

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pipetrain.config.records import PACKED, PADDED, STREAM, DataConfig
from pipetrain.data.batch import Batch
from pipetrain.data.corpus import key_of_text
from pipetrain.data.token_file import HELDOUT, PARTS, TRAIN, Ids, TokenPart, TokenSheet, read_part
from pipetrain.data.tokenizing import place_named, refusal_of

IGNORED = -100  # the target of a position that does not count


class Windows:
    """Samples of one long row of tokens, in the smallest integer type; on disk or in memory."""

    def __init__(self, tokens: Ids, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self._windows = tokens[:0].reshape(0, sequence_length + 1)
        if len(tokens) > sequence_length:
            self._windows = sliding_window_view(tokens, sequence_length + 1)[::sequence_length]

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Token ids and targets `[samples, sequence_length]`, int64."""
        wide = torch.from_numpy(self._windows[indices].astype(np.int64))
        return Batch(inputs=wide[:, :-1].contiguous(), targets=wide[:, 1:].contiguous())


class Documents:
    """Samples of whole documents, as `packed` has them; without it one each, and a mask in place of positions.

    Of a document that is longer than `room` they have the beginning.
    """

    def __init__(
        self, part: TokenPart, documents: NDArray[np.int64], packed: Packed | None, *, room: int, pad: int
    ) -> None:
        self.sequence_length = room
        self._part, self._pad, self._with_mask = part, pad, packed is None
        each = np.arange(len(documents))
        packed = packed or Packed(each, each + 1)
        self._documents, self._ends = documents[packed.order], packed.ends

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Token ids with a mask or positions, and targets; all `[samples, sequence_length]`, int64."""
        shape = (len(indices), self.sequence_length)
        ids, targets = np.full(shape, self._pad, np.int64), np.full(shape, IGNORED, np.int64)
        where = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for document in self._documents[self._ends[index - 1] if index else 0 : self._ends[index]]:
                first = int(self._part.ends[document - 1]) if document else 0
                last = min(int(self._part.ends[document]), first + self.sequence_length)
                tokens, end = self._part.tokens[first:last], at + last - first
                ids[row, at:end] = tokens
                targets[row, at : end - 1] = tokens[1:]
                if self._part.counted is not None:
                    targets[row, at : end - 1][self._part.counted[first + 1 : last] == 0] = IGNORED
                where[row, at:end] = 1 if self._with_mask else np.arange(last - first)
                at = end
            if not self._with_mask:
                where[row, at:] = np.arange(self.sequence_length - at)
        name = "attention_mask" if self._with_mask else "position_ids"
        return Batch({"input_ids": torch.from_numpy(ids), name: torch.from_numpy(where)}, torch.from_numpy(targets))


class Samples(Protocol):
    """What batches are made of."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample that are predicted; 1 where a sample is counted as one."""
        ...

    def __len__(self) -> int: ...
    def take(self, indices: NDArray[np.int64], /) -> Batch:
        """Those samples, in this order."""
        ...


class Packed(NamedTuple):
    """Sample i has the documents `order[ends[i - 1]]` to `order[ends[i] - 1]`."""

    order: NDArray[np.int64]
    ends: NDArray[np.int64]


def pack_documents(lengths: NDArray[Any], room: int) -> Packed:
    """Samples of at most `room` tokens from documents of so many each, all from 1 to `room`. The same for the same lengths.

    Best-fit decreasing puts each document into the fullest sample that still has room for it; it needs at most 11/9 of the least number of
    samples (Johnson et al. 1974). Documents of one length are put at once, so it takes as long as there are lengths, however many documents.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= room), "every document fits"
    sample_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[by_length], prepend=-1))
    with_room: dict[int, list[NDArray[np.int64]]] = {}  # samples by the room that they have left
    num_samples = 0

    def put(left: int, samples: NDArray[np.int64]) -> None:
        if left and len(samples):
            with_room.setdefault(left, []).append(samples)

    for group in np.split(by_length, starts[1:]) if len(lengths) else ():
        length, count = int(lengths[group[0]]), len(group)
        given: list[NDArray[np.int64]] = []
        while count and (left := min((each for each in with_room if each >= length), default=0)):
            samples = np.concatenate(with_room.pop(left))
            put(left, samples[count:])
            put(left - length, samples[:count])
            given.append(samples[:count])
            count -= len(given[-1])
        if count:
            each = room // length  # a new sample is the fullest with room for the next one, until it is full
            new = num_samples + np.arange(-(-count // each), dtype=np.int64)
            num_samples += len(new)
            given.append(np.repeat(new, each)[:count])
            put(room - each * length, new[:-1])
            put(room - (count - each * (len(new) - 1)) * length, new[-1:])
        sample_of[group] = np.concatenate(given)
    return Packed(np.argsort(sample_of, kind="stable"), np.cumsum(np.bincount(sample_of, minlength=0)))


class InVocabulary:
    """Samples whose token ids are looked at when they are taken: a file may have changed since its ids were known. `key` names it."""

    def __init__(self, samples: Samples, vocabulary_size: int, key: str) -> None:
        self.sequence_length = samples.sequence_length
        self._samples = samples
        self._vocabulary_size = vocabulary_size
        self._key = key

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """As the samples do. Raises ValueError: a token is not in the vocabulary."""
        batch = self._samples.take(indices)
        ids = batch.inputs["input_ids"] if isinstance(batch.inputs, dict) else batch.inputs
        largest = max((int(each.max()) for each in (ids, batch.targets) if each.numel()), default=0)
        if largest >= self._vocabulary_size:
            raise ValueError(
                f"{self._key}: a sample holds the token {largest}, and there are {self._vocabulary_size}: its tokens have changed since "
                "they were written; make them again, or find out which: pipetrain tokenize PATH --check"
            )
        return batch


@dataclass(frozen=True)
class SampleSets:
    """The samples of both parts; `heldout` is empty where nothing is held out. `fingerprint`: equal for the same samples."""

    train: Samples
    heldout: Samples
    vocabulary_size: int
    fingerprint: str
    num_skipped: int = 0  # documents that are no samples, with data.on_error=skip
    first_skipped: str | None = None  # why the first of them is none


def stream_samples(config: DataConfig, train: Ids, heldout: Ids, unit: str) -> tuple[Windows, Windows]:
    """Windows of two long rows of tokens, which are called `unit` in messages. Raises ValueError: one is too short for a sample."""
    if len(train) <= config.sequence_length:
        raise too_short("the training part of the text", len(train), config, unit)
    if _holds_out(config) and len(heldout) <= config.sequence_length:
        raise too_short("the held-out part of the text", len(heldout), config, unit)
    return Windows(train, config.sequence_length), Windows(heldout, config.sequence_length)


def folder_samples(config: DataConfig, folder: Path, sheet: TokenSheet) -> SampleSets:
    """The samples of a folder of tokens. Raises ValueError: there are none, or a document is none and data.on_error=stop."""
    if sheet.num_skipped and config.on_error == "stop":
        raise ValueError(refusal_of(str(sheet.first_problem)))
    layout = config.layout or (PACKED if sheet.is_chat else STREAM)
    parts = {name: read_part(folder, sheet, name) for name in PARTS}
    if layout != STREAM:
        return _whole_documents(config, sheet, parts, layout)
    if sheet.is_chat:
        raise ValueError(
            f"data.layout=stream: {key_of_text(config)} holds chats, which cannot be cut into pieces; use data.layout=packed or padded"
        )
    train, heldout = stream_samples(config, parts[TRAIN].tokens, parts[HELDOUT].tokens, "tokens")
    return SampleSets(train, heldout, sheet.vocabulary_size, sheet.fingerprint, sheet.num_skipped, sheet.first_problem)


def too_short(what: str, size: int, config: DataConfig, unit: str) -> ValueError:
    """The error for text that does not make one sample."""
    where = key_of_text(config)
    need = f"a sample of data.sequence_length={config.sequence_length} needs {config.sequence_length + 1}"
    instead = "data.eval_fraction=0" if size < 2 else f"data.sequence_length={size - 1}"
    return ValueError(f"{where}: {what} has {size} {unit} and {need}; give more text, or {instead}")


def _holds_out(config: DataConfig) -> bool:
    return bool(config.eval_fraction or config.eval_path or config.eval_split)


def _whole_documents(config: DataConfig, sheet: TokenSheet, parts: dict[str, TokenPart], layout: str) -> SampleSets:
    samples, room = {}, config.sequence_length
    num_skipped, first_skipped = sheet.num_skipped, sheet.first_problem
    digest = hashlib.sha256(f"{sheet.fingerprint} {layout}{' truncated' * config.truncate}".encode())
    for name, part in parts.items():
        documents, problem = _choose(config, sheet, part)
        packed = None if layout == PADDED else pack_documents(np.minimum(part.lengths[documents], room), room)
        samples[name] = Documents(part, documents, packed, room=room, pad=sheet.pad_token)
        if not len(documents) and (name == TRAIN or _holds_out(config)):
            raise ValueError(
                f"{key_of_text(config)}: the part {name} has no document that is a sample; give more, or data.eval_fraction=0"
            )
        digest.update(documents.tobytes())
        num_skipped += len(part.lengths) - len(documents)
        first_skipped = first_skipped or problem
    fingerprint = digest.hexdigest()
    return SampleSets(samples[TRAIN], samples[HELDOUT], sheet.vocabulary_size, fingerprint, num_skipped, first_skipped)


def _choose(config: DataConfig, sheet: TokenSheet, part: TokenPart) -> tuple[NDArray[np.int64], str | None]:
    """The documents that fit and have a token to predict; what is wrong with the first other. Raises ValueError: with data.on_error=stop."""
    lengths, room = part.lengths, config.sequence_length
    if len(lengths) and (lengths.min() < 0 or part.ends[-1] > len(part.tokens)):
        raise ValueError(f"{key_of_text(config)}: the ends of its documents are damaged; tokenize it again")
    fits = (lengths <= room) & (lengths > 1)
    if config.truncate:
        for long in np.flatnonzero(lengths > room):
            first = int(part.ends[long]) - int(lengths[long])
            fits[long] = part.counted is None or bool(part.counted[first + 1 : first + room].any())
    if fits.all():
        return np.arange(len(lengths)), None
    number = int(np.flatnonzero(~fits)[0])
    source, line = map(int, part.places[number])
    where = place_named(sheet.sources, source, line) if 0 <= source < len(sheet.sources) else "a document"
    problem = f"{where}: it has {lengths[number]} tokens, "
    if lengths[number] < 2:
        problem += "and none of them is predicted"
    elif config.truncate:
        problem += f"and none of the first data.sequence_length={room} counts"
    else:
        problem += f"more than data.sequence_length={room}; data.sequence_length={lengths.max()} takes all, data.truncate=true cuts it"
    if config.on_error == "stop":
        raise ValueError(refusal_of(problem))
    return np.flatnonzero(fits), problem
