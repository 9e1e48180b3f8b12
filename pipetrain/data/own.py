"""data=python: samples of a dataset that a function of the user's makes; their order and shares are those of all other data.

    data.target ── in each process that reads ──► dataset ── sample by sample ──► data.collate ──► (inputs, targets) of a step

The ranks of the first and the last stage read it; the others know how many samples there are. An iterable dataset has an order of its own:
each rank that reads takes all its samples, and a snapshot has its state.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, default_collate

from pipetrain.config.own_code import call_target, check_target, function_of, told_of
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import DataConfig, RunConfig
from pipetrain.data.batch import Batch, Share
from pipetrain.data.batches import Batches, Data, HeldoutBatches

Sizes = tuple[int, int]  # samples for training, and held out
STREAM = 0  # the number of samples of an iterable dataset, which nobody knows


@dataclass(frozen=True)
class Reader:
    """The samples of the dataset that the function at `spelling` makes: once in each process, when it is first read."""

    key: str
    spelling: str
    args: Mapping[str, Any]
    collate: str | None = None
    size: int | None = None  # what rank 0 says
    is_read: bool = True  # a rank that needs no samples knows their number alone, and gets batches of None
    sequence_length = 1

    @property
    def called(self) -> str:
        return f"{self.key}={self.spelling}"

    def __len__(self) -> int:
        return len(self.dataset) if self.size is None else self.size

    @functools.cached_property
    def dataset(self) -> Any:
        """Raises ConfigError: there is none, it has no samples, or another number than on rank 0."""
        made = _dataset_of(self.key, self.spelling, json.dumps(dict(self.args)))
        size = STREAM if _is_stream(made) else len(made)
        if self.size not in (None, size):
            raise ConfigError(
                f"{self.called}: has {size} samples here and {self.size} on rank 0: every rank needs the same"
            )
        return made

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """The samples in one batch. Raises ConfigError: one cannot be read, or they make no batch."""
        return self.collated([self[index] for index in indices.tolist()]) if self.is_read else Batch(None, None)

    def __getitem__(self, index: int) -> Any:
        dataset = self.dataset
        try:
            return dataset[index]
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(f"{self.called}: sample {index} raises {told_of(error)}") from error

    def collated(self, samples: list[Any]) -> Batch:
        """Raises ConfigError: the samples make no batch."""
        collate = default_collate if self.collate is None else function_of("data.collate", self.collate, {})
        try:
            batch = collate(samples)
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(
                f"{self.called}: samples make no batch ({told_of(error)}): each must be the same tree of tensors of one "
                "shape; or name a function from a list of samples to a batch, data.collate=my_package.data:collate"
            ) from error
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError(
                f"{self.called}: a sample must be the pair (inputs, targets), and a batch is a {type(batch).__name__}; name a "
                "function that makes pairs, data.collate=my_package.data:collate"
            )
        return Batch(*batch)


@functools.lru_cache(maxsize=2)  # for training and held out
def _dataset_of(key: str, spelling: str, args: str) -> Any:
    made = call_target(key, spelling, json.loads(args))
    if key != "data.target" or not _is_stream(made):
        check_map_style(f"{key}={spelling}", made, " or, if it is iterable, state_dict and load_state_dict")
    return made


def _is_stream(dataset: Any) -> bool:
    """Whether it is iterable, and can tell how far it is read."""
    has_state = hasattr(dataset, "__iter__") and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return has_state and not _is_map_style(dataset)


def _is_map_style(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def check_map_style(called: str, dataset: Any, otherwise: str = "") -> None:
    """Raises ConfigError: it has no `__len__` and `__getitem__`, or no samples. `otherwise`: what else it might have."""
    if not _is_map_style(dataset):
        raise ConfigError(
            f"{called}: a {type(dataset).__name__} cannot be read at any place, so a run could not resume; give a dataset with __len__ "
            f"and __getitem__{otherwise}"
        )
    if not len(dataset):
        raise ConfigError(f"{called}: the dataset has no samples")


class OwnBatches(Batches):
    """Batches that worker processes read ahead; without workers they are read when they are asked for."""

    def __init__(self, samples: Any, batch_size: int, seed: int, num_workers: int, timeout_seconds: float) -> None:
        super().__init__(samples, batch_size, seed)
        self._reader, self._num_workers, self._timeout_seconds = samples, num_workers, timeout_seconds
        self._next: tuple[int, Share | None] | None = None
        self._loaded: Any = None  # an iterator of torch, while workers run

    def batch_from(self, first: int, share: Share | None = None) -> Batch:
        if not self._num_workers:
            return super().batch_from(first, share)
        if self._loaded is None or self._next != (first, share):  # the first, or after a rollback
            self.close()
            loader = DataLoader(
                self._reader,
                batch_sampler=(self.indices_from(at, share).tolist() for at in itertools.count(first, self.batch_size)),
                num_workers=self._num_workers,
                collate_fn=self._reader.collated,
                timeout=self._timeout_seconds,
                worker_init_fn=functools.partial(_end_with, os.getpid()),
                multiprocessing_context="forkserver",  # a rank holds threads of gloo, which a fork would not copy
            )
            self._loaded = iter(loader)
        try:
            batch = next(self._loaded)
        except ConfigError as error:  # of a worker: the last line of what torch makes of it
            raise ConfigError(str(error).strip().splitlines()[-1].partition(": ")[2]) from error
        except RuntimeError as error:  # a worker died, or did not answer in time
            line = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"data.num_workers={self._num_workers}: reading {self._reader.spelling}: {line}"
            ) from error
        self._next = first + self.batch_size, share
        return Batch(*batch)

    def close(self) -> None:
        """Ends the workers. An error may hold the iterator, which ends them only when it is deleted."""
        if self._loaded is not None:
            self._loaded._shutdown_workers()
        self._loaded = None


class Stream:
    """An iterable dataset, in its own order; when it ends, it begins again. `state_dict` is its state behind the samples that were taken."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._position = 0  # samples that were read
        self._samples = self._read()
        self._last: tuple[int, list[Any]] = (0, [])  # where the samples taken last begin, and they

    def take(self, first: int, count: int, share: Share | None) -> Batch:
        """A batch of the `share` of `count` samples, the next ones, the last ones again, or later ones.

        Raises ConfigError: a sample cannot be read, or it is an earlier one.
        """
        if not self._reader.is_read:
            return Batch(None, None)
        if (first, count) != (self._last[0], len(self._last[1])):
            if first < self._position:
                raise ConfigError(
                    f"{self._reader.called}: sample {first} was read before, and an iterable dataset only goes on"
                )
            while self._position < first:  # those that the guard passes over
                next(self._samples)
            self._last = first, list(itertools.islice(self._samples, count))
        samples = self._last[1]
        return self._reader.collated(samples if share is None else samples[share.rows_of(count)])

    def _read(self) -> Iterator[Any]:
        """The samples from here on, without end. Raises ConfigError: one cannot be read, or there are none."""
        num_empty = 0
        while num_empty < 2:  # one that stood at its end has none the first time
            num_empty += 1
            try:
                for sample in self._reader.dataset:
                    self._position, num_empty = self._position + 1, 0
                    yield sample
            except Exception as error:  # whatever the user's code raises
                raise ConfigError(f"{self._reader.called}: sample {self._position} raises {told_of(error)}") from error
        raise ConfigError(f"{self._reader.called}: the dataset has no samples")

    def state_dict(self) -> dict[str, Any]:
        """Raises ConfigError: JSON would give back another state."""
        if not self._reader.is_read:
            return {}
        state = self._reader.dataset.state_dict()
        try:
            is_plain = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            raise ConfigError(
                f"{self._reader.called}: state_dict() must give what JSON gives back as it was: lists, numbers, text, and dicts with text as keys"
            )
        return {"position": self._position, "dataset": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and self._reader.is_read:
            self._reader.dataset.load_state_dict(state["dataset"])
            self._position, self._samples, self._last = state["position"], self._read(), (0, [])


class StreamBatches(Batches):
    """Batches of a `Stream`. Phases may have batches of other sizes of one stream."""

    samples_per_epoch = STREAM

    def __init__(self, stream: Stream, batch_size: int) -> None:
        self._stream, self.batch_size = stream, batch_size

    def batch_from(self, first: int, share: Share | None = None) -> Batch:
        return self._stream.take(first, self.batch_size, share)

    def are_of(self, other: Batches) -> bool:
        return isinstance(other, StreamBatches)

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)


