"""Snapshots in a training loop of the user's own: `pipetrain.save` and `pipetrain.load`, by the writer and the reader of a run.

save ─► the writer begins     step ─► poll     optimizer.step ─► first waits for the copies     close ─► waits for the whole snapshot
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from pipetrain.comm.group import Group
from pipetrain.config.read_files import parse_json
from pipetrain.config.terminal import say
from pipetrain.models.trained import Beside, Model, Optimizer
from pipetrain.plan.plan import Plan
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.session import agreed, as_dict
from pipetrain.snapshot.start import look_for
from pipetrain.snapshot.state import Part, RunState, known_to_json, options_of, restore_options, tensors_of


class Trained(Model, Protocol):
    """A `Pipeline`."""

    step_index: int
    seed: int
    plan: Plan
    beside: list[Beside]

    @property
    def ranks(self) -> Group: ...


class Scheduler(Protocol):
    """A learning rate scheduler of torch, the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def save(
    folder: str | os.PathLike[str],
    pipeline: Trained,
    optimizer: Optimizer,
    *,
    scheduler: Scheduler | None = None,
    extra: Any = None,
    keep_last: int | None = None,
) -> None:
    """Begin to save all that training needs to go on, as `folder/step-00000200` after 200 steps. Collective; waits only for the save before.

    Training goes on: `optimizer.step` first waits until its old values are copied, and nothing else may change weights until then. The
    snapshot has its name when all ranks have written, in one of the next steps or when the pipeline closes. If a save fails,
    stderr says so, and training goes on.

    Args:
        folder: the same on all ranks, on a file system that all machines share.
        optimizer: of this rank's parameters; its options, such as the learning rate, are saved too.
        scheduler: of the learning rate.
        extra: what JSON knows; `load` gives it back. That of rank 0 counts.
        keep_last: how many of the newest snapshots in `folder` are kept; None: all.

    Raises:
        ValueError: something that a snapshot cannot hold; the message names it.
        PipelineError: another rank failed.
    """
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(f"save was given keep_last={keep_last!r}: 1 or more is needed, or None, which keeps all")
    loop = {"extra": json.dumps(known_to_json(extra, "extra"))}
    if scheduler is not None:
        loop["scheduler"] = json.dumps(known_to_json(_as_lists(scheduler.state_dict()), "the scheduler's state"))
    ranks, plan = pipeline.ranks, pipeline.plan
    state = RunState(pipeline.step_index, ranks.size, {"seed": pipeline.seed}, as_dict(plan), loop=loop)
    tensors = tensors_of(
        pipeline, optimizer, ranks.device, replica=ranks.coordinates.replica, num_replicas=plan.num_replicas
    )
    tensors[Part.OPTIONS] = options_of(pipeline, optimizer)
    saves = next((one for one in pipeline.beside if isinstance(one, Saves)), None)
    if saves is None:
        saves = Saves(ranks)
        pipeline.beside.append(saves)
    saver = saves.saver_of(Path(folder).absolute())
    saver.wait()  # the save before keeps as many as it was told
    saver.keep_last = keep_last
    saver.save(state, tensors)
    saves.hold_back(optimizer)


def load(
    folder: str | os.PathLike[str], pipeline: Trained, optimizer: Optimizer, *, scheduler: Scheduler | None = None
) -> Any:
    """Make weights, optimizer, scheduler, generators, `step_index` and `seed` what they were, on any number of stages and replicas. Collective.

    Args:
        folder: what `save` was given (then its newest whole snapshot is taken), one snapshot, or a run folder of `pipetrain train`.
        scheduler: made as it was; needed where one was saved.

    Returns:
        What was saved as `extra`, {} where nothing was. None where `folder` holds no snapshot: then nothing has changed, and training begins.

    Raises:
        ValueError: all snapshots are damaged, or they are of another model or another optimizer.
        PipelineError: another rank failed.
    """
    for one in pipeline.beside:
        one.wait()
    ranks = pipeline.ranks
    snapshot = agreed(ranks, lambda: look_for(Path(folder), say))
    if snapshot is None:
        return None
    loop = snapshot.state.loop or {}
    if (scheduler is None) != ("scheduler" not in loop):
        had, now = ("no", "without it") if scheduler is not None else ("a", "with scheduler=...")
        raise ValueError(f"{snapshot.folder} was saved with {had} scheduler: call load {now}")
    snapshot.restore(pipeline, optimizer, ranks.rank, ranks.device)
    restore_options(pipeline, optimizer, snapshot.tensors(Part.OPTIONS))
    if scheduler is not None:
        scheduler.load_state_dict(_like(parse_json(loop["scheduler"]), scheduler.state_dict()))
    pipeline.step_index, pipeline.seed = snapshot.state.step, snapshot.state.config["seed"]
    if ranks.rank == 0:
        say(f"going on from {snapshot.folder}")
    extra = parse_json(loop.get("extra", "null"))
    return {} if extra is None else extra


class Saves:
    """The savers of one pipeline, one for each folder; their copies are waited for before each optimizer step."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._savers: dict[Path, Saver] = {}
        self._waiting: list[Optimizer] = []  # optimizers whose steps wait

    def saver_of(self, folder: Path) -> Saver:
        if folder not in self._savers:
            ranks = self._ranks
            self._savers[folder] = Saver(folder, rank=ranks.rank, agree=ranks.largest, keep_last=None, say=say)
        return self._savers[folder]

    def hold_back(self, optimizer: Optimizer) -> None:
        """The steps of `optimizer` wait for copies from now on. Where it has no hooks, this waits for them."""
        before_step = getattr(optimizer, "register_step_pre_hook", None)
        if before_step is None:
            self._before_update()
        elif not any(one is optimizer for one in self._waiting):
            before_step(self._before_update)
            self._waiting.append(optimizer)

    def _before_update(self, *_: Any) -> None:
        for saver in self._savers.values():
            saver.before_update()

    def poll(self) -> None:
        for saver in self._savers.values():
            saver.poll()

    def wait(self) -> None:
        for saver in self._savers.values():
            saver.wait()


def _as_lists(state: Any) -> Any:
    """A scheduler's state with its Counters (`milestones` of MultiStepLR) as lists: JSON has no numbers as keys."""
    if isinstance(state, Counter):
        return list(state.elements())
    if isinstance(state, dict):
        return {key: _as_lists(value) for key, value in state.items()}
    return [_as_lists(value) for value in state] if isinstance(state, list) else state


def _like(saved: Any, now: Any) -> Any:
    """`saved`, with Counters where `now` has some. Raises ValueError: its lists, which have a value for each group, have other lengths."""
    if isinstance(now, Counter):
        return Counter(saved)
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _like(value, now.get(key)) for key, value in saved.items()}
    if isinstance(now, list) and isinstance(saved, list):
        if len(now) != len(saved):
            raise ValueError(
                f"the scheduler has {len(now)} values where {len(saved)} were saved: make as many groups in the optimizer as before"
            )
        return [_like(one, other) for one, other in zip(saved, now)]
    return saved
