"""docs/KEYS.md is what docs/keys.py makes of the records, and the pages name keys and choices that exist."""

import importlib.util
import re
from pathlib import Path

from pipetrain.config.schema import is_free, keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *DOCS.rglob("*.md")]
NOT_THERE = {"recompute.mod", "observe.wandb.api_key"}  # shown as mistakes


def test_the_page_is_that_of_the_records() -> None:
    spec = importlib.util.spec_from_file_location("keys_page", DOCS / "keys.py")
    assert spec is not None
    assert spec.loader is not None
    keys_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keys_page)
    text = keys_page.page()
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
