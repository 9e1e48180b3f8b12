"""data=python: samples of your own dataset in an order that you can compute, read by those ranks that need them, with or without workers."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
from typing import Any

import pytest
import torch

import pipetrain
from pipetrain.config.load import load_config
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import DataConfig
from pipetrain.data import own
from pipetrain.data.batch import Batch, Share
from pipetrain.data.batches import PhasedBatches
from pipetrain.data.dataset import check_data, make_data

DATA = """
import torch

class Pairs(torch.utils.data.Dataset):
    def __init__(self, size=10, fails_at=None):
        self.size, self.fails_at = size, fails_at

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.fails_at:
            raise OSError("the disk is gone")
        return {"x": torch.full((2,), float(index))}, index

class Uneven(Pairs):
    def __getitem__(self, index):
        return torch.zeros(1 + index % 2), index

class Single(Pairs):
    def __getitem__(self, index):
        return index

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 1, 2

class Counting(Stream):
    def __init__(self, size=10, fails_at=None, in_tuple=False):
        self.size, self.fails_at, self.at, self.in_tuple = size, fails_at, 0, in_tuple

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            if self.at - 1 == self.fails_at:
                raise OSError("the disk is gone")
            yield torch.full((2,), float(self.at - 1)), self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": (self.at,) if self.in_tuple else self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

def doubled(samples):
    return torch.tensor([2 * y for _, y in samples]), torch.tensor([y for _, y in samples])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "pairs.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "pairs", raising=False)
    own._dataset_of.cache_clear()
    return tmp_path


def of(name: str, *typed: str) -> DataConfig:
    return load_config(["data=python", f"data.target=pairs:{name}", "data.global_batch_size=4", *typed]).data


def numbers(batch: Batch) -> list[int]:
    return [int(number) for number in batch.targets]


def test_the_order_is_that_of_the_formula() -> None:
    data = make_data(of("Pairs"), 7)
    seen = [number for step in range(5) for number in numbers(data.train.batch(step))]
    expected = []
    for epoch in range(2):
        seed = int.from_bytes(hashlib.sha256(f"7/{epoch}".encode()).digest()[:8], "big", signed=True)
        expected += torch.randperm(10, generator=torch.Generator().manual_seed(seed)).tolist()
    assert seen == expected  # two epochs, the third batch in both
    first = data.train.batch(0)
    assert torch.equal(first.inputs["x"], first.targets[:, None].expand(-1, 2).float())


def test_batches_of_the_library_are_those_of_the_trainer() -> None:
    config = of("Pairs")
    data = make_data(config, 7)
    own_loop = pipetrain.batches(sys.modules["pairs"].Pairs(), 4, seed=7, first_step=2)
    for step in (2, 3, 4):
        inputs, targets = next(own_loop)
        assert torch.equal(inputs["x"], data.train.batch(step).inputs["x"])
        assert torch.equal(targets, data.train.batch(step).targets)


def test_a_rank_that_does_not_need_them_makes_no_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "call_target", None)  # whoever calls it fails
    config = of("Pairs", "data.heldout_target=pairs:Pairs", "data.num_workers=2")
    data = own.OwnData(config, 7, (10, 6), is_read=False).cut(config)
    assert data.train.batch(3) == Batch(None, None)
    assert list(data.heldout) == [Batch(None, None)] * 2
    assert data.train.samples_per_epoch == 10


def test_workers_read_the_same_batches_and_go_back() -> None:
    plain, ahead = (make_data(of("Pairs", f"data.num_workers={number}"), 7).train for number in (0, 2))
    share = Share(1, 2, 1)
    try:
        for step, part in ((0, None), (1, None), (2, None), (1, None), (1, share), (2, share)):
            assert numbers(ahead.batch(step, part)) == numbers(plain.batch(step, part))
    finally:
        ahead.close()


def test_a_worker_that_fails_names_the_sample() -> None:
    config = of("Pairs", "data.num_workers=1", "data.args.fails_at=5")
    train = own.OwnData(config, 7, (10, 0), timeout_seconds=100.0).cut(config).train
    with contextlib.closing(train), pytest.raises(ConfigError) as raised:
        list(map(train.batch, range(3)))
    assert str(raised.value) == "data.target=pairs:Pairs: sample 5 raises OSError: the disk is gone (pairs.py, line 13)"


def test_held_out_samples_come_in_order_and_all() -> None:
    data = make_data(of("Pairs", "data.heldout_target=pairs:Pairs", "data.heldout_args.size=6"), 7)
    assert [numbers(batch) for batch in data.heldout] == [[0, 1, 2, 3], [4, 5]]
    assert list(make_data(of("Pairs"), 7).heldout) == []


def test_a_function_may_make_the_batch() -> None:
    batch = make_data(of("Pairs", "data.collate=pairs:doubled"), 7).train.batch(0)
    assert torch.equal(batch.inputs, 2 * batch.targets)


