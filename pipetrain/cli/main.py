"""The `pipetrain` command: finds the subcommand, runs it, and prints one line if it fails.

Each subcommand is a file, which is loaded only when it is called. It loads torch only when it runs, so that the other commands start fast.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pipetrain.cli.command import STDOUT, Command, Parser, refuse, say
from pipetrain.config.renamed import current_overrides
from pipetrain.launcher.outcome import Exit

COMMANDS = {
    "train": "train a model over pipeline stages",
    "show": "draw a schedule and its cost, without running it",
    "profile": "measure time and memory of each layer, and list outputs that are worth keeping",
    "report": "print what a run did, measured and predicted; or compare several runs",
    "verify": "compare every schedule and mode with one process, bit for bit",
    "generate": "generate text with a trained model",
    "export": "write a trained Hugging Face model as a folder for from_pretrained",
    "tokenize": "write a corpus as token ids to disk, before training",
}
_BENCH, _BENCH_HELP = "bench", "measure this machine against other systems"  # has its own options
_MANY_OBJECTS = 10_000  # new objects before Python's next garbage collection, in place of 700


def command() -> int:
    """`pipetrain ARGV` in a process that does nothing else: starting and ending then take a third less time.

    Loading torch makes some 400,000 objects that stay. Without this the garbage collector would search them many times.
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
    # `--json` alone must not take the next override as its file
    arguments = parser.parse_intermixed_args([f"--json={STDOUT}" if word == "--json" else word for word in words[1:]])
    if given := getattr(arguments, "overrides", None):
        arguments.overrides = current_overrides(given, say)
    try:
        return command.run(arguments)
    except ValueError as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return refuse("interrupted", Exit.FAILED)
    except BrokenPipeError:  # the reader of our output has closed the pipe
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
