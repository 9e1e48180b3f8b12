"""The configuration of a run, typed: one frozen record per group of `conf/`; per field its range, its default and a sentence.

Only `load.py` makes these from files and overrides. The type of a field says which values it may have, and whether a resumed run may
change it (`limits.py`). `together.py` checks keys that must fit each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pipetrain.config.limits import (
    MOST_STAGES,
    Amount,
    Count,
    Limit,
    MayChange,
    Name,
    PerPhase,
    Size,
    Stages,
    at_least,
    below_one,
    choice_of,
    each,
    is_date,
    matching,
    more_than,
    only,
    within,
)
from pipetrain.config.target import ENGINES, is_extension

NATIVE, DEEPSPEED = "native", "deepspeed"
HUGGING_FACE = "hf"  # the model.name of a model of transformers
PYTHON = "python"  # the model.name and data.name of the user's own code
EDGES = ("auto", "nccl", "pinned")
COMMUNICATORS = ("edge", "pair")
ORDERS = ("replica-stage", "stage-replica")
AUTO_REPLICAS = "auto"
ADAMW, CPU_ADAM = OPTIMIZERS = ("adamw", "deepspeed_cpu_adam")
# Of `precision`: the dtype of the weights.
WEIGHTS_IN = {"auto": "float32", "fp32": "float32", "bf16-true": "bfloat16", "bf16-mixed": "float32"}
DEFAULT_STEPS = 200

LAYOUTS = STREAM, PACKED, PADDED = ("stream", "packed", "padded")
ANSWERS, LAST, ALL = ("answers", "last", "all")

_YEAR = 366 * 24 * 3600  # seconds

_Positive = Annotated[float, more_than(0)]
_Probability = Annotated[float, below_one(" is a probability: at least 0, below 1; 0 switches it off")]
_Targets = Annotated[
    tuple[str, ...],
    Limit(lambda value: value and all(value), ": allowed is a list of names of linear layers, as in [q_proj,v_proj]"),
]
_Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of linear layers (model=hf). Only the adapters are trained."""

    # Inner dimension of the two matrices; None: no adapters.
    rank: Annotated[int | None, at_least(1, most=2**20)] = None
    # Linear layers that get adapters, each by the end of its name: q_proj, or layers.11.mlp.up_proj for a single one.
    targets: _Targets = ("q_proj", "v_proj")
    # Decoder layers that get adapters, from 0; None: all.
    layers: Annotated[tuple[int, ...] | None, each(0, 10_000, "the number of a decoder layer")] = None
    alpha: _Positive | None = None  # the adapters' output is multiplied by alpha / rank; None: by 1
    merge: MayChange[bool] = True  # whether `export` adds the adapters to the weights; else it writes them as PEFT does


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, built layer by layer."""

    # Block style: `llama` (RMSNorm, rotary, grouped queries, SwiGLU) or `gpt2` (LayerNorm, learned positions, GELU); or `hf`, `python`.
    name: str = "llama"
    # Transformer blocks; embedding and head are two more layers.
    num_hidden_layers: Annotated[int, at_least(1, most=10_000)] = 4
    hidden_size: Annotated[int, at_least(1, most=2**20)] = 128  # width of the residual stream
    num_attention_heads: Size = 4  # query heads per block
    num_key_value_heads: Size | None = None  # key and value heads (grouped queries); None: as many as query heads
    # Width inside the MLP; None: 4 x hidden_size for gpt2, 8/3 x for llama (rounded up to 8).
    intermediate_size: Size | None = None
    vocab_size: Size | None = None  # size of the vocabulary; None: that of the tokenizer
    max_position_embeddings: Size = 1024  # longest sequence of positions
    rope_theta: _Positive = 10_000.0  # base of the rotary frequencies
    dropout: _Probability = 0.0  # dropout in attention output, MLP output and embedding
    norm_epsilon: _Positive = 1e-5  # added to the variance in a norm, under the root
    # For model=hf: a folder that save_pretrained of transformers wrote, or a name of the hub, as in Qwen/Qwen2.5-7B-Instruct.
    path: MayChange[str | None] = None
    revision: MayChange[str | None] = None  # branch, tag or commit on the hub; None: the main branch
    # For model=hf: `pretrained` reads the weights, `random` reads only the configuration and makes random weights.
    weights: MayChange[Annotated[str, choice_of("pretrained", "random")]] = "pretrained"
    # Type of the weights: `auto` (as they are stored), float32, bfloat16 or float16; None: as `precision` says.
    dtype: Annotated[str | None, choice_of("auto", "float32", "bfloat16", "float16")] = None
    # For model=hf: how transformers computes attention (`sdpa`, `eager`, `flash_attention_2`, ...); None: transformers chooses.
    attention: str | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    compile: MayChange[bool] = False  # whether torch.compile compiles the layers, each kind once; needs a C++ compiler
    # For model=python: the function or class that gives your layers, as in my_package.models:make_layers.
    target: str | None = None
    # Arguments of model.target; `_target_` makes an object, as in Hydra.
    args: _Arguments = field(default_factory=dict, hash=False)
    # For model=python: a function from (output, targets) of a microbatch to the mean loss; None: that of the model, or cross_entropy.
    loss: str | None = None
    loss_args: _Arguments = field(default_factory=dict, hash=False)  # more arguments of model.loss
    # For model=python: a function from the targets of a microbatch to how much of them counts; None: rows, for cross_entropy the targets
    # that are not -100.
    count: str | None = None
    count_args: _Arguments = field(default_factory=dict, hash=False)  # more arguments of model.count
    # SHA-256 of the file of model.target; None: computed now. To resume with a changed file, type the value of the run.
    file_sha256: str | None = None


_HeldOut = Annotated[
    float, below_one(" is a share of the bytes: at least 0 (nothing is held out), below 1; the default is 0.1")
]
_Date = Annotated[str, Limit(is_date, ": allowed is a date, as in 2026-01-31")]
_AssistantOnly = Annotated[
    bool | str, Limit(lambda value: isinstance(value, bool) or value == LAST, f": allowed is true, false or {LAST}")
]


@dataclass(frozen=True)
class DataConfig:
    """The data of training, and how it becomes samples."""

    # `stdlib` (the running Python's own library), `text`, `jsonl`, `hf` (data set of Hugging Face), `memmap` (token ids) or `python`.
    name: str = "stdlib"
    path: MayChange[str | None] = None  # file, folder or glob to read; for hf a folder, or a name on the hub
    # Glob of the files in the folder that are read; files ending in .gz are unpacked.
    pattern: MayChange[str] = "**/*.txt"
    subset: str | None = None  # hf: the configuration of a data set that has several
    split: str = "train"  # hf: the split for training
    text_field: str = "text"  # jsonl and hf: the field with the text, if there are no `messages`
    # How text becomes tokens: `byte` (256 tokens), or a tokenizer's folder or name; null: the one of the model in model.path.
    tokenizer: str | None = "byte"
    # What a sample is: `stream` (a piece of one long row of tokens), `packed` (whole documents, side by side) or `padded` (one
    # document); null: packed for chats, stream for all else.
    layout: Annotated[str | None, choice_of(*LAYOUTS)] = None
    # Tokens of a chat that count in the loss: the answers (true), the last answer (`last`) or every token (false).
    assistant_only_loss: _AssistantOnly = True
    template_date: _Date = "2026-01-01"  # the date that chat templates get which ask for today's
    item_type: Annotated[str, choice_of("uint16", "uint32", "int32")] = (
        "uint16"  # memmap: the type of a token id in a .bin file
    )
    truncate: bool = False  # whether a document longer than sequence_length is cut at its end (packed and padded)
    # What to do with a document that cannot be a sample.
    on_error: MayChange[Annotated[str, choice_of("stop", "skip")]] = "stop"
    # Folder of the tokens; null: pipetrain/tokens in $XDG_CACHE_HOME or ~/.cache.
    cache_dir: MayChange[str | None] = None
    global_batch_size: PerPhase[Size] = 16  # samples of a step, over all replicas
    sequence_length: PerPhase[Size] = 256  # tokens per sample that are predicted
    eval_path: MayChange[str | None] = None  # held-out data in a place of its own; null: eval_fraction of data.path
    eval_split: str | None = None  # hf: the held-out split; null: eval_fraction of data.split
    eval_fraction: _HeldOut = 0.1  # share of the files (by bytes) or documents that training never sees
    eval_bytes: MayChange[Count] = 204_800  # most tokens of the held-out part that an evaluation reads
    # For data=python: the function or class that gives your dataset of (inputs, targets), as in my_package.data:make_dataset.
    target: str | None = None
    args: _Arguments = field(default_factory=dict, hash=False)  # arguments of data.target; `_target_` makes an object
    # For data=python: a function that gives the held-out dataset; None: nothing is held out.
    heldout_target: MayChange[str | None] = None
    heldout_args: MayChange[_Arguments] = field(default_factory=dict, hash=False)  # arguments of data.heldout_target
    # For data=python: a function from a list of samples to a batch; None: default_collate of torch.
    collate: str | None = None
    # For data=python: processes that read ahead, on each rank that reads; 0: the rank itself reads.
    num_workers: MayChange[Annotated[int, at_least(0, most=1024)]] = 0
    # SHA-256 of the file of data.target; None: computed now. To resume with a changed file, type the value of the run.
    file_sha256: str | None = None

    @property
    def counted(self) -> str:
        """Which tokens of a chat count in the loss: `answers`, `last` or `all`."""
        return LAST if self.assistant_only_loss == LAST else ANSWERS if self.assistant_only_loss else ALL


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut into stages, and in which order ops run."""

    # Name of a schedule family, `auto`, a CSV file, or MODULE:FUNCTION (from a `Shape` to the ops of each rank).
    schedule: str = "gpipe"
    # Function of the schedule's CALL ops: MODULE:FUNCTION, called as function(op, layers of its stage); None: there are no such ops.
    on_call: str | None = None
    # auto: most seconds of search; 0: list scheduling alone.
    search_seconds: Annotated[float, at_least(0, most=_YEAR)] = 30.0
    num_stages: Stages | None = None  # stages of the model; None: ranks of a replica x stages_per_rank
    stages_per_rank: Stages = 1  # stages on each rank (virtual stages)
    # Which rank holds which stage: `loop` (stage s on rank s modulo ranks), `v` (V-shaped: rank 0 holds the first and the last stage), or
    # a list with the rank of each stage.
    placement: str | tuple[int, ...] = "loop"
    num_microbatches: PerPhase[Count] = 8  # microbatches of a step, per replica
    balance: str | tuple[int, ...] = "auto"  # layers per stage, or `auto`
    # Split each B in two: I (gradient of the input) and W (gradients of the weights, in time in which the stage would wait).
    split_backward: bool = False
    # 1f1b: microbatches in flight on stage 0, or one number per stage; None: classic 1F1B.
    warmup: int | tuple[int, ...] | None = None


