"""README and the pages: every command parses and its keys fit together, keys and choices exist, and docs/KEYS.md is fresh."""

import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipetrain.cli.main import COMMANDS, Parser, all_overrides
from pipetrain.cli.multirun import expand
from pipetrain.config.load import load_config
from pipetrain.config.schema import is_free, keys
from pipetrain.config.together import check_run, check_schedule

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOT_THERE = {"recompute.mod", "observe.wandb.api_key"}  # shown as mistakes
# Commands that a page shows as a mistake, or with a part left out; and Hydra's own keys, which Hydra checks.
NOT_WHOLE = ("recompute.mod=", "NAME", "COMMAND", "FUNCTION", "[--", "[RUN", "[KEY", "...", "e --out", "hydra/launcher")


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


def test_the_page_is_that_of_the_records() -> None:
    text = runpy.run_path(str(DOCS / "keys.py"))["page"]()
    assert (DOCS / "KEYS.md").read_text() == text, "run: python docs/keys.py"
    without = [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert without == []


def test_pages_name_keys_that_exist() -> None:
    known = keys()
    groups = "|".join(sorted({path.partition(".")[0] for path in known if "." in path}))
    for page in PAGES:
        named = set(re.findall(rf"(?<![\w.])((?:{groups})\.[a-z_.]*[a-z_])(?==)", page.read_text()))
        named -= {path for path in named if is_free(path)}  # the user's own, as in model.args.width
        assert named - known.keys() - NOT_THERE == set(), page.name


def test_pages_choose_what_conf_has() -> None:
    groups = {
        folder.name: {file.stem for file in folder.iterdir()} for folder in (ROOT / "conf").iterdir() if folder.is_dir()
    }
    for page in PAGES:
        for group, choice in re.findall(
            rf"(?<![\w./-])({'|'.join(groups)})=([a-z\d][\w-]*+)(?!\()", page.read_text()
        ):  # Python calls
            assert choice in groups[group], f"{page.name}: {group}={choice}"
