"""The snapshots of one training run: where it starts, and when it saves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from pipetrain.config.records import RunConfig
from pipetrain.model.trained import Model, Optimizer
from pipetrain.plan.plan import Plan
from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.find import SNAPSHOTS, find, newest_whole
from pipetrain.snapshot.reader import Snapshot, TensorFiles
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import Part, RunState, tensors_of

AUTO = "auto"
# What a run must keep to go on exactly: its data and its model. Everything else may change.
_FIXED_KEYS = (
    "seed",
    "data.name",
    "data.tokenizer",
    "data.batch_size",
    "data.sequence_length",
    "data.heldout_fraction",
    "model.name",
    "model.num_blocks",
    "model.hidden_size",
    "model.num_heads",
    "model.num_kv_heads",
    "model.mlp_size",
    "model.vocabulary_size",
    "model.max_sequence_length",
    "model.rope_base",
    "model.dropout",
    "model.norm_epsilon",
)


class Ranks(Protocol):
    """This rank among the others, and how they agree."""

    rank: int
    size: int
    device: torch.device

    def largest(self, value: int) -> int: ...
    def from_first(self, value: str) -> str: ...


class Carried(Protocol):
    """What else a run carries from step to step, the same on every rank; its state is what JSON can say."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Snapshots:
    """Every rank has one and calls the same methods. `data` is the fingerprint of the text.

    Raises:
        ValueError: what `resume` or `init_from` names cannot be used; the same on every rank.
    """

    def __init__(self, config: RunConfig, plan: Plan, run_dir: Path, ranks: Ranks, *, data: str | None = None) -> None:
        self._config = config
        self._plan = plan
        self._ranks = ranks
        self._data = data
        self._guard: Carried | None = None
        self._model: Model | None = None
        self._optimizer: Optimizer | None = None
        self._folder = run_dir / SNAPSHOTS
        self._saver = Saver(
            self._folder,
            rank=ranks.rank,
            agree=ranks.largest,
            keep_last=config.snapshot.keep_last,
            keep_multiples_of=_kept_for_good(config),
            say=_say,
        )
        self._start = self._agree_on(self._look_for_start)
        self.first_step = 1 if self._start is None else self._start.state.step + 1

    def attach(self, model: Model, optimizer: Optimizer, guard: Carried | None = None) -> None:
        """Give a new model, its optimizer and the guard the state to start from, and save theirs from now on."""
        self._model, self._optimizer, self._guard = model, optimizer, guard
        if self._start is not None:
            self._start.restore(model, optimizer, self._ranks.rank, self._ranks.device)
            if guard is not None:
                guard.load_state_dict(self._start.state.guard)
        elif self._config.init_from is not None:
            _initialize(model, Path(self._config.init_from))

    def after_step(self, step: int, *, stopping: bool) -> None:
        """Save where it is time to, or where the run stops; then this waits until that is done. Collective."""
        self._saver.poll()
        every = self._config.snapshot.every_steps
        if stopping or (every is not None and step % every == 0):
            assert self._model is not None
            assert self._optimizer is not None
            guard = {} if self._guard is None else self._guard.state_dict()
            state = RunState(step, self._ranks.size, _plain(self._config), _plain(self._plan), self._data, guard)
            self._saver.save(state, tensors_of(self._model, self._optimizer, self._ranks.device))
        if stopping:
            self._saver.wait()

    def before_update(self) -> None:
        """To be called before each optimizer step: returns when a save that has begun needs the old weights no more."""
        self._saver.before_update()

    def roll_back(self) -> RunState | None:
        """Make model, optimizer and generators what they were in the newest whole snapshot of this run. Collective.

        That is the one it started from where it has none of its own; None: there is none at all.
        """
        assert self._model is not None
        assert self._optimizer is not None
        self._saver.wait()
        snapshot = self._agree_on(self._look_for_newest)
        if snapshot is None:
            return None
        snapshot.restore(self._model, self._optimizer, self._ranks.rank, self._ranks.device)
        return snapshot.state

    def finish(self) -> None:
        """Wait for a save that is on its way. Collective."""
        self._saver.wait()

    @property
    def newest(self) -> Path | None:
        """The newest snapshot that this process has written."""
        return None if self._saver.last_step is None else path_of(self._folder, self._saver.last_step)

    def _agree_on(self, look: Callable[[], dict[str, str]]) -> Snapshot | None:
        """Rank 0 looks and checks every byte; the others are told what it found."""
        found = {}
        if self._ranks.rank == 0:
            try:
                found = look()
            except ValueError as error:
                found = {"error": str(error)}
        found = json.loads(self._ranks.from_first(json.dumps(found)))
        if "error" in found:
            raise ValueError(found["error"])
        return Snapshot(Path(found["path"]), checked=True) if found else None

    def _look_for_start(self) -> dict[str, str]:
        resume = self._config.resume
        if resume is None:
            return {}
        path = newest_whole(self._folder, _say) if resume == AUTO else find(Path(resume), _say)
        if path is None:
            return {}
        state = Snapshot(path, checked=True).state
        check_same_run(path, state, self._config)
        check_same_data(path, state, self._data)
        _say(f"going on from {path}")
        return {"path": str(path.resolve())}

    def _look_for_newest(self) -> dict[str, str]:
        path = newest_whole(self._folder, _say)
        if path is None and self._start is not None:
            path = self._start.folder
        return {} if path is None else {"path": str(path.resolve())}


