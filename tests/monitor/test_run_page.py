"""A run's page shows what a schedule's page shows: both steps with their memory, fading, and where the recomputation went."""

import dataclasses
import re

from shows import show
from test_report import REPORT

from pipetrain.monitor.draw.page import html, recompute_words, run_page

MEASURED = show(num_stages=4, num_microbatches=8, recompute="inline")
PREDICTED = show(num_stages=4, num_microbatches=8)


def page_of(*, predicted: bool = True) -> str:
    steps = [MEASURED], PREDICTED if predicted else None
    return run_page(REPORT, *steps, predicted_from=range(2, 5), clock_error_seconds=2e-6)


def test_both_steps_have_their_picture_and_their_memory() -> None:
    text = page_of()
    assert text.index("Predicted from the op times of steps 2 to 4") < text.index("Measured, step 200")
    assert text.count('class="curve"') == 8  # a curve per rank and step
    boxes = [event for one in (MEASURED, PREDICTED) for event in one.timeline.events if event.op.kind.computes]
    assert text.count('<rect class="op"') == len(boxes)
    assert not re.search(r"(src|href)=|url\(http|@import", text)


def test_it_answers_to_the_pointer_as_the_page_of_a_schedule_does() -> None:
    def script(page: str) -> str:
        return page[page.index("<script>") :]

    assert script(page_of()) == script(html(PREDICTED))


def test_without_a_prediction_the_measured_step_stands_alone() -> None:
    text = page_of(predicted=False)
    assert "Predicted" not in text
    assert text.count('class="curve"') == 4
    assert "measured against predicted" not in text


def test_what_was_hidden_and_what_was_exposed_is_said() -> None:
    assert "Exposed: 24 s (100%)" in recompute_words(MEASURED)
    assert recompute_words(PREDICTED) == (
        "Recomputation took 24 s of all ranks. Hidden: 16 s (67%), in which the rank would have waited. Exposed: 8 s (33%), in "
        "which the next op had all its inputs and could not run yet; most on rank 2, 8 s."
    )
    assert recompute_words(PREDICTED) in page_of()
    assert recompute_words(show(num_stages=2, num_microbatches=2, recompute="never")) == "Nothing was recomputed."


def test_names_are_escaped_and_remarks_are_there() -> None:
    report = dataclasses.replace(REPORT, experiment="<b>", skipped_steps=3)
    text = run_page(report, [MEASURED], None, predicted_from=range(2, 5), clock_error_seconds=0.0)
    assert "<b>" not in text
    assert "Steps skipped because of their loss or gradient: 3." in text
