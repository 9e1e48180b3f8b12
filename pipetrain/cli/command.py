"""A subcommand, the options that several subcommands share, and how they print their results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipetrain.launcher.outcome import Exit

Parser = argparse.ArgumentParser
Arguments = argparse.Namespace
STDOUT = "-"
_OVERRIDES = "a key, as in steps=50 recompute.mode=inline (docs/KEYS.md lists all); or a group by name, as in data=text model=gpt2"


@dataclass(frozen=True)
class Command:
    """A subcommand: its options, and the function that runs it and returns the exit code."""

    add_arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int]


def add_overrides(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="print only JSON to stdout; --json=FILE writes it to FILE")


def add_run(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")


def present(arguments: Arguments, text: Callable[[], str], values: Callable[[], object]) -> None:
    """Prints the result of a command: as JSON if `--json` is given, and as text (unless it is empty) if stdout has no JSON.

    Raises:
        ValueError: the file for JSON cannot be written.
    """
    if arguments.json is not None:
        written = json.dumps(values(), indent=2) + "\n"
        if arguments.json == STDOUT:
            sys.stdout.write(written)
            return
        try:
            Path(arguments.json).write_text(written)
        except OSError as error:
            raise ValueError(f"{arguments.json}: cannot be written ({error.strerror})") from error
    if words := text():
        print(words, flush=True)


def say(text: str) -> None:
    """A line for the user, on stderr."""
    print(f"pipetrain: {text}", file=sys.stderr, flush=True)


def refuse(message: str, code: Exit = Exit.WRONG_INPUT) -> int:
    """Prints the reason in one line on stderr; returns the exit code."""
    say(message)
    return code
