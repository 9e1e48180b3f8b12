"""What a user may get wrong, a row each: what was typed, what lies on the disk, and what the answer must say.

Each row goes through the real entry: `pipetrain`, which refuses before a process starts, or for what only a rank can find out
`train.main` as the one rank of a run. Every answer is one line, with exit code 2 where the input is wrong.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist
from safetensors.torch import save_file
from torch import zeros

from pipetrain import train as rank
from pipetrain.cli.main import main
from pipetrain.config.load import conf_dir
from pipetrain.config.schema import limits
from pipetrain.launcher import launch
from pipetrain.observe.folder import RunFolder
from pipetrain.proof.damage import flip, truncate

Prepare = Callable[[pathlib.Path], None]


@dataclass(frozen=True)
class Row:
    """`typed` after `pipetrain`; `says` must all be in the one line of the answer; `{}` in both is the folder of the row."""

    typed: str
    says: tuple[str, ...]
    prepare: Prepare = lambda folder: None
    code: int = 2
    as_rank: bool = False  # only a rank can find out
    as_nobody: bool = False  # root may read and write everything
    note: str = ""  # what lies on the disk, for the name of the test

    @property
    def name(self) -> str:
        return f"{self.note} {self.typed}".strip()


def train(typed: str, *says: str, prepare: Prepare = lambda folder: None, as_nobody: bool = False) -> Row:
    return Row(f"train experiment=smoke {typed}", says, prepare, as_nobody=as_nobody)


def lines(typed: str, *says: str, prepare: Prepare) -> Row:
    return train(f"data=jsonl data.path={{}}/a.jsonl {typed}".strip(), *says, prepare=prepare)


def files(**contents: bytes) -> Prepare:
    """Files by their names."""

    def prepare(folder: pathlib.Path) -> None:
        for name, content in contents.items():
            (folder / name).write_bytes(content)

    return prepare


def second_line(line: bytes) -> Prepare:
    """a.jsonl, with a good line before this one."""
    return files(**{"a.jsonl": b'{"text": "Hello"}\n' + line + b"\n"})


def text(**files: bytes) -> Prepare:
    """A folder `text` with these files."""

    def prepare(folder: pathlib.Path) -> None:
        (folder / "text").mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / "text" / f"{name}.txt").write_bytes(content)

    return prepare


ENOUGH = text(a=b"a stage waits " * 500, b=b"a stage runs " * 500)

# Overrides that cannot be read, keys and choices that do not exist, wrong types -----------------------------------------
CONFIG = [
    train("stpes=3", "stpes:", "did you mean", "'steps'"),
    train("recompute.mod=inline", "recompute.mod:", "'recompute.mode'"),
    train("recompute=inlin", "allowed are early, inline, never, overlap", "'inline'"),
    train("recompute.mode=overlapp", "recompute.mode", "'overlap'"),
    train("pipeline=gpip", "pipeline=gpip", "gpipe"),
    train("pipeline.schedule=1f1bb", "1f1bb", "'1f1b'"),
    train("modell=gpt2", "modell:", "'model'"),
    train("model=gpt3", "model=gpt3", "gpt2"),
    train("model.name=lama", "model.name='lama'", "did you mean 'llama'"),
    train("data=wikitext", "data=wikitext", "memmap, stdlib, text"),
    train("experiment=quikstart", "experiment=quikstart", "'quickstart'"),
    train("optim=sgd", "optim=sgd", "adamw"),
    train("transport=gloo", "transport=gloo", "auto, pinned, serial"),
    train("recompute.last_stage=never", "recompute.last_stage", "auto", "always"),
    train("steps=abc", "steps=abc", "an integer"),
    train("steps=3.5", "steps=3.5", "an integer"),
    train("steps=1e99999", "steps", "an integer"),
    train("seed=null", "null", "an integer"),
    train("seed=true", "seed=true", "an integer"),
    train("seed=[1,2]", "seed", "an integer"),
    train("optim.learning_rate=fast", "optim.learning_rate=fast", "a number"),
    train("optim.betas=0.9", "optim.betas", "2 numbers"),
    train("optim.betas=[0.9,0.95,0.99]", "optim.betas", "a list of 2 numbers"),
    train("observe.progress=1", "true or false"),
    train("observe.wandb=3", "observe.wandb=3"),
    train("model.dropout={a:1}", "model.dropout"),
    train("data.path=123", "data.path=\"'123'\""),
    train("+optim.momentum=0.9", "neither added nor removed"),
    train("~optim.clip_norm", "key=value"),
    train("steps", "steps: an override is key=value"),
    train("=3", "=3: an override is key=value"),
    train("steps=", "steps"),
    train("steps=3=4", "steps"),
    train("steps=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
    train("steps=${nothing}", "steps"),
    train("pipeline.balance=3,3", "pipeline.balance=[3,3]"),
]

# Numbers out of range ----------------------------------------------------------------------------------------------------
RANGES = [
    train("model.dtype=int8", "model.dtype=int8", "auto, float32, bfloat16 or float16"),
    train("model.weights=trained", "model.weights=trained", "pretrained or random"),
    train("model.lora.rank=0", "model.lora.rank=0", "1 or more"),
    train("model.lora.alpha=0", "model.lora.alpha=0", "greater than 0"),
    train("model.lora.targets=[]", "model.lora.targets=[]", "a list of names of linear layers"),
    train("model.lora.layers=[-1]", "model.lora.layers=[-1]", "a decoder layer"),
    train("cost.input_share=2", "cost.input_share=2.0", "a part of a set from 0 to 1"),
    train("cost.kept_share=-1", "cost.kept_share=-1.0", "a part of a set from 0 to 1"),
    train("cost.reduce_seconds=-1", "cost.reduce_seconds=-1.0", "a time in seconds from 0"),
    train("epochs=0", "epochs=0.0", "more than 0"),
    train("observe.peak_flops_per_second=0", "observe.peak_flops_per_second=0.0", "more than 0"),
    train("optim.masters=on", "optim.masters=on", "auto or off"),
    train("precision=fp16", "precision=fp16", "auto, fp32, bf16, bf16_autocast"),
    train("recompute.segments=9", "recompute.segments=9: stage 0 has 2 layers", "use recompute.segments=2"),
    train("recompute.segments=0", "recompute.segments=0", "a number of parts, sqrt or layers"),
    train("transport.ahead=-1", "transport.ahead=-1", "0 or more"),
    train("transport.communicators=rank", "transport.communicators=rank", "edge or pair"),
    train("transport.edges=ncll", "transport.edges=ncll", "auto, nccl or pinned"),
    train("steps=0", "steps=0", "1 or more"),
    train("recompute.verify=0", "recompute.verify=0", "first, every, off or a number of steps"),
    train("seed=-1", "seed=-1", "0 or more"),
    train("timeout_seconds=0", "timeout_seconds=0", "more than 0"),
    train("timeout_seconds=nan", "timeout_seconds=nan", "finite", "more than 0"),
    train("timeout_seconds=1e300", "timeout_seconds=1e+300", "31622400 at most"),
    train("seed=99999999999999999999", "seed=99999999999999999999", "at most"),
    train("threads_per_rank=99999999", "threads_per_rank=99999999", "1024 at most"),
    train("model.num_blocks=99999999", "model.num_blocks=99999999", "10000 at most"),
    train("model.rope_base=inf", "model.rope_base=inf", "finite"),
    train("data.heldout_bytes=0", "data.heldout_bytes=0", "1 or more"),
    train("pipeline.num_stages=99999999", "pipeline.num_stages=99999999", "4096 at most"),
    train("pipeline.stages_per_rank=99999999", "pipeline.stages_per_rank=99999999", "4096 at most"),
    train("cluster.num_nodes=99999999", "cluster.num_nodes=99999999", "4096 at most"),
    train("cluster.num_nodes=4096 cluster.gpus_per_node=4096", "16777216 stages", "too many", "4096"),
    train(
        "pipeline.num_microbatches=99999999 data.batch_size=99999999",
        "pipeline.num_microbatches=99999999 with 2 stages",
        "131072 at most",
    ),
    *(
        Row(f"show cost.{name}_seconds={seconds}", (f"cost.{name}_seconds={seconds}", "finite", "from 0 to 1000000000"))
        for name in ("forward", "backward", "recompute", "hop", "input_gradient", "weight_gradient")
        for seconds in ("nan", "inf")
    ),
    Row("show cost.forward_seconds=-1", ("cost.forward_seconds=-1.0", "from 0 to 1000000000")),
    Row("show cost.forward_seconds=[1,nan]", ("cost.forward_seconds=[1.0, nan]", "finite")),
    Row("show pipeline.num_stages=99999999", ("pipeline.num_stages=99999999", "4096 at most")),
    Row("show pipeline.num_microbatches=99999999", ("pipeline.num_microbatches=99999999", "131072 at most")),
    Row("show cluster.num_nodes=0", ("cluster.num_nodes=0", "1 or more")),
    train("timeout_seconds=inf", "timeout_seconds=inf", "finite"),
    train("engine.name=megatron", "engine.name=megatron", "native or deepspeed"),
    train("optim.name=sgd", "optim.name=sgd", "adamw, deepspeed_cpu_adam, deepspeed_fused_adam"),
    train("parallel.zero=4", "parallel.zero=4", "from 0 to 3"),
    train("parallel.num_replicas=99999999", "parallel.num_replicas=99999999", "4096 at most"),
    train("parallel.order=stage", "parallel.order=stage", "replica-stage or stage-replica"),
    train("parallel.check_every_steps=0", "parallel.check_every_steps=0", "1 or more"),
    train("threads_per_rank=0", "threads_per_rank=0", "1 or more"),
    train("optim.learning_rate=-1", "optim.learning_rate=-1", "more than 0"),
    train("optim.learning_rate=nan", "optim.learning_rate=nan", "more than 0"),
    train("optim.learning_rate=inf", "optim.learning_rate=inf", "finite"),
    train("optim.clip_norm=0", "optim.clip_norm=0", "more than 0"),
    train("optim.weight_decay=-0.1", "optim.weight_decay=-0.1", "0 or more"),
    train("optim.warmup_steps=-1", "optim.warmup_steps=-1", "0 or more"),
    train("optim.final_fraction=2", "optim.final_fraction=2", "from 0 to 1"),
    train("optim.betas=[0.9,1.0]", "optim.betas", "less than 1"),
    train("observe.evaluate_every_steps=0", "observe.evaluate_every_steps=0", "1 or more"),
    train("snapshot.every_steps=0", "snapshot.every_steps=0", "1 or more"),
    train("snapshot.keep_last=0", "snapshot.keep_last=0", "1 or more"),
    train("snapshot.keep_every=0", "snapshot.keep_every=0", "1 or more"),
    train("guard.not_finite=ignore", "guard.not_finite=ignore", "stop, skip, rollback"),
    train("guard.spike=of", "guard.spike=of", "did you mean 'off'"),
    train("guard.spike_window=0", "guard.spike_window=0", "1 or more"),
    train("guard.spike_factor=1", "guard.spike_factor=1", "more than 1"),
    train("guard.spike_norm_factor=0.5", "guard.spike_norm_factor=0.5", "more than 1"),
    train("guard.max_skips=-1", "guard.max_skips=-1", "0 or more"),
    train("guard.max_rollbacks=-1", "guard.max_rollbacks=-1", "0 or more"),
    train("cluster.num_nodes=0", "cluster.num_nodes=0", "1 or more"),
    train("cluster.gpus_per_node=0", "cluster.gpus_per_node=0", "1 or more"),
    train("cluster.cpus_per_rank=0", "cluster.cpus_per_rank=0", "1 or more"),
    train("cluster.signal_seconds=0", "cluster.signal_seconds=0", "1 or more"),
    train("cluster.max_restarts=-1", "cluster.max_restarts=-1", "0 or more"),
    train("cluster.name=slurmm", "cluster.name=slurmm", "local or slurm"),
    train("cluster.device=tpu", "cluster.device=tpu", "gpu or cpu"),
    train("cluster.rendezvous=node1", "cluster.rendezvous=node1", "HOST:PORT"),
    train("cluster.time_limit=soon", "cluster.time_limit=soon", "minutes"),
    train("cluster.partition=a/b", "cluster.partition=a/b", "without spaces"),
    train("cluster.account=a/b", "cluster.account=a/b", "without spaces"),
    train("cluster.interface=a/b", "cluster.interface=a/b", "without spaces"),
    train("cluster.options=[qos]", "cluster.options", "options of sbatch"),
    train("observe.wandb.mode=onlin", "observe.wandb.mode=onlin", "disabled, offline or online"),
    train("pipeline.num_stages=0", "pipeline.num_stages=0", "1 or more"),
    train("pipeline.stages_per_rank=0", "pipeline.stages_per_rank=0", "1 or more"),
    train("pipeline.num_microbatches=0", "pipeline.num_microbatches=0", "1 or more"),
    train("pipeline.search_seconds=-1", "pipeline.search_seconds=-1.0", "0 or more"),
    train(
        "pipeline.schedule=auto pipeline.search_seconds=600", "pipeline.search_seconds=600.0", "timeout_seconds=600.0"
    ),
    train("pipeline.schedule=auto pipeline.stages_per_rank=2", "one stage per rank", "pipeline.stages_per_rank=1"),
    train("pipeline.schedule=auto recompute.last_stage=always", "recompute.last_stage=always", "last_stage=auto"),
    train("pipeline.schedule=auto plan.profile={}/run", "plan.profile={}/run", "profile.json is not there"),
    train("plan.profile={}/run", "plan.profile={}/run", "pipeline.schedule=auto"),
    train("recompute.sets=0", "recompute.sets=0", "1 or more"),
    train("recompute.sets=[2,1,1]", "recompute.sets=[2, 1, 1]", "has 3 numbers for 2 stages"),
    train("recompute.stash=[8]", "recompute.stash=[8]", "has 1 numbers for 2 stages"),
    train("recompute.stash=1", "recompute.stash=1: stage 0 holds", "use recompute.stash=", "1f1b"),
    train("recompute.ahead=2", "recompute.ahead", "recompute.sets=a"),
    train("recompute.keep=1", "recompute.keep=1", "recompute.sets=k+1"),
    train("data.batch_size=0 pipeline.num_microbatches=1", "data.batch_size=0"),
    train("data.sequence_length=0", "data.sequence_length=0", "1 or more"),
    train("data.heldout_fraction=1", "data.heldout_fraction=1", "below 1"),
    train("data.heldout_bytes=3", "data.heldout_bytes=3", "data.heldout_bytes=32 or more"),
    train("data.layout=paked", "data.layout=paked", "'packed'"),
    train("data.counted=answer", "data.counted=answer", "'answers'"),
    train("data.item_type=int16", "data.item_type=int16", "'uint16'"),
    train("data.on_error=ignore", "data.on_error=ignore", "stop or skip"),
    train("data.template_date=1.1.2026", "data.template_date=1.1.2026", "2026-01-31"),
    train("model.num_blocks=0", "model.num_blocks=0", "1 or more"),
    train("model.hidden_size=0", "model.hidden_size=0", "1 or more"),
    train("model.num_heads=0", "model.num_heads=0", "1 or more"),
    train("model.num_heads=3", "model.num_heads=3 does not divide", "set model.num_heads="),
    train("model.num_kv_heads=0", "model.num_kv_heads=0", "1 or more"),
    train("model.mlp_size=0", "model.mlp_size=0", "1 or more"),
    train("model.vocabulary_size=0", "model.vocabulary_size=0", "1 or more"),
    train("model.max_sequence_length=0", "model.max_sequence_length=0", "1 or more"),
    train("model.dropout=1", "model.dropout=1", "below 1"),
    train("model.norm_epsilon=0", "model.norm_epsilon=0", "greater than 0"),
    train("model.rope_base=0", "model.rope_base=0", "greater than 0"),
]

# Keys that do not fit each other -----------------------------------------------------------------------------------------
TOGETHER = [
    train("pipeline.num_microbatches=9", "num_microbatches=9", "batch_size=8", "num_microbatches=8 or less"),
    train("pipeline.balance=[8,8,8,8] pipeline.num_stages=4", "balance=[8, 8, 8, 8]", "32", "4"),
    train("pipeline.balance=[0,4] pipeline.num_stages=2", "balance=[0, 4]", "at least one layer"),
    train("pipeline.balance=[1,1,2] pipeline.num_stages=2", "balance=[1, 1, 2]", "2 stages"),
    train("pipeline.balance=[2,x]", "pipeline.balance", "a list of integers"),
    train("pipeline.balance=evenly", "pipeline.balance", "auto"),
    train("pipeline.num_stages=9", "9", "4 layers"),
    train("pipeline.num_stages=4 pipeline.stages_per_rank=3", "stages_per_rank=3", "multiple"),
    train("pipeline.placement=zigzag", "pipeline.placement='zigzag'", "loop, v, or a list"),
    train("pipeline.placement=[0,2]", "pipeline.placement=[0, 2]", "rank 1 holds no stage"),
    train("pipeline.placement=[0,1] pipeline.num_stages=3", "pipeline.placement=[0, 1]", "2 entries for 3 stages"),
    train("pipeline.placement=[]", "pipeline.placement=[] names no rank"),
    train("pipeline.placement=[0,-1]", "pipeline.placement=[0, -1]", "there is no rank -1"),
    train(
        "pipeline.placement=[0,1,1,0] pipeline.schedule=interleaved", "pipeline.placement=v", "pipeline.schedule=gpipe"
    ),
    train("pipeline.schedule=inference", "no backward", "gpipe"),
    train("pipeline.warmup=3 pipeline.num_stages=2", "warmup"),
    train("data.sequence_length=2048", "data.sequence_length=2048", "model.max_sequence_length=2048"),
    train("parallel.num_replicas=0", "parallel.num_replicas=0"),
    train("parallel.num_replicas=2.5", "parallel.num_replicas=2.5", "an integer or text"),
    train("parallel.zero=1", "parallel.zero=1 with parallel.num_replicas=1", "parallel.num_replicas=2"),
    train("parallel.num_replicas=3", "parallel.num_replicas=3 x pipeline.num_microbatches=4 = 12", "data.batch_size=8"),
    train("parallel.num_replicas=auto", "parallel.num_replicas=auto", "set pipeline.num_stages"),
    train("parallel.num_replicas=auto pipeline.num_stages=2", "set cluster.gpus_per_node"),
    train(
        "parallel.num_replicas=auto pipeline.num_stages=4 cluster.gpus_per_node=10",
        "10 ranks are not a multiple of the 4 of one replica (pipeline.num_stages=4)",
        "start 8 or 12 ranks",
    ),
    train(
        "parallel.num_replicas=2 pipeline.num_stages=2 cluster.gpus_per_node=6",
        "make 6 ranks, but parallel.num_replicas=2 and pipeline.num_stages=2",
        "need 4 ranks; set pipeline.num_stages=3, or parallel.num_replicas=3",
    ),
    train("parallel.num_replicas=2 cluster.gpus_per_node=5", "5 ranks cannot be shared out", "start 4 or 6 ranks"),
    train("phases=[{from:2}]", "phases[0].from=2", "begins with the run", "from: 0"),
    train("phases=[{from:0},{from:3},{from:3}]", "phases[2].from=3", "phases[1] begins after 3 steps"),
    train("phases=[{from:0},{from:6}]", "phases[1].from=6", "steps=6", "more steps"),
    train(
        "phases=[{from:0},{from:3,optim:{clip_norm:2}}]", "phases[1].optim.clip_norm", "recompute.*, data.batch_size"
    ),
    train(
        "phases=[{from:0},{from:3,pipeline:{balance:[1,3]}}]", "phases[1].pipeline.balance", "layers stay where they"
    ),
    train("phases=[{from:0},{from:3,recompute:{set:2}}]", "phases[1].recompute.set", "did you mean 'recompute.sets'"),
    train("phases=[{from:0},{from:3,data:{batch_size:3}}]", "phases[1]: ", "num_microbatches=4", "data.batch_size=3"),
    train(
        "phases=[{from:0},{from:3,data:{sequence_length:2048}}]",
        "phases[1]: data.sequence_length=2048",
        "shorter samples",
    ),
    train("phases=[{from:0},{from:3,recompute:{segments:9}}]", "phases[1]: recompute.segments=9", "segments=2 or less"),
    Row("show --phase=1", ("--phase=1", "the run has no phases")),
    Row("show phases=[{from:0},{from:9}] --phase=2", ("--phase=2", "there are phases 0 to 1")),
]

# Data --------------------------------------------------------------------------------------------------------------------
DATA = [
    train("data=text", "data.path is not set", "data.path=FILE_OR_FOLDER"),
    train("data=text data.path={}/nowhere", "{}/nowhere is not there"),
    train("data=text data.path={}/textt", "did you mean data.path={}/text?", prepare=ENOUGH),
    train("data=text data.path={}/text", "matches no file", "there is no file in it", prepare=text()),
    train("data=text data.path={}/text data.pattern=*.md", "matches no file", "'**/*.txt'", prepare=ENOUGH),
    train("data=text data.path={}/text data.pattern=/etc/*", "no pattern inside a folder", prepare=ENOUGH),
    train("data=text data.path={}/text data.pattern=''", "data.pattern", prepare=ENOUGH),
    train("data=text data.path={}/text", "has 0 bytes", "give more text", prepare=text(a=b"", b=b"")),
    train("data=text data.path={}/text/a.txt", "has 20 bytes", "data.sequence_length=19", prepare=text(a=b"x" * 20)),
    train(
        "data=text data.path={}/pipe", "neither a file nor a folder", prepare=lambda folder: os.mkfifo(folder / "pipe")
    ),
    train("data=stdlib data.path={}/text", "data=text data.path={}/text", prepare=ENOUGH),
    train("data=text data.path='{}/t*/*.md'", "data.path={}/t*/*.md matches no file", prepare=ENOUGH),
    train(
        "data=text data.path={}/text data.heldout_path={}/held",
        "data.heldout_path={}/held is not there",
        prepare=ENOUGH,
    ),
    train("data=text data.path={}/text data.tokenizer={}/text", "no tokenizer in this folder", prepare=ENOUGH),
    train("data=text data.path={}/text data.tokenizer=null", "data.tokenizer=byte", prepare=ENOUGH),
    *(
        replace(row, typed=f"{row.typed} data.cache_dir={{}}/cache")
        for row in (
            lines("", "{}/a.jsonl: the text has 0 bytes", prepare=files(**{"a.jsonl": b""})),
            lines("", "{}/a.jsonl", "has 0 tokens", prepare=files(**{"a.jsonl": b"\n\n"})),
            lines(
                "",
                "{}/a.jsonl:2: it is no JSON",
                "column 10",
                "data.on_error=skip",
                prepare=second_line(b'{"text": "ab'),
            ),
            lines("", "{}/a.jsonl:2: it is not UTF-8", prepare=second_line(b'{"text": "\xff"}')),
            lines("", "{}/a.jsonl:2: it is no object but a list", prepare=second_line(b"[]")),
            lines(
                "",
                "{}/a.jsonl:2",
                "neither `messages` nor `text`",
                "fields are: txt",
                prepare=second_line(b'{"txt": 1}'),
            ),
            lines("", "{}/a.jsonl:2: `text` is no text but a int", prepare=second_line(b'{"text": 1}')),
            lines("", "{}/a.jsonl:2", "texts or of chats", prepare=second_line(b'{"messages": [{"role": "user"}]}')),
            lines(
                "data.layout=padded",
                "{}/a.jsonl:2: it has 101 tokens",
                "data.sequence_length=101",
                prepare=second_line(b'{"text": "' + b"x" * 100 + b'"}'),
            ),
            lines(
                "",
                "data.tokenizer=byte",
                "chat template",
                prepare=files(**{"a.jsonl": b'{"messages": [{"role": "user", "content": "Hi"}]}'}),
            ),
        )
    ),
    train("data=hf", "data.path is not set", "data=hf"),
    train("data=hf data.path={}/nowhere", "data.path={}/nowhere: this is no saved data set here"),
    train("data=memmap", "data.path is not set", "FILE.bin"),
    train("data=memmap data.path={}/a.bin", "{}/a.bin is no file", "pipetrain tokenize"),
    train("data=memmap data.path={}/a.bin", "has 3 bytes", "data.item_type=uint16", prepare=files(**{"a.bin": b"abc"})),
    train("data=memmap data.path={}/a.bin", "is empty", prepare=files(**{"a.bin": b""})),
    train("data=memmap data.path={}/a.bin", "has 29 tokens", prepare=files(**{"a.bin": b"a" * 64})),
    train(
        "data=memmap data.path={}/a.bin data.layout=packed", "data.layout=stream", prepare=files(**{"a.bin": b"a" * 64})
    ),
    train("data=memmap data.path={}/a.bin data.item_type=int32", "holds -1", prepare=files(**{"a.bin": b"\xff" * 400})),
    train("data=memmap data.path={}/text", "no tokens.json in this folder", prepare=ENOUGH),
    train(
        "data=memmap data.path={}/a.bin data.tokenizer=byte",
        "holds the token 24929",
        prepare=files(**{"a.bin": b"a" * 400}),
    ),
    Row("tokenize {}/text/a.txt", ("{}/text/a.txt", "--out=FOLDER"), prepare=ENOUGH),
    Row("tokenize {}/text --out={}/text", ("--out={}/text: there is something already",), prepare=ENOUGH),
    train(
        "data=text data.path={}/text",
        "a.txt may not be read",
        "chmod +r",
        prepare=lambda folder: (ENOUGH(folder), (folder / "text" / "a.txt").chmod(0)),
        as_nobody=True,
    ),
    train(
        "data=text data.path={}/text",
        "may not be read",
        "chmod +rx",
        prepare=lambda folder: (ENOUGH(folder), (folder / "text").chmod(0)),
        as_nobody=True,
    ),
]


# Folders, snapshots, weights ---------------------------------------------------------------------------------------------
def file_at(name: str, content: bytes = b"x") -> Prepare:
    def prepare(folder: pathlib.Path) -> None:
        (folder / name).write_bytes(content)

    return prepare


def a_run(folder: pathlib.Path) -> None:
    """A run folder that holds a run, as far as anybody looks."""
    (folder / "run").mkdir()
    RunFolder(folder / "run").config.write_text("steps: 3\n")


def weights_of_another_model(folder: pathlib.Path) -> None:
    save_file({"0.weight": zeros(3, 3)}, folder / "other.safetensors")


RUN_FOLDERS = [
    train("run_dir={}/file", "run_dir={}/file", "this is a file", prepare=file_at("file")),
    train("run_dir={}/file/run", "run_dir={}/file/run", "{}/file is a file", prepare=file_at("file")),
    train("run_dir={}/run", "there is a run in this folder", prepare=a_run),
    train(
        "run_dir={}/run",
        "run_dir={}/run",
        "may not be written",
        prepare=lambda folder: folder.chmod(0o555),
        as_nobody=True,
    ),
    train("resume=auto", "resume=auto", "run_dir=PATH"),
    train("resume=nowhere", "resume=nowhere: there is nothing", "snapshots/step-"),
    train("init_from=nowhere", "init_from=nowhere: there is nothing"),
    train("resume={} init_from={}", "a resumed run has its weights"),
]

ANOTHER = "data=text data.path={}/text experiment=smoke pipeline.num_stages=1 observe.progress=false run_dir={}/new"


def as_rank(typed: str, *says: str, prepare: Prepare = lambda folder: None) -> Row:
    return Row(f"{ANOTHER} {typed}", says, prepare, as_rank=True)


WEIGHTS = "weights/rank-0000.safetensors"
SNAPSHOTS = [
    replace(
        as_rank(""),
        typed=ANOTHER.replace("{}/new", "{}/new/" + 256 * "n"),
        says=("run_dir={}/new/nn", "cannot be made"),
    ),
    as_rank("resume={}", "there is no snapshot"),
    as_rank("resume={}/text/a.txt", "{}/text/a.txt: there is no snapshot"),
    as_rank("init_from={}", "there is no snapshot"),
    as_rank("init_from={}/text/a.txt", "{}/text/a.txt is no safetensors file"),
    as_rank("init_from={}/other.safetensors", "weights are of another model", prepare=weights_of_another_model),
    as_rank("resume={}/old seed=5", "seed=5", "had 0", "set seed=0", "init_from="),
    as_rank("resume={}/old model.hidden_size=64", "model.hidden_size=64", "had 32", "init_from="),
    as_rank("resume={}/old model.num_blocks=3", "model.num_blocks=3", "had 2"),
    as_rank("resume={}/old data.batch_size=4", "data.batch_size=4", "had 8"),
    as_rank("resume={}/old steps=1", "steps=1", "has 2 steps behind it", "set steps to 2 or more"),
    as_rank("resume={}/old/snapshots/step-00000009", "step-00000009: there is nothing"),
]


def harmed(what: str, harm: Prepare, *says: str) -> list[Row]:
    """A snapshot that is harmed: named by the user, and as the only one of a run that goes on by itself."""

    def prepare(folder: pathlib.Path) -> None:
        harm(folder / "old" / "snapshots" / "step-00000002")

    named = replace(as_rank("resume={}/old/snapshots/step-00000002", *says, prepare=prepare), note=what)
    alone = replace(named, typed=named.typed.replace("/new", "/old").rpartition(" ")[0] + " resume=auto")
    return [named, replace(alone, says=(*says, "no snapshot in", "is whole", "choose another run_dir"))]


def swapped(snapshot: pathlib.Path) -> None:
    (snapshot / WEIGHTS).rename(snapshot / "kept")
    (snapshot / "optimizer" / "rank-0000.safetensors").rename(snapshot / WEIGHTS)
    (snapshot / "kept").rename(snapshot / "optimizer" / "rank-0000.safetensors")


def longer(snapshot: pathlib.Path) -> None:
    with (snapshot / WEIGHTS).open("ab") as file:
        file.write(b"x")


HARMED = [
    *harmed("manifest gone", lambda snapshot: (snapshot / "manifest.json").unlink(), "manifest.json is missing"),
    *harmed("manifest empty", lambda snapshot: truncate(snapshot / "manifest.json", 0), "manifest.json cannot be read"),
    *harmed("manifest cut", lambda snapshot: truncate(snapshot / "manifest.json", 90), "manifest.json cannot be read"),
    *harmed(
        "manifest text", lambda snapshot: (snapshot / "manifest.json").write_text("[1]"), "manifest.json cannot be"
    ),
    *harmed("state flipped", lambda snapshot: flip(snapshot / "state.json", -3), "state.json has changed"),
    *harmed("header flipped", lambda snapshot: flip(snapshot / WEIGHTS, 20), f"{WEIGHTS} has changed"),
    *harmed("data flipped", lambda snapshot: flip(snapshot / WEIGHTS, -1), f"{WEIGHTS} has changed"),
    *harmed("data cut", lambda snapshot: truncate(snapshot / WEIGHTS, 1000), f"{WEIGHTS} has 1000 bytes"),
    *harmed("data longer", longer, f"{WEIGHTS} has", "were written"),
    *harmed("file gone", lambda snapshot: (snapshot / "generators" / "rank-0000.safetensors").unlink(), "No such file"),
    *harmed("files swapped", swapped, "were written"),
]

# Other commands ----------------------------------------------------------------------------------------------------------
COMMANDS = [
    Row("trian steps=3", ("trian: there is no such command", "train")),
    Row("show cost.forward_seconds=[1,2,3] pipeline.num_stages=2", ("cost.forward_seconds", "2")),
    Row("show cost.hop_seconds=-1", ("cost.hop_seconds",)),
    Row("show pipeline.schedule={}/nowhere.csv", ("nowhere.csv",)),
    Row("show pipeline.schedule={}/bad.csv pipeline.num_stages=2", ("bad.csv",), file_at("bad.csv", b"0F0,what\n")),
    Row("show --out={}/x.bmp pipeline.num_stages=2", ("bmp", "svg")),
    Row("show --out={}/nowhere/x.svg pipeline.num_stages=2", ("nowhere",)),
    Row("report {}/nowhere", ("there is no run",)),
    Row("report {}/run", ("report",), a_run),
    Row("generate {}/nowhere", ("there is no run",)),
    Row("generate {}/run", ("weights",), a_run),
]

ROWS = [*CONFIG, *RANGES, *TOGETHER, *DATA, *RUN_FOLDERS, *SNAPSHOTS, *HARMED, *COMMANDS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of two steps with a snapshot, by one rank in this process."""
    folder = tmp_path_factory.mktemp("trained")
    ENOUGH(folder)
    options = ANOTHER.replace("{}/new", "{}/old").replace("{}", str(folder))
    assert rank.main([*options.split(), "steps=2", "snapshot.every_steps=2"]) == 0
    return folder


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder that everybody may enter: pytest's own are for their owner."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="pipetrain-test-"))
    path.chmod(0o777)
    yield path
    path.chmod(0o777)
    for inside, folders, _ in os.walk(path):  # top-down: a row may have shut a folder
        for name in folders:
            (pathlib.Path(inside) / name).chmod(0o777)
    shutil.rmtree(path)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """This process without root's rights, where it has them."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)  # os.access asks for the real user
    try:
        if not os.access(conf_dir(), os.R_OK | os.X_OK):
            pytest.skip("without root's rights this checkout cannot be read")
        yield
    finally:
        os.setresuid(0, 0, 0)


def answer(row: Row, folder: pathlib.Path) -> int:
    words = row.typed.replace("{}", str(folder)).split()
    if not row.as_rank:
        return main(words)
    try:
        return rank.main(words)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_answer_is_one_line_that_helps(
    row: Row,
    folder: pathlib.Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if row.as_rank:
        shutil.copytree(request.getfixturevalue("trained"), folder, dirs_exist_ok=True)
        capsys.readouterr()
    row.prepare(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("processes were started"))
    with as_nobody() if row.as_nobody else contextlib.nullcontext():
        code = answer(row, folder)
    told = capsys.readouterr()
    assert code == row.code, told.err
    (line,) = told.err.splitlines()
    assert line.startswith("pipetrain: ")
    assert [word for word in row.says if word.replace("{}", str(folder)) not in line] == [], line
    assert "Traceback" not in told.err + told.out


def test_a_fault_that_cannot_be_read(
    trained: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPETRAIN_FAULTS", "kil rank=1 op=1B1 step=3")
    options = ANOTHER.replace("{}/new", str(tmp_path / "new")).replace("{}", str(trained))
    assert answer(Row(options, (), as_rank=True), tmp_path) == 2
    assert "PIPETRAIN_FAULTS: there is no 'kil'" in capsys.readouterr().err


def test_every_key_with_a_range_has_a_row() -> None:
    typed = " ".join(row.typed for row in RANGES)
    ranged = {key for key, limit in limits().items() if not limit.of_null}  # of null: this version supports one value
    assert len(ranged) > 50
    assert [key for key in sorted(ranged) if f" {key}=" not in typed] == []


def test_rows_are_distinct() -> None:
    assert len(ROWS) >= 60
    assert len({(row.name, row.says) for row in ROWS}) == len(ROWS)