# `RecomputePolicy` has the same fields and checks their values (`check_schedule`).
@dataclass(frozen=True)
class RecomputeConfig:
    """What is recomputed, and when."""

    mode: str = "overlap"  # `never`, `inline`, `early` or `overlap`
    # Activation slots of a stage, for kept and recomputed sets: one number, or one per stage. None: one set, or with `segments` one part.
    sets: int | float | tuple[int, ...] | tuple[float, ...] | None = None
    # Whether free slots are used to keep sets: `none` or `auto`; None: `auto` with more than one slot.
    keep: str | int | None = None
    # Most microbatches in flight (between F and B) on a stage: one number, or one per stage; None: no bound.
    stash: int | tuple[int, ...] | None = None
    last_stage: str = "auto"  # `auto`: the last stage has no R if it has room for a whole set; `always`: it has R
    # Number of parts in which a stage is recomputed, one after the other: a number, `sqrt` (of its layers) or `layers` (each alone).
    segments: int | str = 1
    # Whether sets may go to host memory between F and B: `none`, `auto` (each is kept, recomputed or offloaded) or `always`.
    offload: str = "none"
    # Most host memory of a rank for these sets; None: a third of what is free, for all ranks of a machine.
    host_bytes: int | None = None
    # Outputs that stay from F to B and that R does not compute: `matmul`, `attention`, an operation as torch names it (`mm`), layers
    # (`2-5`, `3.mlp`: their products and attention), both (`2-5:attention`), or a list of these; None: R computes all.
    selective: str | tuple[str, ...] | None = None
    # Layers that are kept (they run once, and their saved tensors stay from F to B): by number (`3`, `2-5`), by kind (`MyLayer`), or a list.
    keep_layers: str | int | tuple[str | int, ...] | None = None
    # Which recomputed microbatches are compared with their forward: `first` (the first of each kind of step), `every`, `off`, or a number
    # N (one every N steps, in turn).
    verify: str | int = "first"


