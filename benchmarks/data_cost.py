"""What data costs: tokenizing beside the tokenizer alone, and batches beside a step of the quickstart.

    python -m benchmarks.data_cost [--rounds=5] [--megabytes=16] [--json=FILE]

The text is the standard library's. The tokenizer (byte-level BPE, 8000 tokens) is trained here, on a part of it. Tokenizing is from a JSON-lines
file to a folder of the cache, all of it: reading, parsing, tokens, writing; beside it `encode_batch_fast` of tokenizers gets the same texts,
in batches of the same size, and what it returns is dropped. Both use all cores, in turns. A batch has the quickstart's size,
16 samples of 256 tokens; a step is the median that a quickstart of 30 steps on this machine reports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipetrain.config.records import DataConfig
from pipetrain.data.corpus import find_files
from pipetrain.data.dataset import make_data, make_tokenizer
from pipetrain.data.tokenizer import HfTokenizer
from pipetrain.data.tokenizing import BATCH_DOCUMENTS, tokenized

LINES_PER_DOCUMENT = 40
NUM_STEPS = 200
QUICKSTART = ("experiment=quickstart", "steps=30", "observe.progress=false")


@dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    date: str
    machine: str
    text_bytes: int
    tokenized_seconds: list[float]
    alone_seconds: list[float]  # of encode_batch_fast
    step_seconds: float  # of the quickstart
    batch_seconds: dict[str, float]  # medians

    def as_text(self) -> str:
        speed = statistics.median(map(lambda a, b: a / b, self.alone_seconds, self.tokenized_seconds))
        rows = [
            f"{name:28} {seconds * 1e3:8.3f} ms  {seconds / self.step_seconds:8.3%}"
            for name, seconds in self.batch_seconds.items()
        ]
        megabytes, seconds = self.text_bytes / 1e6, statistics.median(self.tokenized_seconds)
        tokenizing = (
            f"tokenizing {megabytes:.1f} MB: {speed:.2f} x the speed of encode_batch_fast (median of "
            f"{len(self.alone_seconds)}), {megabytes / seconds:.2f} MB/s"
        )
        return "\n".join([tokenizing, f"a batch, and its share of a step of {self.step_seconds * 1e3:.0f} ms", *rows])


def texts_of_stdlib(most_bytes: int) -> list[str]:
    """Documents of some lines each."""
    texts, size = [], 0
    for file in find_files(DataConfig(pattern="**/*.py")):
        lines = file.read_text(errors="replace").splitlines(keepends=True)
        for first in range(0, len(lines), LINES_PER_DOCUMENT):
            texts.append("".join(lines[first : first + LINES_PER_DOCUMENT]))
            size += len(texts[-1])
            if size > most_bytes:
                return texts
    return texts


def save_trained_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def tokenizing_seconds(config: DataConfig, texts: Sequence[str], rounds: int) -> tuple[list[float], list[float]]:
    """Of the whole way, and of the tokenizer alone, in turns."""
    tokenizer = make_tokenizer(config)
    assert isinstance(tokenizer, HfTokenizer)
    assert config.cache_dir is not None, "it is removed before each round"
    cache = Path(config.cache_dir)

    def alone() -> None:
        for first in range(0, len(texts), BATCH_DOCUMENTS):
            tokenizer.backend.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS], add_special_tokens=False)

    alone()
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(seconds_of(alone))
        shutil.rmtree(cache, ignore_errors=True)
        ours.append(seconds_of(lambda: tokenized(config, tokenizer)))
    return ours, theirs


def batch_seconds(configs: dict[str, DataConfig]) -> dict[str, float]:
    """The median time of a batch of each source, over the first steps."""
    found = {}
    for name, config in configs.items():
        batches = make_data(config, 0).train
        batches.batch(0)
        found[name] = statistics.median(seconds_of(partial(batches.batch, step)) for step in range(1, NUM_STEPS + 1))
    return found


def quickstart_step_seconds(folder: Path) -> float:
    """The median step of the quickstart."""
    command = [sys.executable, "-m", "pipetrain.cli", "train", *QUICKSTART, f"run_dir={folder / 'run'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return float(report["step_seconds_measured"])


def measure(folder: Path, rounds: int, megabytes: float) -> Result:
    texts = texts_of_stdlib(int(megabytes * 1e6))
    save_trained_tokenizer(folder / "tokenizer", texts[::8])
    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (np.arange(5_000_000) % 8000).astype(np.uint16).tofile(folder / "train.bin")
    config = DataConfig(
        name="jsonl", path=str(lines), tokenizer=str(folder / "tokenizer"), cache_dir=str(folder / "cache")
    )
    short = folder / "short.jsonl"
    short.write_text("".join(json.dumps({"text": text[:300]}) + "\n" for text in texts))
    documents = {**vars(config), "path": str(short), "on_error": "skip"}
    ours, theirs = tokenizing_seconds(config, texts, rounds)
    return Result(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        text_bytes=sum(len(text.encode()) for text in texts),
        tokenized_seconds=ours,
        alone_seconds=theirs,
        step_seconds=quickstart_step_seconds(folder),
        batch_seconds=batch_seconds(
            {
                "the quickstart's bytes": DataConfig(pattern="**/*.py"),
                "memmap (.bin)": DataConfig(name="memmap", path=str(folder / "train.bin"), tokenizer=None),
                "the cache, stream": config,
                "the cache, packed": DataConfig(**{**documents, "layout": "packed"}),
                "the cache, padded": DataConfig(**{**documents, "layout": "padded"}),
            }
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What data costs.")
    parser.add_argument("--rounds", type=int, default=5, help="of tokenizing (default: 5)")
    parser.add_argument("--megabytes", type=float, default=16, help="of text (default: 16)")
    parser.add_argument("--json", metavar="FILE", help="all figures as JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pipetrain-data-") as folder:
        result = measure(Path(folder), given.rounds, given.megabytes)
    print(result.as_text())
    if given.json is not None:
        Path(given.json).write_text(json.dumps(asdict(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
