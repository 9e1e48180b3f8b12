"""Saves while training goes on.

    main thread   save ... F B F B ... before_update ... steps ... poll: [3] all ranks have written ... poll: [5] done
    own thread         [1] copy to host memory,      [2] write and fsync files    rank 0: [4] manifest, fsync, rename, prune

Weights and optimizer state stay as they are until the next optimizer step, so they are copied beside its F and B.

Ranks agree in `save` and `poll` only, on the main thread, so a save needs no communication of its own. Nothing that
goes wrong here ends the training: the error is shown, and the older snapshots are not touched.

Tensors are copied to host memory first, so that training may change them, then written as a safetensors file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipetrain.comm.device import Device, Stream, device_of
from pipetrain.snapshot import files as folders
from pipetrain.snapshot.files import ALWAYS, FILE_MODE, STATE, Part, rank_path
from pipetrain.snapshot.manifest import FileRecord, record_of, write_manifest
from pipetrain.snapshot.state import RunState, Tensors

Agree = Callable[[int], int]  # collective: the largest number that any rank gave
_LONGEST_PAUSE = 8  # polls
_LONG_AFTER = 32  # polls after all is written, when a snapshot has long had its name


class _Progress(IntEnum):
    """Ordered so that the largest over the ranks says what to do."""

    DONE = 0
    FAILED = 1
    RUNNING = 2


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """A piece of work in a thread of its own, which does not keep the process from ending."""
    job = Future[None]()

    def run() -> None:
        try:
            work()
        except Exception as error:
            job.set_exception(error)
        else:
            job.set_result(None)

    threading.Thread(target=run, name="snapshot", daemon=True).start()
    return job


@dataclass
class _Save:
    """A save on its way."""

    state: RunState
    draft: Path
    copied: threading.Event
    job: Future[None]
    left: int  # polls to the next agreement, in which a rank that is early waits for the others
    pause: int = 2  # polls from there to the one after it
    polls: int = 0  # so far
    committing: bool = False  # every rank's files are written; rank 0 makes the snapshot of them


class Saver:
    """Writes the snapshots of one run into `folder`, one at a time. Every rank has one and calls the same methods.

    Args:
        agree: the largest number that any rank gave; collective.
        keep_last: how many snapshots are kept, 1 or more; None: all.
        keep_multiples_of: snapshots of such steps are kept for good; None: there are none.
        say: told what the user should know.
        run: the folder of the run, whose lines about steps are on the disk before a snapshot of these steps; None: it has none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        agree: Agree,
        keep_last: int | None,
        say: Callable[[str], None],
        keep_multiples_of: int | None = None,
        run: Path | None = None,
    ) -> None:
        self.last_step: int | None = None  # of the newest snapshot that was written here
        self._folder = folder
        self._rank = rank
        self._agree = agree
        self.keep_last = keep_last
        self._keep_multiples_of = keep_multiples_of
        self._say = say
        self._run = run
        self._images: dict[Part, Tensors] = {}
        self._streams: dict[torch.device, tuple[Device, Stream]] = {}  # for copies
        self._save: _Save | None = None
        self._first_agreement = 1  # in this poll of a save: about when the one before was written
        if rank == 0:
            folders.remove_left_overs(folder)

    def save(self, state: RunState, tensors: Mapping[Part, Mapping[str, Tensor]]) -> None:
        """Begin to save. `tensors` (of any device) must not change before `before_update` has returned.

        Waits for the save before. Collective.
        """
        self.wait()
        tensors = {part: {} for part in ALWAYS} | dict(tensors)
        if not (token := self._agree(self._open_draft(state.step, tensors) if self._rank == 0 else 0)):
            return
        draft = folders.draft_path(self._folder, state.step, token)
        versions = _versions(tensors)
        copied, (device, stream) = threading.Event(), self._copy_stream(tensors)

        def write() -> None:
            try:
                self._copy(tensors, device, stream)
                _check_unchanged(versions, _versions(tensors))
            finally:
                copied.set()
            _write_files(draft, self._rank, self._images)

        self._save = _Save(state, draft, copied, _in_thread(write), self._first_agreement)

    def before_update(self) -> None:
        """Returns when the tensors that were given to `save` may change: they are copied, or could not be."""
        if self._save is not None:
            self._save.copied.wait()

    def poll(self) -> None:
        """Take a save further that has come to its next agreement; does not wait. Collective.

        Ranks agree about when the save before was written, and after pauses of 2, 4, and at most 8 polls while one of them still writes.
        """
        if self._save is not None:
            self._save.polls += 1
            self._save.left -= 1
            if self._save.left == 0:
                self._advance(self._save)

    def _advance(self, save: _Save) -> None:
        own = _Progress.RUNNING
        if save.job.done():
            own = _Progress.DONE if save.job.exception() is None else _Progress.FAILED
        progress = _Progress(self._agree(own))
        if progress is _Progress.RUNNING:
            save.left, save.pause = save.pause, min(2 * save.pause, _LONGEST_PAUSE)
            return
        if progress is _Progress.FAILED:
            if (error := save.job.exception() if save.job.done() else None) is not None:
                self._say(self._failure(save.state.step, error))
            if self._rank == 0:
                shutil.rmtree(save.draft, ignore_errors=True)
            self._save = None
        elif save.committing:
            self.last_step, self._save = save.state.step, None
        else:

            def commit() -> None:
                if self._rank == 0:
                    _write_manifest(save.draft, save.state)
                    if self._run is not None:
                        folders.sync_lines(self._run)
                    folders.publish(save.draft, folders.path_of(self._folder, save.state.step))
                    folders.prune(self._folder, save.state.step, self.keep_last, self._keep_multiples_of)

            self._first_agreement = min(max(1, save.polls - 1), _LONGEST_PAUSE)
            save.committing, save.left = True, _LONG_AFTER
            save.job = _in_thread(commit)

    def wait(self) -> None:
        """Until there is no save on its way. Collective."""
        while self._save is not None:
            self._save.job.exception()  # it waits
            self._advance(self._save)

    def _copy(self, tensors: Mapping[Part, Mapping[str, Tensor]], device: Device, stream: Stream) -> None:
        with device.on(stream):
            self._images = {part: _image(mapping, self._images.get(part)) for part, mapping in tensors.items()}
        device.finish(stream)

    def _copy_stream(self, tensors: Mapping[Part, Mapping[str, Tensor]]) -> tuple[Device, Stream]:
        """A stream of the GPU that holds some of `tensors`, else of the CPU; it begins when the work before it has made them."""
        gpus = (tensor.device for mapping in tensors.values() for tensor in mapping.values() if tensor.is_cuda)
        if (where := next(gpus, torch.device("cpu"))) not in self._streams:
            device = device_of(where)
            self._streams[where] = device, device.stream()
        device, stream = self._streams[where]
        device.follow(stream, device.current())
        return device, stream

    def _open_draft(self, step: int, parts: Iterable[Part]) -> int:
        """Rank 0 makes the folder; returns its token, or 0 where it cannot be made."""
        token = secrets.randbits(31) | 1
        try:
            draft = folders.draft_path(self._folder, step, token)
            self._folder.mkdir(mode=folders.FOLDER_MODE, parents=True, exist_ok=True)
            for path in (draft, *(draft / part for part in parts)):
                path.mkdir(mode=folders.FOLDER_MODE)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            self._say(self._failure(step, error))
            return 0
        return token

    def _failure(self, step: int, error: BaseException) -> str:
        steps = folders.steps_in(self._folder)
        older = (
            f"the newest snapshot is {folders.path_of(self._folder, steps[0])}" if steps else "there is no snapshot yet"
        )
        reason = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        return f"rank {self._rank} could not write the snapshot of step {step} ({reason}): training goes on; {older}"


