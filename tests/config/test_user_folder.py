"""Configuration files of your own, as users of Hydra know them: `--config-dir`, `--config-name`, `--cfg`, and what `--help` lists."""

import pathlib

import pytest
import yaml

from pipetrain.cli.main import main
from pipetrain.config.load import choices, load_config
from pipetrain.config.problem import ConfigError
from pipetrain.config.schema import keys

FILES = {
    "mine.yaml": "defaults: [config, {override recompute: inline}, {override experiment: null}, _self_]\nexperiment: mine\nsteps: 30\n",
    "experiment/small.yaml": "# @package _global_\ndefaults: [{override /model: gpt2}]\nsteps: 5\nmodel: {hidden_size: 32}\n",
    "model/tiny.yaml": "name: llama\nintermediate_size: ${oc.decode:'16'}\n",
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_of_your_own_builds_on_ours(folder: pathlib.Path) -> None:
    config = load_config([f"--config-dir={folder}", "--config-name=mine", "steps=40"])
    assert (config.experiment, config.steps, config.recompute.mode) == ("mine", 40, "inline")
    small = load_config([f"--config-dir={folder}", "experiment=small", "recompute=never"])
    assert (small.model.name, small.model.hidden_size, small.steps, small.recompute.mode) == ("gpt2", 32, 5, "never")
    assert load_config([f"--config-dir={folder}", "model=tiny"]).model.intermediate_size == 16


def test_without_the_option_it_is_not_there(folder: pathlib.Path) -> None:
    load_config([f"--config-dir={folder}", "model=tiny"])
    with pytest.raises(ConfigError, match="model=tiny: allowed are gpt2, hf, llama, python"):
        load_config(["model=tiny"])
    with pytest.raises(ConfigError, match="Cannot find primary config 'mine'"):
        load_config(["--config-name=mine"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config-dir=nowhere"], "--config-dir=nowhere: there is no such folder"),
        (["--config-name=nothing"], "Cannot find primary config 'nothing'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 0
    return capsys.readouterr().out


def test_the_configuration_is_shown_as_hydra_shows_it(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = (f"--config-dir={folder}", "model=tiny", "steps=7")
    job = yaml.safe_load(printed(capsys, *mine, "--cfg=job"))
    assert (job["steps"], job["model"]["intermediate_size"]) == (7, "${oc.decode:'16'}")
    assert yaml.safe_load(printed(capsys, *mine, "--cfg=job", "--resolve"))["model"]["intermediate_size"] == 16
    assert set(yaml.safe_load(printed(capsys, *mine, "--cfg=hydra"))) == {"hydra"}
    assert {"hydra", "steps"} <= set(yaml.safe_load(printed(capsys, *mine, "--cfg=all")))


def test_help_lists_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    few = capsys.readouterr().out
    for group, names in choices().items():
        assert f"{group}=" in few
        assert ", ".join(names) in few
    assert sum(f"\n  {key} " in few for key in keys()) == 21
    every = printed(capsys, "--help-keys")
    missing = [key for key in keys() if not hasattr(keys()[key], "__dataclass_fields__") and f"  {key} " not in every]
    assert missing == []


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "pipetrain 0.1.0\n"
