"""A wrong command, key, value, or set of keys of the configuration gets one line that helps."""

import pytest
from bad_rows import Check, Row, a_run, files, train

from pipetrain.config.schema import limits

# Overrides that cannot be read, keys and choices that do not exist, wrong types
CONFIG = [
    train("stpes=3", "stpes:", "did you mean", "'steps'"),
    train("optim.lr=1e-3", "optim.lr:", "did you mean 'optim.learning_rate'"),
    train("recompute=inlin", "recompute=inlin", "allowed are early, inline, never, overlap", "'inline'"),
    train("model.name=lama", "model.name=lama", "did you mean 'llama'"),
    train("pipeline.schedule=1f1bb", "1f1bb", "'1f1b'"),
    train("data=wikitext", "data=wikitext", "memmap, python, stdlib, text"),
    train("transport=gloo", "transport=gloo", "auto, pinned, serial"),
    train("recompute.last_stage=never", "recompute.last_stage", "auto", "always"),
    train("steps=abc", "steps=abc", "this is text", "an integer"),
    train("steps=3.5", "steps=3.5", "a number", "an integer"),
    train("steps=1e99999", "steps", "an integer"),
    train("seed=null", "null", "an integer"),
    train("seed=true", "seed=true", "an integer"),
    train("optim.learning_rate=fast", "optim.learning_rate=fast", "a number"),
    train("optim.betas=[0.9,0.95,0.99]", "optim.betas", "a list of 2 numbers"),
    train("optim.betas=0.9", "optim.betas", "2 numbers"),
    train("observe.progress=1", "true or false"),
    train("observe.wandb=3", "observe.wandb=3", "mode, project"),
    train("model.dropout={a:1}", "model.dropout"),
    train("data.path=123", "allowed is text or null", "data.path=\"'123'\""),
    train("+optim.momentum=0.9", "neither added nor removed"),
    train("~optim.max_grad_norm", "key=value"),
    train("steps", "steps: an override is key=value"),
    train("=3", "=3: an override is key=value"),
    train("steps=", "steps"),
    train("steps=3=4", "steps"),
    train("steps=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
    train("pipeline.balance=3,3", "one value", "pipeline.balance=[3,3]"),
]
# What is allowed -> one number or word each that is not
ALLOWED = {
    "1 or more": (
        "plan.memory_budget_bytes=0 model.lora.rank=0 cost.copy_contention=0.5 steps=0 data.eval_bytes=0 "
        "parallel.check_every_steps=0 threads_per_rank=0 observe.eval_every_steps=0 snapshot.every_steps=0 "
        "snapshot.keep_last=0 snapshot.keep_every=0 guard.spike_window=0 cluster.num_nodes=0 "
        "cluster.ranks_per_node=0 cluster.cpus_per_rank=0 cluster.signal_seconds=0 pipeline.num_stages=0 "
        "pipeline.stages_per_rank=0 pipeline.num_microbatches=0 recompute.sets=0 data.sequence_length=0 "
        "model.num_hidden_layers=0 model.hidden_size=0 model.num_attention_heads=0 "
        "model.num_key_value_heads=0 model.intermediate_size=0 model.vocab_size=0 "
        "model.max_position_embeddings=0"
    ),
    "0 or more": (
        "transport.prefetch=-1 seed=-1 optim.weight_decay=-0.1 optim.warmup_steps=-1 guard.max_skips=-1 "
        "guard.max_rollbacks=-1 cluster.max_restarts=-1 pipeline.search_seconds=-1"
    ),
    "more than 0": (
        "model.lora.alpha=0 observe.peak_flops_per_second=0 timeout_seconds=0 optim.learning_rate=-1 "
        "optim.learning_rate=nan optim.max_grad_norm=0 snapshot.every_minutes=0 model.norm_epsilon=0 "
        "model.rope_theta=0"
    ),
    "more than 1": "guard.spike_factor=1 guard.spike_norm_factor=0.5",
    "from 0 to 1": "optim.final_fraction=2",
    "below 1": "data.eval_fraction=1 model.dropout=1",
    "finite": "model.rope_theta=inf timeout_seconds=inf optim.learning_rate=inf",
    "1024 at most": "threads_per_rank=99999999",
    "4096 at most": (
        "pipeline.num_stages=99999999 pipeline.stages_per_rank=99999999 cluster.num_nodes=99999999 "
        "parallel.num_replicas=99999999"
    ),
    "without spaces": "cluster.partition=a/b cluster.account=a/b cluster.interface=a/b",
}
# Numbers out of range
RANGES = [
    *(train(typed, typed, allowed) for allowed, words in ALLOWED.items() for typed in words.split()),
    Row("plan plan.cluster=2xcpu-4gb plan.tensor=0", ("plan.tensor=0", "allowed are 1, 2")),
    train("model.dtype=int8", "model.dtype=int8", "auto, float32, bfloat16, float16"),
    train("model.weights=trained", "model.weights=trained", "pretrained, random"),
    train("model.lora.targets=[]", "model.lora.targets=[]", "a list of names of linear layers"),
    train("model.lora.layers=[-1]", "model.lora.layers=[-1]", "a decoder layer"),
    train("cost.input_share=2", "cost.input_share=2.0", "a part of a set from 0 to 1"),
    train("cost.kept_share=-1", "cost.kept_share=-1.0", "a part of a set from 0 to 1"),
    train("cost.reduce_seconds=-1", "cost.reduce_seconds=-1.0", "a time in seconds from 0"),
    train("cost.offload_seconds=-1", "cost.offload_seconds=-1.0", "a time in seconds from 0"),
    train("epochs=0 steps=null", "epochs=0.0: allowed is more than 0"),
    train("optim.masters=on", "optim.masters=on", "auto, off"),
    train("precision=fp16", "precision=fp16", "auto, fp32, bf16-true, bf16-mixed"),
    train("recompute.segments=9", "recompute.segments=9: stage 0 has 2 layers", "use recompute.segments=2"),
    train("recompute.segments=0", "recompute.segments=0", "1 or more parts, sqrt or layers"),
    train("transport.communicators=rank", "transport.communicators=rank", "edge, pair"),
    train("transport.backend=ncll", "transport.backend=ncll", "auto, nccl, pinned"),
    train("recompute.verify=0", "recompute.verify=0", "first, every, off, or a number N"),
    train("timeout_seconds=nan", "timeout_seconds=nan", "finite", "more than 0"),
    train("timeout_seconds=1e300", "timeout_seconds=1e+300", "31622400 at most"),
    train("seed=99999999999999999999", "seed=99999999999999999999", "at most"),
    train("model.num_hidden_layers=99999999", "model.num_hidden_layers=99999999", "10000 at most"),
    train("data=python data.target=torch.nn:Identity data.num_workers=-1", "data.num_workers=-1", "0 or more"),
    train(
        "model=python model.target=torch.nn:Identities", "model.target=torch.nn:Identities", "did you mean 'Identity'?"
    ),
    train("model=python model.target=torch.nn:Identity", "model.target=torch.nn:Identity", "cannot be cut"),
    train("cluster.num_nodes=4096 cluster.ranks_per_node=4096", "16777216 stages", "too many", "4096"),
    train(
        "pipeline.num_microbatches=99999999 data.global_batch_size=99999999",
        "pipeline.num_microbatches=99999999 with 2 stages",
        "131072 at most",
    ),
    *(
        Row(f"show cost.{name}_seconds={seconds}", (f"cost.{name}_seconds={seconds}", "finite", "from 0 to 1000000000"))
        for name, seconds in zip(
            ("forward", "backward", "recompute", "hop", "input_gradient", "weight_gradient"), 3 * ("nan", "inf")
        )
    ),
    Row("show cost.forward_seconds=-1", ("cost.forward_seconds=-1.0", "from 0 to 1000000000")),
    Row("show cost.forward_seconds=[1,nan]", ("cost.forward_seconds=[1.0, nan]", "finite")),
    Row("show pipeline.num_microbatches=99999999", ("pipeline.num_microbatches=99999999", "131072 at most")),
    train("engine.name=megatron", "engine.name=megatron", "native, deepspeed"),
    train("optim.name=sgd", "optim.name=sgd", "adamw, deepspeed_cpu_adam"),
    train("parallel.zero_stage=4", "parallel.zero_stage=4", "from 0 to 3"),
    train("parallel.fsdp=true", "parallel.fsdp=true", "not supported", "pipeline.num_stages"),
    train("parallel.tensor=2", "parallel.tensor=2", "not supported", "pipeline.num_stages"),
    train("parallel.order=stage", "parallel.order=stage", "replica-stage, stage-replica"),
    train("guard.not_finite=ignore", "guard.not_finite=ignore", "stop, skip, rollback"),
    train("guard.spike=of", "guard.spike=of", "did you mean 'off'"),
    train("cluster.name=slurmm", "cluster.name=slurmm", "local, slurm"),
    train("cluster.device=tpu", "cluster.device=tpu", "gpu, cpu"),
    train("cluster.rendezvous=node1", "cluster.rendezvous=node1", "HOST:PORT"),
    train("cluster.time_limit=soon", "cluster.time_limit=soon", "minutes", "D-H:M:S"),
    train("cluster.options=[qos]", "cluster.options", "options of sbatch"),
    train("observe.wandb.mode=onlin", "observe.wandb.mode=onlin", "disabled, offline, online"),
    train(
        "pipeline.schedule=auto pipeline.search_seconds=600", "pipeline.search_seconds=600.0", "timeout_seconds=600.0"
    ),
    train("pipeline.schedule=auto pipeline.stages_per_rank=2", "one stage per rank", "pipeline.stages_per_rank=1"),
    train("pipeline.schedule=auto recompute.last_stage=always", "recompute.last_stage=always", "last_stage=auto"),
    train("pipeline.schedule=auto plan.profile={}/run", "plan.profile={}/run", "profile.json is not there"),
    train("plan.profile={}/run pipeline.balance=[2,2]", "plan.profile={}/run", "use `auto` for one of them"),
    train("plan.profile={}/run", "plan.profile={}/run", "profile.json is not there"),
    train("recompute.sets=[2,1,1]", "recompute.sets=[2, 1, 1]", "has 3 numbers for 2 stages"),
    train("recompute.stash=[8]", "recompute.stash=[8]", "has 1 numbers for 2 stages"),
    train("recompute.stash=1", "recompute.stash=1: stage 0 holds", "use recompute.stash=", "1f1b"),
    train("recompute.ahead=2", "recompute.ahead", "recompute.sets=a"),
    train("recompute.keep=1", "recompute.keep=1", "recompute.sets=2"),
    train("data.global_batch_size=0 pipeline.num_microbatches=1", "data.global_batch_size=0"),
    train("data.eval_bytes=3", "data.eval_bytes=3", "data.eval_bytes=32 or more"),
    train("data.layout=paked", "data.layout=paked", "stream, packed, padded", "'packed'"),
    train("data.assistant_only_loss=answer", "data.assistant_only_loss=answer", "true, false or last"),
    train("data.item_type=int16", "data.item_type=int16", "uint16, uint32, int32", "'uint16'"),
    train("data.on_error=ignore", "data.on_error=ignore", "stop, skip"),
    train("data.template_date=1.1.2026", "data.template_date=1.1.2026", "2026-01-31"),
    train(
        "model.num_attention_heads=3", "model.num_attention_heads=3 does not divide", "set model.num_attention_heads="
    ),
    train("optim.betas=[0.9,1.0]", "optim.betas", "less than 1"),
]
# Keys that do not fit each other
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
    train("data.sequence_length=2048", "data.sequence_length=2048", "model.max_position_embeddings=2048"),
    train("parallel.num_replicas=0", "parallel.num_replicas=0", "1 or more, or auto"),
    train("parallel.num_replicas=2.5", "parallel.num_replicas=2.5", "an integer or text"),
    train(
        "parallel.zero_stage=1",
        "parallel.zero_stage=1 with parallel.num_replicas=1",
        "parallel.zero_stage=0",
        "parallel.num_replicas=2",
    ),
    train(
        "parallel.num_replicas=3",
        "parallel.num_replicas=3 x pipeline.num_microbatches=4 = 12",
        "data.global_batch_size=8",
    ),
    train("parallel.num_replicas=auto", "parallel.num_replicas=auto", "set pipeline.num_stages"),
    train("parallel.num_replicas=auto pipeline.num_stages=2", "set cluster.ranks_per_node"),
    train(
        "parallel.num_replicas=auto pipeline.num_stages=4 cluster.ranks_per_node=10",
        "10 ranks are not a multiple of the 4 of one replica (pipeline.num_stages=4)",
        "start 8 or 12 ranks",
    ),
    train(
        "parallel.num_replicas=2 pipeline.num_stages=2 cluster.ranks_per_node=6",
        "make 6 ranks, but parallel.num_replicas=2 and pipeline.num_stages=2",
        "need 4 ranks; set pipeline.num_stages=3, or parallel.num_replicas=3",
    ),
    train("parallel.num_replicas=2 cluster.ranks_per_node=5", "5 ranks make no 2 replicas", "start 4 or 6 ranks"),
    train("snapshot=weights guard.not_finite=rollback", "returns to the newest snapshot", "snapshot.every_steps=100"),
    train("snapshot.keep_every=3", "keeps some of the regular snapshots", "snapshot.every_steps=100"),
    train(
        "precision=bf16-true optim.masters=off optim=deepspeed_cpu_adam",
        "optim.masters=off: optim=deepspeed_cpu_adam updates float32 alone",
    ),
    train("model.dtype=float16", "model.dtype=float16: precision=auto trains float32 weights; leave model.dtype out"),
    train("steps=3 epochs=1", "steps=3 epochs=1: both set the length of the run; give one"),
    train("phases=[{from:2}]", "phases[0].from=2", "begins with the run", "from: 0"),
    train(
        "phases=[{from:0},{from:3,data:{sequence_length:2048}}]",
        "phases[1]: data.sequence_length=2048",
        "shorter samples",
    ),
    Row("show --phase=1", ("--phase=1", "the run has no phases")),
    Row("show phases=[{from:0},{from:9}] --phase=2", ("--phase=2", "there are phases 0 to 1")),
]
# Of other commands than `train`
COMMANDS = [
    Row("trian steps=3", ("trian: there is no such command", "train")),
    Row("show cost.forward_seconds=[1,2,3] pipeline.num_stages=2", ("cost.forward_seconds has 3 numbers", "or 2")),
    Row(
        "show cost.weight_gradient_seconds=[1,2,3] pipeline.num_stages=2",
        ("cost.weight_gradient_seconds has 3 numbers", "or 2"),
    ),
    Row("show recompute.mode=never_", ("recompute.mode", "'never'")),
    Row("show --against=recompute.mod=inline", ("recompute.mod:", "'recompute.mode'")),
    Row("show pipeline.schedule={}/nowhere.csv", ("nowhere.csv",)),
    Row("show pipeline.schedule={}/bad.csv pipeline.num_stages=2", ("bad.csv",), files(**{"bad.csv": b"0F0,what\n"})),
    Row("show --out={}/x.bmp pipeline.num_stages=2", ("bmp", "svg")),
    Row("show --out={}/nowhere/x.svg pipeline.num_stages=2", ("nowhere",)),
    Row("plan plan.cluster=8xh10-80gb", ("plan.cluster=8xh10-80gb", "nearest device is h100-80gb")),
    Row("plan plan.cluster=8xh100+nvlink", ("plan.cluster", "memory of h100 is missing", "h100-80gb")),
    Row("plan plan.cluster=8h100", ("plan.cluster=8h100: cannot be read", "8xh100-80gb+nvlink")),
    Row("plan plan.cluster=8xh100-80gb plan.tensor=3", ("plan.tensor=3", "1, 2, 4, 8")),
    Row("plan plan.cluster=2xcpu-4gb precision=bf16-true", ("precision=bf16-true", "precision=fp32")),
    Row("plan plan.cluster=2xcpu-4gb plan.profile=latest", ("plan.profile=latest", "plan.cluster")),
    Row("train plan.cluster=2xcpu-4gb", ("plan.cluster=2xcpu-4gb", "`pipetrain plan` alone reads")),
    Row("plan plan.tensor=2", ("plan.tensor=2", "plan.cluster")),
    Row("plan --for=megatorn", ("--for='megatorn'", "torchtitan, megatron, deepspeed", "'megatron'")),
    Row("plan --csv={}/order.csv", ("--csv", "--for=torchtitan")),
    Row("report {}/nowhere", ("there is no run",)),
    Row("report {}/run", ("report",), a_run),
    Row("generate {}/nowhere", ("there is no run",)),
    Row("generate {}/run", ("weights",), a_run),
]


@pytest.mark.parametrize("row", [*CONFIG, *RANGES, *TOGETHER, *COMMANDS], ids=lambda row: row.name)
def test_the_answer_is_one_line_that_helps(row: Row, check: Check) -> None:
    check(row)


def test_every_key_with_a_range_has_a_row() -> None:
    typed = " ".join(row.typed for row in RANGES)
    assert len(limits()) > 50
    assert [key for key in sorted(limits()) if f" {key}=" not in typed] == []
