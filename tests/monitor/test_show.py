"""What `show` draws and writes."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pages import drawn_in, panels_in
from shows import show

from pipetrain.cli.main import main
from pipetrain.cli.show_command import draw, write_drawing
from pipetrain.monitor.shown import Shown
from pipetrain.schedule.op import Op


@pytest.fixture
def shown() -> Shown:
    return show("gpipe", num_stages=3, num_microbatches=4, recompute="inline")


def test_drawing_and_table(shown: Shown) -> None:
    lines = draw([shown], width=90).splitlines()
    assert lines[0] == "gpipe, inline: 3 stages x 4 microbatches"
    assert lines[2].startswith("rank 0 F0")
    assert max(map(len, lines[:6])) <= 90
    facts = lines[-1].split()
    assert facts[-6] == f"{shown.step_seconds:.4g}"
    assert facts[-2] == f"{sum(rank.recompute_exposed_seconds for rank in shown.breakdown):.4g}"


def test_two_schedules_beside_each_other(shown: Shown, tmp_path: Path) -> None:
    other = show("gpipe", num_stages=3, num_microbatches=4, recompute="overlap")
    text = draw([shown, other], width=90)
    assert text.count("rank 0 F0") == 2
    assert [line.split(":")[0] for line in text.splitlines()[-2:]] == ["gpipe, inline", "gpipe, overlap"]
    write_drawing([shown, other], tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().count("rank 2</text>") == 2
    with pytest.raises(ValueError, match="holds one schedule"):
        write_drawing([shown, other], tmp_path / "x.csv")


def test_pictures_are_well_formed(shown: Shown, tmp_path: Path) -> None:
    write_drawing([shown], tmp_path / "x.svg")
    boxes = ElementTree.parse(tmp_path / "x.svg").getroot().iter("{http://www.w3.org/2000/svg}title")
    assert "2B3" in {(box.text or "").split()[0] for box in boxes}
    write_drawing([shown], tmp_path / "x.html")
    assert "2B3" in {op[2] for op in panels_in((tmp_path / "x.html").read_text())[0]["ops"]}
    assert "http-equiv" not in (tmp_path / "x.html").read_text()


def test_a_page_offers_the_schedule_with_other_numbers_of_sets(tmp_path: Path) -> None:
    """Each as `show` itself simulates it."""
    keys = ["pipeline.num_stages=3", "pipeline.num_microbatches=4", "recompute.mode=overlap"]
    page = tmp_path / "x.html"
    assert main(["show", *keys, f"--out={page}"]) == 0
    (asked,), steps = drawn_in(page.read_text())["fixed"], drawn_in(page.read_text())["steps"]
    names = [step["panels"][0]["name"] for step in steps]
    assert names == ["1 activation set per stage", *(f"{sets} activation sets per stage" for sets in (2, 3, 4))]
    seconds = [step["panels"][0]["seconds"] for step in steps]
    assert seconds[0] == asked["seconds"]
    assert seconds == sorted(seconds, reverse=True)
    for sets in (2, 4):
        assert main(["show", *keys, f"recompute.sets={sets}", f"--out={page}"]) == 0
        assert drawn_in(page.read_text())["fixed"][0]["ops"] == steps[sets - 1]["panels"][0]["ops"]
    for more in (["recompute.mode=never"], ["pipeline.schedule=auto", "pipeline.search_seconds=0"]):
        assert main(["show", *keys, *more, f"--out={page}"]) == 0
        assert drawn_in(page.read_text())["steps"] == []


def test_tables_are_read_back(shown: Shown, tmp_path: Path) -> None:
    write_drawing([shown], tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == shown.as_json()
    write_drawing([shown], tmp_path / "x.csv")
    rows = [[Op.parse(cell) for cell in line.split(",")] for line in (tmp_path / "x.csv").read_text().splitlines()]
    assert [{op.stage for op in row} for row in rows] == [{0}, {1}, {2}]
    assert [len(row) for row in rows] == [12, 12, 8]  # the last stage has no R


def test_an_unknown_ending_is_refused(shown: Shown, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png is unknown; allowed are \.svg, \.html, \.csv, \.trace\.json, \.json"):
        write_drawing([shown], tmp_path / "x.png")
    with pytest.raises(ValueError, match="cannot be written"):
        write_drawing([shown], tmp_path / "missing" / "x.svg")


def test_the_schedule_of_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    phases = "phases=[{from:0},{from:9,pipeline:{num_microbatches:2},recompute:{mode:inline}}]"
    for options, microbatches in (([], 8), (["--phase=0"], 8), (["--phase=1"], 2)):
        assert main(["show", phases, *options, "--json"]) == 0
        ops = {op["op"] for op in json.loads(capsys.readouterr().out)["ops"]}
        assert len([op for op in ops if op.startswith("0F")]) == microbatches
    assert main(["show", phases, "--phase=1", "--against=recompute.mode=never"]) == 0
    assert "gpipe, inline: 2 stages x 2 microbatches" in capsys.readouterr().out
