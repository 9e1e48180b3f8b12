"""What is left of a step that was refused: its batch, and where the trouble began.

inspect/step-00000137/
  batch.safetensors   inputs and targets of the whole batch: a tensor for each leaf of their trees, `inputs`, `inputs['mask']`
  incident.json       step, microbatch, rank, stage, layer, cause, seed, what was done
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.data.batch import Batch
from pipetrain.loop.guard import Incident
from pipetrain.runtime.cut import Whole
from pipetrain.runtime.diagnosis import Diagnosis

_FOLDER_MODE = 0o750  # the owner writes, the group reads, others have no business here


def folder_of(inspect: Path, incident: Incident) -> Path:
    """Where `write_incident` puts it. After a rollback a step comes again with another batch, and has a folder for each."""
    name = f"step-{incident.step:08d}"
    return inspect / (name if incident.batch == incident.step - 1 else f"{name}-batch-{incident.batch:08d}")


def write_incident(folder: Path, incident: Incident, diagnosis: Diagnosis | None, batch: Batch, seed: int) -> None:
    """Both files; what an earlier run of the same step and batch left is replaced.

    Raises:
        OSError: they cannot be written.
    """
    for path in (folder.parent, folder):
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    tensors, values = _leaves_of(batch)
    save_file(tensors, folder / "batch.safetensors", metadata=values)
    (folder / "incident.json").write_text(json.dumps(_record(incident, diagnosis, seed), indent=2) + "\n")


def explain(incident: Incident, diagnosis: Diagnosis | None) -> str:
    """One line: what is wrong, where it began, what is done."""
    return f"{incident.what}: {_where(incident, diagnosis)}; {incident.advice}"


def advice_on_stop(incident: Incident, folder: Path) -> str:
    """What to look at and what to type, where the run ends."""
    key = "guard.spike" if incident.is_spike else "guard.not_finite"
    return (
        f"no weight was changed; the batch is in {folder}. The next run will meet it again: resume=auto with {key}=skip "
        f"(or rollback), a smaller optim.learning_rate or optim.clip_norm, or an older snapshot"
    )


def _where(incident: Incident, diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return "this engine does not tell where it began"
    if diagnosis.finding is not None:
        return diagnosis.finding.text
    largest = _largest(diagnosis.losses)
    if incident.is_spike:
        return (
            "no microbatch has a loss"
            if largest is None
            else f"microbatch {largest} has the largest loss, {diagnosis.losses[largest]:.4g}"
        )
    if incident.grad_norm is not None and not math.isfinite(incident.grad_norm):
        return "every gradient is finite, their norm overflows"
    return "the sum over the microbatches overflows, each of which is finite"


def _leaves_of(batch: Batch) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of both trees by their place in them, and what else there is, as text."""
    tensors, values = {}, {}
    for part, tree in batch._asdict().items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            name, value = part + pytree.keystr(path), leaf.value if isinstance(leaf, Whole) else leaf
            if isinstance(value, Tensor):
                tensors[name] = value.contiguous().clone()  # the format refuses tensors that share memory
            else:
                values[name] = repr(value)
    return tensors, values


def _largest(losses: Mapping[int, float | None]) -> int | None:
    """The microbatch with the largest loss."""
    finite = {number: loss for number, loss in losses.items() if loss is not None}
    return max(finite, key=lambda number: finite[number], default=None)


def _record(incident: Incident, diagnosis: Diagnosis | None, seed: int) -> dict[str, Any]:
    finding = None if diagnosis is None else diagnosis.finding
    losses = {} if diagnosis is None else diagnosis.losses
    return {
        "step": incident.step,
        "batch": incident.batch,
        "seed": seed,
        "what": incident.what,
        "action": incident.action.value,
        "loss": _finite(incident.loss),
        "grad_norm": _finite(incident.grad_norm),
        "microbatch": _largest(losses) if finding is None else finding.microbatch,
        **{key: getattr(finding, key, None) for key in ("rank", "stage", "layer", "layer_name", "where", "cause")},
        "microbatch_losses": [losses[number] for number in sorted(losses)],
        "changed_weights": False,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no nan."""
    return value if value is not None and math.isfinite(value) else None
