"""model=python: layers are counted in another process, once, and without memory for weights; a rank makes them from the run's seed."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from pipetrain.config.load import load_config
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import ModelConfig
from pipetrain.models import own_size
from pipetrain.models.own import count, cross_entropy, own_loss
from pipetrain.models.size import ModelSize, size_of
from pipetrain.models.spec import make_spec

MODEL = """
import torch
from torch import nn

SHIFT = 0

def whole(width=8):
    return nn.Sequential(nn.Embedding(16, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))

def tied(width=8):
    layers = whole(width)
    layers[3].weight = layers[0].weight
    return layers

def huge():
    layers = [nn.Linear(1 << 20, 1 << 20, bias=False)] * 3  # 4 TiB
    return layers

def forbidden():
    raise RuntimeError("a factory was called")

def factories():
    return [forbidden] * 5

def reads():
    layers = whole()
    layers[1].weight.sum().item()
    return layers

def with_loss():
    return whole(), nn.functional.mse_loss

def loss(output, targets, scale=1.0):
    return scale * output.mean()

def weigh(targets):
    return 7

def numbers():
    return [1, 2, 3]

def prints():
    print("hello")
    return whole()

def dies():
    import os
    os._exit(3)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of all tests here: what one has counted, in a process that loads torch, others find."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    own_size._counted.cache_clear()
    return tmp_path


def of(name: str, *typed: str) -> ModelConfig:
    return load_config(["model=python", f"model.target=mine:{name}", *typed]).model


def test_layers_are_counted_once_and_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of("prints")
    first = size_of(config)
    assert (first.num_layers, first.parameters_per_layer) == (4, (128, 72, 0, 144))
    assert first.flops_per_layer == (0.0, 128.0, 0.0, 256.0)  # an embedding is looked up
    assert "mine" not in sys.modules
    monkeypatch.setattr(subprocess, "run", None)  # nobody is asked again
    own_size._counted.cache_clear()
    assert size_of(config) == first


def test_a_changed_file_is_counted_anew(folder: pathlib.Path) -> None:
    assert size_of(of("whole")).num_layers == 4
    (folder / "mine.py").write_text(MODEL.replace("nn.ReLU(), ", ""))
    assert size_of(of("whole")).num_layers == 3


def test_damage_in_the_cache_is_counted_anew(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = json.loads(json.dumps(dataclasses.asdict(count(of("whole"))))), []
    monkeypatch.setattr(own_size, "_asked_of_a_child", lambda question: asked.append(question) or answer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    first = size_of(of("whole"))
    (file,) = (folder / "cache" / "pipetrain" / "layers").iterdir()
    damaged = "", "{}", '{"num_layers": 4, "kinds": 5, "tied": []}', '{"num_layers": 9, "kinds": ["a"], "tied": []}'
    for times, damage in enumerate(damaged, 2):
        file.write_text(damage)
        own_size._counted.cache_clear()
        assert size_of(of("whole")) == first
        assert len(asked) == times


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("factories", ModelSize(5)),  # counted, not called
        ("tied", ModelSize(4, tied=((0, 3),))),
        ("huge", ModelSize(3, parameters_per_layer=(1 << 40,) * 3, tied=((0, 1), (0, 2)))),
        ("reads", ModelSize(4, parameters_per_layer=(128, 72, 0, 144))),  # of values that meta tensors do not have
        ("with_loss", ModelSize(4)),
    ],
)
def test_what_is_counted(name: str, size: ModelSize) -> None:
    found = count(of(name))
    assert (found.num_layers, found.tied) == (size.num_layers, size.tied)
    assert size.parameters_per_layer in (None, found.parameters_per_layer)


@pytest.mark.quick("dies")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("numbers", "a model of type list cannot be cut: layer 0 is of type int; give an nn.Sequential"),
        ("dies", "ended with exit code 3"),
        (
            "loss",
            "missing a required argument: 'output'; it takes (output, targets, scale=1.0): set them as model.args.NAME=VALUE",
        ),
    ],
    ids=["numbers", "dies", "loss"],
)
def test_what_is_no_model_is_said_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        size_of(of(name))
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"model.target=mine:{name}")
    assert "\n" not in str(raised.value)


def test_without_torch_a_count_that_is_known_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    first, find = size_of(of("whole")), importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find(name))
    own_size._counted.cache_clear()
    assert size_of(of("whole")) == first
    with pytest.raises(ConfigError, match="counted with torch, which is not installed here"):
        size_of(of("whole", "model.args.width=9"))


def test_weights_follow_the_seed_and_the_callers_generators_stay() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    specs = [make_spec(of("whole"), 0, seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(1), expected)
    first, same, other = (spec.build(1, 2, seed=0)[0].state_dict()["weight"] for spec in specs)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    torch.manual_seed(1)
    plain = __import__("mine").whole()
    assert torch.equal(first, plain[1].weight)  # as a user who seeds with it gets them


def test_loss_and_count_are_named_like_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        own_size, "_counted", lambda question: count(of("with_loss"))
    )  # here: another process loads torch
    default = make_spec(of("whole"), 0)
    output, targets = torch.randn(2, 3, 16), torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert default.loss_fn is not None
    expected = torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    assert torch.equal(default.loss_fn(output, targets), expected)
    assert default.count(targets) == 3
    of_tuple = make_spec(of("with_loss"), 0)
    assert of_tuple.loss_fn is torch.nn.functional.mse_loss  # as it is
    assert of_tuple.count(targets) == 2  # rows: the default's count belongs to the default
    named = make_spec(of("with_loss", "model.loss=mine:loss", "model.loss_args.scale=2.0", "model.count=mine:weigh"), 0)
    assert named.loss_fn is not None
    assert torch.equal(named.loss_fn(output, targets), 2.0 * output.mean())
    assert named.count(targets) == 7


def test_a_loss_for_each_row_is_refused_before_a_process_starts() -> None:
    for typed in (["model.loss=torch.nn:MSELoss"], ["model.loss=torch.nn.functional:mse_loss"]):
        assert own_loss(of("whole", *typed)) is not None
        with pytest.raises(ConfigError, match=f"{typed[0]}: reduction=none gives a loss for each row; leave it out"):
            own_loss(of("whole", *typed, "model.loss_args.reduction=none"))
    assert own_loss(of("whole")) is None
    a_module = make_spec(of("whole", "model.loss=torch.nn:MSELoss"), 0).loss_fn
    assert isinstance(a_module, torch.nn.MSELoss)  # itself: a stage looks at the buffers of a loss


@pytest.mark.parametrize("targets", [torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64), {"a": torch.zeros(2)}])
def test_the_default_loss_says_what_it_takes(targets: Any) -> None:
    with pytest.raises(ValueError, match=r"takes an output \[..., classes\]"):
        cross_entropy(torch.randn(2, 5), targets)


def test_another_number_of_layers_than_was_counted_is_refused(folder: pathlib.Path) -> None:
    (folder / "depth.py").write_text("DEPTH = 2\n")
    (folder / "mine.py").write_text(
        "import depth\nfrom torch import nn\ndef deep():\n    return [nn.ReLU()] * depth.DEPTH\n"
    )
    config = of("deep")
    assert size_of(config).num_layers == 2
    (folder / "depth.py").write_text("DEPTH = 3  # another length\n")
    with pytest.raises(
        ConfigError, match="gives 3 layers, and gave another number when they were counted; start again"
    ):
        make_spec(config, 0)
    assert size_of(config).num_layers == 3
    sys.modules.pop("depth")
