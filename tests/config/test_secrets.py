"""A configuration holds no secret and names no code: it is written to config.yaml and into every snapshot."""

import pathlib

import pytest

from pipetrain.cli.main import main
from pipetrain.config.load import load_config, read
from pipetrain.config.problem import ConfigError
from pipetrain.config.schema import keys
from pipetrain.config.secrets import looks_secret

VALUE = "0123456789abcdef-marker"


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "observe.wandb.api_key", "wandb.apikey", "db.password", "AWS_SECRET", "x.token"],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


def test_no_key_of_ours_looks_like_a_secret() -> None:
    assert [key for key in keys() if looks_secret(key)] == []


OF_SECRETS = ["observe.wandb.api_key={}", "+observe.wandb.api_key={}", "++wandb_token={}", "~hub.token={}"]


@pytest.mark.parametrize("override", [*OF_SECRETS, "observe.wandb={{api_key: {}}}", "password={} with a space"])
def test_a_key_for_a_secret_is_refused_and_its_value_not_repeated(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", override.format(VALUE)]) == 2
    out, err = capsys.readouterr()
    assert "a secret does not belong in the configuration" in err
    assert VALUE not in out + err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "override", ["run_dir=${oc.env:WANDB_API_KEY}", "observe.wandb.project='x-{}'", "data.path={}", "experiment=smoke"]
)
def test_a_value_that_holds_a_secret_of_the_environment_is_refused(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    if override == "experiment=smoke":
        load_config([override])
        return
    with pytest.raises(ConfigError, match="holds the value of WANDB_API_KEY") as caught:
        load_config([override.replace("{}", VALUE)])
    assert VALUE not in str(caught.value)


def test_other_variables_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12345678901")
    monkeypatch.setenv("HF_TOKEN", "abc")  # too short to be one: it would forbid words by chance
    assert load_config(["run_dir=runs/${oc.env:SLURM_JOB_ID}-abc"]).run_dir == "runs/12345678901-abc"


@pytest.mark.parametrize(
    "override",
    [
        "model._target_=os.system",
        "+model._target_=os.system",
        "optim={_target_: os.system}",
        "model.path._target_=os.system",
        "hydra.launcher._target_=os.system",
        "observe.wandb={mode: disabled, project: x, _target_: os.system}",
        "_partial_=true",
    ],
)
def test_code_cannot_be_named(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config([override])


def test_the_message_says_that_code_cannot_be_named() -> None:
    with pytest.raises(ConfigError, match=r"model\._target_: a configuration names no code to run"):
        load_config(["model._target_=os.system"])


def test_a_run_folder_cannot_name_code_either(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yaml").write_text("model:\n  _target_: os.system\n  _args_: [touch x]\n")
    with pytest.raises(ConfigError, match=r"model\._target_: a configuration names no code"):
        read(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("seed: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError):
        read(tmp_path / "config.yaml")