_MORE_STAGES = "use more stages (pipeline.num_stages)"
_NotSharded = Annotated[bool, only(False, f"parameters are not sharded; {_MORE_STAGES} to save memory")]
_NotSplit = Annotated[int, only(1, f"layers are not split; {_MORE_STAGES} for more ranks")]
_Replicas = Annotated[
    int | str,
    Limit(
        lambda value: value == AUTO_REPLICAS or (isinstance(value, int) and value >= 1),
        f": allowed is 1 or more, or {AUTO_REPLICAS} (as many as the ranks allow)",
        most=MOST_STAGES,
    ),
]


@dataclass(frozen=True)
class ParallelConfig:
    """Replicas of the pipeline, and what they share."""

    # Replicas of the pipeline, which share each batch: a number, or `auto` (as many as the ranks allow).
    num_replicas: _Replicas = 1
    # Ranks with neighbouring numbers, which share a machine: the stages of a replica (`replica-stage`), or the replicas of a stage
    # (`stage-replica`).
    order: Annotated[str, choice_of(*ORDERS)] = ORDERS[0]
    # Steps between two comparisons of the replicas' weights, which are also compared before each snapshot; None: never.
    check_every_steps: Count | None = 100
    # ZeRO stage: 0, or 1 (each replica holds a share of the optimizer state).
    zero_stage: Annotated[int, within(0, 3)] = 0
    fsdp: _NotSharded = False  # whether parameters are sharded over replicas
    tensor: _NotSplit = 1  # ranks that share one layer


