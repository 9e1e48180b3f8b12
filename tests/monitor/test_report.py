"""The report as a file, as a page and as text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from foreign import REPORT as REPORT_OF_A_RUN

from pipetrain.monitor.draw.table import Table, size
from pipetrain.monitor.report import as_markdown, read_report, report_parts

REPORT = dataclasses.replace(REPORT_OF_A_RUN, experiment="quickstart", balance=(3, 3), steps=200)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**dataclasses.asdict(REPORT), "format_version": 99}))
    with pytest.raises(ValueError, match="format_version=99"):
        read_report(path)
    with pytest.raises(ValueError, match="there is no report"):
        read_report(tmp_path / "missing.json")


def test_the_page_says_what_was_predicted_and_what_was_deferred_where_a_backward_was_split() -> None:
    text = as_markdown(dataclasses.replace(REPORT, deferred_share=(0.0, 0.0)))
    assert text.startswith("# quickstart: 200 steps\n")
    assert "0.4900 s (-2.0%)" in text
    assert "| peak activations      |   1.5 MB |    900 B |" in text
    assert "2.0 GB" in text
    assert "deferred" not in text
    text = as_markdown(dataclasses.replace(REPORT, deferred_share=(0.376, 0.0)))
    assert "| backward deferred to W |      38% |       0% |" in text


def test_each_row_and_column_has_one_sentence_below_its_table() -> None:
    phases = tuple(dataclasses.replace(REPORT, phase=number, first_step=1) for number in range(2))
    sizes: dict[str, Any] = dict.fromkeys(("set_bytes", "input_bytes", "kept_bytes"), (1, 1))
    whole = dataclasses.replace(
        REPORT, tokens_seen=9, mfu=0.5, first_step=1, deferred_share=(0.1, 0.1), phases=phases, **sizes
    )
    totals, ranks, _, of_phases = report_parts(whole)
    for table, names in (
        (totals, [row[0] for row in totals.rows]),
        (ranks, [row[0] for row in ranks.rows]),
        (of_phases, of_phases.head),
    ):
        assert [name for name, _ in table.words] == list(names)
        below = table.as_markdown().split("\n\n")[1]
        assert below.splitlines() == [f"- {name}: {words}" for name, words in table.words]
    assert all(words.endswith(".") for table in (totals, ranks, of_phases) for _, words in table.words)
    assert dict(totals.words)["held-out perplexity"] == "e to the held-out loss."


def test_what_is_not_known_is_a_dash() -> None:
    stopped = dataclasses.replace(REPORT, heldout_loss=None, step_seconds_predicted=None, stopped_by="SIGINT")
    text = as_markdown(stopped)
    assert "stopped by SIGINT" in text
    for line in text.splitlines():
        if line.startswith("|") and ("held-out" in line or "predicted" in line):
            assert line.rstrip(" |").endswith("-"), line


def test_columns_line_up() -> None:
    lines = Table(("", "a"), [("row", "1"), ("longer row", "1000000")]).as_markdown().splitlines()
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345_678, "12.3 MB"), (2e12, "2,000.0 GB")],
)
def test_sizes(num_bytes: float | None, text: str) -> None:
    assert size(num_bytes) == text