def _end_with(rank: int, _worker: int) -> None:
    """In a worker: it ends when the process of the rank is gone, of which nobody else tells it where that was killed."""

    def watch() -> None:
        while Path(f"/proc/{rank}").exists():
            time.sleep(1.0)
        os._exit(1)

    if Path("/proc/self").exists():
        threading.Thread(target=watch, name="rank", daemon=True).start()


@dataclass(frozen=True)
class OwnData:
    """The user's datasets, to be read in batches of one size or of several. Ranks agree on `sizes`; one that does not read gets batches of
    None."""

    config: DataConfig
    seed: int
    sizes: Sizes
    is_read: bool = True
    timeout_seconds: float = 0.0

    @functools.cached_property
    def _readers(self) -> list[Reader]:
        """For training and held out; phases have the same. Held out is what trains where there is nothing: none of it is read."""
        return [
            replace(one, size=size, is_read=self.is_read) for one, size in zip(_readers_of(self.config), self.sizes)
        ]

    @functools.cached_property
    def _stream(self) -> Stream:
        return Stream(self._readers[0])

    def cut(self, config: DataConfig) -> Data:
        """The data in batches of the size in `config`; without `data.heldout_target` nothing is held out."""
        size = config.global_batch_size
        if self.sizes[0] == STREAM:
            train: Batches = StreamBatches(self._stream, size)
        else:
            num_workers = config.num_workers if self.is_read else 0
            train = OwnBatches(self._readers[0], size, self.seed, num_workers, self.timeout_seconds)
        heldout = HeldoutBatches(self._readers[-1], size, self.sizes[1])
        # equal for the same code with the same arguments and number of samples
        code = [self.config.target, dict(self.config.args), self.config.collate, self.config.file_sha256, self.sizes[0]]
        fingerprint = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()
        return Data(train, heldout, vocabulary_size=0, tokenizer=None, fingerprint=fingerprint)


