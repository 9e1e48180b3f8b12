"""A whole snapshot, read by the names of the whole model: a reader need not know which rank wrote a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipetrain.config.read_files import read_record
from pipetrain.config.renamed import current_values
from pipetrain.models.trained import Model, Optimizer
from pipetrain.models.weights import tensors_in
from pipetrain.snapshot.files import STATE, Part, rank_path
from pipetrain.snapshot.manifest import OLDER, SnapshotDamaged, check_whole, read_manifest
from pipetrain.snapshot.state import RunState, restore_generators, restore_optimizer


class Snapshot:
    """Reads the snapshot in `folder`.

    Args:
        checked: whether every byte was compared with the manifest already, by another rank; else it is done here.

    Raises SnapshotDamaged: it is not as it was written.
    """

    def __init__(self, folder: Path, *, checked: bool = False) -> None:
        self.folder = folder
        self._manifest = read_manifest(folder) if checked else check_whole(folder)
        try:
            state = read_record(RunState, folder / STATE, OLDER)
            self.state = replace(state, config=current_values(state.config))
        except ValueError as error:
            raise SnapshotDamaged(str(error)) from error
        for what in ("step", "num_ranks"):
            if (there := getattr(self.state, what)) != (listed := getattr(self._manifest, what)):
                raise SnapshotDamaged(f"{folder}: {STATE} has {what}={there}, the manifest {listed}")

    def tensors(self, part: Part) -> Mapping[str, Tensor]:
        """All tensors of a part, of all ranks that wrote it."""
        return tensors_in(self.folder / path for path in self._manifest.paths(part))

    def restore_weights(self, model: Model) -> None:
        """This rank's parameters and buffers. Raises ValueError: it is of another model: a tensor is missing, or has another shape."""
        try:
            model.load_state_dict(self.tensors(Part.WEIGHTS))
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.folder} is a snapshot of another model: {error}") from error

    def restore(self, model: Model, optimizer: Optimizer, rank: int, device: torch.device) -> None:
        """Everything of this rank: weights, optimizer state, generators.

        A rank that the run did not have before keeps its own generators. Raises ValueError: it is of another model.
        """
        self.restore_weights(model)
        restore_optimizer(model, optimizer, self.tensors(Part.OPTIMIZER))
        if rank < self.state.num_ranks:
            path = self.folder / rank_path(Part.GENERATORS, rank)
            try:
                restore_generators(tensors_in([path]), device)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:  # of torch, Python and numpy
                raise SnapshotDamaged(f"{path} holds no state of generators ({error}); {OLDER}") from error


@contextmanager
def taken_from(folder: Path, *also: type[Exception]) -> Iterator[None]:
    """The block uses values of a state, which may be of any kind: an error of Python's, or `also` of these, is one of the snapshot.

    Raises SnapshotDamaged: the values are not what a run has saved.
    """
    kinds: tuple[type[Exception], ...] = (AttributeError, IndexError, KeyError, OverflowError, TypeError, *also)
    try:
        yield
    except kinds as error:
        what = f"{type(error).__name__}: {error}"
        raise SnapshotDamaged(f"{folder / STATE} holds no state of a run ({what}); {OLDER}") from error
