"""`phases`: from one configuration to one per phase, and what is said where that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipetrain.config.load import as_yaml, load_config, read
from pipetrain.config.phases import batches_before, naming_phase, phases_of, steps_of_phases, value_in_step
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import phase_keys
from pipetrain.config.together import check_run, with_steps
from pipetrain.engine.available import check_engine
from pipetrain.trainer.prepare import prepare_phases

THREE = (
    "phases=[{from:0,recompute:{sets:1}},{from:50,recompute:{mode:inline,segments:sqrt},data:{global_batch_size:32},"
    "pipeline:{num_microbatches:4}},{from:120,data:{sequence_length:512}}]"
)


def test_a_run_without_phases_is_one() -> None:
    (only,) = phases_of(load_config([]))
    assert (only.number, only.first_step, only.config) == (0, 1, load_config([]))


def test_each_phase_is_the_run_with_its_own_keys() -> None:
    config = load_config([THREE])
    first, second, third = phases_of(config)
    assert [phase.number for phase in (first, second, third)] == [0, 1, 2]
    assert [phase.first_step for phase in (first, second, third)] == [1, 51, 121]
    assert first.config == load_config(["recompute.sets=1"])
    assert second.config == load_config(
        ["recompute.mode=inline", "recompute.segments=sqrt", "data.global_batch_size=32", "pipeline.num_microbatches=4"]
    )
    assert third.config == load_config(["data.sequence_length=512"])  # and not what the phase before it had
    assert [count for _, count in steps_of_phases((first, second, third), 200)] == [50, 70, 80]
    assert [count for _, count in steps_of_phases((first, second, third), 60)] == [50, 10, 0]


def test_keys_may_be_written_with_dots() -> None:
    config = load_config(["phases=[{from:0},{from:7,recompute.sets:2,data.global_batch_size:8}]"])
    assert phases_of(config)[1].config == load_config(["recompute.sets=2", "data.global_batch_size=8"])


def test_they_come_back_from_the_run_folder(tmp_path: Any) -> None:
    (tmp_path / "config.yaml").write_text(as_yaml(load_config([THREE])))
    assert read(tmp_path / "config.yaml") == load_config([THREE])


def test_what_a_phase_may_change() -> None:
    of_batches = {"data.global_batch_size", "data.sequence_length", "pipeline.num_microbatches"}
    assert set(phase_keys()) == {*of_batches, *(f"recompute.{key}" for key in vars(RunConfig().recompute))}


MISTAKES = {
    "5": ["phases=5", "a list of groups of keys, as in [{key: value}"],
    "[5]": ["phases=[5]", "a list of groups of keys"],
    "[{recompute:{sets:1}}]": ["phases[0]: it has no `from`", "{from: 5000, recompute: {sets: 3}}"],
    "[{from:10}]": ["phases[0].from=10", "begins with the run", "from: 0"],
    "[{from:0},{from:9},{from:9}]": ["phases[2].from=9", "phases[1] begins after 9 steps"],
    "[{from:0},{from:9},{from:5}]": ["phases[2].from=5", "phases[1] begins after 9 steps"],
    "[{from:0},{from:-1}]": ["phases[1].from=-1", "0 or more"],
    "[{from:0},{from:1.5}]": ["phases[1].from=1.5", "a number of steps"],
    "[{from:0},{from:true}]": ["phases[1].from=True", "a number of steps"],
    "[{from:0},{from:200}]": ["phases[1].from=200", "steps=200"],
    "[{from:0,optim:{learning_rate:1}}]": ["phases[0].optim.learning_rate", "recompute.*, data.global_batch_size"],
    "[{from:0,pipeline:{balance:[3,3]}}]": ["phases[0].pipeline.balance", "layers stay on their stages"],
    "[{from:0,recompute:inline}]": ["phases[0].recompute", "a group"],
    "[{from:0,recompute:{mod:inline}}]": ["phases[0].recompute.mod", "did you mean 'recompute.mode'"],
    "[{from:0,data:{global_batch_size:x}}]": ["phases[0].data.global_batch_size=x", "an integer"],
    "[{from:0,hub_token:abc}]": ["hub_token", "a secret"],
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_told_in_one_line(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_run(load_config([f"phases={given}"]))
    message = str(refused.value)
    assert [part for part in MISTAKES[given] if part not in message] == []
    assert "\n" not in message


def test_a_secret_in_a_list_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdefghijk")
    with pytest.raises(ConfigError, match=r"phases\[0\]\.recompute\.mode: holds the value of SOME_API_KEY"):
        load_config(["phases=[{from:0,recompute:{mode:abcdefghijk}}]"])


# Each phase is prepared ------------------------------------------------------------------------------------------------


UNFIT = {
    "{from:9,pipeline:{num_microbatches:40}}": "phases[1]: pipeline.num_microbatches=40 is more than data.global_batch_size=16",
    "{from:9,data:{global_batch_size:4}}": "phases[1]: pipeline.num_microbatches=8 is more than data.global_batch_size=4",
    "{from:9,data:{sequence_length:4096}}": "phases[1]: data.sequence_length=4096 is longer than model.max_position_embeddings=1024",
    "{from:9,recompute:{segments:9}}": "phases[1]: recompute.segments=9: stage 0 has 4 layers",
    "{from:9,recompute:{sets:0}}": "phases[1]: recompute.sets=0",
    "{from:9,recompute:{mode:later}}": "phases[1]: recompute.mode=",
}


@pytest.mark.parametrize("given", UNFIT)
def test_a_phase_that_does_not_fit_is_told_before_anything_starts(given: str) -> None:
    with pytest.raises(ValueError, match=r"^phases\[1\]: ") as refused:
        prepare_phases(load_config([f"phases=[{{from:0}},{given}]"]))
    assert UNFIT[given] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_layers_stay_where_they_are() -> None:
    """By their FLOPs, which attention makes depend on the length, the layers of the second phase would be cut otherwise."""
    options = ["model.num_hidden_layers=9", "model.vocab_size=8192", "model.max_position_embeddings=100000"]
    long = "data.sequence_length=100000"
    alone = prepare_phases(load_config([*options, long]))[0].run.plan.balance
    first, second = prepare_phases(load_config([*options, "phases=[{from:0},{from:5,data:{sequence_length:100000}}]"]))
    assert first.run.plan.balance == second.run.plan.balance != alone


def test_each_phase_has_its_own_schedule() -> None:
    first, second, third = prepare_phases(load_config([THREE]))
    assert [phase.first_step for phase in (first, second, third)] == [1, 51, 121]
    assert [phase.run.schedule.num_microbatches for phase in (first, second, third)] == [8, 4, 8]
    assert [phase.run.plan.num_microbatches for phase in (first, second, third)] == [8, 4, 8]
    modes = [phase.run.schedule.policy.mode.value for phase in (first, second, third)]
    assert modes == ["overlap", "inline", "overlap"]


def test_deepspeed_refuses_phases() -> None:
    with pytest.raises(ConfigError, match=r"^phases=\[\{'from': 0\}\]: not supported by engine=deepspeed"):
        check_engine(load_config(["engine=deepspeed", "pipeline=1f1b", "recompute=inline", "phases=[{from:0}]"]))


def test_only_a_run_with_phases_names_them() -> None:
    with pytest.raises(ValueError, match=r"^too long$"), naming_phase(phases_of(load_config([]))[0], load_config([])):
        raise ValueError("too long")


# Epochs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [
        (1.0, 13),  # 4 of 100 samples in each of 10 steps, then 60 % of 50 samples, 10 in a step
        (1.5, 16),  # 2.5 more steps' worth of 10
        (2.0, 18),
    ],
)
def test_epochs_are_counted_over_phases(epochs: float, steps: int) -> None:
    phases = "phases=[{from:0},{from:10,data:{global_batch_size:10,sequence_length:512}}]"
    known = with_steps(replace(load_config(["data.global_batch_size=4", phases]), epochs=epochs), 100, 50)
    assert (known.num_steps, known.epochs) == (steps, None)


def test_epochs_that_end_before_a_phase_begins() -> None:
    config = load_config(["data.global_batch_size=10", "phases=[{from:0},{from:50,recompute:{sets:2}}]"])
    config = replace(config, epochs=1.0)
    with pytest.raises(ConfigError, match=r"^phases\[1\]\.from=50: the run ends after steps=10"):
        with_steps(config, 100, 100)


# What is behind a run ----------------------------------------------------------------------------------------------------


def plain(**values: Any) -> dict[str, Any]:
    return {"data": {"global_batch_size": 16, "sequence_length": 256}, **values}


def test_the_batches_of_a_run_that_is_behind() -> None:
    phases = [{"from": 0}, {"from": 5, "recompute": {"sets": 2}}, {"from": 9, "data": {"global_batch_size": 4}}]
    assert batches_before(plain(), 100) == [(0, 16, 256)]
    assert batches_before(plain(phases=phases), 9) == [(0, 16, 256)]  # another policy is no other batch
    assert batches_before(plain(phases=phases), 10) == [(0, 16, 256), (9, 4, 256)]
    dotted = [{"from": 0}, {"from": 9, "data.global_batch_size": 4}]
    assert batches_before(plain(phases=dotted), 10) == [(0, 16, 256), (9, 4, 256)]


def test_a_value_in_a_step() -> None:
    """Each phase has what the run has but for its own keys, not what the phase before it had."""
    of_nine = {"from": 9, "data": {"global_batch_size": 4}}
    config = plain(phases=[{"from": 0, "data.global_batch_size": 8}, {"from": 5, "recompute": {"sets": 2}}, of_nine])
    found = [value_in_step(config, "data.global_batch_size", step) for step in (1, 5, 6, 9, 10, 999)]
    assert found == [8, 8, 16, 16, 4, 4]
    assert {value_in_step(one, "data.global_batch_size", 7) for one in (plain(), plain(phases=()))} == {16}
