"""Pictures and files of a schedule: width, colours, well-formedness, and that all ops are in them."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from pages import panels_in
from shows import show

from pipetrain.monitor.breakdown import break_down
from pipetrain.monitor.draw.page import html, ranks_table, schedules_table
from pipetrain.monitor.draw.palette import LOOKS, drawn_kinds, looks_of
from pipetrain.monitor.draw.svg import svg
from pipetrain.monitor.draw.table import Table, number
from pipetrain.monitor.draw.terminal import legend, staircase
from pipetrain.monitor.shown import Shown, chrome_trace
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import OpEvent, Timeline
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self.seen.append(tag)


SHOWN = show(num_stages=4, num_microbatches=8)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 8), (8, 64), (12, 3)])
def test_the_terminal_picture_is_never_too_wide(width: int, stages: int, microbatches: int) -> None:
    timeline = show("1f1b", num_stages=stages, num_microbatches=microbatches).timeline
    for colour in (False, True):
        lines = COLOUR.sub("", staircase(timeline, width=width, colour=colour)).splitlines()
        assert len(lines) == stages
        assert max(map(len, lines)) <= width


def test_colours_are_only_there_when_asked() -> None:
    assert "\x1b" not in staircase(SHOWN.timeline) + legend(Kind)
    assert staircase(SHOWN.timeline, colour=True).count("\x1b[0m") == sum(
        event.op.kind.computes for event in SHOWN.timeline.events
    )
    assert "\x1b" in legend(Kind, colour=True)


def test_every_kind_that_is_drawn_looks_different() -> None:
    kinds = [kind for kind in Kind if kind.row.looks is not None]
    assert {kind for kind in Kind if kind.computes} < set(kinds)
    for of_one in ("word", "fill", "character", "ansi"):
        assert len({getattr(looks_of(kind), of_one) for kind in kinds}) == len(kinds)
    assert list(drawn_kinds(Kind)) == sorted(kinds, key=lambda kind: list(LOOKS.values()).index(looks_of(kind)))


def test_a_legend_explains_what_is_drawn() -> None:
    assert legend([Kind.R, Kind.F, Kind.SEND_F]) == "F- forward  R~ recompute  . idle"
    picture = svg(show(num_stages=2, num_microbatches=2, recompute="never"))
    assert "B backward" in picture
    assert "recompute" not in picture[picture.rindex('<g class="legend">') :]


def test_r_beside_b_has_a_row_of_its_own() -> None:
    events = [
        OpEvent(0, Lane.COMPUTE, Op.parse("0F0"), 0, 1),
        OpEvent(0, Lane.COMPUTE, Op.parse("0B0"), 1, 3),
        OpEvent(0, Lane.RECOMPUTE, Op.parse("0R1"), 2, 3),
    ]
    timeline = Timeline(1, tuple(events))
    assert staircase(timeline) == "rank 0 F0-B0====\n       ......R1~"
    schedule = make_schedule(num_stages=1, num_microbatches=2)
    shown = Shown(schedule, Costs.spread(1), timeline, 0.0, break_down(schedule, timeline))
    boxes = {
        rect[0].text.split()[0]: (float(rect.get("y", 0)), float(rect.get("height", 0)))
        for rect in ElementTree.fromstring(svg(shown)).iter()
        if rect.get("class") == "op"
    }
    assert boxes["0F0"] == boxes["0B0"]
    assert boxes["0R1"][0] >= sum(boxes["0B0"])


def test_svg_has_a_box_for_every_op() -> None:
    root = ElementTree.fromstring(svg(SHOWN))
    titles = [title.text.split()[0] for title in root.iter("{http://www.w3.org/2000/svg}title") if title.text]
    for event in SHOWN.timeline.events:
        assert (str(event.op) in titles) == event.op.kind.computes
    widths = [
        float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in root.iter() if rect.tag.endswith("rect")
    ]
    assert max(widths) <= float(root.get("width", 0))


def test_two_schedules_share_a_time_scale() -> None:
    inline = show(num_stages=4, num_microbatches=8, recompute="inline")
    root = ElementTree.fromstring(svg(inline, SHOWN))
    rows = [
        float(rect.get("width", 0))
        for rect in root.iter()
        if rect.get("class") == "idle" and rect.get("height") == "30"
    ]
    assert rows[0] / rows[4] == pytest.approx(inline.step_seconds / SHOWN.step_seconds, rel=1e-3)


def test_html_is_one_self_contained_page() -> None:
    page = html(SHOWN, show("1f1b", num_stages=4, num_microbatches=8))
    reader = Tags()
    reader.feed(page)
    assert reader.seen.count("script") == 2  # what is drawn, and what draws it
    panels = panels_in(page)
    assert [panel["name"] for panel in panels] == [SHOWN.title, SHOWN.title.replace("gpipe", "1f1b")]
    assert [len(panel["held"]) for panel in panels] == [4, 4]  # a curve of memory per rank
    assert not re.search(r"(src|href)=|url\(http|@import", page)
    assert "addEventListener('pointermove'" in page


def test_memory_is_in_bytes_where_their_sizes_are_known() -> None:
    costs = dataclasses.replace(Costs.spread(4), set_bytes=(16e6,) * 4, input_bytes=(2e6,) * 4)
    page = html(show(num_stages=4, num_microbatches=8, costs=costs))
    (panel,) = panels_in(page)
    assert panel["bytes"]
    # rank 0: a set, and the inputs of the seven other microbatches
    assert max(held for _, held in panel["held"][0]) == 30e6


def test_chrome_trace() -> None:
    trace = json.loads(chrome_trace(SHOWN.timeline))["traceEvents"]
    ops = {(event["pid"], event["name"]): event for event in trace if event["ph"] == "X"}
    assert len(ops) == len(SHOWN.timeline.events)
    event = next(event for event in SHOWN.timeline.events if str(event.op) == "2B3")
    assert (ops[2, "2B3"]["ts"], ops[2, "2B3"]["dur"]) == (event.start * 1e6, 2e6)


def test_json_has_the_names_that_scripts_rely_on() -> None:
    data = json.loads(json.dumps(SHOWN.as_json()))
    ops = data.pop("ops")
    assert data == {
        "step_seconds": 38.0,
        "bound_seconds": 38.0,
        "bubble_fraction": pytest.approx(8 / 38),
        "recompute_hidden_seconds": [8.0, 8.0, 0.0, 0.0],
        "recompute_exposed_seconds": [0.0, 0.0, 8.0, 0.0],
        "peak_sets": [1, 1, 1, 1],
        "peak_stash": [8, 8, 8, 1],
    }
    assert {op["lane"] for op in ops} == {"compute", "recompute", "send", "recv"}
    assert {"rank": 2, "lane": "recompute", "op": "2R0", "start": 10.0, "end": 11.0} in ops


def test_tables() -> None:
    inline = show(num_stages=4, num_microbatches=8, recompute="inline")
    assert schedules_table([SHOWN, inline]).as_text() == (
        "schedule                                   step s  bound s  bubble  R hidden s  R exposed s  peak sets\n"
        "gpipe, overlap: 4 stages x 8 microbatches      38       38   21.1%          16            8          1\n"
        "gpipe, inline: 4 stages x 8 microbatches       40       38   25.0%           0           24          1"
    )
    assert len(ranks_table(SHOWN.breakdown).as_text().splitlines()) == 5


TABLE = Table(("name", "s", "word"), [("a<b", "1.5", "x"), ("c", "10", "longer")], left=frozenset({0, 2}))


def test_text_is_in_columns() -> None:
    assert TABLE.as_text().splitlines() == ["name    s  word", "a<b   1.5  x", "c      10  longer"]
    assert TABLE.as_text(ruled=True).splitlines()[1] == "----  ---  ------"


def test_markdown_says_which_columns_stand_to_the_right() -> None:
    assert TABLE.as_markdown().splitlines() == [
        "| name |   s | word   |",
        "|------|----:|--------|",
        "| a<b  | 1.5 | x      |",
        "| c    |  10 | longer |",
    ]


def test_html_is_escaped() -> None:
    assert '<td class="left">a&lt;b</td><td>1.5</td><td class="left">x</td>' in TABLE.as_html()


def test_a_row_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table(("a", "b"), [("1",)]).as_text()


def test_a_number_that_is_not_known_is_a_dash() -> None:
    assert (number(None), number(0.123456), number(2.0, "{:.1f} s")) == ("-", "0.1235", "2.0 s")
