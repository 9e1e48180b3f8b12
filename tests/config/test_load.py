"""Composition of conf/, and the way to YAML and back."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from pipetrain.config.load import as_yaml, choices, load_config, read
from pipetrain.config.problem import ConfigError
from pipetrain.config.read_files import shipped
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import keys
from pipetrain.config.together import check_run

CONF = shipped("conf")
GROUPS = "model data pipeline recompute plan parallel engine optim guard snapshot observe cluster transport"
PROMISED = (
    "seed steps run_dir resume init_from timeout_seconds data.path data.global_batch_size data.sequence_length "
    "model.path model.dropout pipeline.schedule pipeline.num_stages pipeline.stages_per_rank "
    "pipeline.num_microbatches pipeline.balance pipeline.placement pipeline.warmup pipeline.search_seconds plan.profile "
    "plan.memory_budget_bytes "
    "recompute.mode recompute.sets recompute.keep recompute.stash recompute.last_stage recompute.segments recompute.selective "
    "transport.prefetch transport.communicators "
    "transport.backend parallel.num_replicas parallel.order parallel.check_every_steps parallel.zero_stage "
    "parallel.fsdp parallel.tensor optim.learning_rate optim.max_grad_norm optim.warmup_steps "
    "snapshot.every_steps snapshot.keep_last observe.wandb.mode cluster.num_nodes cluster.ranks_per_node "
    "phases cost.forward_seconds cost.backward_seconds cost.recompute_seconds cost.hop_seconds "
    "cost.input_gradient_seconds cost.weight_gradient_seconds cost.input_share cost.kept_share "
)


def test_groups_are_those_of_the_design() -> None:
    assert set(choices()) == {*GROUPS.split(), "experiment"}


def test_keys_that_scripts_rely_on() -> None:
    assert [key for key in PROMISED.split() if key not in keys()] == []


def test_files_and_records_have_the_same_defaults() -> None:
    composed, written = load_config(), RunConfig()
    assert composed.data.pattern == "**/*.py"  # stdlib's own
    data = dataclasses.replace(composed.data, pattern=written.data.pattern)
    model = dataclasses.replace(
        composed.model, num_hidden_layers=4, hidden_size=128
    )  # the sizes of quickstart are its own
    assert dataclasses.replace(composed, data=data, model=model) == written


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_no_file_repeats_a_default(file: pathlib.Path) -> None:
    """They would be two places to change, and the second one would win in silence."""
    text = file.read_text()
    whole = file.parent == CONF or "@package _global_" in text
    values = yaml.safe_load(text) or {}
    written = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    default = dict(flat(yaml.safe_load(as_yaml(RunConfig()))))
    found = list(flat(written, "" if whole else f"{file.parent.name}."))
    assert [key for key, value in found if default[key] == value] == []


def test_a_key_that_no_file_names_can_be_set_and_read() -> None:
    assert "threads_per_rank" not in "".join(file.read_text() for file in CONF.rglob("*.yaml"))
    assert load_config(["threads_per_rank=3", "run_dir=runs/${threads_per_rank}"]).run_dir == "runs/3"


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in choices().items() for name in names], ids="=".join
)
def test_every_choice_composes(group: str, name: str, tmp_path: pathlib.Path) -> None:
    target = [f"{group}.target=torch.nn:Identity"] if name == "python" else []
    vocabulary = ["model.vocab_size=9"] if group == "data" else []
    config = load_config([f"{group}={name}", *target, *vocabulary])
    check_run(config)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert read(tmp_path / "config.yaml") == config


def test_the_experiment_of_the_defaults_may_be_named() -> None:
    for choice in ("model=gpt2", "data=text", "recompute=never"):
        assert load_config([choice]) == load_config([choice, f"experiment={load_config([choice]).experiment}"])


def test_overrides_win_over_groups_and_groups_over_defaults() -> None:
    config = load_config(["experiment=smoke", "model=gpt2", "steps=7", "recompute=inline", "recompute.sets=[2,1]"])
    assert (config.experiment, config.steps, config.model.name) == ("smoke", 7, "gpt2")
    assert (config.recompute.mode, config.recompute.sets) == ("inline", (2, 1))
    assert config.model.num_hidden_layers == 2  # of the experiment, over the group's 4


def test_a_value_of_one_configuration_is_none_of_the_next() -> None:
    """Files are composed once, values set each time."""
    default = load_config([])
    assert load_config(["steps=7", "optim.betas=[0.5,0.6]", "recompute.sets=[2,1]"]) != default
    assert load_config([]) == default


def test_types_are_those_of_the_records() -> None:
    words = "timeout_seconds=30 pipeline.balance=[2,4] cost.hop_seconds=[1,0.5] optim.max_grad_norm=null"
    config = load_config(words.split())
    assert isinstance(config.timeout_seconds, float)
    assert config.pipeline.balance == (2, 4)
    assert config.cost.hop_seconds == (1.0, 0.5)
    assert config.optim.max_grad_norm is None


def test_a_file_of_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="a configuration is a mapping"):
        read(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="there is no such file"):
        read(tmp_path / "missing.yaml")


def test_a_length_that_is_typed_replaces_that_of_an_experiment() -> None:
    tuned = load_config(["experiment=finetune", "steps=12"])
    assert (tuned.steps, tuned.epochs) == (12, None)
    assert load_config(["experiment=finetune"]).epochs == 1
    smoke = load_config(["experiment=smoke", "epochs=2"])
    assert (smoke.steps, smoke.epochs) == (None, 2)
    assert load_config(["experiment=finetune", "steps=null"]).epochs == 1
