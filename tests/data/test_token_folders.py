"""Corpora that are tokenized once: what is written, what is held out, who makes it, and what is noticed when it is no longer that."""

import dataclasses
import errno
import fcntl
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from counts import num_counted
from tiny_tokenizer import TEXT, save_tokenizer
from torch.utils import _pytree as pytree

from pipetrain.cli.main import main
from pipetrain.config.records import DataConfig
from pipetrain.data import corpus, documents, tokenizing
from pipetrain.data.batches import Data
from pipetrain.data.dataset import check_data, make_data, make_tokenizer
from pipetrain.data.token_file import TRAIN, TokenPart, read_part, read_sheet
from pipetrain.data.tokenizer import ByteTokenizer
from pipetrain.data.tokenizing import corpus_of, made_once, tokenized

LINES = [f"Hello there {number}, how are you today?" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def config_of(folder: pathlib.Path, **fields: Any) -> DataConfig:
    common = {"cache_dir": str(folder / "cache"), "global_batch_size": 3, "sequence_length": 16}
    return DataConfig(**{**common, **fields})


def write_lines(path: pathlib.Path, texts: Sequence[str] = LINES) -> str:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def lines_of(folder: pathlib.Path, texts: Sequence[str] = LINES, **fields: Any) -> DataConfig:
    return config_of(folder, name="jsonl", path=write_lines(folder / "a.jsonl", texts), **fields)


def train_part(config: DataConfig) -> TokenPart:
    made = make_tokenizer(config)
    assert made is not None
    folder = tokenized(config, made)
    return read_part(folder, read_sheet(folder), TRAIN)


def batches(data: Data, steps: Sequence[int] = range(12)) -> list[list[Any]]:
    found = [data.train.batch(step) for step in steps]
    return [[leaf.tolist() for leaf in pytree.tree_leaves(batch)] for batch in found]


# What is written ----------------------------------------------------------------------------------------------------------


def test_a_text_begins_and_ends(tokenizer: str, tmp_path: pathlib.Path) -> None:
    config = lines_of(tmp_path, tokenizer=tokenizer, eval_fraction=0.0)
    part, made = train_part(config), make_tokenizer(config)
    assert made is not None
    assert part.tokens.dtype == np.uint16
    for text, row in zip(LINES, np.split(part.tokens, part.ends[:-1]), strict=True):
        assert row.tolist() == [*made.encode(text.encode()), 1]
        assert made.decode(row) == text


def test_a_long_text_is_read_in_pieces(tokenizer: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with a line, so tokens are those of the whole, and it is one document that begins and ends once."""
    text = TEXT.replace(". ", ".\n\n  ") * 3 + "für"
    (tmp_path / "a.txt").write_text(text)
    config = config_of(tmp_path, name="text", path=str(tmp_path / "a.txt"), tokenizer=tokenizer, eval_fraction=0.0)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 100)
    made = make_tokenizer(config)
    assert made is not None
    pieces = list(corpus_of(config, made).documents())
    assert len(pieces) > 10
    assert b"".join(piece.content for piece in pieces) == text.encode()
    part = train_part(config)
    assert part.tokens.tolist() == [*made.encode(text.encode()), 1]
    assert part.ends.tolist() == [len(part.tokens)]


def test_a_line_that_never_ends_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_LONGEST_LINE", 8)
    for text in ("üüüüüü", "aüüüüü", "€€€€"):
        begin, rest = documents._cut_after_a_line(text.encode())
        assert begin
        assert begin.decode() + rest.decode() == text


def test_text_of_gz_and_globs_is_the_same(tokenizer: str, tmp_path: pathlib.Path) -> None:
    for folder in ("text", "packed"):
        (tmp_path / folder).mkdir()
    for name in "ab":
        content = (f"Hello {name}\n" * 50).encode()
        (tmp_path / "text" / f"{name}.txt").write_bytes(content)
        (tmp_path / "packed" / f"{name}.txt.gz").write_bytes(gzip.compress(content))
    for kind in ("byte", tokenizer):
        plain, packed, globbed = (
            make_data(config_of(tmp_path, name="text", path=str(tmp_path / path), tokenizer=kind), 0)
            for path in ("text", "packed", "text/[ab].txt")
        )
        assert plain.fingerprint == packed.fingerprint == globbed.fingerprint
        assert batches(plain) == batches(packed) == batches(globbed)


def test_damaged_gz(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    write_lines(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read \(Compressed file ended"):
        make_data(config_of(tmp_path, name="jsonl", path=str(path)), 0)


def test_bytes_of_files_may_be_more_than_memory_takes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file in the cache come the very batches that come from memory."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 70 + b"\xff\n")
    config = config_of(tmp_path, name="text", path=str(tmp_path))
    expected = batches(make_data(config, 0))
    monkeypatch.setattr("pipetrain.data.dataset._IN_MEMORY_BYTES", 100)
    assert batches(make_data(config, 0)) == expected
    assert (tmp_path / "cache").is_dir()


def test_text_that_is_not_utf8(tokenizer: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"Hello\xff there")
    (tmp_path / "b.txt").write_bytes(b"Hello there. " * 20)
    config = config_of(tmp_path, name="text", path=str(tmp_path), tokenizer=tokenizer, eval_fraction=0.0, eval_bytes=16)
    with pytest.raises(ValueError, match=r"a\.txt: it is not UTF-8 \(invalid start byte: b'\\xff'\)"):
        make_data(config, 0)
    assert make_data(dataclasses.replace(config, on_error="skip"), 0).num_skipped == 1


def test_a_corpus_of_which_nothing_is_left(tokenizer: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text('nonsense\n{"tex": "Hello there."}\n')
    config = config_of(tmp_path, name="jsonl", path=str(tmp_path / "a.jsonl"), tokenizer=tokenizer, on_error="skip")
    with pytest.raises(
        ValueError, match=r"^no document can be a sample; first of 2: .*a\.jsonl:1: it is not valid JSON"
    ):
        make_data(config, 0)


# What is held out ---------------------------------------------------------------------------------------------------------


def held_texts(config: DataConfig) -> tuple[list[str], list[str]]:
    """The documents of both parts."""
    found = list(corpus_of(config, ByteTokenizer()).documents())
    texts = [[str(it.content) for it in found if it.is_heldout == held] for held in (False, True)]
    return texts[0], texts[1]


def test_documents_are_held_out_by_what_they_hold(tmp_path: pathlib.Path) -> None:
    one = lines_of(tmp_path, eval_fraction=0.25)
    other = dataclasses.replace(one, path=write_lines(tmp_path / "b.jsonl", LINES[::-1] + LINES[:5]))
    train, heldout = held_texts(one)
    assert (len(train), len(heldout)) == (30, 10)
    assert set(held_texts(other)[1]) == set(heldout)
    assert not set(held_texts(other)[0]) & set(heldout)


def test_few_documents_hold_out_one(tmp_path: pathlib.Path) -> None:
    for count in (2, 5):
        config = lines_of(tmp_path, LINES[:count])
        assert list(map(len, held_texts(config))) == [count - 1, 1]


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_a_heldout_part_of_its_own(name: str, tokenizer: str, tmp_path: pathlib.Path) -> None:
    if name == "jsonl":
        paths = write_lines(tmp_path / "a.jsonl"), write_lines(tmp_path / "b.jsonl", ["Something else that is long."])
    else:
        paths = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
        for path, text in zip(paths, LINES):
            pathlib.Path(path).write_text(text * 30)
    config = config_of(tmp_path, name=name, path=paths[0], eval_path=paths[1], tokenizer=tokenizer)
    data = make_data(config, 0)
    made = make_tokenizer(config)
    assert made is not None
    held = made.decode(torch.cat([batch.inputs.flatten() for batch in data.heldout]).tolist())
    assert held[:9] in pathlib.Path(paths[1]).read_text()
    assert data.fingerprint != make_data(dataclasses.replace(config, eval_path=None), 0).fingerprint


def test_a_file_that_is_held_out_is_not_trained_on(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    config = config_of(tmp_path, name="text", path=str(tmp_path), eval_path=str(tmp_path / "a.txt"))
    inputs, _ = make_data(config, 0).train.batch(0)
    assert set(inputs.flatten().tolist()) == {ord("b")}


def test_a_single_text_is_held_out_from_a_line_on(tokenizer: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("für\n" * 500)
    config = config_of(tmp_path, name="text", path=str(tmp_path / "a.txt"), tokenizer=tokenizer)
    made = make_tokenizer(config)
    assert made is not None
    texts = [document.content for document in corpus_of(config, made).documents()]
    assert len(texts) == 2
    assert all(isinstance(text, bytes) and text.startswith(b"f") and text.endswith(b"\n") for text in texts)


# Every source, again ------------------------------------------------------------------------------------------------------


def sources(folder: pathlib.Path, tokenizer: str) -> dict[str, DataConfig]:
    from datasets import Dataset, DatasetDict

    lines = write_lines(folder / "a.jsonl.gz")
    (folder / "a.txt").write_text("\n".join(LINES))
    np.arange(500, dtype=np.uint16).tofile(folder / "train.bin")
    rows = Dataset.from_dict({"text": LINES})
    DatasetDict({"train": rows, "test": rows.select([0, 1])}).save_to_disk(str(folder / "saved"))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am fine"}]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat * (n % 3 + 1)}) for n in range(20)))
    hf = {"name": "hf", "path": str(folder / "saved"), "tokenizer": tokenizer}
    long = {"tokenizer": tokenizer, "sequence_length": 64}
    return {
        "text": config_of(folder, name="text", path=str(folder / "a.txt"), tokenizer=tokenizer),
        "jsonl": config_of(folder, name="jsonl", path=lines, tokenizer=tokenizer),
        "jsonl as bytes": config_of(folder, name="jsonl", path=lines),
        "documents": config_of(folder, name="jsonl", path=lines, layout="packed", **long),
        "chats": config_of(folder, name="jsonl", path=str(folder / "chat.jsonl"), **long),
        "hf": config_of(folder, **hf),
        "hf, a split held out": config_of(folder, eval_split="test", **hf),
        "memmap": config_of(folder, name="memmap", path=str(folder / "train.bin"), tokenizer=None),
    }


def test_every_source_goes_on_with_the_very_batches(tokenizer: str, tmp_path: pathlib.Path) -> None:
    """A batch is a function of the step: whoever reads anew, with or without the cache, has those of the run that was killed."""
    for name, config in sources(tmp_path, tokenizer).items():
        data = make_data(config, 3)
        expected = batches(data)
        again = make_data(config, 3)
        assert batches(again, range(5, 12)) == expected[5:], name
        assert again.fingerprint == data.fingerprint
        elsewhere = make_data(dataclasses.replace(config, cache_dir=str(tmp_path / "elsewhere")), 3)
        assert elsewhere.fingerprint == data.fingerprint, name
        assert batches(elsewhere, [7]) == expected[7:8], name
        assert batches(make_data(config, 4)) != expected, name
        assert data.vocabulary_size == {"memmap": 500, "jsonl as bytes": 256}.get(name, 360)
        assert len(data.heldout) > 0, name


def test_a_split_that_is_not_there(tokenizer: str, tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(sources(tmp_path, tokenizer)["hf"], split="tst")
    with pytest.raises(ValueError, match=r"data\.split=tst: .* has the splits train, test; did you mean 'test'\?"):
        make_data(config, 0)


def test_ids_of_a_bin_file(tmp_path: pathlib.Path) -> None:
    np.arange(400, dtype=np.uint32).tofile(tmp_path / "train.bin")
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "val.bin")
    paths = {"path": str(tmp_path / "train.bin"), "eval_path": str(tmp_path / "val.bin")}
    config = config_of(tmp_path, name="memmap", item_type="uint32", **paths)
    data = make_data(dataclasses.replace(config, tokenizer=None), 0)
    assert data.vocabulary_size == 400
    assert num_counted(data.heldout) == 96
    inputs, targets = data.train.batch(0)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    with pytest.raises(ValueError, match=r"it holds the token 399, and data\.tokenizer=byte has 256"):
        make_data(config, 0)


# Made once ----------------------------------------------------------------------------------------------------------------


def test_what_is_cached_is_not_tokenized_again(
    tokenizer: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lines_of(tmp_path, tokenizer=tokenizer)
    expected = batches(make_data(config, 0))
    with monkeypatch.context() as patched:
        patched.setattr(tokenizing, "PartWriter", lambda *_, **__: pytest.fail("tokenized again"))
        assert batches(make_data(config, 0)) == expected
        assert make_data(dataclasses.replace(config, sequence_length=8), 0).train.samples_per_epoch > 0
    changed = save_tokenizer(tmp_path / "other", template=None)
    other = dataclasses.replace(config, tokenizer=str(changed))
    assert make_data(other, 0).fingerprint != make_data(config, 0).fingerprint
    write_lines(tmp_path / "a.jsonl", LINES[:-1])
    assert batches(make_data(config, 0)) != expected


MAKER = """
import json, sys
from pipetrain.config.records import DataConfig
from pipetrain.data.dataset import make_data
print(make_data(DataConfig(**json.loads(sys.argv[1])), 0).fingerprint)
"""


@pytest.mark.slow
def test_processes_that_make_the_same_at_once(tmp_path: pathlib.Path) -> None:
    config = lines_of(tmp_path, LINES * 50)
    command = [sys.executable, "-c", MAKER, json.dumps(vars(config))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert said == {make_data(config, 0).fingerprint + "\n"}
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == ["", ".lock"]


def test_one_that_does_not_come_on_is_named(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "tokens"
    with (tmp_path / "tokens.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 4711 on node7")
        lock.flush()
        with pytest.raises(ValueError, match=r"process 4711 on node7, which has not come on for 0 s"):
            made_once(folder, lambda *_: pytest.fail("made"), timeout_seconds=0.3)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Two might write one draft: it is refused."""

    def no_lock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    config = lines_of(tmp_path)
    with pytest.raises(ValueError, match=rf"tokens cannot be kept there \({os.strerror(error)}\); choose another"):
        make_data(config, 0)


def test_what_a_killed_process_left_is_removed(tmp_path: pathlib.Path) -> None:
    """Its lock ended with it."""

    def make(draft: pathlib.Path) -> None:
        (draft / "tokens.json").write_text("{}")

    left = tmp_path / "tokens.draft" / "train"
    left.mkdir(parents=True)
    made_once(tmp_path / "tokens", make, timeout_seconds=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["tokens", "tokens.json", "tokens.lock"]


def test_what_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Hello"}\n{"text": "broken\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: it is not valid JSON"):
        make_data(config_of(tmp_path, name="jsonl", path=str(path)), 0)
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_folder_that_may_not_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    config = lines_of(tmp_path, cache_dir=str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*file: tokens cannot be kept there \(.*\); choose another"):
        make_data(config, 0)


def test_a_folder_of_tokens_that_was_cut(tmp_path: pathlib.Path) -> None:
    config = lines_of(tmp_path)
    make_data(config, 0)
    (tokens,) = (tmp_path / "cache").glob("*/train/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"tokens\.bin cannot be read \(it has \d+ bytes, not \d+\); make it again: pipetrain tokenize"
    ):
        make_data(config, 0)


# The command --------------------------------------------------------------------------------------------------------------


def test_tokenize_and_read_the_folder(
    tokenizer: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_lines(tmp_path / "a.jsonl"), tmp_path / "tokens"
    keys = [f"data.cache_dir={tmp_path / 'cache'}", f"data.tokenizer={tokenizer}", "data.sequence_length=16"]
    assert main(["tokenize", path, *keys, f"--out={out}"]) == 0
    told = capsys.readouterr()
    assert told.out == f"tokens: {out}\n"
    assert re.search(r"pipetrain: 36 documents of [\d,]+ tokens; held out: 4 of", told.err)
    config = config_of(tmp_path, name="jsonl", path=path, tokenizer=tokenizer)
    of_folder = dataclasses.replace(config, name="memmap", path=str(out))
    assert batches(make_data(of_folder, 0)) == batches(make_data(config, 0))
    other = save_tokenizer(tmp_path / "other", template=None)
    with pytest.raises(ValueError, match=r"or has changed since \(its SHA-256 is .*tokenize again"):
        make_data(dataclasses.replace(of_folder, tokenizer=str(other)), 0)


def test_tokenize_ahead_is_what_train_finds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*LINES, "x" * 300])
    assert main(["tokenize", path, f"data.cache_dir={tmp_path / 'cache'}", "data.sequence_length=16"]) == 0
    monkeypatch.setattr(tokenizing, "PartWriter", lambda *_, **__: pytest.fail("tokenized again"))
    make_data(config_of(tmp_path, name="jsonl", path=path), 0)
    told = capsys.readouterr()
    assert told.out.startswith(f"tokens: {tmp_path / 'cache'}/")
    assert "pipetrain: 37 documents of" in told.err


# What is not installed ----------------------------------------------------------------------------------------------------


def test_what_is_not_installed(tokenizer: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(tmp_path, tokenizer=tokenizer)
    rows = config_of(tmp_path, name="hf", path=str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for config, missing in ((lines, "transformers"), (rows, "datasets")):
        with pytest.raises(ValueError, match=rf"{missing} is not installed; pip install \"pipetrain\[hf\]\" brings it"):
            check_data(config)


@pytest.mark.slow
def test_nothing_of_transformers_is_loaded_to_train_on_what_is_cached(tokenizer: str, tmp_path: pathlib.Path) -> None:
    """It takes seconds, in each rank."""
    config = lines_of(tmp_path, tokenizer=tokenizer)
    make_data(config, 0)
    code = MAKER + "assert not {'transformers', 'tokenizers', 'datasets', 'huggingface_hub'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(vars(config))], check=False, timeout=120)
    assert done.returncode == 0
