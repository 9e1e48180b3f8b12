"""What happens to a step whose loss or gradient cannot be right: it is refused before it changes a weight.

    engine.step: loss, norm ──► accepts? ── yes ──► weights change
                                   │ no: an Incident
                                   ▼
            stop: the run ends    skip: the next batch    rollback: an older snapshot, and the batches after this one

Loss and norm are the same on every rank, so all ranks decide the same and nobody has to ask. What is left of a refused step:

inspect/step-00000137/
  batch.safetensors   inputs and targets of the whole batch: a tensor for each leaf of their trees, `inputs`, `inputs['mask']`
  incident.json       step, microbatch, rank, stage, layer, cause, seed, what was done
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.config.read_files import fitted
from pipetrain.config.records import GuardConfig
from pipetrain.config.write_files import draft_beside, replace_file
from pipetrain.data.batch import Batch
from pipetrain.runtime.cut import Whole
from pipetrain.runtime.diagnosis import Diagnosis
from pipetrain.snapshot.files import FOLDER_MODE


class Action(StrEnum):
    """What is done about an incident."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class Incident:
    """A step that was refused. `batch` is the number of its batch, from 0."""

    step: int
    batch: int
    is_spike: bool
    what: str  # `the loss of step 7 is not finite (nan)`
    action: Action
    advice: str  # why the run stops, or what is done instead
    loss: float
    grad_norm: float | None


