"""Draws the pictures of docs/SCHEDULES.md and docs/SCALING.md: each from the `pipetrain show` command that stands below it.

python docs/pictures/make.py
"""

from __future__ import annotations

import io
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from pipetrain.cli.main import main
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.shown import show_schedule
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy

PAGES = tuple(Path(__file__).parent.parent / name for name in ("SCHEDULES.md", "SCALING.md"))


def pictures(page: str) -> dict[str, str]:
    """File name -> SVG text, for each command of the page that ends in --out=docs/pictures/NAME.svg."""
    commands = re.findall(r"pipetrain show (.+) --out=docs/pictures/(\S+)", page)
    return {name: as_shown(words) if "parallel." in words else drawn(_overrides(words)) for words, name in commands}


def _overrides(words: str) -> dict[str, str]:
    return dict(word.split("=") for word in words.split())


def as_shown(words: str) -> str:
    """What the command itself writes."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        out = Path(folder) / "picture.svg"
        assert main(["show", *words.split(), f"--out={out}"]) == 0, words
        return out.read_text()


def drawn(overrides: dict[str, str]) -> str:
    stages = int(overrides["pipeline.num_stages"])
    policy = RecomputePolicy(
        mode=overrides.get("recompute.mode", "overlap"),  # type: ignore[arg-type]
        sets=int(overrides.get("recompute.sets", 1)),
    )
    schedule = make_schedule(
        overrides["pipeline.schedule"],
        num_stages=stages,
        num_ranks=stages // int(overrides.get("pipeline.stages_per_rank", 1)),
        placement=overrides.get("pipeline.placement", "loop"),
        num_microbatches=int(overrides["pipeline.num_microbatches"]),
        recompute=policy,
        split_backward=overrides.get("pipeline.split_backward") == "true",
    )
    return svg(show_schedule(schedule))


if __name__ == "__main__":
    for page in PAGES:
        for name, text in pictures(page.read_text()).items():
            (Path(__file__).parent / name).write_text(text)
            print(f"docs/pictures/{name}")
