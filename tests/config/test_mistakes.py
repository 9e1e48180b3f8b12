"""A table of mistakes: each ends with exit code 2 and one message that says what to type."""

import pytest

from pipetrain.config.load import load
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig
from pipetrain.config.together import check_run, check_schedule
from pipetrain.engine.available import check_available, check_engine

# what the user typed -> words that the message must have
UNREADABLE = {
    "recompute.mod=inline": ["recompute.mod:", "'recompute.mode'"],
    "recompute=inlin": ["recompute=inlin", "early, inline, never, overlap", "'inline'"],
    "step=3": ["step:", "'steps'"],
    "modell=gpt2": ["modell:", "'model'"],
    "observe.wandb.mod=x": ["'observe.wandb.mode'"],
    "mode.dropout=0.1": ["mode.dropout:", "'model.dropout'"],
    "optim.beta=3": ["'optim.betas'"],
    "recompute.mode.x=1": ["there is no such key", "'recompute.mode'"],
    "optim=sgd": ["optim=sgd", "allowed are adamw"],
    "steps=abc": ["steps=abc", "this is text", "an integer"],
    "steps=3.5": ["steps=3.5", "a number", "an integer"],
    "seed=null": ["null", "an integer"],
    "seed=true": ["seed=true", "an integer"],
    "optim.learning_rate=fast": ["optim.learning_rate=fast", "a number"],
    "observe.progress=1": ["true or false"],
    "optim.betas=[0.9,0.95,0.99]": ["optim.betas", "a list of 2 numbers"],
    "pipeline.balance=3,3": ["one value", "pipeline.balance=[3,3]"],
    "cluster.options=--exclusive": ["cluster.options=--exclusive", "a list of texts"],
    "pipeline.balance=[3,x]": ["pipeline.balance", "a list of integers"],
    "observe.wandb=3": ["observe.wandb=3", "mode, project"],
    "data.path=123": ["allowed is text or null", "data.path=\"'123'\""],
    "data.path=/a b=c": ["cannot be read", "quote"],
    "+optim.momentum=0.9": ["neither added nor removed"],
    "~optim.clip_norm": ["key=value"],
    "steps": ["an override is key=value"],
}
OUT_OF_RANGE = {
    "steps=0": ["steps=0", "1 or more"],
    "data.layout=paked": ["data.layout=paked", "stream, packed, padded", "'packed'"],
    "data.counted=answer": ["data.counted=answer", "answers, last, all", "'answers'"],
    "data.item_type=int16": ["data.item_type=int16", "uint16, uint32, int32"],
    "data.on_error=ignore": ["data.on_error=ignore", "stop or skip"],
    "data.template_date=today": ["data.template_date=today", "2026-01-31"],
    "seed=-1": ["seed=-1", "0 or more"],
    "timeout_seconds=0": ["timeout_seconds=0", "more than 0"],
    "threads_per_rank=0": ["threads_per_rank=0", "1 or more"],
    "optim.learning_rate=-1": ["optim.learning_rate=-1", "more than 0"],
    "optim.clip_norm=0": ["optim.clip_norm=0", "more than 0"],
    "optim.betas=[0.9,1.0]": ["optim.betas", "less than 1"],
    "optim.final_fraction=2": ["optim.final_fraction=2", "from 0 to 1"],
    "observe.evaluate_every_steps=0": ["observe.evaluate_every_steps=0", "1 or more"],
    "observe.wandb.mode=on": ["observe.wandb.mode=on", "disabled, offline or online"],
    "pipeline.num_microbatches=17": ["num_microbatches=17", "batch_size=16"],
    "engine.name=megatron": ["engine.name=megatron", "native or deepspeed"],
    "optim.name=sgd": ["optim.name=sgd", "adamw, deepspeed_cpu_adam"],
    "parallel.zero=4": ["parallel.zero=4", "0 to 3"],
    "parallel.zero=2": ["parallel.zero=2", "not supported by engine=native", "parallel.zero=1"],
    "parallel.zero=1": ["parallel.zero=1 with parallel.num_replicas=1", "parallel.zero=0", "parallel.num_replicas=2"],
    "parallel.num_replicas=0": ["parallel.num_replicas=0", "1 or more, or auto"],
    "parallel.num_replicas=all": ["parallel.num_replicas=all", "1 or more, or auto"],
    "parallel.num_replicas=9999": ["parallel.num_replicas=9999", "4096 at most"],
    "parallel.order=stage": ["parallel.order=stage", "replica-stage or stage-replica"],
    "parallel.check_every_steps=0": ["parallel.check_every_steps=0", "1 or more"],
    "pipeline.schedule=inference": ["no backward", "gpipe"],
    "cluster.name=pbs": ["cluster.name=pbs", "local or slurm"],
    "cluster.num_nodes=0": ["cluster.num_nodes=0", "1 or more"],
    "cluster.gpus_per_node=0": ["cluster.gpus_per_node=0", "1 or more"],
    "cluster.cpus_per_rank=0": ["cluster.cpus_per_rank=0", "1 or more"],
    "cluster.signal_seconds=0": ["cluster.signal_seconds=0", "1 or more"],
    "cluster.max_restarts=-1": ["cluster.max_restarts=-1", "0 or more"],
    "cluster.device=tpu": ["cluster.device=tpu", "gpu or cpu"],
    "cluster.rendezvous=node1": ["cluster.rendezvous=node1", "HOST:PORT"],
    "cluster.rendezvous=node1:70000": ["cluster.rendezvous=node1:70000", "HOST:PORT"],
    "cluster.time_limit=soon": ["cluster.time_limit=soon", "D-H:M:S"],
    "cluster.partition='a b'": ["cluster.partition=a b", "without spaces"],
    "cluster.options=[exclusive]": ["cluster.options=", "sbatch"],
}
OUT_OF_RANGE_FOR_SHOW_TOO = {
    "pipeline.num_microbatches=0": ["num_microbatches=0", "1 or more"],
    "pipeline.num_stages=0": ["num_stages=0", "1 or more"],
    "recompute.sets=0": ["recompute.sets=0", "1 or more"],
    "recompute.sets=[2,0]": ["recompute.sets=[2, 0]", "1 or more"],
    "recompute.sets=inf": ["recompute.sets=inf", "a whole number, 1 or more"],
    "recompute.sets=[1,nan]": ["recompute.sets=[1, nan]", "a whole number, 1 or more"],
    "recompute.sets=[]": ["recompute.sets=[]", "a list with one per stage"],
    "recompute.segments=0": ["recompute.segments=0", "1 or more parts, sqrt or layers"],
    "recompute.segments=half": ["recompute.segments='half'", "1 or more parts, sqrt or layers"],
    "recompute.stash=0": ["recompute.stash=0", "1 or more"],
    "recompute.keep=atuo": ["recompute.keep='atuo'", "none, auto", "did you mean 'auto'"],
    "recompute.keep=2": ["recompute.keep=2", "none and auto", "recompute.sets=3"],
}
UNSUPPORTED = {
    "parallel.fsdp=true": "pipeline.num_stages",
    "parallel.tensor=2": "pipeline.num_stages",
}