@dataclass(frozen=True)
class TransportConfig:
    """How messages are sent from stage to stage."""

    prefetch: Amount = 2  # tensors of an edge that are received before they are used; 0: just in time
    # NCCL communicators: one per `edge` of stages and direction, or one per `pair` of ranks and direction.
    communicators: Annotated[str, choice_of(*COMMUNICATORS)] = "edge"
    # Library that sends them: `auto` (gloo on CPUs, NCCL on GPUs), `nccl`, or `pinned` (gloo through pinned host memory, for GPUs that
    # NCCL does not connect and for several ranks on one GPU).
    backend: Annotated[str, choice_of(*EDGES)] = "auto"


@dataclass(frozen=True)
class PlanConfig:
    """Measurements from which a run is planned."""

    # A finished run (its folder, `latest`, or its profile.json), or a file of `pipetrain profile`. A schedule or balance of `auto` is
    # searched for these times, `show` draws with them, and `recompute.segments` cuts stages into parts by the bytes of layers.
    profile: str | None = None
    # Most bytes that each device may hold, for `pipetrain plan` and plan=auto; on a CPU bytes of tensors. None: no limit.
    memory_budget_bytes: Count | None = None
    # Machines that are not here, for `pipetrain plan` alone: 8xh100-80gb+nvlink, or 16x8xh100-80gb+nvlink+ib400 with Gbit/s per device
    # between machines. Times and bytes are then estimates; no weights are read, and a device's memory is the default budget.
    cluster: str | None = None
    # Tensor ranks in each stage, for plan.cluster alone: nothing trains with them.
    tensor: Annotated[int, at_least(1, most=1024)] = 1
    auto: bool = False  # whether the run takes the first plan of `pipetrain plan`; plan=auto sets it


