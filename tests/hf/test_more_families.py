"""Families beyond those that every test of this folder runs on: their stages are the model, and the page names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hf.test_families import check_pipeline
from hf.test_masks import REFUSED, _through, assert_close, packed
from hf.tiny import FAMILIES, MIXING, MORE, tiny, token_ids

from pipetrain.models.hf.hf_spec import spec_of_hf

PAGE = (Path(__file__).parents[2] / "docs" / "MODELS.md").read_text()

# Their weights are drawn as those of a trained model are not: some families warn of that, others of slow kernels.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", MORE)
def test_stages_are_the_model(family: str) -> None:
    check_pipeline(family, "overlap")


def keeps_apart(family: str) -> bool:
    """Whether packed documents are taken, which their logits must bear out."""
    spec = spec_of_hf(tiny(family).eval())
    assert spec.take_batch is not None
    inputs = packed(1)
    try:
        spec.take_batch(inputs, None)
    except ValueError:
        return False
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, :5] = token_ids(1, 5, seed=77)
    layers = spec.build(0, spec.num_layers)
    assert_close(*(_through(layers, batch)[:, 5:] for batch in (inputs, other)))
    return True


def test_the_table_of_the_page_has_them() -> None:
    apart = {family: keeps_apart(family) for family in MORE}
    for takes, said in ((True, "yes"), (False, "refused")):
        names = ", ".join(f"`{family}`" for family in sorted(MORE) if apart[family] is takes)
        line = f"| {names} | {said} | |"
        assert line in PAGE.splitlines(), f"docs/MODELS.md needs the line {line}"


def test_the_table_has_no_others() -> None:
    table = PAGE.partition("| family (`model_type`)")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    named = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0]) if name != "eager"}
    assert named.keys() == {*FAMILIES, *MORE, *(set(MIXING) & set(REFUSED) - {"recurrent_gemma"})}
    assert {name for name in named if name not in MORE and named[name] == "refused"} == set(REFUSED) - {
        "recurrent_gemma"
    }