def _readers_of(config: DataConfig) -> list[Reader]:
    assert config.target is not None, "it was checked"
    readers = [Reader("data.target", config.target, config.args, config.collate)]
    if config.heldout_target is not None:
        readers.append(Reader("data.heldout_target", config.heldout_target, config.heldout_args, config.collate))
    return readers


def check_own_data(config: DataConfig) -> None:
    """Whether there are such functions; none is called. Raises ConfigError: there are none, or they take other arguments."""
    for reader in _readers_of(config):
        check_target(reader.key, reader.spelling, reader.args)
    if config.collate is not None:
        function_of("data.collate", config.collate, {})


def sizes_of(config: DataConfig) -> Sizes:
    """How many samples there are. The datasets are made, and the first two samples of each make a batch.

    Raises ConfigError: there is no dataset, it has no samples, or they make no batch; or workers would read an iterable one.
    """
    sizes = []
    for reader in _readers_of(config):
        if _is_stream(reader.dataset):
            if config.num_workers:
                raise ConfigError(
                    f"data.num_workers={config.num_workers}: a {type(reader.dataset).__name__} is iterable, so each rank reads it by itself; "
                    "leave data.num_workers out"
                )
            stream = Stream(reader)
            stream.take(0, 2, None)
            stream.state_dict()
            _dataset_of.cache_clear()  # it has been read from
            sizes.append(STREAM)
            continue
        sizes.append(len(reader))
        reader.take(np.arange(min(2, sizes[-1])))
    return sizes[0], sum(sizes[1:])


def check_length(config: RunConfig, sizes: Sizes) -> None:
    """Raises ConfigError: the run is to pass so often through samples whose number nobody knows."""
    if sizes[0] == STREAM and config.epochs is not None:
        raise ConfigError(
            f"epochs={config.epochs:g}: the length of data.target={config.data.target}, an iterable dataset, is not known; give steps instead"
        )


def batches(
    dataset: Any,
    batch_size: int,
    *,
    seed: int = 0,
    first_step: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """The batches that `pipetrain train data=python` takes from `dataset`, from step `first_step` (the first is 0) on, without end.

    An epoch has all samples, each once, in the order `torch.randperm(len(dataset))` of a generator whose seed is that of the first 8 bytes
    of the SHA-256 of "SEED/EPOCH". A batch reaches over the end of an epoch, so no sample is dropped.

    Raises:
        ValueError: the dataset has no `__len__` and `__getitem__`, or no samples.
    """
    check_map_style("dataset", dataset)
    order = Batches(dataset, batch_size, seed)
    return (
        collate([dataset[index] for index in order.indices_from(step * batch_size).tolist()])
        for step in itertools.count(first_step)
    )
