"""The script of docs/OWN_MODEL.md runs as it stands there, and its model learns."""

import pathlib
import re

import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "OWN_MODEL.md").read_text()


def test_the_script_of_the_page_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"^```python\n(.+?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(script, "train_mine.py", "exec"), {"__name__": "train_mine"})
    loss, heldout = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out))
    assert loss < 2.2, "uniform guessing: 2.303"
    assert heldout < 2.2
