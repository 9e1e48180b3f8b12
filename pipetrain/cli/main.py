"""The `pipetrain` command: which subcommand runs, how its result is printed, the help on keys, and one line if it fails.

Each subcommand is a file with `add_arguments` and `run`, which returns the exit code; it is loaded only when it is called. It loads torch only when it runs, so that the other commands start fast.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path

from pipetrain import __version__
from pipetrain.config.read_files import shipped
from pipetrain.config.renamed import current_overrides
from pipetrain.config.terminal import printable
from pipetrain.config.terminal import say as say
from pipetrain.launcher.outcome import Exit, out_of_memory

Parser = argparse.ArgumentParser
Arguments = argparse.Namespace
STDOUT = "-"
OWN_FILE = "pipetrain.yaml"  # of the current folder: a project's own configuration, which `pipetrain new` writes
_MOST_TOLD = 300  # characters of an unforeseen error
_OVERRIDES = "a key, as in steps=50 recompute.mode=inline (docs/KEYS.md lists all); or a group by name, as in data=text model=gpt2"


def add_overrides(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own configuration files and groups")
    parser.add_argument("--config-name", metavar="NAME", help="the file to begin with (default: config)")
    parser.add_argument("--cfg", choices=("job", "hydra", "all"), help="print the configuration and do nothing")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: with interpolations replaced")
    parser.add_argument("--help-keys", action="store_true", help="list all keys")


def add_own(parser: Parser) -> None:
    """A model and data by MODULE:FUNCTION, in place of `model=python model.target=...`."""
    parser.add_argument(
        "--data", metavar="MODULE:FUNCTION", help="your dataset: data=python data.target=MODULE:FUNCTION"
    )


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="print only JSON to stdout; --json=FILE writes it to FILE")


def add_run(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")


def present(
    arguments: Arguments, text: Callable[[], str], values: Callable[[], object], *, coloured: bool = False
) -> None:
    """Prints the result of a command: as JSON if `--json` is given, and as text (unless it is empty) if stdout has no JSON.

    `coloured`: the text has codes of a terminal, and nothing of a file.

    Raises:
        ValueError: the file for JSON cannot be written.
    """
    if arguments.json is not None:
        written = json.dumps(values(), indent=2) + "\n"
        if arguments.json == STDOUT:
            sys.stdout.write(written)
            return
        with writing(arguments.json):
            Path(arguments.json).write_text(written)
    if words := text():
        print(words if coloured else printable(words), flush=True)


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """While the block writes `what`, a file or an option with its file. Raises ValueError: it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what}: cannot be written ({error.strerror or error})") from error


def ending_of(out: Path, endings: Collection[str]) -> str:
    """The one of `endings` that the file `out` has. Raises ValueError: it has none of them."""
    found = next((ending for ending in endings if out.name.endswith(ending)), None)
    if found is None:
        raise ValueError(f"--out={out}: {out.suffix or 'no ending'} is unknown; allowed are {', '.join(endings)}")
    return found


def refuse(message: str, code: Exit = Exit.WRONG_INPUT) -> int:
    """Prints the reason in one line on stderr; returns the exit code."""
    say(message)
    return code


# Which subcommand is meant -------------------------------------------------------------------------------------------

