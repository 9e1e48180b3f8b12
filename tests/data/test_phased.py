"""Batches over phases: each sample of a length once per epoch, whatever the batches; nothing comes again after a rollback."""

import pathlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipetrain.config.records import DataConfig
from pipetrain.data.batch import Batch
from pipetrain.data.batches import Batches, PhasedBatches
from pipetrain.data.dataset import OpenData, make_data
from pipetrain.data.samples import Windows

TOKENS = np.arange(101, dtype=np.uint8)
SHORT, LONG = Windows(TOKENS, 4), Windows(TOKENS, 10)  # 25 samples, and 10


def starts(batch: Batch) -> list[int]:
    """Which samples a batch has, by their first token: of tokens that count upwards."""
    return [int(row[0]) for row in batch.inputs]


def phased() -> PhasedBatches:
    """Steps 1 to 4 take 2 short samples, 5 and 6 take 3, 7 to 9 take 2 long ones, and from 10 on it is 5 short ones."""
    return PhasedBatches(
        [
            (0, Batches(SHORT, 2, seed=1)),
            (4, Batches(SHORT, 3, seed=1)),
            (6, Batches(LONG, 2, seed=1)),
            (9, Batches(SHORT, 5, seed=1)),
        ]
    )


def test_a_run_without_phases_has_the_batches_that_it_had() -> None:
    batches = Batches(SHORT, 7, seed=3)
    for step in (1, 2, 9):
        assert starts(PhasedBatches([(0, batches)]).batch(step)) == starts(batches.batch(step - 1))


def test_no_sample_comes_again_before_all_of_its_length_have_come() -> None:
    batches = phased()
    drawn = [starts(batches.batch(step)) for step in range(1, 13)]
    assert list(map(len, drawn)) == [2, 2, 2, 2, 3, 3, 2, 2, 2, 5, 5, 5]
    short = [first for step in (1, 2, 3, 4, 5, 6, 10, 11, 12) for first in drawn[step - 1]]
    assert sorted(short[:25]) == list(range(0, 100, 4))  # 8 + 6 of the first phases, 11 of the last one
    whole = Batches(SHORT, 29, seed=1)
    assert short == starts(whole.batch(0))  # and in the order of a run that has no phases
    long = [first for step in (7, 8, 9) for first in drawn[step - 1]]
    assert long == starts(Batches(LONG, 6, seed=1).batch(0))
    assert len(set(long)) == 6


def test_batches_are_a_function_of_the_step() -> None:
    forwards = [starts(phased().batch(step)) for step in range(1, 13)]
    backwards = [starts(phased().batch(step)) for step in range(12, 0, -1)]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("went_back", [[(2, 3)], [(2, 5)], [(3, 8)], [(2, 5), (4, 6)], [(5, 11), (5, 7)]])
def test_what_was_passed_over_does_not_come_again(went_back: list[tuple[int, int]]) -> None:
    """Over one border of phases or several: until the epoch is over, nothing that was read once is read again."""
    batches, read, step = phased(), dict[int, list[int]](), 1
    passed_over: list[tuple[int, int]] = []
    for back_to, from_step in went_back:
        while step <= from_step:
            batch = batches.batch(step, passed_over)
            read.setdefault(batch.inputs.shape[1], []).extend(starts(batch))
            step += 1
        passed_over.append((back_to, from_step))
        step = back_to + 1
    for rest in range(step, 12):
        batch = batches.batch(rest, passed_over)
        assert len(batch.inputs) == len(batches.batch(rest).inputs)
        read.setdefault(batch.inputs.shape[1], []).extend(starts(batch))
    for length, epoch in ((4, 25), (10, 10)):
        first = read[length][:epoch]
        assert len(set(first)) == len(first)


def test_lengths_are_cut_of_what_was_read_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 400)
    config = DataConfig(name="text", path=str(tmp_path), global_batch_size=4, sequence_length=16, eval_fraction=0.1)
    opened = OpenData(config, 0)
    (tmp_path / "a.txt").write_text("what is written later")
    short, other, long = (
        opened.cut(own)
        for own in (
            config,
            replace(config, global_batch_size=2),
            replace(config, global_batch_size=2, sequence_length=64),
        )
    )
    assert [data.train.batch(0).inputs.shape for data in (short, other, long)] == [(4, 16), (2, 16), (2, 64)]
    assert next(iter(long.heldout)).inputs.shape == (2, 64)
    assert short.train.are_of(other.train)
    assert not short.train.are_of(long.train)
    assert len({data.fingerprint for data in (short, other, long)}) == 1
    with pytest.raises(ValueError, match=r"data\.sequence_length"):
        opened.cut(replace(config, sequence_length=100_000))


def test_opening_and_cutting_is_what_make_data_does(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 400)
    config = DataConfig(name="text", path=str(tmp_path), global_batch_size=4, sequence_length=16)
    one, other = make_data(config, 3), OpenData(config, 3).cut(config)
    assert torch.equal(one.train.batch(5).inputs, other.train.batch(5).inputs)
    assert one.fingerprint == other.fingerprint
