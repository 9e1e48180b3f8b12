"""Tokens on disk that somebody has changed: `--check` finds each one, and no token outside of the vocabulary reaches a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import save_tokenizer

from pipetrain.cli.main import main
from pipetrain.config.records import DataConfig
from pipetrain.data.dataset import make_data, make_tokenizer
from pipetrain.data.token_file import TRAIN
from pipetrain.data.tokenizing import tokenized

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes." * (1 + n % 5)}]}
    for n in range(40)
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A corpus, as `tokenize` is given it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    tokenizer = save_tokenizer(folder / "tokenizer")
    return [str(folder / "a.jsonl"), f"data.tokenizer={tokenizer}", f"data.cache_dir={folder / 'cache'}"]


def config_of(words: list[str], **fields: object) -> DataConfig:
    values = dict(word.removeprefix("data.").split("=", 1) for word in words[1:])
    return DataConfig(name="jsonl", path=words[0], global_batch_size=2, sequence_length=128, **{**values, **fields})


def made(words: list[str], **fields: object) -> Path:
    config = config_of(words, **fields)
    tokenizer = make_tokenizer(config)
    assert tokenizer is not None
    return tokenized(config, tokenizer)


def change(path: Path, kind: type, value: int) -> None:
    np.memmap(path, kind, "r+")[3] = value


@pytest.mark.parametrize("name", ["tokens", "ends", "counted"])
def test_check_finds_a_change(name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [*words[:2], f"data.cache_dir={tmp_path}"]
    folder = made(own)
    for given in (own, [str(folder)]):
        assert main(["tokenize", *given, "--check"]) == 0
        assert capsys.readouterr().out == f"tokens: {folder}\n"
    path = folder / TRAIN / f"{name}.bin"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    for given in (own, [str(folder)]):
        assert main(["tokenize", *given, "--check"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"pipetrain: {folder / TRAIN}: its tokens have changed since they were written; make it")


def test_check_needs_tokens(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", *words[:2], f"data.cache_dir={tmp_path}", "--check"]) == 2
    assert "--check finds no tokens of it in the cache" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_token_outside_of_the_vocabulary_ends_the_step(words: list[str], tmp_path: Path) -> None:
    config = config_of(words, cache_dir=str(tmp_path))
    data = make_data(config, seed=0)
    change(made(words, cache_dir=str(tmp_path)) / TRAIN / "tokens.bin", np.uint16, 60_000)
    told = (
        rf"data\.path={words[0]}: a sample holds the token 60000, and there are \d+: .* pipetrain tokenize PATH --check"
    )
    with pytest.raises(ValueError, match=told):
        list(map(data.train.batch, range(40)))


@pytest.mark.parametrize("value", [-5, 10**9])
def test_damaged_ends_make_no_samples(value: int, words: list[str], tmp_path: Path) -> None:
    folder = made(words, cache_dir=str(tmp_path))
    ends = np.memmap(folder / TRAIN / "ends.bin", np.int64, "r+")
    ends[-1] = value
    ends.flush()
    with pytest.raises(ValueError, match="the ends of its documents are damaged; tokenize it again"):
        make_data(config_of(words, cache_dir=str(tmp_path)), seed=0)
