"""The trained weights at the end of a run: a safetensors file per rank, under the names that the model's spec has for files.

    rank 0   [1] no index ──► all: own file, whole or not at all ──► [2] rank 0: the index of all names, and the run's weights are there

Nobody gathers the model, and of several replicas the first writes it. The names of the files and of the index are those of sharded models of Hugging Face; one rank alone writes
`model.safetensors` and no index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipetrain.config.read_files import opened_tensors
from pipetrain.config.write_files import draft_beside, replace_file
from pipetrain.models.hf.source import indexed_files
from pipetrain.models.spec import ModelSpec
from pipetrain.models.trained import Model

WEIGHTS_AT_END = "weights"  # the folder of a run folder that holds them

_TODO = "name another run, snapshot or file of weights"
SINGLE, INDEX_OF_SHARDS = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """Which of `count` files a rank writes; None: another replica of the pipeline has the same tensors, and writes them."""

    number: int | None
    count: int


class Together(Protocol):
    """This rank among those that write; `largest` returns when all have called it."""

    rank: int
    size: int

    def largest(self, value: int) -> int: ...


def save_weights(
    folder: Path, own: Mapping[str, Tensor], spec: ModelSpec, ranks: Together, shard: Shard | None = None
) -> None:
    """Writes this rank's tensors of the model, which have the model's own names, as its `shard`: without one, each rank writes one.

    Collective: they are all there when it returns.
    """
    shard = shard or Shard(ranks.rank, ranks.size)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX_OF_SHARDS).unlink(missing_ok=True)
    ranks.largest(0)
    if shard.number is not None:
        write_shard(folder / shard_name(shard.number, shard.count), spec.to_file(own))
    ranks.largest(0)
    if ranks.rank == 0:
        names = [shard_name(number, shard.count) for number in range(shard.count)]
        for path in folder.glob("*.safetensors"):
            if path.name not in names:  # the run ended before, on another number of ranks
                path.unlink()
        if shard.count > 1:
            write_index(folder, names)
    ranks.largest(0)


def shard_name(number: int, count: int) -> str:
    """The file of shard `number`, from 0."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of `tensors`, which is there whole or not at all."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with draft_beside(path) as draft:
        save_file(whole, draft, metadata={"format": "pt"})


def write_index(folder: Path, shards: list[str]) -> None:
    """Which of the `shards` holds which tensor, as transformers reads it."""
    weight_map, total = {}, 0
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as opened:
            weight_map.update(dict.fromkeys(opened.keys(), shard))
        with (folder / shard).open("rb") as file:  # the length of its header in 8 bytes, the header, the tensors
            total += (folder / shard).stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    replace_file(folder / INDEX_OF_SHARDS, json.dumps(index, indent=1, sort_keys=True))


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read or made by its function of `makers` when it is asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def tensors_in(paths: Iterable[Path]) -> LazyTensors:
    """The tensors of several safetensors files. Raises DamagedFile: one is no such file."""

    def read(path: Path, name: str) -> Tensor:
        with opened_tensors(path, _TODO, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    found: dict[str, Callable[[], Tensor]] = {}
    for path in paths:
        with opened_tensors(path, _TODO, framework="pt") as file:
            found |= {name: partial(read, path, name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    return LazyTensors(found)


def has_weights(folder: Path) -> bool:
    """Whether a run that ended left its weights in `folder`."""
    return (folder / INDEX_OF_SHARDS).is_file() or (folder / SINGLE).is_file()


def check_weights(folder: Path) -> None:
    """Raises ValueError: there are none."""
    if not has_weights(folder):
        raise ValueError(f"{folder}: there are no weights; the run is still going on, or it failed")


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """The tensors that a run left in `folder`, under their names in files, each read when asked for. Raises ValueError: there are none, or a shard is missing."""
    check_weights(folder)
    index = folder / INDEX_OF_SHARDS
    names = dict.fromkeys(indexed_files(index, _TODO).values()) if index.is_file() else [SINGLE]
    paths = [folder / name for name in names]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"{missing[0]} is missing, which {index} names: the weights are not whole")
    return tensors_in(paths)


def load_weights(folder: Path, model: Model, spec: ModelSpec) -> None:
    """Fills `model`, whole or one rank's part, from what `save_weights` wrote. Raises ValueError: there are no weights, or they are of another model."""
    weights = spec.from_file(read_weights(folder))
    try:
        model.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{folder}: these weights are of another model ({error})") from error
