"""The snapshots of one training run: where it starts, and when it saves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pipetrain.comm.group import Group, made_by_first
from pipetrain.config.records import RunConfig
from pipetrain.config.terminal import say
from pipetrain.models.spec import TensorMapping, unchanged
from pipetrain.models.trained import Model, Optimizer
from pipetrain.models.weights import WEIGHTS_AT_END, has_weights, read_weights, tensors_in
from pipetrain.plan.plan import Plan
from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.reader import Snapshot, taken_from
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.start import (
    AUTO,
    SNAPSHOTS,
    check_same_data,
    check_same_run,
    find,
    newest_whole,
    told_of_replicas,
)
from pipetrain.snapshot.state import Part, RunState, tensors_of


class Carried(Protocol):
    """What else a run carries from step to step, the same on every rank; its state is what JSON can say."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Snapshots:
    """Every rank has one and calls the same methods. `data` is the fingerprint of the text; `clock` is in seconds.

    Raises ValueError: what `resume` or `init_from` names cannot be used; the same on every rank.
    """

    _model: Model  # as the two below given by `attach`
    _optimizer: Optimizer
    _carried: tuple[Carried | None, Carried | None]  # the guard, and the count of tokens

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        run_dir: Path,
        ranks: Group,
        *,
        data: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._saved_at = clock()
        self._plan = plan
        self._ranks = ranks
        self._data = data
        self._folder = run_dir / SNAPSHOTS
        every, keep_every = config.snapshot.every_steps, config.snapshot.keep_every
        self._saver = Saver(
            self._folder,
            rank=ranks.rank,
            agree=ranks.largest,
            keep_last=config.snapshot.keep_last,
            keep_multiples_of=None if every is None or keep_every is None else every * keep_every,
            say=say,
            run=run_dir,
        )
        self._start = agreed(ranks, self._look_for_start)
        self.first_step = 1 if self._start is None else self._start.state.step + 1

    def attach(
        self,
        model: Model,
        optimizer: Optimizer,
        guard: Carried | None = None,
        tokens: Carried | None = None,
        *,
        from_file: TensorMapping = unchanged,
    ) -> None:
        """Give a new model, its optimizer, the guard and the count of tokens the state to start from, and save theirs from now on.

        `from_file` makes the model's tensors of those in a file of weights (`ModelSpec.from_file`).
        """
        self._model, self._optimizer, self._carried = model, optimizer, (guard, tokens)
        if self._start is not None:
            self._start.restore(model, optimizer, self._ranks.rank, self._ranks.device)
            for carried, state in zip(self._carried, (self._start.state.guard, self._start.state.tokens)):
                if carried is not None:
                    with taken_from(self._start.folder, ValueError):
                        carried.load_state_dict(state)
        elif self._config.init_from is not None:
            _initialize(model, Path(self._config.init_from), from_file)

    def clock_asks(self) -> bool:
        """Whether rank 0's clock asks for a snapshot. Clocks differ, so the ranks have to agree on it; another rank never asks."""
        minutes = self._config.snapshot.every_minutes
        return self._ranks.rank == 0 and minutes is not None and self._clock() - self._saved_at >= 60 * minutes

    def is_due(self, step: int, *, asked: bool) -> bool:
        """Whether `after_step` saves; `asked`: by a clock, or because the run stops."""
        every = self._config.snapshot.every_steps
        return asked or (every is not None and step % every == 0)

    def after_step(self, step: int, *, stopping: bool, by_clock: bool = False) -> None:
        """Save where it is time to, or where the run stops; then this waits until that is done. Collective."""
        self._saver.poll()
        if self.is_due(step, asked=stopping or by_clock):
            self._saved_at = self._clock()
            guard, tokens = ({} if one is None else one.state_dict() for one in self._carried)
            config, plan, ranks = as_dict(self._config), as_dict(self._plan), self._ranks
            state = RunState(step, ranks.size, config, plan, self._data, guard, tokens)
            at, of = ranks.coordinates.replica, self._plan.num_replicas
            tensors = tensors_of(self._model, self._optimizer, ranks.device, replica=at, num_replicas=of)
            self._saver.save(state, tensors)
        if stopping:
            self._saver.wait()

    def before_update(self) -> None:
        """To be called before each optimizer step: returns when a save that has begun needs the old weights no more."""
        self._saver.before_update()

    def roll_back(self) -> RunState | None:
        """Make model, optimizer and generators what they were in the newest whole snapshot of this run. Collective.

        That is the one it started from where it has none of its own; None: there is none at all.
        """
        self._saver.wait()

        def look_for_newest() -> Path | None:
            return newest_whole(self._folder, say) or (None if self._start is None else self._start.folder)

        snapshot = agreed(self._ranks, look_for_newest)
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

    def _look_for_start(self) -> Path | None:
        resume = self._config.resume
        if resume is None:
            return None
        path = newest_whole(self._folder, say) if resume == AUTO else find(Path(resume), say)
        if path is None:
            return None
        state, now = Snapshot(path, checked=True).state, as_dict(self._config)
        with taken_from(path):
            check_same_run(path, state, now)
            check_same_data(path, state, self._data)
            told = [f"going on from {path}", *told_of_replicas(state, self._plan.num_replicas, now)]
        for one in told:
            say(one)
        return path


def agreed(ranks: Group, look: Callable[[], Path | None]) -> Snapshot | None:
    """Rank 0 looks for a snapshot and checks every byte; the others are told what it found. Collective.

    Raises ValueError: what it raises, on every rank.
    """
    found = made_by_first(lambda: None if (path := look()) is None else str(path.resolve()), ranks)
    return None if found is None else Snapshot(Path(found), checked=True)


def _initialize(model: Model, path: Path, from_file: TensorMapping) -> None:
    """Weights only: from a safetensors file, a run that is done, or a snapshot."""
    weights: Mapping[str, Tensor]
    if path.is_file():
        weights = from_file(tensors_in([path]))
    elif has_weights(path / WEIGHTS_AT_END):
        weights = from_file(read_weights(path / WEIGHTS_AT_END))
    else:
        weights = Snapshot(find(path, say)).tensors(Part.WEIGHTS)
    try:
        model.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"init_from={path}: these weights are of another model: {error}") from error


def as_dict(record: Any) -> dict[str, Any]:
    """A record as JSON gives it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(record)))
    return plain