def check_start(config: RunConfig) -> None:
    """What can be said of `resume` and `init_from` before a process starts.

    Raises:
        ValueError: keys that do not go together, or a path where nothing is.
    """
    if config.resume == AUTO and config.run_dir is None:
        raise ValueError("resume=auto: goes on from the newest snapshot in run_dir; give run_dir=PATH as well")
    if config.resume not in (None, AUTO) and config.init_from is not None:
        raise ValueError(
            f"resume={config.resume} init_from={config.init_from}: a resumed run has its weights; give one"
        )
    for key, path in (("resume", config.resume), ("init_from", config.init_from)):
        if path not in (None, AUTO) and not Path(str(path)).exists():
            raise ValueError(
                f"{key}={path}: there is nothing; name a snapshot such as runs/latest/snapshots/step-00000200"
            )


def check_same_run(path: Path, state: RunState, config: RunConfig) -> None:
    """Raises:
    ValueError: with another model or other data the run would not go on where it was; or it has all its steps.
    """
    now = _plain(config)
    for key in _FIXED_KEYS:
        was, wanted = _value(state.config, key), _value(now, key)
        if was != wanted and was is not _MISSING:
            raise ValueError(
                f"{key}={wanted}: the run of {path} had {was}, and goes on with the same data and model only; "
                f"set {key}={was}, or start a new run with init_from={path}"
            )
    if state.step > config.steps:
        raise ValueError(
            f"steps={config.steps}: {path} has {state.step} steps behind it; set steps to {state.step} or more"
        )


def check_same_data(path: Path, state: RunState, fingerprint: str | None) -> None:
    """Raises:
    ValueError: the text is not the one that the run was trained on, byte for byte.
    """
    if None not in (state.data, fingerprint) and state.data != fingerprint:
        raise ValueError(
            f"the text is not that of {path} (its SHA-256 is {str(fingerprint)[:12]}..., it was {str(state.data)[:12]}...): a "
            "file was added, removed or changed, or data=stdlib is read by another Python; bring the old text back, or start "
            f"a new run with init_from={path}"
        )


def _kept_for_good(config: RunConfig) -> int | None:
    """Snapshots of steps that are a multiple of this stay."""
    every, keep = config.snapshot.every_steps, config.snapshot.keep_every
    return None if every is None or keep is None else every * keep


def _initialize(model: Model, path: Path) -> None:
    """Weights only: from a safetensors file, a run that is done, or a snapshot."""
    if path.is_dir() and (path / "weights" / "model.safetensors").is_file():
        path = path / "weights" / "model.safetensors"
    weights = TensorFiles([path]) if path.is_file() else Snapshot(find(path, _say)).tensors(Part.WEIGHTS)
    try:
        model.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"init_from={path}: these weights are of another model: {error}") from error


_MISSING = object()


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _plain(record: Any) -> dict[str, Any]:
    """A record as JSON gives it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(record)))
    return plain


def _say(text: str) -> None:
    print(f"pipetrain: {text}", file=sys.stderr, flush=True)
