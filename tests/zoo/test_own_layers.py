"""`pipetrain verify MODULE:FUNCTION`: which of a user's layers can be recomputed, and what is said of wrong input."""

import json
import os
import pathlib
import sys
import textwrap
import time

import pytest

from pipetrain.cli.main import main
from pipetrain.verify.beside_loop import Found, Verdict, Way
from pipetrain.verify.own_layers import try_apart

MODULE = """
import torch
from torch import nn

calls = []


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(probe).tanh().sum(), probe, create_graph=True)
        return self.inner(x) + slope


class Counts(nn.Module):
    def forward(self, x):
        calls.append(1)
        return x * x * (1 + 0.1 * len(calls))


def good():
    print("good is made")
    return [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2)]


def with_all():
    return nn.Sequential(*good()), nn.functional.mse_loss, torch.randn(5, 4), torch.randn(5, 2)  # of 3 and 2 rows


def penalised():
    return [nn.Linear(4, 4), Penalised(), nn.Linear(4, 2)]


def counts():
    calls.clear()
    return [nn.Linear(4, 4), nn.Linear(4, 4), Counts(), nn.Linear(4, 2)]  # last in a stage, nobody would read what it gives


def make_batch():
    return torch.randn(6, 4), torch.randn(6, 2)


def raises():
    raise KeyError("weights")


def no_model():
    return 3


def triple():
    return [nn.Linear(4, 4)], None, torch.ones(6, 4)


def fails():
    return [nn.Linear(4, 4), nn.Linear(5, 4)]


def unsure():
    import os
    return [nn.Linear(4, 4), nn.Dropout(int.from_bytes(os.urandom(7), "big") / 2**57)]


number = 3
"""


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_model.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


BATCH = ["--batch", "own_model:make_batch", "--quick"]


@pytest.mark.usefixtures("here")
def test_layers_that_can_all_be_recomputed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "own_model:with_all", "--quick", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [(layer["kind"], layer["result"]) for layer in report["layers"]] == [
        ("Linear", "equal"),
        ("BatchNorm1d", "equal"),
        ("Dropout", "equal"),
        ("Linear", "equal"),
    ]
    assert report["ways"] == [{"mode": "overlap", "stages": 2, "result": "equal", "detail": ""}]


@pytest.mark.usefixtures("here")
def test_a_layer_that_is_kept_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "own_model:penalised", *BATCH]) == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines[1] == "0 Linear recomputed"
    assert lines[2].startswith("1 Penalised kept: layer 1 (Penalised) takes a gradient inside its forward")
    assert lines[3] == "2 Linear recomputed"
    assert lines[-1] == "1 of 1 ways to run it equal the plain loop bit for bit"


@pytest.mark.usefixtures("here")
def test_a_layer_that_cannot_be_recomputed_is_named_among_those_that_can(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "own_model:counts", *BATCH]) == 3
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert [lines[number] for number in (1, 2, 4)] == [f"{layer} Linear recomputed" for layer in (0, 1, 3)]
    assert lines[3].startswith("2 Counts cannot be recomputed: layer 2 (Counts)")
    assert lines[-1] == "0 of 1 ways to run it equal the plain loop bit for bit"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own_model"], "own_model: names no function; write MODULE:FUNCTION, as in my_package.models:make_layers"),
        (["no_such_model:f"], "no_such_model:f: there is no module 'no_such_model' in "),
        (["broken_model:f"], "broken_model cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (["own_model:no_such"], "own_model has no 'no_such'; there are Counts, Penalised, counts, fails, good"),
        (["own_model:number"], "own_model:number: is a int, and no function"),
        (["own_model:raises"], "own_model:raises() raised KeyError: 'weights'"),
        (["own_model:good"], "gives layers without a batch to train on"),
        (["own_model:triple"], "own_model:triple returned a tuple of 3: allowed are layers, (layers, loss_fn)"),
        (["own_model:no_model", *BATCH], "own_model:no_model: a model of type int cannot be cut"),
        (["own_model:good", "--batch", "own_model:no_model"], "own_model:no_model returned a int: it must return the pair"),
        (["own_model:fails", *BATCH], "own_model:fails: the plain loop fails itself: RuntimeError: mat1 and mat2"),
        (["own_model:unsure", *BATCH], "own_model:unsure: two plain loops from one seed differ in the loss of step 1"),
        (["--batch", "own_model:make_batch"], "--batch belongs to MODULE:FUNCTION"),
        (["own_model:good", "--faults"], "MODULE:FUNCTION and --faults are two things to verify: choose one"),
        (["--layers"], "--layers: layers of every kind are tests of pipetrain's repository: type `python tests/zoo/layer_zoo.py` there"),
        (["own_model:good", "--layers", "--quick", "--json"], "--layers: layers of every kind are tests"),
    ],
)  # fmt: skip
def test_wrong_input_ends_with_2_and_a_line(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("pipetrain: ")]
    assert said in line


def ends_dies_or_hangs(way: Way) -> Found:
    if way.mode == "dies":
        os.kill(os.getpid(), 9)
    if way.mode == "hangs":
        time.sleep(600)
    return Found(Verdict.EQUAL)


def test_what_hangs_or_dies_is_named_and_the_rest_goes_on() -> None:
    ways = [Way(mode, 1) for mode in ("ends", "dies", "ends", "hangs", "ends")]
    came = list(try_apart(ends_dies_or_hangs, ways, seconds=3))
    assert [way for way, _ in came] == ways
    assert [(found.result.value, found.detail) for _, found in came] == [
        ("equal", ""),
        ("failed", "its process died (exit code -9)"),
        ("equal", ""),
        ("failed", "hangs: nothing came for 3 s"),
        ("failed", "not tried, as hangs, 1 stage hung"),
    ]
