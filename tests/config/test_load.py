"""Composition of conf/, and the way to YAML and back."""

import dataclasses
import pathlib

import pytest

from pipetrain.config.load import as_yaml, choices, load, read
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import keys
from pipetrain.config.together import check_run

GROUPS = {
    "model",
    "data",
    "pipeline",
    "recompute",
    "parallel",
    "engine",
    "optim",
    "guard",
    "snapshot",
    "observe",
    "cluster",
}
PROMISED = (
    "seed steps run_dir resume init_from timeout_seconds data.path data.batch_size data.sequence_length "
    "model.path model.dropout pipeline.schedule pipeline.num_stages pipeline.stages_per_rank "
    "pipeline.num_microbatches pipeline.balance pipeline.warmup recompute.mode recompute.ahead "
    "recompute.keep recompute.last_stage recompute.granularity parallel.num_replicas parallel.zero "
    "parallel.fsdp parallel.tensor optim.learning_rate optim.clip_norm optim.warmup_steps "
    "snapshot.every_steps snapshot.keep_last observe.wandb.mode cluster.num_nodes cluster.gpus_per_node "
    "cost.forward_seconds cost.backward_seconds cost.recompute_seconds cost.hop_seconds "
)


def test_groups_are_those_of_the_design() -> None:
    assert set(choices()) == GROUPS | {"experiment"}


def test_keys_that_scripts_rely_on() -> None:
    assert [key for key in PROMISED.split() if key not in keys()] == []


def test_files_and_records_have_the_same_defaults() -> None:
    composed, written = load(), RunConfig()
    assert composed.data.pattern == "**/*.py"  # stdlib's own
    data = dataclasses.replace(composed.data, pattern=written.data.pattern)
    assert dataclasses.replace(composed, data=data) == written


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in choices().items() for name in names], ids="=".join
)
def test_every_choice_composes(group: str, name: str, tmp_path: pathlib.Path) -> None:
    config = load([f"{group}={name}"])
    assert config == load([f"{group}={name}", f"experiment={config.experiment}"])
    check_run(config)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert read(tmp_path / "config.yaml") == config


def test_overrides_win_over_groups_and_groups_over_defaults() -> None:
    config = load(["experiment=smoke", "model=gpt2", "steps=7", "recompute=inline", "recompute.keep=2"])
    assert (config.experiment, config.steps, config.model.name) == ("smoke", 7, "gpt2")
    assert (config.recompute.mode, config.recompute.keep) == ("inline", 2)
    assert config.model.num_blocks == 2  # of the experiment, over the group's 4


def test_types_are_those_of_the_records() -> None:
    config = load(["timeout_seconds=30", "pipeline.balance=[2,4]", "cost.hop_seconds=[1,0.5]", "optim.clip_norm=null"])
    assert isinstance(config.timeout_seconds, float)
    assert config.pipeline.balance == (2, 4)
    assert config.cost.hop_seconds == (1.0, 0.5)
    assert config.optim.clip_norm is None


def test_a_file_of_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="a configuration is a mapping"):
        read(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="there is no such file"):
        read(tmp_path / "missing.yaml")
