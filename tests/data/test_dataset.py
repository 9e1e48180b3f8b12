"""From `data=...` to batches: what is read, how it is split, and what is refused with which words."""

import dataclasses
import os
import pathlib
import sysconfig
from collections.abc import Iterable, Sequence

import pytest
import torch
from counts import num_counted

from pipetrain.config.records import DataConfig
from pipetrain.data.corpus import Piece, Split, files_of, find_files, read_pieces, scan, split_files
from pipetrain.data.dataset import check_data, make_data
from pipetrain.data.tokenizer import ByteTokenizer

TEXT = DataConfig(name="text", global_batch_size=2, sequence_length=8)


def write(folder: pathlib.Path, **contents: bytes) -> pathlib.Path:
    for name, content in contents.items():
        path = folder / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def text(path: pathlib.Path, **fields: object) -> DataConfig:
    return dataclasses.replace(TEXT, path=str(path), **fields)


def split(files: Iterable[pathlib.Path], eval_fraction: float) -> Split:
    return split_files(scan(sorted(files), pathlib.Path("nowhere")), [], eval_fraction)


def paths(pieces: Sequence[Piece]) -> set[pathlib.Path]:
    return {piece.path for piece in pieces}


def numbered(count: int, size: int = 100) -> dict[str, bytes]:
    return {f"f{index:03}": bytes([index]) * size for index in range(count)}


