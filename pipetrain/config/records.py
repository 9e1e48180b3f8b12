"""The configuration of a run, typed: one frozen record per group of `conf/`; per field its range, its default and a sentence.

Only `load.py` makes these from files and overrides; everything else is given them. What a field may be, and whether a run
that goes on may change it, is part of its type (`limits.py`). What several keys must be together stands in `together.py`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pipetrain.config.limits import (
    Limit,
    MayChange,
    PerPhase,
    at_least,
    choice_of,
    each,
    matching,
    more_than,
    only,
    within,
)

NATIVE, DEEPSPEED = "native", "deepspeed"
HUGGING_FACE = "hf"  # the model.name of what transformers has
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
ITEM_TYPES = ("uint16", "uint32", "int32")

_LARGEST = 2**63 - 1  # the largest integer that torch takes
_MOST_STAGES = 4096  # of a schedule, and so of ranks
_YEAR = 366 * 24 * 3600  # seconds


def _is_date(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


Count = Annotated[int, at_least(1, most=_LARGEST)]
Stages = Annotated[int, at_least(1, most=_MOST_STAGES)]
Amount = Annotated[int, at_least(0, most=_LARGEST)]
Size = Annotated[int, at_least(1, most=2**31 - 1)]
Name = Annotated[str, matching(r"[\w.@,:+-]+", "a name without spaces")]

_Positive = Annotated[float, more_than(0)]
_Probability = Annotated[
    float, Limit(lambda value: 0.0 <= value < 1.0, " is a probability: at least 0, below 1; 0 switches it off")
]
_Targets = Annotated[
    tuple[str, ...],
    Limit(lambda value: value and all(value), ": allowed is a list of names of linear layers, as in [q_proj,v_proj]"),
]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside linear layers that stay as they are (model=hf): only these are trained."""

    rank: Annotated[int | None, at_least(1, most=2**20)] = None  # numbers between the two matrices; None: no adapters
    # Which linear layers, each the end of a name: q_proj, or layers.11.mlp.up_proj for one alone.
    targets: _Targets = ("q_proj", "v_proj")
    # Decoder layers that get adapters, from 0; None: all.
    layers: Annotated[tuple[int, ...] | None, each(0, 10_000, "the number of a decoder layer")] = None
    alpha: _Positive | None = None  # what they give is multiplied by alpha / rank; None: by 1
    merge: MayChange[bool] = True  # whether `export` adds them to the weights, else it writes them as PEFT does


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, built layer by layer."""

    # Block style: `llama` (RMSNorm, rotary, grouped queries, SwiGLU) or `gpt2` (LayerNorm, learned positions, GELU).
    name: str = "llama"
    # Transformer blocks; embedding and head are two more layers.
    num_hidden_layers: Annotated[int, at_least(1, most=10_000)] = 4
    hidden_size: Annotated[int, at_least(1, most=2**20)] = 128  # width of the residual stream
    num_attention_heads: Size = 4  # query heads per block
    num_key_value_heads: Size | None = None  # key and value heads (grouped queries); None: as many as query heads
    # Width inside the MLP; None: 4 x hidden_size for gpt2, 8/3 x for llama (rounded up to 8).
    intermediate_size: Size | None = None
    vocab_size: Size | None = None  # number of tokens; None: what the tokenizer has
    max_position_embeddings: Size = 1024  # the longest sequence that positions are made for
    rope_theta: _Positive = 10_000.0  # base of the rotary frequencies
    dropout: _Probability = 0.0  # in attention output, MLP output and embedding
    norm_epsilon: _Positive = 1e-5  # added under the root of a norm
    # For model=hf: a folder that save_pretrained of transformers wrote, or a name of the hub, as in Qwen/Qwen2.5-7B-Instruct.
    path: MayChange[str | None] = None
    revision: MayChange[str | None] = None  # branch, tag or commit of a name of the hub; None: its main branch
    # For model=hf: `pretrained` reads the weights, `random` takes the config alone.
    weights: MayChange[Annotated[str, choice_of("pretrained", "random")]] = "pretrained"
    # Of the weights: `auto` (as they are stored), float32, bfloat16 or float16; None: what `precision` says.
    dtype: Annotated[str | None, choice_of("auto", "float32", "bfloat16", "float16")] = None
    # For model=hf: how transformers computes attention (`sdpa`, `eager`, `flash_attention_2`, ...); None: its own choice.
    attention: str | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    compile: MayChange[bool] = False  # whether torch.compile compiles the layers, each kind once; needs a C++ compiler


_HeldOut = Annotated[
    float,
    Limit(
        lambda value: 0.0 <= value < 1.0,
        " is a share of the bytes: at least 0 (nothing is held out), below 1; the default is 0.1",
    ),
]
_Date = Annotated[str, Limit(_is_date, ": allowed is a date, as in 2026-01-31")]


_AssistantOnly = Annotated[
    bool | str, Limit(lambda value: isinstance(value, bool) or value == LAST, f": allowed is true, false or {LAST}")
]


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how it becomes samples."""

    # `stdlib` (the running Python's own library), `text`, `jsonl`, `hf` (a data set of Hugging Face) or `memmap` (token ids).
    name: str = "stdlib"
    path: MayChange[str | None] = None  # file, folder or glob to read; for hf a folder, or a name on the hub
    pattern: MayChange[str] = "**/*.txt"  # which files of the folder are read, as a glob; each may be one of .gz, too
    subset: str | None = None  # hf: the configuration of a data set that has several
    split: str = "train"  # hf: the split that is trained on
    text_field: str = "text"  # jsonl and hf: the field that holds the text, where there are no `messages`
    # How text becomes tokens: `byte` (256 tokens), or a tokenizer's folder or name; null: the one of the model in model.path.
    tokenizer: str | None = "byte"
    # What a sample is: `stream` (a piece of one long row of tokens), `packed` (whole documents, side by side) or `padded` (one
    # document); null: packed for chats, stream for all else.
    layout: Annotated[str | None, choice_of(*LAYOUTS)] = None
    # Of a chat, in the loss: the answers (true), the last answer (`last`) or every token (false).
    assistant_only_loss: _AssistantOnly = True
    template_date: _Date = "2026-01-01"  # what chat templates that ask for today's date are told
    item_type: Annotated[str, choice_of(*ITEM_TYPES)] = "uint16"  # memmap: the type of a token id in a .bin file
    on_error: MayChange[Annotated[str, choice_of("stop", "skip")]] = (
        "stop"  # what happens at a document that is no sample
    )
    # Where tokens are kept; null: pipetrain/tokens in $XDG_CACHE_HOME or ~/.cache.
    cache_dir: MayChange[str | None] = None
    global_batch_size: PerPhase[Size] = 16  # samples of a whole step, over all replicas
    sequence_length: PerPhase[Size] = 256  # tokens per sample that are predicted
    eval_path: MayChange[str | None] = None  # what is held out, if apart; null: eval_fraction of data.path
    eval_split: str | None = None  # hf: the split that is held out; null: eval_fraction of data.split
    eval_fraction: _HeldOut = 0.1  # share of the files (by bytes) or documents that training never sees
    eval_bytes: MayChange[Count] = 204_800  # how much of the held-out part an evaluation reads at most, in tokens

    @property
    def counted(self) -> str:
        """What counts in the loss of a chat: `answers`, `last` or `all`."""
        return LAST if self.assistant_only_loss == LAST else ANSWERS if self.assistant_only_loss else ALL


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut and in which order the ops run."""

    schedule: str = "gpipe"  # name of a schedule family, `auto`, or a CSV file
    search_seconds: Annotated[float, at_least(0, most=_YEAR)] = 30.0  # auto: the longest search; 0: its rule alone
    num_stages: Stages | None = None  # stages of the whole model; None: ranks of a replica x stages_per_rank
    stages_per_rank: Stages = 1  # stages that live on one rank (interleaving)
    # Which rank holds which stage: `loop` (round the ranks of a replica), `v` (to the last rank and back), or a list, a rank per
    # stage.
    placement: str | tuple[int, ...] = "loop"
    num_microbatches: PerPhase[Count] = 8  # slices of a batch
    balance: str | tuple[int, ...] = "auto"  # layers per stage, or `auto`
    # Make I (the gradient of the input) and W (those of the weights, where the stage would wait) of each B.
    split_backward: bool = False
    warmup: int | tuple[int, ...] | None = None  # 1f1b: forwards in flight, one number or one per stage; None: classic


@dataclass(frozen=True)
class RecomputeConfig:
    """What is recomputed, and when. `RecomputePolicy` has a field per key and checks the values (`check_schedule`)."""

    mode: str = "overlap"  # `never`, `inline`, `early` or `overlap`
    # Sets of a stage alive at once, kept or recomputed; one number or one per stage. None: one, or with `segments` one part.
    sets: int | float | tuple[int, ...] | tuple[float, ...] | None = None
    keep: str | int | None = (
        None  # whether places are used to keep sets: `none` or `auto`; None: `auto` with more than one place
    )
    # The most microbatches of a stage between F and B, one number or one per stage; None: any.
    stash: int | tuple[int, ...] | None = None
    last_stage: str = "auto"  # `auto`: the last stage has no R, where a whole set has room; `always`: it has
    # In how many parts a stage is recomputed, one after the other: a number, `sqrt` (of its layers) or `layers` (each alone).
    segments: int | str = 1
    # Outputs that stay from F to B, so that R need not compute them: `matmul`, `attention`, an operation as torch names it (`mm`), layers
    # (`2-5`, `3.mlp`: their products and attention), both (`2-5:attention`), or a list of such; None: R computes all.
    selective: str | tuple[str, ...] | None = None
    # Layers whose saved tensors stay from F to B, and that run once, by number (`3`, `2-5`) or kind (`MyLayer`), or a list of such.
    keep_layers: str | int | tuple[str | int, ...] | None = None
    # Which recomputed microbatches are compared with their forward: `first` of each kind of step, `every`, `off`, or a number
    # N: one every N steps, in turn.
    verify: str | int = "first"


_MORE_STAGES = "use more stages (pipeline.num_stages)"
_NotSharded = Annotated[bool, only(False, f"parameters are not sharded; {_MORE_STAGES} to save memory")]
_NotSplit = Annotated[int, only(1, f"layers are not split; {_MORE_STAGES} for more ranks")]


_Replicas = Annotated[
    int | str,
    Limit(
        lambda value: value == AUTO_REPLICAS or (isinstance(value, int) and value >= 1),
        f": allowed is 1 or more, or {AUTO_REPLICAS} (as many as the ranks allow)",
        most=_MOST_STAGES,
    ),
]


@dataclass(frozen=True)
class ParallelConfig:
    """Copies of the pipeline and what they share."""

    # Whole copies of the pipeline, each of which takes its share of a batch: a number, or `auto` (as many as the ranks allow).
    num_replicas: _Replicas = 1
    # Which ranks are neighbours, and so share a machine: the stages of a replica (`replica-stage`), or the replicas of a
    # stage (`stage-replica`).
    order: Annotated[str, choice_of(*ORDERS)] = ORDERS[0]
    # Steps between two comparisons of the replicas' weights, which are compared before each snapshot, too; None: they never are.
    check_every_steps: Count | None = 100
    # ZeRO stage: 0, or 1 (each replica holds a share of the optimizer state).
    zero_stage: Annotated[int, within(0, 3)] = 0
    fsdp: _NotSharded = False  # whether parameters are sharded over replicas
    tensor: _NotSplit = 1  # ranks that share one layer


@dataclass(frozen=True)
class TransportConfig:
    """How messages go from stage to stage."""

    prefetch: Amount = 2  # tensors of an edge received before they are used; 0: just in time
    # NCCL's communicators: one for each `edge` of stages and direction, or one for each `pair` of ranks and direction.
    communicators: Annotated[str, choice_of(*COMMUNICATORS)] = "edge"
    # What carries them: `auto` (gloo on CPUs, NCCL on GPUs), `nccl`, or `pinned` (memory of the host and gloo, on GPUs without NCCL
    # between them and for several ranks on one).
    backend: Annotated[str, choice_of(*EDGES)] = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """Which runtime trains."""

    # `native`: pipetrain's own; `deepspeed`: DeepSpeed's PipelineEngine.
    name: Annotated[str, choice_of(NATIVE, DEEPSPEED)] = NATIVE


_Betas = Annotated[
    tuple[float, float],
    Limit(lambda value: all(0 <= beta < 1 for beta in value), ": allowed is two numbers, each from 0 to less than 1"),
]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a linear warm-up and a cosine to `final_fraction` of the learning rate."""

    # `adamw` (torch's fused one) or `deepspeed_cpu_adam` (state on the host).
    name: Annotated[str, choice_of(*OPTIMIZERS)] = ADAMW
    learning_rate: Annotated[float, more_than(0)] = 3e-3  # at the end of the warm-up
    weight_decay: Annotated[float, at_least(0)] = 0.1  # for matrices only
    betas: _Betas = (0.9, 0.95)  # decay of the two moments
    warmup_steps: Amount = 20  # steps of linear warm-up
    final_fraction: Annotated[float, within(0, 1)] = 0.1  # learning rate of the last step / learning_rate
    max_grad_norm: Annotated[float | None, more_than(0)] = 1.0  # largest global gradient norm; None: no clipping
    # Float32 copies of bfloat16 weights, which take the updates: `auto` (where there are such weights) or `off`.
    masters: Annotated[str, choice_of("auto", "off")] = "auto"


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradient cannot be right, before it changes a weight."""

    # The loss or the gradient norm is not finite: `stop`, `skip` the step or `rollback` to a snapshot.
    not_finite: Annotated[str, choice_of("stop", "skip", "rollback")] = "stop"
    # A loss or gradient norm is far above the latest ones.
    spike: Annotated[str, choice_of("off", "stop", "skip", "rollback")] = "off"
    # A spike is a loss above spike_factor x the median of the last spike_window losses.
    spike_factor: Annotated[float, more_than(1)] = 3.0
    # The same for the gradient norm; None: it is not looked at.
    spike_norm_factor: Annotated[float | None, more_than(1)] = None
    spike_window: Count = 20  # steps that the median is taken of; there is no spike before there are so many
    max_skips: Amount = 10  # steps skipped in a row, after which the run stops
    max_rollbacks: Amount = 3  # rollbacks of a run, after which it stops


@dataclass(frozen=True)
class SnapshotConfig:
    """Saved training state."""

    every_steps: Count | None = None  # steps between snapshots; None: only when the run is asked to stop
    keep_last: Count = 2  # how many snapshots are kept, the newest
    keep_every: Count | None = None  # every keep_every-th of the regular ones stays for good; None: none does


@dataclass(frozen=True)
class WandbConfig:
    """The wandb tracker."""

    # `disabled`, `offline` (files in the run folder) or `online`.
    mode: Annotated[str, choice_of("disabled", "offline", "online")] = "disabled"
    project: str = "pipetrain"  # project name there
    name: str | None = None  # the run's name there; None: that of its folder
    group: str | None = None  # the group of runs that it belongs to
    tags: tuple[str, ...] = ()  # words to find it by


@dataclass(frozen=True)
class ObserveConfig:
    """What is shown and written while training."""

    progress: bool = True  # a progress bar on rank 0 (lines where stderr is no terminal)
    eval_every_steps: Count | None = None  # steps between held-out evaluations; None: at the end only
    tensorboard: bool = False  # event files for TensorBoard in the run folder
    # Floating-point operations that one device can do in a second, at the run's precision; None: `mfu` is null.
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
    """Where the processes run. What only SLURM reads comes below `device`."""

    # `local`: this machine, and others where the same command is typed; `slurm`: a job of its own.
    name: Annotated[str, choice_of("local", "slurm")] = "local"
    num_nodes: Stages = 1  # machines
    ranks_per_node: Stages | None = None  # ranks per machine, with or without GPUs; None: as many as the pipeline needs
    # HOST:PORT of the first machine, where several meet; in a job its script sets it.
    rendezvous: _Address | None = None
    # `gpu`: the job asks for a GPU per rank; `cpu`: ranks compute on CPU cores.
    device: Annotated[str, choice_of("gpu", "cpu")] = "gpu"
    partition: Name | None = None  # where the job waits; None: the cluster's default
    account: Name | None = None  # who pays for the job; None: the user's default
    time_limit: _TimeLimit | None = None  # of one start of the job: minutes, H:M:S or D-H:M:S; None: the partition's
    cpus_per_rank: Count | None = None  # CPU cores per rank; None: threads_per_rank
    interface: Name | None = None  # network device between machines, such as ib0; None: the one of the machine's name
    signal_seconds: Count = 120  # how long before its time limit the job is told to save and stop
    requeue: bool = True  # whether the job waits again after a time limit, a preemption or a failure, and goes on
    max_restarts: Amount = 3  # restarts in a row without a newer snapshot, after which the job gives up
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
    reduce_seconds: _Seconds = 0.0  # adding up a stage's gradients over the replicas, or what stages share
    # A stage's input in sets, by bytes: 1 / (16 x layers) or so of a GPT's stage; None: inputs are not counted.
    input_share: _Share | None = None
    # What recompute.selective keeps of a microbatch, in sets, by bytes; None: nothing, or not counted.
    kept_share: _Share | None = None


@dataclass(frozen=True)
class PlanConfig:
    """What is known before a run is planned."""

    # A run that ended: its folder, `latest`, or its profile.json. `auto` seeks the order for what its ops took, and `show` draws with it.
    # Or what `pipetrain profile` wrote: by its layers' bytes `recompute.segments` cuts stages into parts, too.
    profile: str | None = None


@dataclass(frozen=True)
class RunConfig:
    """One run, whole. A run that goes on keeps what it computes: the seed, the data, the model."""

    experiment: MayChange[str] = "quickstart"  # name of the experiment, part of the run folder's name
    seed: Amount = 0  # of weights, dropout and data order
    steps: MayChange[Count | None] = None  # optimizer steps; None: those of `epochs`, or 200
    # Steps as times through the training data.
    epochs: MayChange[Annotated[float | None, more_than(0, most=10**9)]] = None
    # Weights and layers in float32 (`fp32`) or in bfloat16 (`bf16-true`, see optim.masters), or float32 weights and layers under autocast
    # (`bf16-mixed`); `auto`: fp32 on the CPU, bf16-mixed on a GPU.
    precision: Annotated[str, choice_of(*WEIGHTS_IN)] = "auto"
    run_dir: MayChange[str | None] = None  # the run folder; None: runs/<date>/<time>-<experiment>
    # Snapshot to go on from, or `auto`: the newest whole one in run_dir, a fresh start without.
    resume: MayChange[str | None] = None
    # Weights to start from: a snapshot, the folder of a run that is done, a safetensors file.
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
    # What changes over the run: a list of phases, each with `from` (the steps done before it begins) and the keys that have another value
    # in it, as in [{from: 0}, {from: 5000, recompute: {sets: 3}}]; none: nothing does.
    phases: MayChange[tuple[Mapping[str, Any], ...]] = ()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run, where they are known: with `epochs` not before the data is (`with_steps`)."""
        assert self.steps is not None or self.epochs is None, "steps of epochs are not known yet"
        return DEFAULT_STEPS if self.steps is None else self.steps