COMMANDS = {
    "train": "train a model over pipeline stages",
    "show": "draw a schedule and its cost, without running it",
    "new": "write a small project with a model and data of your own",
    "profile": "measure time and memory of each layer, and list outputs that are worth keeping",
    "plan": "find the fastest way to train within a memory budget per device",
    "watch": "serve the page of a run on this machine, while the run goes on",
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
    # Not at all for a drawing, whose millions of objects are no garbage.
    gc.set_threshold(0 if sys.argv[1:2] == ["show"] else _MANY_OBJECTS)
    code = main()
    gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pipetrain ARGV` and returns the exit code. Whatever fails is said in one line."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return refuse("interrupted", Exit.FAILED)
    except BrokenPipeError:  # the reader of our output has closed the pipe
        sys.stderr.close()
        return Exit.DONE
    except Exception as error:
        return refuse(out_of_memory(error) or _unforeseen(error), Exit.FAILED)


def _run(words: Sequence[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"pipetrain {__version__}")
        return Exit.DONE
    if not words or words[0] in ("-h", "--help"):
        helps = COMMANDS if _benchmarks() is None else {**COMMANDS, _BENCH: _BENCH_HELP}
        lines = [f"  {name:<{max(map(len, helps))}}  {text}" for name, text in helps.items()]
        print("\n".join(["usage: pipetrain COMMAND ...", "", *lines, "", "pipetrain COMMAND --help says more."]))
        return Exit.DONE if words else Exit.WRONG_INPUT
    if words[0] == _BENCH and (benchmarks := _benchmarks()) is not None:
        ended: int = importlib.import_module(benchmarks).main(words[1:])
        return ended
    if words[0] not in COMMANDS:
        return refuse(f"{words[0]}: there is no such command; there are {', '.join(COMMANDS)}")
    command = importlib.import_module(f"pipetrain.cli.{words[0]}_command")
    parser = Parser(prog=f"pipetrain {words[0]}", description=COMMANDS[words[0]], allow_abbrev=False)
    command.add_arguments(parser)
    parser.add_argument("--version", action="version", version=f"pipetrain {__version__}")
    if words[0] == "train" and {"-h", "--help"} & set(words):
        parser.epilog, parser.formatter_class = few_keys(), argparse.RawDescriptionHelpFormatter
    # `--json` alone must not take the next override as its file
    arguments = parser.parse_intermixed_args([f"--json={STDOUT}" if word == "--json" else word for word in words[1:]])
    if hasattr(arguments, "overrides"):
        arguments.overrides = all_overrides(arguments)
        if (told := _told_instead(arguments)) is not None:
            print(told, end="")
            return Exit.DONE
    code: int = command.run(arguments)
    return code


def _unforeseen(error: Exception) -> str:
    """The line for an error that no message was written for. The traceback goes to a file of the user's alone."""
    what = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:_MOST_TOLD]}"
    try:
        descriptor, path = tempfile.mkstemp(prefix="pipetrain-error-", suffix=".txt", text=True)
        with os.fdopen(descriptor, "w", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
    except OSError as problem:
        return (
            f"{what}; this should not happen, and its traceback cannot be kept ({problem.strerror}): please report it"
        )
    return f"{what}; this should not happen: please report it with {path}"


def all_overrides(arguments: Arguments) -> list[str]:
    """What was typed, as overrides alone, with the user's own files in front.

    Raises:
        ValueError: `--config-dir` is no folder.
    """
    words = current_overrides(arguments.overrides, say)
    if hasattr(arguments, "data"):
        is_target = [bool(re.fullmatch(r"\w+(\.\w+)*[:.]\w+", word)) for word in words]
        own = [["model=python", f"model.target={word}"] if found else [word] for word, found in zip(words, is_target)]
        words = [word for group in own for word in group]
        if arguments.data is not None:
            words += ["data=python", f"data.target={arguments.data}"]
    folder, name = arguments.config_dir, arguments.config_name
    if folder is None and name is None and Path(OWN_FILE).is_file():
        folder, name = ".", OWN_FILE
        say(f"{OWN_FILE} of this folder is used")
    source = [("--config-dir", folder and Path(folder).resolve()), ("--config-name", name)]
    return [*(f"{option}={value}" for option, value in source if value is not None), *words]


def _told_instead(arguments: Arguments) -> str | None:
    """What `--help-keys` or `--cfg` asks for, in place of what the command does; None: neither."""
    if arguments.help_keys:
        return all_keys()
    if arguments.cfg is not None:
        from pipetrain.config.load import composed_yaml

        return composed_yaml(arguments.overrides, arguments.cfg, resolve=arguments.resolve)
    return None


def _benchmarks() -> str | None:
    """The module of the benchmarks, which can be imported then; None: there is none."""
    folder = shipped("benchmarks")
    if not (folder / "command.py").is_file():
        return None
    if (folder.parent / "cli").is_dir():  # in our package, and not beside it
        return "pipetrain.benchmarks.command"
    sys.path.insert(0, str(folder.parent))
    return "benchmarks.command"


# The keys, for the terminal -------------------------------------------------------------------------------------------

_MOST_CHANGED = {
    "": ("steps", "epochs", "seed", "precision", "run_dir", "resume"),
    "model.": ("target", "path"),
    "data.": ("path", "target", "global_batch_size", "sequence_length"),
    "pipeline.": ("num_stages", "num_microbatches", "schedule", "balance"),
    "recompute.": ("mode", "sets"),
    "parallel.": ("num_replicas",),
    "optim.": ("learning_rate",),
    "snapshot.": ("every_steps",),
}  # keys, by the start of their names
_WIDTH = 116  # of a line


def sentences(record: type) -> dict[str, str]:
    """The comment of each field of a record."""
    source = inspect.getsource(record)
    lines = source.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            comments = [line.partition("# ")[2] for line in lines[first : node.end_lineno] if "# " in line]
            found[node.target.id] = " ".join(comments).strip()
    return found


def few_keys() -> str:
    """The groups with their choices, and the keys that people change most."""
    from pipetrain.config.load import choices

    rows_of_keys = [_row_of(f"{group}{name}") for group, names in _MOST_CHANGED.items() for name in names]
    rows = [("groups", "")]
    rows += [(f"  {group}=", ", ".join(names)) for group, names in choices().items()]
    rows += [("keys (--help-keys lists all)", ""), *rows_of_keys]
    return _in_columns(rows)


def all_keys() -> str:
    """All keys, each with its sentence."""
    from pipetrain.config.schema import keys

    return _in_columns([_row_of(path) for path, kind in keys().items() if not is_dataclass(kind)])


def _row_of(path: str) -> tuple[str, str]:
    from pipetrain.config.records import RunConfig
    from pipetrain.config.schema import keys

    *groups, name = path.split(".")
    record = functools.reduce(lambda above, group: keys(above)[group], groups, RunConfig)
    return f"  {path}", sentences(record)[name].replace("None:", "null:")


def _in_columns(rows: list[tuple[str, str]]) -> str:
    most = max(len(left) for left, right in rows if right) + 2
    texts = []
    for left, right in rows:
        first, *rest = textwrap.wrap(right, _WIDTH - most) or [""]
        texts += [f"{left:<{most}}{first}".rstrip(), *(" " * most + line for line in rest)]
    return "\n".join(texts) + "\n"
