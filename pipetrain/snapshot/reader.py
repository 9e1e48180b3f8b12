"""A whole snapshot, read by the names of the whole model: a reader need not know which rank wrote a tensor."""

from __future__ import annotations

from collections.abc import Mapping
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
        self.state = _read_state(folder / STATE)
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
            restore_generators(tensors_in([self.folder / rank_path(Part.GENERATORS, rank)]), device)


def _read_state(path: Path) -> RunState:
    try:
        state = read_record(RunState, path, OLDER)
        return replace(state, config=current_values(state.config))
    except ValueError as error:
        raise SnapshotDamaged(str(error)) from error
