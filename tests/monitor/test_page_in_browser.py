"""In a real browser the page answers to pointer and keys, and runs nothing that a run folder says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browsing, find_browser
from pages import drawn_in
from shows import show
from test_report import REPORT
from test_run_page import TEXT, page_of, recorded_in, report_of

from pipetrain.monitor.draw.page import html
from pipetrain.monitor.recorded import page_of_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_problem(browser: Browser) -> Iterator[None]:
    """Whatever a test does: the console is told of no error, and no dialog opens."""
    browser.problems.clear()
    browser.media()
    yield
    assert browser.problems == []


def opened(browser: Browser, folder: Path, text: str) -> None:
    """Opens a page of this text."""
    path = folder / "page.html"
    path.write_text(text)
    browser.open(path.as_uri())


def run_page(folder: Path) -> str:
    """Of a run whose metrics are there too."""
    lines = [
        {"step": step, "loss": 4 - step / 9, "tokens_per_second": 900.0, "bubble_fraction": 0.2} for step in range(9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return page_of(folder)


def of_canvas(browser: Browser, name: str = "steps") -> str:
    """What is drawn there."""
    return hashlib.sha256(browser.run(f"document.getElementById('{name}').toDataURL()").encode()).hexdigest()


def text_of(browser: Browser, name: str) -> Any:
    return browser.run(f"document.getElementById('{name}').innerText")


def middle_of(browser: Browser, page: str, panel: int, op: str) -> tuple[float, float]:
    """Where an op is drawn, from the layout that the script has: the left edge of time, rows from the top of its panel."""
    values = drawn_in(page)
    panels = [*values["fixed"], *values["steps"][-1]["panels"]]
    rank, _, _, start, took = next(one for one in panels[panel]["ops"] if one[2] == op)
    longest = max(one["seconds"] for one in panels)
    box = browser.run(
        "(() => { const at = document.getElementById('steps').getBoundingClientRect(); return [at.left, at.top, at.width] })()"
    )
    x = box[0] + 92 + (start + took / 2) / longest * (box[2] - 92 - 12)
    rows = 0.0
    for number in range(panel + 1):
        of_rank = [sorted({one[1] for one in panels[number]["ops"] if one[0] == place}) for place in range(4)]
        heights = [sum((22, 14, 9, 9, 9)[lane] + 1 for lane in lanes) + 5 for lanes in of_rank]
        rows += 40 + (sum(heights[:rank]) if number == panel else sum(heights) + 24)
    return x, box[1] + rows + 11


def test_the_op_under_the_pointer_is_named_and_a_click_tells_its_layers_and_tensors(
    browser: Browser, tmp_path: Path
) -> None:
    page = run_page(tmp_path)
    opened(browser, tmp_path, page)
    assert text_of(browser, "tip") == ""
    for panel, op in ((0, "1F3"), (1, "3B7"), (1, "0F0")):
        x, y = middle_of(browser, page, panel, op)
        browser.mouse("mouseMoved", x, y)
        tip = text_of(browser, "tip")
        assert tip.startswith(f"op: {op}, "), tip
        assert f"microbatch: {op[-1]}" in tip
        assert "takes" in tip
    browser.click(x, y)
    chosen = text_of(browser, "chosen")
    assert "0F0, forward" in chosen
    assert "reads the input of the stage" in chosen
    assert "Predicted from" in chosen  # how long the same op was to take
    browser.key("Escape")
    assert text_of(browser, "chosen").strip() == ""


def test_zoom_and_pan(browser: Browser, tmp_path: Path) -> None:
    page = run_page(tmp_path)
    opened(browser, tmp_path, page)
    whole, memory = of_canvas(browser), of_canvas(browser, "memory")
    x, y = middle_of(browser, page, 1, "2B3")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)  # Ctrl
    near = of_canvas(browser)
    assert near != whole
    assert of_canvas(browser, "memory") != memory  # on the same axis
    browser.mouse("mouseMoved", x, y)
    assert text_of(browser, "tip").startswith("op: 2B3, ")  # what was under the pointer stays there
    for kind, at in (("mousePressed", x), ("mouseMoved", x - 60), ("mouseReleased", x - 60)):
        browser.mouse(kind, at, y, button="left", buttons=0 if kind == "mouseReleased" else 1, clickCount=1)
    browser.mouse("mouseMoved", 5, 5)
    assert of_canvas(browser) != near
    browser.run("document.getElementById('whole').click()")
    browser.drawn()
    assert of_canvas(browser) == whole
    browser.run("document.getElementById('closer').click(), document.getElementById('farther').click()")
    browser.drawn()
    assert of_canvas(browser) == whole


def test_keys_choose_ops_and_steps(browser: Browser, tmp_path: Path) -> None:
    recorded = recorded_in(tmp_path, layers=["0 to 2 (embedding, 2 x block)", "3", "4", "5"])
    for step in (1, 2, 3):
        recorded.add(step, report_of(show(num_stages=4, num_microbatches=step), step=step))
    opened(browser, tmp_path, page_of_run(tmp_path / "timeline.json", tmp_path / "metrics.jsonl"))
    browser.run("document.getElementById('steps').focus()")
    browser.key("ArrowRight")
    assert "0F0, forward" in text_of(browser, "chosen")
    assert "0 to 2 (embedding, 2 x block)" in text_of(browser, "chosen")
    browser.key("ArrowRight")
    assert "0F1, forward" in text_of(browser, "chosen")
    assert "The device has 80 GB, which is above this scale." in text_of(browser, "memory-words")
    browser.key("ArrowDown")
    assert "rank 0, lane" in text_of(browser, "chosen")
    before = of_canvas(browser)
    browser.key("+")
    assert of_canvas(browser) != before
    assert text_of(browser, "bars-of") == "Measured, step 3"
    browser.key("[")
    assert text_of(browser, "bars-of") == "Measured, step 2"
    browser.run(
        "(() => { const step = document.getElementById('step'); step.value = 0; step.dispatchEvent(new Event('change')); })()"
    )
    browser.drawn()
    assert text_of(browser, "bars-of") == "Measured, step 1"
    browser.key("]")
    assert text_of(browser, "bars-of") == "Measured, step 2"


def test_causes_charts_and_memory_are_said(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, run_page(tmp_path))
    causes = text_of(browser, "causes")
    assert "The rank waits for a gradient of the stage after. Try recompute.mode=overlap" in causes
    assert "loss: 3.111 at step 8" in text_of(browser, "charts")
    assert browser.run("document.querySelectorAll('#charts path').length") == 3
    assert text_of(browser, "memory-words").startswith(
        'Filled: activation sets alive. Line: the same of "Predicted from'
    )
    assert "recompute, exposed: the next op waits for it" in text_of(browser, "legend")


def test_dark_and_print(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, run_page(tmp_path))
    paper = "getComputedStyle(document.body).backgroundColor"
    light, shown = of_canvas(browser), browser.run(paper)
    browser.media(scheme="dark")
    assert of_canvas(browser) != light
    assert (shown, browser.run(paper)) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)")
    browser.media(scheme="dark", kind="print")
    assert browser.run(paper) == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.getElementById('closer')).display") == "none"
    assert browser.printed().startswith(b"%PDF")


def test_stages_of_one_rank_are_told_apart(browser: Browser, tmp_path: Path) -> None:
    """Two ops of one kind and rank, of two stages, have other colours."""
    page = html(show("interleaved", num_stages=4, num_ranks=2, num_microbatches=4, recompute="never"))
    opened(browser, tmp_path, page)
    (panel,) = drawn_in(page)["fixed"]
    first, later = (next(op for op in panel["ops"] if op[2] == name) for name in ("0F0", "2F0"))
    assert first[0] == later[0] == 0
    starts = [op[3] / panel["seconds"] for op in (first, later)]
    colours = browser.run(
        f"""(() => {{ const canvas = document.getElementById('steps'), scale = canvas.width / canvas.clientWidth;
        const copy = document.createElement('canvas').getContext('2d', {{ willReadFrequently: true }});
        Object.assign(copy.canvas, {{ width: canvas.width, height: canvas.height }});
        copy.drawImage(canvas, 0, 0);
        const x = start => (92 + start * (canvas.clientWidth - 104) + 3) * scale;
        return {starts}.map(start => [...copy.getImageData(x(start), 43 * scale, 1, 1).data]) }})()"""
    )
    assert colours[0] == [0x4A, 0x90, 0xC4, 255]  # forward
    assert colours[1] not in (colours[0], [255] * 4)


def test_nothing_that_a_folder_says_runs(browser: Browser, tmp_path: Path) -> None:
    page_of(
        tmp_path, report=dataclasses.replace(REPORT, experiment=TEXT, schedule=TEXT, recompute_mode=TEXT), title=TEXT
    )
    path = tmp_path / "timeline.json"
    values = json.loads(path.read_text())

    def planted(value: Any) -> Any:
        if isinstance(value, str):
            return TEXT
        if isinstance(value, list):
            return [planted(one) for one in value]
        return {key: planted(one) for key, one in value.items()} if isinstance(value, dict) else value

    path.write_text(json.dumps({**planted(values), "format_version": 1}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "x": "</script>"}\n{"step": 2, "loss": 1e999}\n')
    opened(browser, tmp_path, page_of_run(path, tmp_path / "metrics.jsonl", live=False))
    browser.run("document.getElementById('steps').focus()")
    browser.key("ArrowRight")
    browser.mouse("mouseMoved", 300, 150)
    assert browser.run("document.images.length") == 0
    assert browser.run("document.scripts.length") == 2
    assert "<img" in text_of(browser, "chosen")


def test_the_picture_of_a_large_page_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html(show("1f1b", num_stages=16, num_microbatches=64)))
    target = tmp_path / "page.png"
    command = [sys.executable, "-m", "tests.browser", str(tmp_path / "page.html"), str(target), "dark"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes().startswith(b"\x89PNG")