def test_stdlib_is_python_without_tests_and_what_was_installed() -> None:
    files = find_files(DataConfig())
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = {file.relative_to(root).as_posix() for file in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert files == find_files(DataConfig())


@pytest.mark.slow
def test_stdlib_holds_out_enough_and_shares_no_file() -> None:
    data, found = make_data(DataConfig(), seed=0), split_files(*files_of(DataConfig()), 0.1)
    assert not paths(found.train) & paths(found.heldout)
    contents = [{piece.path.read_bytes() for piece in part} for part in (found.train, found.heldout)]
    assert not contents[0] & contents[1]
    sizes = [sum(len(content) for content in part) for part in contents]
    assert 0.09 < sizes[1] / sum(sizes) <= 0.1
    assert num_counted(data.heldout) == 204_800
    assert data.vocabulary_size == 256
    inputs, targets = data.train.batch(0)
    assert inputs.shape == targets.shape == (16, 256)


def test_the_seed_changes_the_order_and_not_the_split(tmp_path: pathlib.Path) -> None:
    config = text(write(tmp_path, **numbered(20)))
    first, second = make_data(config, seed=0), make_data(config, seed=1)
    assert [batch.inputs.tolist() for batch in first.heldout] == [batch.inputs.tolist() for batch in second.heldout]
    assert not torch.equal(first.train.batch(0)[0], second.train.batch(0)[0])
    assert torch.equal(first.train.batch(7)[0], make_data(config, seed=0).train.batch(7)[0])


def test_the_split_depends_on_contents_alone(tmp_path: pathlib.Path) -> None:
    names = {f"g{index:03}": content for index, content in enumerate(reversed(numbered(20).values()))}
    first = split(write(tmp_path / "a", **numbered(20)).iterdir(), 0.2)
    second = split(write(tmp_path / "b", **names).iterdir(), 0.2)
    assert read_pieces(first.heldout) == read_pieces(second.heldout)
    assert read_pieces(first.train) == read_pieces(second.train)
    assert len(first.heldout) == 4


def test_copies_are_read_once(tmp_path: pathlib.Path) -> None:
    copies = {f"copy{index}": bytes([index % 10]) * 100 for index in range(30)}
    found = split(write(tmp_path, **copies).iterdir(), 0.3)
    train, heldout = read_pieces(found.train), read_pieces(found.heldout)
    assert len(train) == 700
    assert len(heldout) == 300
    assert not set(train) & set(heldout)


def test_a_single_file_is_cut_by_position(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, only=bytes(range(200))) / "only.txt"
    found = split([path], 0.1)
    assert read_pieces(found.train) == bytes(range(180))
    assert read_pieces(found.heldout) == bytes(range(180, 200))
    assert num_counted(make_data(text(path), seed=0).heldout) == 16


def test_few_files_hold_out_the_smallest(tmp_path: pathlib.Path) -> None:
    found = split(write(tmp_path, a=b"a" * 100, b=b"b" * 60, c=b"c" * 90).iterdir(), 0.1)
    assert read_pieces(found.heldout) == b"b" * 60


def test_nothing_held_out(tmp_path: pathlib.Path) -> None:
    config = text(write(tmp_path, **numbered(3)), eval_fraction=0.0)
    assert num_counted(make_data(config, seed=0).heldout) == 0
    assert len(split_files(*files_of(config), 0.0).train) == 3


def test_binary_and_broken_text_are_bytes_like_any_other(tmp_path: pathlib.Path) -> None:
    broken = bytes(range(256)) + "ü".encode()[:1]
    data = make_data(text(write(tmp_path, broken=broken), eval_fraction=0.0), seed=0)
    seen = torch.cat([data.train.batch(step)[0].flatten() for step in range(16)])
    assert sorted(set(seen.tolist())) == list(range(256))


def test_folders_are_searched_and_patterns_choose(tmp_path: pathlib.Path) -> None:
    write(tmp_path, a=b"a" * 50, sub__b=b"b" * 50)
    (tmp_path / "c.md").write_bytes(b"c" * 50)
    found = [
        [file.name for file in find_files(text(tmp_path, pattern=pattern))]
        for pattern in ("**/*.txt", "*.txt", "**/*.md")
    ]
    assert found == [["a.txt", "b.txt"], ["a.txt"], ["c.md"]]


def test_bytes_survive_the_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("für".encode()) == [102, 195, 188, 114]
    assert tokenizer.encode(b"") == []
    assert tokenizer.decode(tokenizer.encode("für".encode())) == "für"
    assert ByteTokenizer().decode([0xC3]) == "�"


REFUSED = {
    "batch size": ({"global_batch_size": 0}, "data.global_batch_size=0: allowed is 1 or more"),
    "length": ({"sequence_length": -1}, "data.sequence_length=-1: allowed is 1 or more"),
    "fraction": ({"eval_fraction": 1.5}, "data.eval_fraction=1.5 is a share of the bytes: at least 0"),
    "heldout bytes": ({"eval_bytes": 7}, "data.eval_bytes=7 .*: set data.eval_bytes=8 or more"),
    "tokenizer": ({"tokenizer": "bite"}, r"data.tokenizer=bite: this is no folder here, .* did you mean 'byte'\?"),
    "name": (
        {"name": "stdlb"},
        r"data=stdlb: allowed are stdlib, text, jsonl, hf, memmap, python; did you mean 'stdlib'\?",
    ),
    "path of stdlib": ({"name": "stdlib"}, "is for your own text: type data=text data.path="),
    "no path": ({"path": None}, "data.path is not set: .* type data.path=FILE_OR_FOLDER"),
    "blank path": ({"path": ""}, "data.path is not set"),
    "pattern": ({"pattern": "*.rst"}, r"data.pattern='\*.rst' matches no file .* type data.pattern='\*\*/\*.txt'"),
    "absolute pattern": (
        {"pattern": "/tmp/*"},
        r"data.pattern='/tmp/\*' is no pattern inside a folder .*allowed are globs",
    ),
    "empty pattern": ({"pattern": ""}, "data.pattern='' is no pattern inside a folder"),
    "too short": (
        {"sequence_length": 500},
        "the text has 300 bytes and .* needs 501; give more text, or data.sequence_length=299",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(fields: dict[str, object], message: str, tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(text(write(tmp_path, **numbered(3))), **fields)
    with pytest.raises(ValueError, match=message):
        check_data(config)
    with pytest.raises(ValueError, match=message):
        make_data(config, seed=0)


def test_a_path_that_is_not_there_names_its_neighbour(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "books", **numbered(3))
    with pytest.raises(ValueError, match=r"data.path=.*/bokos is not there .* did you mean data.path=.*/books\?"):
        check_data(text(tmp_path / "bokos"))
    with pytest.raises(ValueError, match=r"is not there .* give a file or folder that exists"):
        check_data(text(tmp_path / "nowhere" / "at all"))


def test_a_pattern_without_a_match_names_the_commonest_kind(tmp_path: pathlib.Path) -> None:
    for name in ("a.md", "b.md", "c.csv", "README"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"matches no file .* type data.pattern='\*\*/\*.md'"):
        check_data(text(tmp_path))


def test_empty_files_and_folders(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match=r"matches no file in data.path=.*; there is no file in it: give another data.path"
    ):
        check_data(text(tmp_path))
    with pytest.raises(ValueError, match=r"the text has 0 bytes .*; give more text"):
        check_data(text(write(tmp_path, empty=b"")))


def test_something_that_is_no_file(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe is neither a file nor a folder"):
        check_data(text(tmp_path / "pipe"))


def test_what_may_not_be_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who is not root: to root every file is readable."""
    path = write(tmp_path, secret=b"s" * 100) / "secret.txt"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"secret.txt may not be read; allow it with: chmod \+r"):
        check_data(text(path))


def test_a_file_that_fails_while_it_is_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read .*: allow it, or leave it out of data.pattern"):
        scan([write(tmp_path, a=b"a") / "a.txt", tmp_path / "gone.txt"], tmp_path)


def test_parts_that_are_shorter_than_a_sample(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, only=b"x" * 60) / "only.txt"
    with pytest.raises(ValueError, match=r"the held-out part of the text has 6 bytes .* or data.sequence_length=5"):
        make_data(text(path), seed=0)
    with pytest.raises(ValueError, match=r"the training part of the text has 6 bytes"):
        make_data(text(path, eval_fraction=0.9), seed=0)
