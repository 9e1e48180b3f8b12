"""The configuration of a run, typed: one frozen record per group of `conf/`, a sentence per field.

Only `load.py` makes these from files and overrides; everything else is given them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, built layer by layer."""

    name: str = "llama"  # block style: `llama` (RMSNorm, rotary, grouped queries, SwiGLU) or `gpt2` (LayerNorm, learned positions, GELU)
    num_blocks: int = 4  # transformer blocks; embedding and head are two more layers of the pipeline
    hidden_size: int = 128  # width of the residual stream
    num_heads: int = 4  # query heads per block
    num_kv_heads: int | None = None  # key and value heads (grouped queries); None: as many as query heads
    mlp_size: int | None = (
        None  # width inside the MLP; None: 4 x hidden_size for gpt2, 8/3 x for llama (rounded up to 8)
    )
    vocabulary_size: int | None = None  # number of tokens; None: what the tokenizer has
    max_sequence_length: int = 1024  # the longest sequence that positions are made for
    rope_base: float = 10_000.0  # base of the rotary frequencies
    dropout: float = 0.0  # probability, in attention output, MLP output and embedding
    norm_epsilon: float = 1e-5  # added under the root of a norm
    path: str | None = None  # folder of a saved Hugging Face model to start from


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is cut."""

    name: str = "stdlib"  # `stdlib` (the running Python's own library) or `text` (data.path)
    path: str | None = None  # file or folder of text, for data=text
    pattern: str = "**/*.txt"  # which files of the folder are read, as a glob
    tokenizer: str = "byte"  # how text becomes tokens: `byte` (256 tokens)
    batch_size: int = 16  # samples of a whole step, over all replicas
    sequence_length: int = 256  # tokens per sample that are predicted
    heldout_fraction: float = 0.1  # share of the files (by bytes) that training never sees
    heldout_bytes: int = 204_800  # how much of the held-out part an evaluation reads at most


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut and in which order the ops run."""

    schedule: str = "gpipe"  # name of a schedule family, or a CSV file
    num_stages: int | None = None  # stages of the whole model; None: ranks of a replica x stages_per_rank
    stages_per_rank: int = 1  # stages that live on one rank (interleaving)
    num_microbatches: int = 8  # slices of a batch
    balance: str | tuple[int, ...] = "auto"  # layers per stage, or `auto`
    warmup: int | tuple[int, ...] | None = None  # 1f1b: forwards in flight, one number or one per stage; None: classic


@dataclass(frozen=True)
class RecomputeConfig:
    """What is recomputed, and when."""

    mode: str = "overlap"  # `never`, `inline`, `early` or `overlap`
    ahead: int = 1  # recomputed sets alive at once, per stage
    keep: int = 0  # sets kept per stage
    last_stage: str = "auto"  # `auto`: the last stage has no R; `always`: it has
    granularity: str = "stage"  # what one R brings back: the whole `stage`


@dataclass(frozen=True)
class ParallelConfig:
    """Copies of the pipeline and what they share."""

    num_replicas: int = 1  # whole copies of the pipeline
    zero: int = 0  # ZeRO stage of the optimizer state: 0, or 1 with engine=deepspeed
    fsdp: bool = False  # whether parameters are sharded over replicas
    tensor: int = 1  # ranks that share one layer


@dataclass(frozen=True)
class EngineConfig:
    """Which runtime trains."""

    name: str = "native"  # `native`: pipetrain's own; `deepspeed`: DeepSpeed's PipelineEngine


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a linear warm-up and a cosine to `final_fraction` of the learning rate."""

    name: str = (
        "adamw"  # `adamw` (torch), `deepspeed_cpu_adam` (state on the host) or `deepspeed_fused_adam` (CUDA only)
    )
    learning_rate: float = 3e-3  # at the end of the warm-up
    weight_decay: float = 0.1  # for matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the two moments
    warmup_steps: int = 20  # steps of linear warm-up
    final_fraction: float = 0.1  # learning rate of the last step / learning_rate
    clip_norm: float | None = 1.0  # largest global gradient norm; None: no clipping


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradient cannot be right, before it changes a weight."""

    not_finite: str = "stop"  # loss or gradient norm is not finite: `stop`, `skip` the step or `rollback` to a snapshot
    spike: str = "off"  # a loss or gradient norm far above the latest ones: `off`, `stop`, `skip` or `rollback`
    spike_factor: float = 3.0  # a spike is a loss above spike_factor x the median of the last spike_window losses
    spike_norm_factor: float | None = None  # the same for the gradient norm; None: it is not looked at
    spike_window: int = 20  # steps that the median is taken of; there is no spike before there are so many
    max_skips: int = 10  # steps skipped in a row, after which the run stops
    max_rollbacks: int = 3  # rollbacks of a run, after which it stops


