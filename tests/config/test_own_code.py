"""Your own code in a configuration: it is typed, its file is known by its digest, and nothing of it runs when a configuration is read."""

import hashlib
import pathlib
import sys

import pytest

from pipetrain.config.load import as_yaml, load_config, read
from pipetrain.config.own_code import call_target, function_of
from pipetrain.config.problem import ConfigError
from pipetrain.config.schema import guarded_keys

MODEL = """
from pathlib import Path
Path("imported").touch()

def make_layers(width=4, *, depth=2):
    return [width] * depth

class Scaled:
    def __init__(self, scale=1):
        self.scale = scale

    def __call__(self, output, targets):
        return self.scale

def broken():
    raise KeyError("weights")
"""
OWN = ["model=python", "model.target=mine:make_layers"]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def test_a_configuration_knows_the_file_and_does_not_import_it(folder: pathlib.Path) -> None:
    config = load_config([*OWN, "model.args.width=8", "model.args.inner={_target_: fractions.Fraction, numerator: 3}"])
    assert config.model.file_sha256 == hashlib.sha256(MODEL.encode()).hexdigest()
    assert config.model.args == {"width": 8, "inner": {"_target_": "fractions.Fraction", "numerator": 3}}
    (folder / "config.yaml").write_text(as_yaml(config))
    assert read(folder / "config.yaml") == config
    assert not (folder / "imported").exists()


def test_a_file_in_a_package_is_found_without_the_package(folder: pathlib.Path) -> None:
    (folder / "kit").mkdir()
    (folder / "kit" / "__init__.py").write_text(MODEL)
    (folder / "kit" / "models.py").write_text("make = list\n")
    config = load_config(["model=python", "model.target=kit.models.make"])
    assert config.model.file_sha256 == hashlib.sha256(b"make = list\n").hexdigest()
    assert not (folder / "imported").exists()


def test_a_resumed_run_keeps_the_target_its_arguments_and_its_file() -> None:
    assert {"model.target", "model.args", "model.loss", "model.file_sha256"} <= set(guarded_keys())
    assert (
        load_config([*OWN, "model.file_sha256=before"]).model.file_sha256 == "before"
    )  # typed: a changed file is accepted


def test_keys_of_an_experiment_that_do_not_apply_are_ignored_and_named_in_one_line() -> None:
    lines: list[str] = []
    config = load_config(["experiment=smoke", *OWN], lines.append)
    assert config.model.hidden_size == load_config([]).model.__class__().hidden_size
    ignored = "model.num_hidden_layers, model.hidden_size, model.num_attention_heads"
    assert lines == [f"experiment=smoke: {ignored} do not apply to model=python, so they are ignored"]
    load_config(OWN, lines.append)  # the default experiment, which nobody typed
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ([*OWN, "model.hidden_size=64"], "model.hidden_size: does not apply to model=python"),
        (["model.target=mine:make_layers"], "type model=python"),
        (["model=python"], "model.target is not set"),
        (["model=python", "model.target=mina:make_layers"], "did you mean 'mine'?"),
        (["model=python", "model.target=make_layers"], "names no function"),
        ([*OWN, "model.args=5"], "allowed is a group of keys"),
        ([*OWN, "model.args.api_key=5"], "a secret"),
        (["model.lora._target_=os.system"], "names no code to run"),
        (["optim={_target_: os.system}"], "names no code to run"),
    ],
)
def test_a_mistake_is_one_line(typed: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(typed)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_functions_and_classes_are_called_with_their_arguments() -> None:
    assert call_target("model.target", "mine:make_layers", {"width": 3, "depth": 1}) == [3]
    made = call_target(
        "model.target", "mine.make_layers", {"width": {"_target_": "fractions.Fraction", "numerator": 3}}
    )
    assert made == [3, 3]
    assert function_of("model.loss", "mine:Scaled", {"scale": 2})(0, 0) == 2  # a class is called
    assert function_of("model.loss", "mine:make_layers", {"depth": 1})(7) == [7]  # a function gets more arguments


@pytest.mark.parametrize(
    ("spelling", "args", "says"),
    [
        ("mine:make_layers", {"hight": 3}, "unexpected keyword argument 'hight'; it takes (width=4, *, depth=2)"),
        ("mine:make_layer", {}, "did you mean 'make_layers'?"),
        ("mine:broken", {}, "raises KeyError: 'weights' (mine.py, line 16)"),
        ("mine:make_layers", {"width": {"_target_": "nowhere.at_all"}}, "an argument cannot be made"),
        ("mine:make_layers", {"_target_": "mine:Scaled"}, "type model.target=mine:Scaled"),
    ],
)
def test_what_cannot_be_called_is_said_in_one_line(spelling: str, args: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call_target("model.target", spelling, args)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
