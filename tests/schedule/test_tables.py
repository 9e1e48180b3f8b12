"""One table, laid out three ways."""

import pytest

from pipetrain.monitor.draw.table import Table, number

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