@dataclass(frozen=True)
class SnapshotConfig:
    """Saved training state."""

    every_steps: int | None = None  # steps between snapshots; None: only when the run is asked to stop
    keep_last: int = 2  # how many snapshots are kept, the newest
    keep_every: int | None = None  # every keep_every-th of the regular ones stays for good; None: none does


@dataclass(frozen=True)
class WandbConfig:
    """The wandb tracker."""

    mode: str = "disabled"  # `disabled`, `offline` (files in the run folder) or `online`
    project: str = "pipetrain"  # project name there


@dataclass(frozen=True)
class ObserveConfig:
    """What is shown and written while training."""

    progress: bool = True  # a progress bar on rank 0 (lines where stderr is no terminal)
    evaluate_every_steps: int | None = None  # steps between held-out evaluations; None: at the end only
    tensorboard: bool = False  # event files for TensorBoard in the run folder
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass(frozen=True)
class ClusterConfig:
    """Where the processes run. What only SLURM reads comes below `device`."""

    name: str = "local"  # `local`: this machine, and others where the same command is typed; `slurm`: a job of its own
    num_nodes: int = 1  # machines
    gpus_per_node: int | None = None  # ranks per machine, with or without GPUs; None: as many as the pipeline needs
    rendezvous: str | None = None  # HOST:PORT of the first machine, where several meet; in a job its script sets it
    device: str = "gpu"  # `gpu`: the job asks for a GPU per rank; `cpu`: ranks compute on CPU cores
    partition: str | None = None  # where the job waits; None: the cluster's default
    account: str | None = None  # who pays for the job; None: the user's default
    time_limit: str | int | None = None  # of one start of the job: minutes, H:M:S or D-H:M:S; None: the partition's
    cpus_per_rank: int | None = None  # CPU cores per rank; None: threads_per_rank
    interface: str | None = None  # network device between machines, such as ib0; None: the one of the machine's name
    signal_seconds: int = 120  # how long before its time limit the job is told to save and stop
    requeue: bool = True  # whether the job waits again after a time limit, a preemption or a failure, and goes on
    max_restarts: int = 3  # restarts in a row without a newer snapshot, after which the job gives up
    options: tuple[str, ...] = ()  # more options of sbatch, as in ["--qos=long","--exclusive"]


@dataclass(frozen=True)
class CostConfig:
    """Costs for `show`, in seconds: a number, or a list per stage (hops: per edge)."""

    forward_seconds: float | tuple[float, ...] = 1.0  # F of a stage
    backward_seconds: float | tuple[float, ...] = 2.0  # B of a stage
    recompute_seconds: float | tuple[float, ...] = 1.0  # R of a stage
    hop_seconds: float | tuple[float, ...] = 0.0  # one boundary tensor to the next stage


@dataclass(frozen=True)
class RunConfig:
    """One run, whole."""

    experiment: str = "quickstart"  # name of the experiment, part of the run folder's name
    seed: int = 0  # of weights, dropout and data order
    steps: int = 200  # optimizer steps
    run_dir: str | None = None  # the run folder; None: runs/<date>/<time>-<experiment>
    resume: str | None = (
        None  # snapshot to go on from, or `auto`: the newest whole one in run_dir, a fresh start without
    )
    init_from: str | None = (
        None  # weights to start from: a snapshot, the folder of a run that is done, a safetensors file
    )
    timeout_seconds: float = 600.0  # longest wait for another rank
    threads_per_rank: int = 1  # CPU threads of one rank
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    cost: CostConfig = field(default_factory=CostConfig)
