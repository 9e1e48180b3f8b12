"""manifest.json: what belongs to a snapshot, byte for byte. Nothing of a snapshot is read before its manifest holds."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipetrain.config.read_files import DamagedFile, fitted, parse_json, read_bytes
from pipetrain.snapshot.files import ALWAYS, STATE, Part, canonical_json, rank_path, write_durable_json

NAME = "manifest.json"
FORMAT_VERSION = 1
OLDER = "name an older snapshot"


class SnapshotDamaged(ValueError):
    """A snapshot that is not what was written: the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a snapshot; `path` is relative to its folder."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of the snapshot after `step` steps."""

    step: int
    files: tuple[FileRecord, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that wrote."""
        return max(len(self.paths(part)) for part in Part)

    def paths(self, folder: str) -> list[str]:
        """The files of one sub-folder, in order."""
        return sorted(file.path for file in self.files if PurePosixPath(file.path).parent.name == folder)


def write_manifest(folder: Path, step: int, files: Iterable[FileRecord]) -> None:
    """The last file of a snapshot."""
    document = {"format_version": FORMAT_VERSION, "step": step, "files": [asdict(file) for file in files]}
    write_durable_json(folder / NAME, {**document, "sha256": _digest(document)})


def check_whole(folder: Path) -> Manifest:
    """The manifest of a snapshot in which every file is as it was written.

    Raises SnapshotDamaged: it is not. Sizes are compared first: a cut file costs no reading.
    """
    manifest = read_manifest(folder)
    for file in manifest.files:
        _check_size(folder, file)
    for file in manifest.files:
        if record_of(folder, file.path).sha256 != file.sha256:
            raise SnapshotDamaged(f"{folder / file.path} has changed since it was written (SHA-256 differs)")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest by itself. Raises SnapshotDamaged: missing, changed, of another version, or with a path that leads out of the folder."""
    path = folder / NAME
    if not path.exists():
        raise SnapshotDamaged(f"{path} is missing: the snapshot was not written to its end")
    try:
        data = read_bytes(path, OLDER)
        document = fitted(dict[str, Any], parse_json(data))
    except ValueError as error:
        raise SnapshotDamaged(
            str(error if isinstance(error, DamagedFile) else DamagedFile(path, error, OLDER))
        ) from error
    digest = document.pop("sha256", None)
    if digest != _digest(document) or canonical_json({**document, "sha256": digest}) != data:
        raise SnapshotDamaged(f"{path} has changed since it was written (SHA-256 differs)")
    if document.get("format_version") != FORMAT_VERSION:
        raise SnapshotDamaged(
            f"{path} has format_version {document.get('format_version')}, this version reads {FORMAT_VERSION}"
        )
    try:
        manifest: Manifest = fitted(Manifest, {key: document.get(key) for key in ("step", "files")})
    except ValueError as error:
        raise SnapshotDamaged(f"{path} is no manifest ({error})") from error
    for file in manifest.files:
        _check_inside(folder, file.path)
    _check_complete(path, manifest)
    return manifest


def record_of(folder: Path, path: str) -> FileRecord:
    """Size and SHA-256 of a file as it lies on the disk."""
    try:
        with os.fdopen(os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(path, file.tell(), digest)
    except OSError as error:
        raise SnapshotDamaged(f"{folder / path} cannot be read ({error.strerror})") from error


def _check_complete(path: Path, manifest: Manifest) -> None:
    """A file that the manifest leaves out would be read unchecked: so it names the state, and of each rank a file of every part."""
    named = {file.path for file in manifest.files}
    parts = {*ALWAYS, *(part for part in Part if manifest.paths(part))}
    wanted = {STATE, *(rank_path(part, rank) for part in parts for rank in range(max(1, manifest.num_ranks)))}
    if wrong := sorted(wanted ^ named):
        does = "leaves out" if wrong[0] in wanted else "names"
        raise SnapshotDamaged(
            f"{path} {does} {wrong[0]!r}: a snapshot is {STATE}, and of each rank a file of every part"
        )


def _check_inside(folder: Path, path: str) -> None:
    """Whoever can write a manifest must not make us read other files: no `..`, no absolute path, no link."""
    parts = PurePosixPath(path).parts
    climbs = not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path
    if not climbs:
        climbs = (folder / path).resolve() != folder.resolve() / path
    if climbs:
        raise SnapshotDamaged(f"{folder / NAME} names {path!r}, which is not inside the snapshot: it is not used")


def _check_size(folder: Path, file: FileRecord) -> None:
    try:
        status = (folder / file.path).stat()
    except OSError as error:
        raise SnapshotDamaged(f"{folder / file.path} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotDamaged(f"{folder / file.path} is not a regular file")
    if status.st_size != file.num_bytes:
        raise SnapshotDamaged(f"{folder / file.path} has {status.st_size} bytes, {file.num_bytes} were written")


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(document)).hexdigest()
