"""Where a run may start: what `resume` and `init_from` can name, which snapshot is the newest undamaged one, and which keys a resumed run must
not change. Without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetrain.config.phases import batches_before, value_in_step
from pipetrain.config.schema import guarded_keys
from pipetrain.snapshot.files import path_of, steps_in
from pipetrain.snapshot.manifest import NAME, SnapshotDamaged, check_whole

if TYPE_CHECKING:
    from pipetrain.snapshot.state import RunState


AUTO = "auto"
SNAPSHOTS = "snapshots"  # the folder of a run folder that holds them
_MICROBATCHES = "pipeline.num_microbatches"
_MISSING = object()


def check_start(resume: str | None, init_from: str | None, run_dir: str | None) -> None:
    """Check `resume` and `init_from` before a process starts.

    Raises ValueError: keys that exclude each other, a path that does not exist, or half a snapshot.
    """
    if resume == AUTO and run_dir is None:
        raise ValueError("resume=auto: resumes from the newest snapshot in run_dir; give run_dir=PATH as well")
    if resume not in (None, AUTO) and init_from is not None:
        raise ValueError(f"resume={resume} init_from={init_from}: a resumed run has its weights; give one")
    for key, path in (("resume", resume), ("init_from", init_from)):
        if path not in (None, AUTO) and not Path(str(path)).exists():
            raise ValueError(
                f"{key}={path}: there is nothing; name a snapshot such as runs/latest/snapshots/step-00000200"
            )
        if path is not None and Path(path).name.startswith("step-") and not (Path(path) / NAME).exists():
            raise ValueError(
                f"{key}={path}: {NAME} is missing in it, as it was not written to its end; name an older one"
            )


def check_same_run(path: Path, state: RunState, now: Mapping[str, Any]) -> None:
    """Whether the run of the snapshot `path` can go on with the configuration `now`, which is plain as in its `state`.

    Raises ValueError: with another model or other data the run would not go on where it was; or it has all its steps.
    """
    if state.loop is not None:
        raise ValueError(
            f"{path} was saved by pipetrain.save in another training loop: a run takes only its weights; start one with init_from={path}"
        )
    for key in guarded_keys():
        was, wanted = _value(state.config, key), _value(now, key)
        if was != wanted and was is not _MISSING:
            raise ValueError(
                f"{key}={wanted}: the run of {path} had {was}, and goes on with the same data and model only; "
                f"set {key}={was}, or start a new run with init_from={path}"
            )
    was_given, is_given = batches_before(state.config, state.step), batches_before(now, state.step)
    if was_given != is_given:
        raise ValueError(
            f"phases: the first {state.step} steps of the run of {path} had batches of {_told(was_given)}, here it is {_told(is_given)}; "
            f"let what is new begin with from={state.step} or later, or start a new run with init_from={path}"
        )
    if state.step > now["steps"]:
        raise ValueError(
            f"steps={now['steps']}: {path} has {state.step} steps behind it; set steps to {state.step} or more"
        )


def check_same_data(path: Path, state: RunState, fingerprint: str | None) -> None:
    """Raises ValueError: the text is not the one that the run was trained on, byte for byte."""
    if None not in (state.data, fingerprint) and state.data != fingerprint:
        raise ValueError(
            f"the text is not that of {path} (its SHA-256 is {str(fingerprint)[:12]}..., it was {str(state.data)[:12]}...): a "
            "file was added, removed or changed, or data=stdlib is read by another Python; bring the old text back, or start "
            f"a new run with init_from={path}"
        )


def _told(batches: Sequence[tuple[int, Any, Any]]) -> str:
    return ", ".join(
        f"data.global_batch_size={size} data.sequence_length={length} after {done} steps"
        for done, size, length in batches
    )


def told_of_replicas(state: RunState, num_replicas: int, now: Mapping[str, Any]) -> Iterator[str]:
    """What a user should know where the run goes on with another number of replicas than the snapshot's had; `now` is plain."""
    was = state.plan.get("num_replicas", 1)
    if was == num_replicas:
        return
    text = f"{num_replicas} replica{'s' * (num_replicas > 1)}, the run had {was}: the batches stay as they are"
    step = state.step + 1
    size = value_in_step(now, "data.global_batch_size", step)
    slices = num_replicas * value_in_step(now, _MICROBATCHES, step)
    before = was * value_in_step(state.config, _MICROBATCHES, step)
    if slices < before:
        text += (
            f", and a microbatch has up to {-(-size // slices)} samples, it had {-(-size // before)}; where memory is "
            f"short, set {_MICROBATCHES}={-(-before // num_replicas)}"
        )
    yield text


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged snapshot in `folder`; None: the folder holds no snapshots.

    Damaged ones get another name, so that they do not count as kept, and `say` gets a line for each.
    Raises SnapshotDamaged: all are damaged. A fresh start would hide that a run was lost, so the user has to ask for one.
    """
    damaged: list[SnapshotDamaged] = []
    for step in steps_in(folder):
        snapshot = path_of(folder, step)
        try:
            check_whole(snapshot)
        except SnapshotDamaged as error:
            damaged.append(error)
            continue
        for problem in damaged:
            say(f"{problem}: that snapshot is set aside, going on from {snapshot.name}")
        for newer in steps_in(folder)[: len(damaged)]:
            with contextlib.suppress(OSError):  # on a disk that is read-only it stays, and is found damaged again
                (aside := path_of(folder, newer)).rename(aside.with_name(f"{aside.name}.damaged"))
        return snapshot
    if damaged:
        raise SnapshotDamaged(
            f"{damaged[0]}, and no snapshot in {folder} is whole: remove them to start from step 1, or choose another run_dir (in your own loop: another folder)"
        )
    return None


def look_for(path: Path, say: Callable[[str], None]) -> Path | None:
    """The snapshot that a user names: its folder, a `snapshots` folder, or a run folder (then the newest whole one); None: there is none.

    Raises SnapshotDamaged: it is damaged.
    """
    if (path / NAME).exists() or path.name.startswith("step-"):
        check_whole(path)
        return path
    for folder in (path / SNAPSHOTS, path):
        snapshot = newest_whole(folder, say)
        if snapshot is not None:
            return snapshot
    return None


def find(path: Path, say: Callable[[str], None]) -> Path:
    """As `look_for`. Raises ValueError: there is none; SnapshotDamaged: it is damaged."""
    snapshot = look_for(path, say)
    if snapshot is not None:
        return snapshot
    raise ValueError(
        f"{path}: there is no snapshot; name a folder such as runs/latest/{SNAPSHOTS}/step-00000200, or a run folder"
    )
