"""What `engine=deepspeed` does not do: the key, the values that it takes, why, and what to type instead. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from pipetrain.config.problem import shown
from pipetrain.config.records import ADAMW, RunConfig, TransportConfig

_COMMAND = "use engine=deepspeed pipeline=1f1b recompute=inline, or engine=native"
_IN_ONE = "recomputes a stage as a whole; use"
_TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "pipeline.schedule": (("1f1b",), f"runs 1F1B alone; {_COMMAND}"),
    "pipeline.stages_per_rank": ((1,), "has one stage per rank; use pipeline.stages_per_rank=1"),
    "pipeline.placement": (("loop",), "holds stage s on rank s; use pipeline.placement=loop"),
    "pipeline.split_backward": ((False,), "runs each B as a whole; use pipeline.split_backward=false"),
    "pipeline.warmup": ((None,), "fills the pipeline as 1F1B does; use pipeline.warmup=null"),
    **{
        f"transport.{key}": ((value,), "sends messages in its own way; use transport=auto")
        for key, value in vars(TransportConfig()).items()
    },
    "recompute.mode": (("never", "inline"), f"recomputes inline or never; {_COMMAND}"),
    "recompute.segments": ((1,), f"{_IN_ONE} recompute.segments=1"),
    "recompute.sets": ((None, 1), "recomputes a set just before its B; use recompute.sets=1"),
    "recompute.keep": ((None, "none"), "keeps all sets of a stage or none; use recompute.keep=none"),
    "recompute.selective": ((None,), f"{_IN_ONE} recompute.selective=null"),
    "recompute.keep_layers": ((None,), f"{_IN_ONE} recompute.keep_layers=null"),
    "recompute.stash": ((None,), "holds what 1F1B holds; use recompute.stash=null"),
    "parallel.zero_stage": ((0, 1), "takes ZeRO 0 or 1 with a pipeline; use parallel.zero_stage=1"),
    "optim.name": ((ADAMW,), "is run with AdamW; use optim=adamw, or engine=native"),
    "precision": (
        ("auto", "fp32", "bf16-mixed"),
        "trains float32 weights: its bf16 without ZeRO saves a state that it cannot load; use precision=bf16-mixed or fp32",
    ),
    "model.compile": ((False,), "is run with layers as they are; use model.compile=false"),
    "model.name": (("llama", "gpt2"), "passes one tensor from stage to stage; use engine=native"),
    "phases": (((),), "trains the whole run by one plan; use phases=[]"),
}


def refused(config: RunConfig, num_replicas: int, tied: Sequence[tuple[int, int]]) -> Iterator[str]:
    """What a user is told, problem by problem; `tied` are pairs of stages that share a parameter."""
    for key, (taken, instead) in _TAKEN.items():
        if (value := attrgetter(key)(config)) not in taken:
            yield f"{key}={shown(value)}: not supported by engine=deepspeed, which {instead}"
    num_microbatches = config.pipeline.num_microbatches
    if config.data.global_batch_size % (num_replicas * num_microbatches):
        replicas = f"parallel.num_replicas={num_replicas} x " if num_replicas > 1 else ""
        yield (
            f"data.global_batch_size={config.data.global_batch_size}: not supported by engine=deepspeed, which wants microbatches of equal size; use a "
            f"multiple of {replicas}pipeline.num_microbatches={num_microbatches}"
        )
    for low, high in tied:
        yield (
            f"engine=deepspeed: stages {low} and {high} share a parameter, whose gradients it does not add up; use engine=native, or a "
            "pipeline.balance that puts both its layers on one stage"
        )
