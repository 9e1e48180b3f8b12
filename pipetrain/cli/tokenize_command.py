"""`pipetrain tokenize`: writes a corpus as token ids before training, on all cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipetrain.cli.main import Arguments, Parser, add_overrides, say
from pipetrain.config.load import load_config
from pipetrain.config.records import PYTHON, RunConfig
from pipetrain.config.terminal import printable
from pipetrain.launcher.outcome import Exit

_SECONDS_BETWEEN_LINES = 5.0


def add_arguments(parser: Parser) -> None:
    parser.add_argument("path", metavar="PATH", help="the corpus: data.path of the later run")
    add_overrides(parser)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="write the tokens to FOLDER, for data=memmap data.path=FOLDER (default: to the cache, in which `train` finds them)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing: compare the tokens of PATH, or PATH itself, with their checksums",
    )


def run(arguments: Arguments) -> int:
    path = Path(arguments.path)
    if not any(override.startswith("data=") for override in arguments.overrides):
        # The source that can read the corpus, by the names of its files.
        is_set = path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        has_lines = ".jsonl" in path.suffixes or (path.is_dir() and next(path.rglob("*.jsonl*"), None) is not None)
        arguments.overrides.insert(0, f"data={'hf' if is_set else 'jsonl' if has_lines else 'text'}")
    config = load_config(arguments.overrides)
    data = replace(config.data, path=arguments.path)
    from pipetrain.data.dataset import check_data, make_tokenizer
    from pipetrain.data.token_file import read_sheet
    from pipetrain.data.tokenizing import corpus_of, folder_in_cache, is_cached, is_whole, tokenized

    if arguments.check and is_whole(path):
        return _checked(path)
    out = None if arguments.out is None else Path(arguments.out).expanduser()
    check_data(data, config.model.path)
    tokenizer = make_tokenizer(data, config.model.path)
    if tokenizer is None or (out is None and not is_cached(data, tokenizer)):
        raise ValueError(
            f"{arguments.path}: bytes and token ids are read as they are and not cached; set a tokenizer, "
            "data.tokenizer=FOLDER_OR_NAME, or a folder for the tokens, --out=FOLDER"
        )
    if arguments.check:
        if out is not None or not is_whole(found := folder_in_cache(data, corpus_of(data, tokenizer), tokenizer)):
            raise ValueError(
                f"{arguments.path}: --check finds no tokens of it in the cache; give a folder of tokens, or the keys of the run"
            )
        return _checked(found)
    if out is not None and out.exists():
        what = "tokens" if is_whole(out) else "something"
        raise ValueError(f"--out={arguments.out}: there is {what} already; remove it, or give another folder")
    folder = tokenized(data, tokenizer, out=out, timeout_seconds=config.timeout_seconds, tell=_progress(config))
    sheet = read_sheet(folder)
    train, heldout = sheet.parts["train"], sheet.parts["heldout"]
    counted = f", {train.counted:,} of them count" if sheet.is_chat else ""
    skipped = f"; {sheet.num_skipped:,} were skipped, the first: {sheet.first_problem}" if sheet.num_skipped else ""
    say(
        f"{train.documents:,} documents of {train.tokens:,} tokens{counted}; held out: {heldout.documents:,} of "
        f"{heldout.tokens:,}{skipped}"
    )
    print(f"tokens: {printable(str(folder))}")
    return Exit.DONE


def _checked(folder: Path) -> int:
    from pipetrain.data.token_file import check_tokens

    check_tokens(folder)
    say("the tokens are those that were written")
    print(f"tokens: {printable(str(folder))}")
    return Exit.DONE


def tokenize_ahead(config: RunConfig) -> None:
    """Tokenizes for a run that starts on this machine, before its ranks start: with a progress bar, and with one message for a mistake.

    Raises:
        ValueError: there are no tokens, or a document cannot be a sample.
    """
    from pipetrain.data.dataset import make_data, make_tokenizer
    from pipetrain.data.tokenizing import is_cached

    data, own = config.data, config.model.path
    if data.name == PYTHON:
        return
    if data.name != "memmap" and not is_cached(data, make_tokenizer(data, own)):
        return
    wait = config.timeout_seconds
    make_data(data, config.seed, own_tokenizer=own, timeout_seconds=wait, tell=_progress(config))


def _progress(config: RunConfig) -> Callable[[float], None]:
    """What is to be told which share is done: says so in a line every few seconds, and nothing of what takes less."""
    said_at = time.monotonic()

    def tell(share: float) -> None:
        nonlocal said_at
        if config.observe.progress and time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            say(f"tokenizing: {share:.0%}")

    return tell
