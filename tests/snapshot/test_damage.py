"""A snapshot that is not as it was written is never used: each kind of byte, flipped or cut off."""

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from damage import places
from safetensors.torch import load_file
from saved import save, trained

from pipetrain.snapshot.files import canonical_json
from pipetrain.snapshot.manifest import NAME, SnapshotDamaged, check_whole, record_of
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.start import find, newest_whole
from pipetrain.verify.drill import flip

WEIGHTS = "weights/rank-0000.safetensors"
FILES = [NAME, "state.json", WEIGHTS, "optimizer/rank-0000.safetensors", "generators/rank-0000.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save(tmp_path_factory.mktemp("snapshots"), 200)


@pytest.fixture
def snapshot(whole: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(whole, tmp_path / whole.name))


def assert_refused(snapshot: pathlib.Path, said: str | None = None) -> None:
    with pytest.raises(SnapshotDamaged, match=said):
        check_whole(snapshot)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(snapshot: pathlib.Path, name: str) -> None:
    path = snapshot / name
    for position in places(path).values():
        flip(path, position)
        assert_refused(snapshot, path.name)
        flip(path, position)
    check_whole(snapshot)


def test_every_byte_of_the_manifest_counts(snapshot: pathlib.Path) -> None:
    path = snapshot / NAME
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        assert_refused(snapshot)


@pytest.mark.parametrize("name", FILES)
def test_another_length_is_found(snapshot: pathlib.Path, name: str) -> None:
    path = snapshot / name
    data = path.read_bytes()
    for length in [0, *places(path).values()]:
        path.write_bytes(data[:length])
        assert_refused(snapshot, path.name)
    for other in (data + b"\0", data + data, data[:-1], data[1:]):
        path.write_bytes(other)
        assert_refused(snapshot, path.name)
    path.unlink()
    assert_refused(snapshot, path.name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_snapshot_is_found(snapshot: pathlib.Path, name: str) -> None:
    """Whole in itself, and of the same size, but of another step: the older one of a backup, for instance."""
    other = save(snapshot.parent / "others", 300)
    assert (other / name).stat().st_size == (snapshot / name).stat().st_size
    if (other / name).read_bytes() == (snapshot / name).read_bytes():
        pytest.skip("equal in both")
    shutil.copy(other / name, snapshot / name)
    assert_refused(snapshot)


def rewrite(snapshot: pathlib.Path, change: Callable[[dict], None]) -> None:
    """Another manifest with a checksum that holds: what somebody would do who wants us to read other files."""
    document = json.loads((snapshot / NAME).read_text())
    del document["sha256"]
    change(document)
    digest = hashlib.sha256(canonical_json(document)).hexdigest()
    (snapshot / NAME).write_bytes(canonical_json({**document, "sha256": digest}))


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "weights/../../secret", "link/secret", "", "a\\..\\b"])
def test_a_path_that_climbs_out_is_refused(snapshot: pathlib.Path, path: str) -> None:
    secret = snapshot.parent / "secret"
    secret.write_text("key")
    (snapshot / "link").symlink_to(snapshot.parent)
    record = {"path": path, "num_bytes": 3, "sha256": hashlib.sha256(b"key").hexdigest()}
    rewrite(snapshot, lambda document: document["files"].append(record))
    assert_refused(snapshot, "not inside the snapshot")


@pytest.mark.parametrize(("name", "place"), [(WEIGHTS, "../outside.safetensors"), ("state.json", "elsewhere.json")])
def test_a_link_is_refused_even_if_its_bytes_are_right(snapshot: pathlib.Path, name: str, place: str) -> None:
    (snapshot / name).rename(snapshot / place)
    (snapshot / name).symlink_to(snapshot / place)
    assert_refused(snapshot, "not inside the snapshot")


def test_a_pipe_in_place_of_a_file_does_not_hang(snapshot: pathlib.Path) -> None:
    (snapshot / WEIGHTS).unlink()
    os.mkfifo(snapshot / WEIGHTS)
    assert_refused(snapshot, "not a regular file")