REFUSED_BY_DEEPSPEED = {
    "transport.edges=pinned": ["transport.edges=pinned", "transport=auto"],
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
    "parallel.zero=2": ["parallel.zero=2", "parallel.zero=1"],
    "parallel.zero=3": ["parallel.zero=3", "parallel.zero=1"],
    "optim=deepspeed_cpu_adam": ["optim.name=deepspeed_cpu_adam", "optim=adamw"],
    "data.batch_size=20": ["data.batch_size=20", "pipeline.num_microbatches=8"],
    "parallel.num_replicas=3": ["parallel.num_replicas=3 x pipeline.num_microbatches=8", "equal size"],
}


def check_both(config: RunConfig) -> None:
    check_run(config)
    check_engine(config)


def assert_says(error: ConfigError, words: list[str]) -> None:
    assert "\n" not in str(error)
    assert [word for word in words if word not in str(error)] == [], error


@pytest.mark.parametrize(("override", "words"), UNREADABLE.items(), ids=UNREADABLE)
def test_what_cannot_be_loaded(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load([override])
    assert_says(caught.value, words)


@pytest.mark.parametrize(("override", "words"), OUT_OF_RANGE.items(), ids=OUT_OF_RANGE)
def test_what_makes_no_run(override: str, words: list[str]) -> None:
    config = load([override])
    with pytest.raises(ConfigError) as caught:
        check_both(config)
    assert_says(caught.value, words)


@pytest.mark.parametrize(("override", "words"), OUT_OF_RANGE_FOR_SHOW_TOO.items(), ids=OUT_OF_RANGE_FOR_SHOW_TOO)
def test_what_makes_no_schedule(override: str, words: list[str]) -> None:
    config = load([override])
    with pytest.raises(ConfigError) as caught:
        check_schedule(config)
    assert_says(caught.value, words)


@pytest.mark.parametrize(("override", "instead"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_what_is_not_supported(override: str, instead: str) -> None:
    config = load([override])
    with pytest.raises(ConfigError) as caught:
        check_both(config)
    assert_says(caught.value, [override.split("=")[0], "not supported", instead])


@pytest.mark.parametrize(("override", "words"), REFUSED_BY_DEEPSPEED.items(), ids=REFUSED_BY_DEEPSPEED)
def test_what_deepspeed_cannot_do(override: str, words: list[str]) -> None:
    taken = ["engine=deepspeed", "pipeline=1f1b", "recompute=inline", "parallel.zero=1"]
    check_engine(load(taken))
    group = override.split("=")[0]
    config = load([*(option for option in taken if option.split("=")[0] != group), override])
    with pytest.raises(ConfigError) as caught:
        check_both(config)
    assert_says(caught.value, [*words, "not supported by engine=deepspeed"])


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(["engine=deepspeed", "pipeline=1f1b", "recompute=inline"])
    optimizer = load(["optim=deepspeed_cpu_adam"])
    check_available(engine)
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        check_available(load([]))
        for config in (engine, optimizer):
            with pytest.raises(ConfigError) as caught:
                check_available(config)
            assert_says(caught.value, ['pip install "pipetrain[deepspeed]"'])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as caught:
        check_available(optimizer)
    assert_says(caught.value, ["optim=deepspeed_cpu_adam", "install g++", "optim=adamw"])


def test_stages_that_do_not_fit_the_ranks() -> None:
    with pytest.raises(ConfigError) as caught:
        check_schedule(load(["pipeline.num_stages=4", "pipeline.stages_per_rank=3"]))
    assert_says(caught.value, ["num_stages=4", "stages_per_rank=3", "multiple"])


def test_show_does_not_look_at_data_or_model() -> None:
    check_schedule(load(["data.batch_size=1", "model.num_blocks=0", "parallel.num_replicas=5", "steps=0"]))
