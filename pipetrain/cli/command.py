"""What a subcommand is, and the options that several of them have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pipetrain.launcher.outcome import Exit

Parser = argparse.ArgumentParser
Arguments = argparse.Namespace
_OVERRIDES = "KEY=VALUE, as in steps=50 recompute.mode=inline; or a group by name, as in data=text model=gpt2"


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in the help, its options, and what it does (the exit code is what it returns)."""

    help: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int]


def add_overrides(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="JSON to stdout, and nothing else there; --json=FILE writes it")


def refuse(message: str, code: Exit = Exit.WRONG_INPUT) -> int:
    """Says why in one line on stderr; returns the exit code."""
    print(f"pipetrain: {message}", file=sys.stderr)
    return code
