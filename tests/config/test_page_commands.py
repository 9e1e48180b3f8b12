"""Every command of README and the pages parses: its options, its keys with their values, and whether they fit together."""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipetrain.cli.main import COMMANDS, Parser, all_overrides
from pipetrain.cli.multirun import expand
from pipetrain.config.load import load_config
from pipetrain.config.together import check_run, check_schedule

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands that a page shows as a mistake, or with a part left out; and Hydra's own keys, which Hydra checks.
NOT_WHOLE = (
    "recompute.mod=",
    "NAME",
    "COMMAND",
    "FUNCTION",
    "[--",
    "[RUN",
    "[KEY",
    "...",
    "tokenize --out",
    "hydra/launcher",
)


def commands_of(text: str) -> Iterator[str]:
    """Commands in blocks and spans of code, as the words behind `pipetrain`. A page may explain a command behind three spaces."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    blocks = re.findall(r"^(?:    |\$ |    \$ )((?:pipetrain|torchrun) .+)$", text, re.MULTILINE)
    for command in [*blocks, *re.findall(r"`((?:pipetrain|torchrun) [^`]+)`", text)]:
        command = re.split(r"\s{3,}", command)[0].replace("-m pipetrain.train", "-m pipetrain train")
        _, found, words = f" {command}".rpartition(" pipetrain ")
        if found and not words.startswith(("-", "bench")) and not any(part in command for part in NOT_WHOLE):
            yield words


COMMANDS_OF_PAGES = sorted({command for page in PAGES for command in commands_of(page.read_text())})


@pytest.mark.parametrize("command", COMMANDS_OF_PAGES)
def test_a_command_of_a_page_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *words = shlex.split(command)
    assert name in COMMANDS
    parser = Parser(allow_abbrev=False)
    importlib.import_module(f"pipetrain.cli.{name}_command").add_arguments(parser)
    arguments = parser.parse_intermixed_args(words)
    monkeypatch.chdir(tmp_path)  # with the modules that pages speak of
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("mine", "my_model", "my_data"):
        (tmp_path / f"{module}.py").touch()
    overrides = all_overrides(arguments) if hasattr(arguments, "overrides") else []
    for job in expand(overrides):
        config = load_config(job.overrides)
        (check_run if name in ("train", "profile") else check_schedule)(config)


def test_pages_have_commands() -> None:
    assert len(COMMANDS_OF_PAGES) > 50
    assert "show pipeline.num_stages=2" in set(
        commands_of("    $ pipetrain show \\\n        pipeline.num_stages=2   draws it")
    )
