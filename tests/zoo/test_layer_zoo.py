"""The zoo of layers: every entry comes out as it says, the table says what does not, and what hangs or dies is named."""

import dataclasses
import os
import time
from pathlib import Path

import apart
import layer_zoo
import pytest
from apart import try_apart
from layer_zoo import ENTRIES, EntryRow, ZooTrial, entry_named, every_third, halves, run_zoo, ways_of, zoo_table

from pipetrain.stage.errors import RecomputeMismatch
from pipetrain.verify.beside_loop import Found, Verdict, Way, differences, is_named, plain, same_tensor

WAY = Way("overlap", 2)


def found(*results: Found, name: str = "LSTM with a projection") -> EntryRow:
    return EntryRow(entry_named(name), tuple((WAY, result) for result in results))


# The zoo --------------------------------------------------------------------------------------------------------------


def unexpected(rows: list[EntryRow]) -> str:
    return zoo_table([row for row in rows if not row.is_expected])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_zoo() -> None:
    """Every entry in the ways of a quick look; `python tests/zoo/layer_zoo.py` goes all ways.

    With a backward in two halves, what comes out equal, kept or refused does so, too.
    """
    rows = run_zoo(quick=True)
    assert all(row.is_expected for row in rows), unexpected(rows)
    for row in rows:
        # What the proof of the first step cannot see, the witness may name.
        allowed = {row.entry.expected} | ({Verdict.REFUSED} if row.entry.is_documented else set())
        in_halves = [came for way, came in row.found if way.schedule is halves]
        assert {came.result for came in in_halves} <= allowed, f"{row.entry.name} in halves: {in_halves}"


def test_each_entry_is_named_once_and_stands_in_the_frame_of_all_stages() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names) >= 80
    for entry in ENTRIES:
        assert {way.mode for way in ways_of(entry)} == {"never", "inline", "early", "overlap"}
        assert len(entry.subject.layers()) >= max(entry.stages), entry.name


def test_every_third_leaves_out_no_kind_of_expectation() -> None:
    assert {entry.expected for entry in every_third()} >= {Verdict.EQUAL, Verdict.KEPT, Verdict.REFUSED}
    assert not any(entry.slow for entry in every_third())


# What is said ---------------------------------------------------------------------------------------------------------


def test_what_is_not_as_expected_is_said_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        found(Found(Verdict.EQUAL)),
        found(Found(Verdict.EQUAL), Found(Verdict.DIFFERS, "the loss differs"), name="RNN"),
    ]
    monkeypatch.setattr(layer_zoo, "run_zoo", lambda *_, **__: rows)
    assert layer_zoo.main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "RNN: expected equal" in out
    assert "differs: the loss differs  [overlap, 2 stages]" in out
    assert "LSTM with a projection: expected" not in out
    rows.pop()
    assert layer_zoo.main([]) == 0


@pytest.mark.parametrize(
    ("name", "came", "expected"),
    [
        ("RNN", [Found(Verdict.EQUAL), Found(Verdict.EQUAL)], True),
        ("RNN", [Found(Verdict.EQUAL), Found(Verdict.KEPT, "layer 1")], False),
        ("a gradient penalty", [Found(Verdict.EQUAL), Found(Verdict.KEPT, "layer 1")], True),
        ("a gradient penalty", [Found(Verdict.EQUAL)], False),
        ("backward() in a forward", [Found(Verdict.REFUSED, "layer 1 (LocalLoss) calls backward()")], True),
        ("backward() in a forward", [Found(Verdict.REFUSED, "layer 2 (Linear)")], False),
        ("backward() in a forward", [Found(Verdict.FAILED, "KeyError: (LocalLoss)")], False),
    ],
)
def test_as_expected(name: str, came: list[Found], expected: bool) -> None:
    assert found(*came, name=name).is_expected is expected


def test_an_entry_without_what_it_needs_is_left_out_and_said() -> None:
    entry = dataclasses.replace(entry_named("RNN"), lacks=lambda: "no compiler here")
    (row,) = run_zoo([entry])
    assert (row.is_expected, row.found) == (True, ())
    assert "left out: no compiler here" in zoo_table([row])


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RecomputeMismatch("layer 3 (Foo): the recompute saves another tensor"), True),
        (ValueError("inputs[0] needs a gradient"), True),
        (RuntimeError("shape '[2]' is invalid"), False),
        (KeyError("layer 3"), False),
        (AssertionError("stage 1 still holds microbatches"), False),
        (KeyboardInterrupt("layer 3"), False),
    ],
)
def test_errors_that_name_a_layer(error: BaseException, named: bool) -> None:
    assert is_named(error) is named


# Beside each other ----------------------------------------------------------------------------------------------------


def test_the_last_bit_and_the_form_count() -> None:
    import torch

    one = torch.tensor([1.0, float("nan")])
    assert same_tensor(one, one.clone())
    assert not same_tensor(one, torch.nextafter(one, 2 * one))
    assert not same_tensor(one, one.double())
    assert [what for what, _ in differences({"a": one, "b": None, "c": 1}, {"a": one, "b": one, "c": 2})] == ["b", "c"]


def test_a_plain_loop_is_the_same_twice() -> None:
    subject = entry_named("stochastic depth by torch").subject
    assert list(differences(plain(subject), plain(subject))) == []


# Apart ----------------------------------------------------------------------------------------------------------------


def hangs_dies_or_ends(trial: ZooTrial) -> Found:
    if trial.subject == "hangs":
        time.sleep(3600)
    if trial.subject == "dies":
        os._exit(9)
    print("what a layer prints is not the command's")
    return Found(Verdict.EQUAL)


def needs_one_that_is_done(trial: ZooTrial) -> Found:
    import torch
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        stay = apart.wait  # what a rank does that has no trial left
        apart.wait = lambda ends: (store.set("stays", ""), stay(ends))[1]  # type: ignore[assignment]
        store.set("process", str(os.getpid()))
        NEEDED.append(dist.isend(torch.ones(10_000_000), 1))  # leaves when it is asked for
    else:
        first = int(store.get("process"))
        while not store.check(["stays"]) and is_running(first):
            time.sleep(0.01)
        dist.recv(torch.zeros(10_000_000), 0)
    return Found(Verdict.EQUAL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


NEEDED: list[object] = []


def test_a_rank_that_is_done_stays_for_the_others() -> None:
    ((_, found),) = try_apart(needs_one_that_is_done, [ZooTrial("ends", WAY)], num_ranks=2)
    assert found == Found(Verdict.EQUAL)


@pytest.mark.slow
def test_what_hangs_or_dies_is_named_and_the_rest_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    subjects = ["ends", "hangs", "hangs", "dies", "ends"]
    came = list(try_apart(hangs_dies_or_ends, [ZooTrial(name, WAY) for name in subjects], num_ranks=2, seconds=10))
    assert [trial.subject for trial, _ in came] == subjects
    assert [result.result for _, result in came] == ["equal", "failed", "failed", "failed", "equal"]
    assert [result.detail for _, result in came][1:4] == [
        "hangs: nothing came for 10 s",
        "not tried, as hangs (overlap, 2 stages) hung",
        "its process died (exit code 9)",
    ]
    assert capfd.readouterr().out == ""