_Engine = Annotated[
    str,
    Limit(
        lambda value: value in (NATIVE, DEEPSPEED) or is_extension(value, ENGINES),
        f": allowed are {NATIVE}, {DEEPSPEED}, MODULE:CLASS and names that installed packages give",
        choices=(NATIVE, DEEPSPEED),
    ),
]


@dataclass(frozen=True)
class EngineConfig:
    """Which runtime trains."""

    # `native`: pipetrain's own; `deepspeed`: DeepSpeed's PipelineEngine; or MODULE:CLASS, called as NativeEngine is.
    name: _Engine = NATIVE


_Betas = Annotated[
    tuple[float, float],
    Limit(lambda value: all(0 <= beta < 1 for beta in value), ": allowed is two numbers, each from 0 to less than 1"),
]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a linear warm-up and a cosine to `final_fraction` of the learning rate."""

    # `adamw` (torch's fused one) or `deepspeed_cpu_adam` (state on the host).
    name: Annotated[str, choice_of(*OPTIMIZERS)] = ADAMW
    learning_rate: Annotated[float, more_than(0)] = 3e-3  # the largest learning rate, at the end of the warm-up
    weight_decay: Annotated[float, at_least(0)] = 0.1  # for matrices only
    betas: _Betas = (0.9, 0.95)  # decay of the two moments
    warmup_steps: Amount = 20  # steps of linear warm-up
    final_fraction: Annotated[float, within(0, 1)] = 0.1  # learning rate of the last step / learning_rate
    max_grad_norm: Annotated[float | None, more_than(0)] = 1.0  # largest global gradient norm; None: no clipping
    # Float32 copies of bfloat16 weights, which take the updates: `auto` (where there are such weights) or `off`.
    masters: Annotated[str, choice_of("auto", "off")] = "auto"


@dataclass(frozen=True)
class GuardConfig:
    """What to do with a step whose loss or gradient is not finite or far too large, before it changes a weight."""

    # If the loss or the gradient norm is not finite: `stop`, `skip` the step, or `rollback` to a snapshot.
    not_finite: Annotated[str, choice_of("stop", "skip", "rollback")] = "stop"
    # If the loss or the gradient norm is far above the latest ones: the same, or `off`.
    spike: Annotated[str, choice_of("off", "stop", "skip", "rollback")] = "off"
    # A spike is a loss above spike_factor x the median of the last spike_window losses.
    spike_factor: Annotated[float, more_than(1)] = 3.0
    # The same for the gradient norm; None: norms are not checked for spikes.
    spike_norm_factor: Annotated[float | None, more_than(1)] = None
    spike_window: Count = 20  # steps of the median; before so many steps nothing is a spike
    max_skips: Amount = 10  # most steps skipped in a row; then the run stops
    max_rollbacks: Amount = 3  # most rollbacks of a run; then it stops


@dataclass(frozen=True)
class SnapshotConfig:
    """Saved training state."""

    every_steps: Count | None = None  # steps between snapshots; None: only those of every_minutes
    # Minutes of rank 0's clock from one snapshot to the next, at a step's end; None: only those of every_steps, and when the run is
    # asked to stop.
    every_minutes: Annotated[float | None, more_than(0)] = 10.0
    keep_last: Count = 2  # number of newest snapshots that are kept
    keep_every: Count | None = None  # every keep_every-th regular snapshot is never deleted; None: all may be


@dataclass(frozen=True)
class WandbConfig:
    """The wandb tracker."""

    # `disabled`, `offline` (files in the run folder) or `online`.
    mode: Annotated[str, choice_of("disabled", "offline", "online")] = "disabled"
    project: str = "pipetrain"  # project in wandb
    name: str | None = None  # name of the run in wandb; None: that of its folder
    group: str | None = None  # group of runs in wandb
    tags: tuple[str, ...] = ()  # tags of the run in wandb


@dataclass(frozen=True)
class ObserveConfig:
    """What is shown and written during training."""

    progress: bool = True  # a progress bar on rank 0 (lines if stderr is not a terminal)
    eval_every_steps: Count | None = None  # steps between held-out evaluations; None: at the end only
    tensorboard: bool = False  # event files for TensorBoard in the run folder
    # More trackers: a list of MODULE:CLASS, each called as class(run folder, first step) on rank 0.
    trackers: tuple[str, ...] = ()
    # Peak floating-point operations per second of one device, at the run's precision; None: `mfu` is null.
    peak_flops_per_second: Annotated[float | None, more_than(0)] = None
    wandb: WandbConfig = field(default_factory=WandbConfig)


_Address = Annotated[
    str,
    Limit(
        lambda value: re.fullmatch(r"[^\s:]+:\d{1,5}", value) and 0 < int(value.rpartition(":")[2]) < 65536,
        ": allowed is HOST:PORT of the first machine, as in node1:29500",
    ),
]
_TimeLimit = Annotated[
    str | int,
    matching(
        r"[1-9]\d*|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", "minutes, H:M:S or D-H:M:S, as in 90, 12:00:00 or 2-00:00:00"
    ),
]
_Options = Annotated[
    tuple[str, ...],
    Limit(
        lambda value: all(re.fullmatch(r"--[a-z][^\n]*", option) for option in value),
        ': allowed is a list of options of sbatch, as in ["--qos=long","--exclusive"]',
    ),
]


@dataclass(frozen=True)
class ClusterConfig:
    """Where the processes run. The keys after `device` are for SLURM."""

    # `local`: this machine, and others on which the same command is typed; `slurm`: a SLURM job.
    name: Annotated[str, choice_of("local", "slurm")] = "local"
    num_nodes: Stages = 1  # machines
    ranks_per_node: Stages | None = None  # ranks per machine, with or without GPUs; None: as many as the pipeline needs
    # HOST:PORT of the first machine, where several machines meet; a job's script sets it.
    rendezvous: _Address | None = None
    # `gpu`: the job asks for a GPU per rank; `cpu`: ranks compute on CPU cores.
    device: Annotated[str, choice_of("gpu", "cpu")] = "gpu"
    partition: Name | None = None  # partition of the job; None: the cluster's default
    account: Name | None = None  # account that is charged; None: the user's default
    # Time limit of one start of the job: minutes, H:M:S or D-H:M:S; None: the partition's.
    time_limit: _TimeLimit | None = None
    cpus_per_rank: Count | None = None  # CPU cores per rank; None: threads_per_rank
    interface: Name | None = None  # network device between machines, such as ib0; None: that to the rendezvous
    signal_seconds: Count = 120  # how long before its time limit SLURM signals the job to save and stop
    requeue: bool = True  # whether the job is queued again after a time limit, a preemption or a failure, and resumes
    max_restarts: Amount = 3  # most restarts in a row without a newer snapshot; then the job gives up
    options: _Options = ()  # more options of sbatch, as in ["--qos=long","--exclusive"]


_Share = Annotated[float | tuple[float, ...], each(0, 1, "a part of a set")]
_Seconds = Annotated[float | tuple[float, ...], each(0, 10**9, "a time in seconds")]


@dataclass(frozen=True)
class CostConfig:
    """Costs for `show`, in seconds: a number, or a list per stage (hops: per edge)."""

    forward_seconds: _Seconds = 1.0  # F of a stage
    backward_seconds: _Seconds = 2.0  # B of a stage
    recompute_seconds: _Seconds = 1.0  # R of a stage
    input_gradient_seconds: _Seconds | None = None  # I of a stage; None: half of its B
    weight_gradient_seconds: _Seconds | None = None  # W of a stage; None: half of its B
    hop_seconds: _Seconds = 0.0  # one boundary tensor to the next stage
    # Copying a set of a stage to host memory, or back; None: as long as its F.
    offload_seconds: _Seconds | None = None
    # How many times as long a message takes in a schedule that copies sets (recompute.offload); None: as long as in others.
    copy_contention: Annotated[float | None, at_least(1, most=1000)] = None
    reduce_seconds: _Seconds = 0.0  # summing a stage's gradients over replicas, or those of shared parameters
    # Bytes of a stage's input, as a fraction of its set: about 1 / (16 x layers) for a GPT; None: inputs are not counted.
    input_share: _Share | None = None
    # Bytes that recompute.selective keeps of a microbatch, as a fraction of the set; None: nothing, or not counted.
    kept_share: _Share | None = None


@dataclass(frozen=True)
class RunConfig:
    """A whole run. A resumed run keeps the keys on which its results depend: the seed, the data, the model."""

    experiment: MayChange[str] = "quickstart"  # name of the experiment; part of the run folder's name
    seed: Amount = 0  # seed of weights, dropout and data order
    steps: MayChange[Count | None] = None  # optimizer steps; None: those of `epochs`, or 200
    # Length of the run as passes through the training data, in place of `steps`.
    epochs: MayChange[Annotated[float | None, more_than(0, most=10**9)]] = None
    # `fp32`: weights and layers in float32; `bf16-true`: both in bfloat16 (see optim.masters); `bf16-mixed`: weights in float32, layers
    # under autocast; `auto`: fp32 on a CPU, bf16-mixed on a GPU.
    precision: Annotated[str, choice_of(*WEIGHTS_IN)] = "auto"
    run_dir: MayChange[str | None] = None  # the run folder; None: runs/<date>/<time>-<experiment>
    # Snapshot from which to resume, or `auto`: the newest whole one in run_dir; if there is none, the run starts at step 1.
    resume: MayChange[str | None] = None
    # Weights to start from: a snapshot, the folder of a finished run, or a safetensors file.
    init_from: MayChange[str | None] = None
    timeout_seconds: MayChange[Annotated[float, more_than(0, most=_YEAR)]] = 600.0  # longest wait for another rank
    threads_per_rank: MayChange[Annotated[int, at_least(1, most=1024)]] = 1  # CPU threads of one rank
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: MayChange[PipelineConfig] = field(default_factory=PipelineConfig)
    recompute: PerPhase[MayChange[RecomputeConfig]] = field(default_factory=RecomputeConfig)
    transport: MayChange[TransportConfig] = field(default_factory=TransportConfig)
    plan: MayChange[PlanConfig] = field(default_factory=PlanConfig)
    parallel: MayChange[ParallelConfig] = field(default_factory=ParallelConfig)
    engine: MayChange[EngineConfig] = field(default_factory=EngineConfig)
    optim: MayChange[OptimConfig] = field(default_factory=OptimConfig)
    guard: MayChange[GuardConfig] = field(default_factory=GuardConfig)
    snapshot: MayChange[SnapshotConfig] = field(default_factory=SnapshotConfig)
    observe: MayChange[ObserveConfig] = field(default_factory=ObserveConfig)
    cluster: MayChange[ClusterConfig] = field(default_factory=ClusterConfig)
    cost: MayChange[CostConfig] = field(default_factory=CostConfig)
    # Keys that change during the run: a list of phases, each with `from` (the steps done before it begins) and the keys with another
    # value, as in [{from: 0}, {from: 5000, recompute: {sets: 3}}].
    phases: MayChange[tuple[Mapping[str, Any], ...]] = ()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run. With `epochs` they are known once the data is (`with_steps`)."""
        assert self.steps is not None or self.epochs is None, "steps of epochs are not known yet"
        return DEFAULT_STEPS if self.steps is None else self.steps