def _versions(tensors: Mapping[Part, Mapping[str, Tensor]]) -> list[tuple[str, int]]:
    return [(name, tensor._version) for mapping in tensors.values() for name, tensor in mapping.items()]


def _check_unchanged(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """Raises ValueError: some copies may be older than a change, and others newer."""
    for (name, version), (_, now) in zip(before, after):
        if version != now:
            raise ValueError(f"{name} changed while it was copied; only an optimizer step may change it, which waits")


def _image(tensors: Mapping[str, Tensor], before: Tensors | None) -> Tensors:
    """Copies in host memory, in that of the save before where it fits: fresh memory costs more than the copy. Those of a GPU, in pinned
    memory, have arrived when the current stream has done what it was given."""
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if before is None or {name: (copy.shape, copy.dtype) for name, copy in before.items()} != forms:
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        before = {name: torch.empty(shape, dtype=dtype, pin_memory=pinned) for name, (shape, dtype) in forms.items()}
    for name, copy in before.items():
        copy.copy_(tensors[name].detach(), non_blocking=True)
    return before


def write_tensors(tensors: Tensors, folder: Path, path: str) -> FileRecord:
    """A new file, on the disk when this returns. Raises OSError: it cannot be written; ValueError: a dtype that the format has not."""
    try:
        save_file(tensors, folder / path)
    except KeyError as error:  # of a dtype that the format has not
        (dtype,) = error.args
        name = next(name for name, tensor in tensors.items() if tensor.dtype == dtype)
        raise ValueError(f"{name} has dtype {dtype}, which a snapshot cannot hold") from error
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code) if found else str(error)) from error
    (folder / path).chmod(FILE_MODE)
    # The disk is waited for while the checksum is made, which reads what is still in memory.
    with (folder / path).open("rb") as file, ThreadPoolExecutor(1, "sync") as thread:
        synced = thread.submit(os.fsync, file.fileno())
        record = record_of(folder, path)
        synced.result()
    return record


def _write_files(draft: Path, rank: int, images: Mapping[Part, Tensors]) -> None:
    """One rank's files, and last a list of them for rank 0."""
    records = [write_tensors(image, draft, rank_path(part, rank)) for part, image in images.items()]
    folders.write_durable_json(_list_of(draft, rank), {"files": [asdict(record) for record in records]})


def _write_manifest(draft: Path, state: RunState) -> None:
    """Rank 0's part, when all files are written: the state and the manifest. The ranks' lists have served."""
    files = []
    for rank in range(state.num_ranks):
        path = _list_of(draft, rank)
        files += [FileRecord(**record) for record in json.loads(path.read_bytes())["files"]]
        path.unlink()
    folders.write_durable_json(draft / STATE, asdict(state))
    for part in {Path(file.path).parent for file in files}:
        folders.sync(draft / part)
    write_manifest(draft, state.step, [record_of(draft, STATE), *files])


def _list_of(draft: Path, rank: int) -> Path:
    return draft / f"files-{rank:04d}.json"
