"""Samples of whole documents: side by side or one each, and what of them is predicted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.data.samples import Documents, pack_documents
from pipetrain.data.token_file import TokenPart

X = -100
# Documents a b c, d e, f g h i, as letters of their tokens; of the last only g and i count.
TOKENS = np.array([ord(letter) for letter in "abcdefghi"], np.uint16)
PART = TokenPart(TOKENS, np.array([3, 5, 9]), None, np.zeros((3, 2), np.int64))
COUNTED = TokenPart(TOKENS, PART.ends, np.array([1, 1, 1, 1, 1, 1, 1, 0, 1], np.uint8), PART.places)


def letters(text: str) -> list[int]:
    return [X if letter == "x" else ord(letter) for letter in text]


def test_padded() -> None:
    """Right of a document is filling, which a mask hides and no target counts."""
    inputs, targets = Documents(PART, np.arange(3), None, room=5, pad=ord(".")).take(np.array([0, 2]))
    assert inputs["input_ids"].tolist() == [letters("abc.."), letters("fghi.")]
    assert targets.tolist() == [letters("bcxxx"), letters("ghixx")]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert {leaf.dtype for leaf in (*inputs.values(), targets)} == {torch.int64}


def test_packed() -> None:
    """Positions begin anew at every document and at the filling; nothing is predicted over a boundary."""
    samples = Documents(PART, np.arange(3), pack_documents(PART.lengths, 8), room=8, pad=ord("."))
    inputs, targets = samples.take(np.arange(2))
    assert inputs["input_ids"].tolist() == [letters("abcfghi."), letters("de......")]
    assert targets.tolist() == [letters("bcxghixx"), letters("exxxxxxx")]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert set(inputs) == {"input_ids", "position_ids"}


def test_what_does_not_count_is_no_target() -> None:
    samples = Documents(COUNTED, np.array([2]), None, room=4, pad=0)
    assert samples.take(np.array([0])).targets.tolist() == [letters("gxix")]


def test_documents_that_are_left_out_are_in_no_sample() -> None:
    chosen = np.array([0, 2])
    samples = Documents(PART, chosen, pack_documents(PART.lengths[chosen], 8), room=8, pad=ord("."))
    assert samples.take(np.arange(len(samples))).inputs["input_ids"].tolist() == [letters("abcfghi.")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 30))
def test_every_document_once_and_none_too_many(given_lengths: list[int], room: int) -> None:
    lengths = np.array(given_lengths)
    packed = pack_documents(lengths, room)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    sums = [int(lengths[part].sum()) for part in np.split(packed.order, packed.ends[:-1])]
    assert max(sums) <= room
    assert min(sums) > 0
    assert sum(sorted(sums)[:2]) > room or len(sums) == 1  # no sample was begun while another had room
    again = pack_documents(lengths, room)
    assert np.array_equal(again.order, packed.order)


def test_little_is_left_over() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000)
    packed = pack_documents(lengths, 2048)
    assert lengths.sum() / (len(packed.ends) * 2048) > 0.99


@pytest.mark.parametrize("room", [3, 4])
def test_documents_of_one_length(room: int) -> None:
    assert pack_documents(np.full(5, 2), room).ends.tolist() == ([1, 2, 3, 4, 5] if room == 3 else [2, 4, 5])


def test_nothing_to_pack() -> None:
    packed = pack_documents(np.array([], np.int64), 8)
    assert (len(packed.order), len(packed.ends)) == (0, 0)
