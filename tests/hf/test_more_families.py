"""Families beyond those that every test of this folder runs on: their stages are the model, and the page names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hf.test_families import check_pipeline
from hf.test_masks import REFUSED, assert_close, logits_of_the_second_document, packed
from hf.tiny import FAMILIES, MIXING, MORE, tiny

from pipetrain.models.hf.hf_spec import spec_of_hf

PAGE = (Path(__file__).parents[2] / "docs" / "MODELS.md").read_text()
TABLE = PAGE.partition("| family (`model_type`)")[2].partition("\n\n")[0]
ROWS = [line.split(" | ") for line in TABLE.splitlines()[2:]]
# What the page says of packed documents.
SAID = {name: row[1] for row in ROWS for name in re.findall(r"`(\w+)`", row[0]) if name != "eager"}


# Their weights are drawn as those of a trained model are not: some families warn of that, others of slow kernels.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", MORE)
def test_stages_are_the_model_and_packed_documents_as_the_page_says(family: str) -> None:
    check_pipeline(family, "overlap")
    spec = spec_of_hf(tiny(family).eval())
    assert spec.take_batch is not None
    if SAID[family] == "yes":
        spec.take_batch(packed(1), None)
        assert_close(*logits_of_the_second_document(spec))
    else:
        with pytest.raises(ValueError, match="see each other"):
            spec.take_batch(packed(1), None)


def test_the_table_has_no_others() -> None:
    refused = set(REFUSED) - {"recurrent_gemma"}
    assert SAID.keys() == {*FAMILIES, *MORE, *(set(MIXING) & refused)}
    assert {name for name in SAID if name not in MORE and SAID[name] == "refused"} == refused