def without(*parts: str) -> Callable[[dict], None]:
    """Of the manifest: it lists no file whose path begins so."""

    def change(document: dict) -> None:
        document["files"] = [file for file in document["files"] if not file["path"].startswith(parts)]

    return change


@pytest.mark.parametrize(
    "left_out", [("",), ("state.json",), ("optimizer/",), (WEIGHTS,), ("generators/", "optimizer/")]
)
def test_a_manifest_that_leaves_files_out_is_refused(snapshot: pathlib.Path, left_out: tuple[str, ...]) -> None:
    """What it leaves out would be read without a check, or missed without a word."""
    rewrite(snapshot, without(*left_out))
    assert_refused(snapshot, r"manifest\.json leaves out '.*': a snapshot is state\.json, and of each rank")


def test_a_manifest_of_fewer_ranks_than_wrote_is_refused(snapshot: pathlib.Path) -> None:
    state = json.loads((snapshot / "state.json").read_text()) | {"num_ranks": 2}
    (snapshot / "state.json").write_bytes(canonical_json(state))
    record = record_of(snapshot, "state.json")
    rewrite(snapshot, without("state.json"))
    rewrite(snapshot, lambda document: document["files"].append(asdict(record)))
    with pytest.raises(SnapshotDamaged, match=r"state\.json has num_ranks=2, the manifest 1"):
        Snapshot(snapshot)


def test_a_deep_manifest_and_a_pipe_in_its_place(snapshot: pathlib.Path) -> None:
    (snapshot / NAME).write_text("[" * 100_000)
    assert_refused(snapshot, r"manifest\.json cannot be read \(it is nested deeper than 64 values\)")
    (snapshot / NAME).unlink()
    os.mkfifo(snapshot / NAME)
    assert_refused(snapshot, r"manifest\.json cannot be read \(it is no regular file\)")


def test_another_format_is_refused(snapshot: pathlib.Path) -> None:
    rewrite(snapshot, lambda document: document.update(format_version=2))
    assert_refused(snapshot, "format_version 2, this version reads 1")


def test_the_one_before_is_used_and_the_user_told(tmp_path: pathlib.Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step)
    flip(tmp_path / "step-00000300" / WEIGHTS, -1)
    (tmp_path / "step-00000200" / NAME).unlink()
    said: list[str] = []
    assert newest_whole(tmp_path, said.append) == tmp_path / "step-00000100"
    assert "step-00000300/weights/rank-0000.safetensors has changed" in said[0]
    assert "step-00000200/manifest.json is missing" in said[1]
    assert all("going on from step-00000100" in text for text in said)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000100", "step-00000200.damaged", "step-00000300.damaged"]


def test_all_damaged_is_an_error_and_none_is_not(tmp_path: pathlib.Path) -> None:
    assert newest_whole(tmp_path / "nowhere", print) is None
    flip(save(tmp_path, 100) / WEIGHTS, -1)
    for _ in range(2):  # the second look finds it under its name still
        with pytest.raises(SnapshotDamaged, match=r"no snapshot in .* is whole"):
            newest_whole(tmp_path, print)


def test_a_user_may_name_a_snapshot_or_a_run(tmp_path: pathlib.Path) -> None:
    snapshot = save(tmp_path / "snapshots", 100)
    assert find(snapshot, print) == find(snapshot.parent, print) == find(tmp_path, print) == snapshot
    with pytest.raises(ValueError, match="there is no snapshot"):
        find(tmp_path / "nothing", print)
    with pytest.raises(SnapshotDamaged, match=r"step-00000200/manifest\.json is missing"):
        find(snapshot.with_name("step-00000200"), print)


def test_weights_are_a_safetensors_file_that_others_read(whole: pathlib.Path) -> None:
    model, _ = trained(200)
    read = load_file(whole / WEIGHTS)
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