class Guard:
    """Looks at each step, and remembers what it needs for that. Its state belongs into a snapshot."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)
        self._skips_in_a_row = 0
        # Rollbacks: (a, b) from step b to step a. The batches that steps a + 1 to b had read are skipped.
        self.passed_over: list[tuple[int, int]] = []
        self.num_skipped = 0
        self.num_rollbacks = 0
        self.incident: Incident | None = None  # of the last step

    def batch_of(self, step: int) -> int:
        """The number (from 0) of the batch for `step` (from 1)."""
        return step - 1 + sum(end - start for start, end in self.passed_over)

    def accepts(self, step: int, loss: float, grad_norm: float | None) -> bool:
        """Whether `step` may change the weights. Where not, `incident` says why, and what to do."""
        problem, is_spike = self._problem_of(step, loss, grad_norm)
        if problem is None:
            self.incident = None
            self._skips_in_a_row = 0
            self._losses.append(loss)
            if grad_norm is not None:
                self._norms.append(grad_norm)
            return True
        action, advice = self._decide(Action(self._config.spike if is_spike else self._config.not_finite))
        self.incident = Incident(step, self.batch_of(step), is_spike, problem, action, advice, loss, grad_norm)
        if action is Action.SKIP:
            self._skips_in_a_row += 1
            self.num_skipped += 1
        return False

    def _problem_of(self, step: int, loss: float, grad_norm: float | None) -> tuple[str | None, bool]:
        """What is wrong with the step, if something is, and whether that is a spike."""
        if not math.isfinite(loss):
            return f"the loss of step {step} is not finite ({loss})", False
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the gradient norm of step {step} is not finite ({grad_norm})", False
        if self._config.spike != "off":
            for name, value, before, factor in (
                ("loss", loss, self._losses, self._config.spike_factor),
                ("gradient norm", grad_norm, self._norms, self._config.spike_norm_factor),
            ):
                if value is None or factor is None or len(before) < self._config.spike_window:
                    continue
                median = statistics.median(before)
                if value > factor * median:
                    text = (
                        f"the {name} of step {step} is {value:.4g}, {value / median:.1f} times the median of the last"
                    )
                    return f"{text} {len(before)} steps", True
        return None, False

    def _decide(self, wanted: Action) -> tuple[Action, str]:
        if wanted is Action.SKIP:
            if self._skips_in_a_row < self._config.max_skips:
                return wanted, "its step is skipped"
            return Action.STOP, f"{self._skips_in_a_row} steps before it were skipped (guard.max_skips): the run stops"
        if wanted is Action.ROLLBACK:
            if self.num_rollbacks < self._config.max_rollbacks:
                return wanted, "the run rolls back to the newest snapshot"
            return Action.STOP, f"the run rolled back {self.num_rollbacks} times (guard.max_rollbacks): it stops"
        return Action.STOP, "the run stops"

    def cannot_go_back(self) -> Incident:
        """The guard asked for a rollback, and there is no snapshot: the run stops instead."""
        assert self.incident is not None
        advice = "there is no snapshot to roll back to yet, so the run stops; a smaller snapshot.every_steps makes one sooner"
        self.incident = replace(self.incident, action=Action.STOP, advice=advice)
        return self.incident

    def rolled_back(self, to_step: int, state: Mapping[str, Any]) -> None:
        """Load `state`, the guard's after `to_step`, and skip the batches from there up to the incident's."""
        assert self.incident is not None
        passed_over = [*self.passed_over, (to_step, self.incident.step)]
        rollbacks, skipped = self.num_rollbacks + 1, self.num_skipped
        self.load_state_dict(state)
        self.passed_over = passed_over
        self.num_rollbacks, self.num_skipped = rollbacks, skipped
        self.incident = None

    def state_dict(self) -> dict[str, Any]:
        """State of plain JSON values. A resumed run that loads it decides as an uninterrupted run does."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skips_in_a_row": self._skips_in_a_row,
            "passed_over": [list(steps) for steps in self.passed_over],
            "num_skipped": self.num_skipped,
            "num_rollbacks": self.num_rollbacks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what `state_dict` gave; an empty mapping (of an older version) is a new guard. Raises ValueError: it is no state of a guard."""
        before = state.get("batches_passed_over", 0)  # what an older version wrote
        state = Guard(self._config).state_dict() | {"passed_over": [[0, before]] if before else []} | dict(state)
        self._losses, self._norms = (
            deque(fitted(list[float], state[key], key), maxlen=self._config.spike_window) for key in ("losses", "norms")
        )
        self.passed_over = fitted(list[tuple[int, int]], state["passed_over"], "passed_over")
        counts = ("skips_in_a_row", "num_skipped", "num_rollbacks")
        self._skips_in_a_row, self.num_skipped, self.num_rollbacks = (fitted(int, state[key], key) for key in counts)
        if any(start < 0 or end < start for start, end in self.passed_over):
            raise ValueError(f"passed_over is {self.passed_over}")


def folder_of(inspect: Path, incident: Incident) -> Path:
    """Where `write_incident` puts it. After a rollback a step comes again with another batch, and has a folder for each."""
    name = f"step-{incident.step:08d}"
    return inspect / (name if incident.batch == incident.step - 1 else f"{name}-batch-{incident.batch:08d}")


def write_incident(folder: Path, incident: Incident, diagnosis: Diagnosis | None, batch: Batch, seed: int) -> None:
    """Both files; what an earlier run of the same step and batch left is replaced.

    Raises OSError: they cannot be written.
    """
    for path in (folder.parent, folder):
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    tensors, values = {}, {}
    for part, tree in batch._asdict().items():
        for place, leaf in pytree.tree_flatten_with_path(tree)[0]:
            name, value = part + pytree.keystr(place), leaf.value if isinstance(leaf, Whole) else leaf
            if isinstance(value, Tensor):
                tensors[name] = value.contiguous().clone()  # the format refuses tensors that share memory
            else:
                values[name] = repr(value)
    with draft_beside(folder / "batch.safetensors") as draft:
        save_file(tensors, draft, metadata=values)
    replace_file(folder / "incident.json", json.dumps(_record(incident, diagnosis, seed), indent=2) + "\n")


def explain(incident: Incident, diagnosis: Diagnosis | None) -> str:
    """One line: what is wrong, where it began, what is done."""
    return f"{incident.what}: {_where(incident, diagnosis)}; {incident.advice}"


def advice_on_stop(incident: Incident, folder: Path) -> str:
    """What to look at and what to type, where the run ends."""
    key = "guard.spike" if incident.is_spike else "guard.not_finite"
    return (
        f"no weight was changed; the batch is in {folder}. The next run will meet it again: resume=auto with {key}=skip "
        f"(or rollback), a smaller optim.learning_rate or optim.max_grad_norm, or an older snapshot"
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
