"""The `pipetrain` command: what a subcommand is and says, which one is meant, and what is said where it fails.

Each subcommand has a file of its own, loaded when it is meant, and loads torch when it runs, so that the light ones stay fast.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipetrain.config.renamed import current_overrides
from pipetrain.launcher.outcome import Exit

Parser = argparse.ArgumentParser
Arguments = argparse.Namespace
STDOUT = "-"
_OVERRIDES = "KEY=VALUE, as in steps=50 recompute.mode=inline; or a group by name, as in data=text model=gpt2"


@dataclass(frozen=True)
class Command:
    """A subcommand: its options, and what it does (the exit code is what it returns)."""

    add_arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int]


def add_overrides(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="JSON to stdout, and nothing else there; --json=FILE writes it")


def add_run(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")


def present(arguments: Arguments, text: Callable[[], str], values: Callable[[], object]) -> None:
    """What a command found: as text (empty: there is none), unless JSON goes to stdout, and as JSON where that is asked for.

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
    """Says why in one line on stderr; returns the exit code."""
    say(message)
    return code


# Which subcommand is meant -------------------------------------------------------------------------------------------

COMMANDS = {
    "train": "train a model over pipeline stages",
    "show": "draw a schedule and say what it costs",
    "profile": "measure what each layer takes and holds, and what is worth keeping",
    "report": "what a run did, and what it was predicted to do; or several runs compared",
    "verify": "compare every schedule and mode with one process, bit for bit",
    "generate": "text from a trained model",
    "export": "a trained Hugging Face model as a folder of transformers",
    "tokenize": "a corpus as token ids on disk, ahead of training",
}
_BENCH, _BENCH_HELP = "bench", "comparisons with other systems, measured on this machine"  # has options of its own
_MANY_OBJECTS = 10_000  # that Python makes before it looks for cycles among the newest, in place of 700


def command() -> int:
    """`pipetrain ARGV` as a process of its own, which has nothing else to do: it starts and ends a third sooner.

    Loading torch makes some 400,000 objects that all stay; the collector would look through them again and again, and once more at the end.
    """
    gc.set_threshold(_MANY_OBJECTS)
    code = main()
    gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pipetrain ARGV` and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        helps = COMMANDS if _find_benchmarks() is None else {**COMMANDS, _BENCH: _BENCH_HELP}
        lines = [f"  {name:<{max(map(len, helps))}}  {text}" for name, text in helps.items()]
        print("\n".join(["usage: pipetrain COMMAND ...", "", *lines, "", "pipetrain COMMAND --help says more."]))
        return Exit.DONE if words else Exit.WRONG_INPUT
    if words[0] == _BENCH and (benchmarks := _find_benchmarks()) is not None:
        return _run_benchmarks(benchmarks, words[1:])
    if words[0] not in COMMANDS:
        return refuse(f"{words[0]}: there is no such command; there are {', '.join(COMMANDS)}")
    command: Command = importlib.import_module(f"pipetrain.cli.{words[0]}_command").COMMAND
    parser = Parser(prog=f"pipetrain {words[0]}", description=COMMANDS[words[0]], allow_abbrev=False)
    command.add_arguments(parser)
    # `--json` alone must not take the override behind it for its file
    arguments = parser.parse_intermixed_args([f"--json={STDOUT}" if word == "--json" else word for word in words[1:]])
    if given := getattr(arguments, "overrides", None):
        arguments.overrides = current_overrides(given, say)
    try:
        return command.run(arguments)
    except ValueError as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return refuse("interrupted", Exit.FAILED)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return Exit.DONE


def _find_benchmarks() -> Path | None:
    """The folder of the benchmarks: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "benchmarks", package.parent / "benchmarks")
    return next((folder for folder in folders if (folder / "command.py").is_file()), None)


def _run_benchmarks(folder: Path, words: Sequence[str]) -> int:
    """`pipetrain bench WORDS`; returns the exit code."""
    if folder.parent.name == "pipetrain":
        module = importlib.import_module("pipetrain.benchmarks.command")
    else:
        sys.path.insert(0, str(folder.parent))
        module = importlib.import_module("benchmarks.command")
    code: int = module.main(words)
    return code
