"""A table of mistakes: each ends with exit code 2 and one message that says what to type."""

from collections.abc import Callable

import pytest

from pipetrain.config.load import load_config
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig
from pipetrain.config.together import check_run, check_schedule
from pipetrain.engine.available import check_available, check_engine

# what the user typed -> words that the message must have
NOT_LOADED = {
    "step=3": ["step:", "'steps'"],
    "observe.wandb.mod=x": ["'observe.wandb.mode'"],
    "mode.dropout=0.1": ["mode.dropout:", "'model.dropout'"],
    "optim.beta=3": ["'optim.betas'"],
    "recompute.mode.x=1": ["there is no such key", "'recompute.mode'"],
    "cluster.options=--exclusive": ["cluster.options=--exclusive", "a list of texts"],
    "data.path=/a b=c": ["cannot be read", "quote"],
}
NO_RUN = {
    "pipeline.num_microbatches=17": ["num_microbatches=17", "batch_size=16"],
    "parallel.zero_stage=2": ["parallel.zero_stage=2", "not supported by engine=native", "parallel.zero_stage=1"],
    "parallel.num_replicas=all": ["parallel.num_replicas=all", "1 or more, or auto"],
    "cluster.rendezvous=node1:70000": ["cluster.rendezvous=node1:70000", "HOST:PORT"],
    "cluster.partition='a b'": ["cluster.partition=a b", "without spaces"],
}
NO_SCHEDULE = {
    "pipeline.num_microbatches=0": ["num_microbatches=0", "1 or more"],
    "pipeline.num_stages=0": ["num_stages=0", "1 or more"],
    "recompute.sets=0": ["recompute.sets=0", "1 or more"],
    "recompute.sets=inf": ["recompute.sets=inf", "a whole number, 1 or more"],
    "recompute.sets=[1,nan]": ["recompute.sets=[1, nan]", "a whole number, 1 or more"],
    "recompute.keep=atuo": ["recompute.keep='atuo'", "none, auto", "did you mean 'auto'"],
}
DEEPSPEED = ["engine=deepspeed", "pipeline=1f1b", "recompute=inline", "parallel.zero_stage=1"]
REFUSED_BY_DEEPSPEED = {
    "transport.backend=pinned": ["transport.backend=pinned", "transport=auto"],
    "pipeline=gpipe": ["pipeline.schedule=gpipe", "pipeline=1f1b"],
    "recompute=overlap": ["recompute.mode=overlap", "recompute=inline"],
    "recompute=early": ["recompute.mode=early", "recompute=inline"],
    "recompute.sets=2": ["recompute.sets=2", "recompute.sets=1"],
    "recompute.segments=2": ["recompute.segments=2", "recompute.segments=1"],
    "recompute.sets=[2,1]": ["recompute.sets=[2, 1]", "recompute.sets=1"],
    "recompute.keep=auto": ["recompute.keep=auto", "recompute.keep=none"],
    "recompute.selective=matmul": ["recompute.selective=matmul", "recompute.selective=null"],
    "recompute.stash=4": ["recompute.stash=4", "recompute.stash=null"],
    "pipeline.stages_per_rank=2": ["pipeline.stages_per_rank=2", "pipeline.stages_per_rank=1"],
    "pipeline.placement=v": ["pipeline.placement=v", "pipeline.placement=loop"],
    "pipeline.warmup=3": ["pipeline.warmup=3", "pipeline.warmup=null"],
    "pipeline.split_backward=true": ["pipeline.split_backward=true", "pipeline.split_backward=false"],
    "parallel.zero_stage=2": ["parallel.zero_stage=2", "parallel.zero_stage=1"],
    "parallel.zero_stage=3": ["parallel.zero_stage=3", "parallel.zero_stage=1"],
    "optim=deepspeed_cpu_adam": ["optim.name=deepspeed_cpu_adam", "optim=adamw"],
    "data.global_batch_size=20": ["data.global_batch_size=20", "pipeline.num_microbatches=8"],
    "precision=bf16-true": ["precision=bf16-true", "which trains float32 weights"],
    "model.compile=true": ["model.compile=true"],
    "model.name=hf model.path=there": ["model.name=hf"],
    "parallel.num_replicas=3": ["parallel.num_replicas=3 x pipeline.num_microbatches=8", "equal size"],
}


def check_both(config: RunConfig) -> None:
    check_run(config)
    check_engine(config)


def refused(check: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check()
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize(("override", "words"), NOT_LOADED.items(), ids=NOT_LOADED)
def test_what_cannot_be_loaded(override: str, words: list[str]) -> None:
    refused(lambda: load_config([override]), words)


@pytest.mark.parametrize(("override", "words"), NO_RUN.items(), ids=NO_RUN)
def test_what_makes_no_run(override: str, words: list[str]) -> None:
    config = load_config([override])
    refused(lambda: check_both(config), words)


@pytest.mark.parametrize(("override", "words"), NO_SCHEDULE.items(), ids=NO_SCHEDULE)
def test_what_makes_no_schedule(override: str, words: list[str]) -> None:
    config = load_config([override])
    refused(lambda: check_schedule(config), words)


@pytest.mark.parametrize(("override", "words"), REFUSED_BY_DEEPSPEED.items(), ids=REFUSED_BY_DEEPSPEED)
def test_what_deepspeed_cannot_do(override: str, words: list[str]) -> None:
    group = override.split("=")[0]
    config = load_config([*(option for option in DEEPSPEED if option.split("=")[0] != group), *override.split()])
    refused(lambda: check_both(config), [*words, "not supported by engine=deepspeed"])


def test_what_deepspeed_takes() -> None:
    check_both(load_config(DEEPSPEED))


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_config(["engine=deepspeed", "pipeline=1f1b", "recompute=inline"])
    optimizer = load_config(["optim=deepspeed_cpu_adam"])
    check_available(engine)
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        check_available(load_config([]))
        for config in (engine, optimizer):
            refused(lambda config=config: check_available(config), ['pip install "pipetrain[deepspeed]"'])  # type: ignore[misc]
    monkeypatch.setenv("PATH", "")
    refused(lambda: check_available(optimizer), ["optim=deepspeed_cpu_adam", "install g++", "optim=adamw"])


def test_stages_that_do_not_fit_the_ranks() -> None:
    config = load_config(["pipeline.num_stages=4", "pipeline.stages_per_rank=3"])
    refused(lambda: check_schedule(config), ["num_stages=4", "stages_per_rank=3", "multiple"])


def test_show_does_not_look_at_data_or_model() -> None:
    check_schedule(
        load_config(["data.global_batch_size=1", "model.num_hidden_layers=0", "parallel.num_replicas=5", "steps=0"])
    )
