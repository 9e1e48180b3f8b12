"""What `pipetrain plan` says of machines that are not here (plan.cluster) and of other runtimes (--for)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipetrain.cli.main import Arguments, Parser, present, writing
from pipetrain.config.records import PYTHON, RunConfig
from pipetrain.launcher.outcome import Exit
from pipetrain.models.hf.hf_size import decoder_sizes
from pipetrain.monitor.draw.table import size
from pipetrain.plan.cluster import Cluster, parse_cluster
from pipetrain.plan.estimate import Estimator
from pipetrain.plan.foreign import PEERS, ForeignPlan, Peer, best_foreign
from pipetrain.plan.planner import PricedPlan
from pipetrain.plan.profile import Profile
from pipetrain.plan.space import PlanProblem
from pipetrain.schedule.policy import not_a_choice
from pipetrain.trainer.prepare import known_vocabulary


def for_cluster(config: RunConfig) -> RunConfig:
    """With what `plan.cluster` says: no weights are read, and budget and peak are those of its device unless they are set.

    Raises:
        ValueError: keys that say something else.
    """
    cluster = _cluster(config)
    if config.plan.profile is not None:
        raise ValueError(
            f"plan.profile={config.plan.profile}: layers of plan.cluster={cluster.text} are estimated; leave one of the two keys out"
        )
    if config.model.name == PYTHON:
        raise ValueError(
            "model=python: sizes of its layers are not known; use model=llama, gpt2 or hf, or measure with plan.profile"
        )
    if config.model.lora.rank is not None:
        raise ValueError(
            "model.lora.rank: estimates are of models whose layers are all trained; leave it out, or measure with plan.profile"
        )
    budget = config.plan.memory_budget_bytes or cluster.device.memory_bytes
    precision = config.precision
    if precision == "auto":
        precision = "bf16-mixed" if cluster.device.bf16 else "fp32"
    own = cluster.device.fp32 if precision == "fp32" else cluster.device.bf16
    peak = config.observe.peak_flops_per_second or own or None
    return replace(
        config,
        precision=precision,
        model=replace(config.model, weights="random"),
        plan=replace(config.plan, memory_budget_bytes=budget),
        observe=replace(config.observe, peak_flops_per_second=peak),
    )


def estimated(config: RunConfig) -> tuple[Profile, int]:
    """The layers on a device of `plan.cluster`, and the pipeline ranks that it has: each is `plan.tensor` devices."""
    cluster, tensor = _cluster(config), config.plan.tensor
    sizes = decoder_sizes(config.model, known_vocabulary(config))
    estimator = Estimator(sizes, cluster, config.data.sequence_length, tensor, config.precision)
    return estimator.profile(), cluster.num_devices // tensor


def told_of_estimate(config: RunConfig) -> str:
    """That figures are estimates, and what they rest on; nothing without `plan.cluster`."""
    if config.plan.cluster is None:
        return ""
    share = _cluster(config).device.efficiency
    return (
        f"Estimated for plan.cluster={config.plan.cluster}, plan.tensor={config.plan.tensor}: no op was measured. Shares of the device's peak: "
        f"matrix products {share.matmul:.0%}, attention {share.attention:.0%}, memory {share.memory:.0%}, links {share.link:.0%}."
    )


def add_foreign(parser: Parser) -> None:
    """The options of `pipetrain plan` for other runtimes."""
    peers = ", ".join(PEERS)
    parser.add_argument(
        "--for", dest="peer", metavar="RUNTIME", help=f"the best plan that this runtime can run: {peers}"
    )
    parser.add_argument("--csv", metavar="FILE", help="with --for: write the order of ops for torch's runtime to FILE")


def check_foreign(arguments: Arguments) -> None:
    """Raises:
    ValueError: `--for` names no runtime, or `--csv` is typed without it.
    """
    if arguments.peer is not None and arguments.peer not in PEERS:
        raise not_a_choice("--for", arguments.peer, list(PEERS))
    if arguments.csv is not None and arguments.peer is None:
        raise ValueError(f"--csv={arguments.csv}: is for another runtime; add --for=torchtitan")


def present_foreign(arguments: Arguments, config: RunConfig, problem: PlanProblem, ours: Sequence[PricedPlan]) -> Exit:
    """Prints the best plan of `--for` beside `ours`, where one fits.

    Raises:
        ValueError: no plan of the runtime fits, or a file cannot be written.
    """
    budget, length, tensor = config.plan.memory_budget_bytes, config.data.sequence_length, config.plan.tensor
    plan = best_foreign(arguments.peer, problem, budget, sequence_length=length, tensor=tensor)
    if arguments.csv is not None:
        with writing(f"--csv={arguments.csv}"):
            Path(arguments.csv).write_text(plan.csv)
    peer = PEERS[arguments.peer]
    present(arguments, lambda: _text(peer, plan, ours, config), lambda: _values(peer, plan, ours, config))
    return Exit.DONE


def _text(peer: Peer, plan: ForeignPlan, ours: Sequence[PricedPlan], config: RunConfig) -> str:
    lines = [f"{peer.title}: step {plan.step_seconds:.4g} s, {size(plan.peak_bytes)} on the fullest rank. To type:"]
    lines += [f"  {line}" for line in plan.lines] + ["It cannot express:", *(f"  {line}" for line in peer.cannot)]
    for one in ours:
        seconds, peak = one.step_seconds, size(one.peak_bytes)
        more = plan.step_seconds / seconds - 1
        lines.append(f"pipetrain's plan 1: step {seconds:.4g} s (the other {more:+.1%}), {peak} on the fullest rank.")
    return "\n".join([told_of_estimate(config), *lines]).lstrip()


def _values(peer: Peer, plan: ForeignPlan, ours: Sequence[PricedPlan], config: RunConfig) -> dict[str, Any]:
    option = plan.option
    return {
        "title": peer.title,
        "step_seconds": plan.step_seconds,
        "peak_bytes": plan.peak_bytes,
        "schedule": option.name,
        "balance": option.balance,
        "num_replicas": option.num_replicas,
        "num_microbatches": option.num_microbatches,
        "recompute": option.recompute,
        "memory": [asdict(rank) for rank in plan.memory],
        "lines": plan.lines,
        "cannot": peer.cannot,
        "estimated": config.plan.cluster is not None,
        "ours": [{"step_seconds": one.step_seconds, "peak_bytes": one.peak_bytes} for one in ours],
    }


def _cluster(config: RunConfig) -> Cluster:
    assert config.plan.cluster is not None
    return parse_cluster(config.plan.cluster)
