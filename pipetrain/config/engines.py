"""Which keys go together with which engine and which optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig

NATIVE, DEEPSPEED = "native", "deepspeed"
ADAMW, CPU_ADAM, FUSED_ADAM = OPTIMIZERS = ("adamw", "deepspeed_cpu_adam", "deepspeed_fused_adam")
_COMMAND = "use engine=deepspeed pipeline=1f1b recompute=inline, or engine=native"


def check_engine(config: RunConfig) -> None:
    """Raises:
    ConfigError: the engine cannot do what another key asks for; with what to set instead.
    """
    problems = _of_deepspeed(config) if config.engine.name == DEEPSPEED else _of_native(config)
    for problem in problems:
        raise ConfigError(problem)


def _of_native(config: RunConfig) -> Iterator[str]:
    if config.parallel.zero != 0:
        yield (
            f"parallel.zero={config.parallel.zero}: not supported by engine=native, which does not shard optimizer state; "
            "use parallel.zero=0, or engine=deepspeed with parallel.zero=1"
        )


def _of_deepspeed(config: RunConfig) -> Iterator[str]:
    pipeline, recompute, data = config.pipeline, config.recompute, config.data
    if pipeline.schedule != "1f1b":
        yield _refused("pipeline.schedule", pipeline.schedule, f"runs 1F1B alone; {_COMMAND}")
    if recompute.mode not in ("never", "inline"):
        yield _refused("recompute.mode", recompute.mode, f"recomputes inline or never; {_COMMAND}")
    if recompute.ahead != 1:
        yield _refused("recompute.ahead", recompute.ahead, "recomputes a set just before its B; use recompute.ahead=1")
    if recompute.keep != 0:
        yield _refused("recompute.keep", recompute.keep, "keeps all sets of a stage or none; use recompute.keep=0")
    if pipeline.stages_per_rank != 1:
        yield _refused(
            "pipeline.stages_per_rank",
            pipeline.stages_per_rank,
            "has one stage per rank; use pipeline.stages_per_rank=1",
        )
    if pipeline.warmup is not None:
        yield _refused("pipeline.warmup", pipeline.warmup, "fills the pipeline as 1F1B does; use pipeline.warmup=null")
    if config.parallel.zero > 1:
        yield _refused("parallel.zero", config.parallel.zero, "takes ZeRO 0 or 1 with a pipeline; use parallel.zero=1")
    if config.optim.name != ADAMW:
        yield _refused("optim.name", config.optim.name, "is run with AdamW; use optim=adamw, or engine=native")
    if data.batch_size % pipeline.num_microbatches:
        yield _refused(
            "data.batch_size",
            data.batch_size,
            f"wants microbatches of equal size; use a multiple of pipeline.num_microbatches={pipeline.num_microbatches}",
        )


def _refused(key: str, value: object, instead: str) -> str:
    return f"{key}={value}: not supported by engine=deepspeed, which {instead}"