def test_the_same_code_and_size_are_the_same_data() -> None:
    same = [make_data(of("Pairs"), seed).fingerprint for seed in (1, 2)]
    others = [
        make_data(of("Pairs", *typed), 1).fingerprint
        for typed in (["data.args.size=9"], ["data.collate=pairs:doubled"])
    ]
    assert same[0] == same[1]
    assert len({*same, *others}) == 3


@pytest.mark.parametrize(
    ("name", "typed", "says"),
    [
        ("Pairs", ["data.args.size=0"], "the dataset has no samples"),
        (
            "Stream",
            [],
            "a Stream cannot be read at any place, so a run could not resume; give a dataset with __len__ and __getitem__ or, ",
        ),
        ("Counting", ["data.args.size=0"], "the dataset has no samples"),
        ("Counting", ["data.args.fails_at=1"], "sample 1 raises OSError: the disk is gone (pairs.py, line "),
        ("Counting", ["data.args.in_tuple=true"], "state_dict() must give what JSON gives back"),
        (
            "Counting",
            ["data.num_workers=2"],
            "data.num_workers=2: a Counting is iterable, so each rank reads it by itself",
        ),
        (
            "Pairs",
            ["data.heldout_target=pairs:Counting"],
            "data.heldout_target=pairs:Counting: a Counting cannot be read at any place",
        ),
        ("Uneven", [], "samples make no batch"),
        ("Single", [], "a sample must be the pair (inputs, targets), and a batch is a Tensor"),
        ("Pairs", ["data.args.fails_at=0"], "sample 0 raises OSError: the disk is gone"),
        (
            "Pairs",
            ["data.heldout_target=pairs:Pairs", "data.heldout_args.size=0"],
            "data.heldout_target=pairs:Pairs: the dataset has no",
        ),
        ("Pears", [], "did you mean 'Pairs'?"),
        ("Pairs", ["data.args.seize=3"], "set them as data.args.NAME=VALUE"),
        ("Pairs", ["data.collate=pairs:double"], "did you mean 'doubled'?"),
    ],
)
def test_a_mistake_is_one_line(name: str, typed: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_data(of(name, *typed), 7)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_names_are_checked_without_making_a_dataset() -> None:
    check_data(of("Pairs", "data.args.size=0"))
    with pytest.raises(ConfigError, match="did you mean 'Pairs'"):
        check_data(of("Pears"))


def test_another_number_of_samples_than_on_rank_0_is_refused() -> None:
    config: Any = of("Pairs")
    reader = own.OwnData(config, 7, (11, 0)).cut(config).train
    with pytest.raises(ConfigError, match="has 10 samples here and 11 on rank 0"):
        reader.batch(0)


def stream_of(*typed: str) -> Any:
    return make_data(of("Counting", *typed), 7).train


def test_an_iterable_dataset_goes_on_from_its_state() -> None:
    """In its own order, over its end, and at the very sample."""
    train = stream_of()
    assert [numbers(train.batch(step)) for step in (0, 1, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    state = json.loads(json.dumps(train.state_dict()))
    rest = [numbers(train.batch(step)) for step in (2, 3)]
    assert rest == [[8, 9, 0, 1], [2, 3, 4, 5]]
    own._dataset_of.cache_clear()
    again = stream_of()
    again.load_state_dict(state)
    assert again.state_dict() == state  # nothing is read again to get there
    assert [numbers(again.batch(step)) for step in (2, 3)] == rest
    again.load_state_dict(state)  # a rollback, which passes over the batches up to the one that was refused
    assert numbers(again.batch(3)) == rest[1]
    with pytest.raises(ConfigError, match="sample 4 was read before, and an iterable dataset only goes on"):
        again.batch(1)


def test_replicas_share_a_batch_of_an_iterable_dataset() -> None:
    train = stream_of()
    parts = [numbers(train.batch(step, Share(replica, 2, 1))) for step in (0, 1) for replica in (0, 1)]
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_phases_with_other_batches_go_on_in_one_stream() -> None:
    config = of("Counting")
    data = own.OwnData(config, 7, (own.STREAM, 0))
    phases = PhasedBatches(
        [(0, data.cut(config).train), (2, data.cut(dataclasses.replace(config, global_batch_size=2)).train)]
    )
    assert [numbers(phases.batch(step)) for step in (1, 2, 3, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1]]


def test_a_rank_that_does_not_read_makes_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "call_target", None)
    train = own.OwnData(of("Counting"), 7, (own.STREAM, 0), is_read=False).cut(of("Counting")).train
    assert train.batch(3) == Batch(None, None)
    assert train.state_dict() == {}
    train.load_state_dict({"position": 4})


def test_epochs_of_an_iterable_dataset_are_refused() -> None:
    config = load_config(["data=python", "data.target=pairs:Counting", "epochs=2"])
    with pytest.raises(ConfigError, match=r"epochs=2: the length of data\.target=pairs:Counting, an"):
        own.check_length(config, (own.STREAM, 0))
    own.check_length(config, (10, 0))
