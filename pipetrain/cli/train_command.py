"""`pipetrain train`: checks the configuration, then starts ranks on this machine, a SLURM job, or a sweep.

With plan=auto a run takes the first plan of `pipetrain plan`; its folder keeps the profile and the keys, which a resumed run uses again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipetrain.cli.main import STDOUT, Arguments, Parser, add_json, add_overrides, add_own, present, say
from pipetrain.cli.plan_command import plan_of_config
from pipetrain.cli.profile_command import ROUNDS, measure_profile
from pipetrain.cli.report_command import reported
from pipetrain.comm.address import is_rank
from pipetrain.config.load import load_config
from pipetrain.config.phases import naming_phase, phases_of
from pipetrain.config.read_files import fitted, read_json
from pipetrain.config.records import RunConfig
from pipetrain.config.write_files import replace_file
from pipetrain.engine.available import check_available
from pipetrain.launcher.launch import check_not_a_slurm_task, launch
from pipetrain.launcher.nodes import Nodes, choose_ranks_per_node, node_rank_in_slurm
from pipetrain.launcher.outcome import Exit, tell
from pipetrain.launcher.slurm.job import check_commands, how_to_go_on, job_script, submit
from pipetrain.models.hf.source import bring_model
from pipetrain.monitor.claim import check_unclaimed
from pipetrain.monitor.draw.table import size
from pipetrain.monitor.folder import RunFolder, check_free, choose_folder, reserve_folder
from pipetrain.monitor.trackers import check_trackers
from pipetrain.plan.profile import Profile, read_profile
from pipetrain.schedule.bound import proof_of
from pipetrain.snapshot.start import AUTO, check_start
from pipetrain.trainer.prepare import Run, prepare_phases

# Keys that a planned run does not need, or has in another form.
_SELF = ("plan", "plan.auto", "plan.profile", "run_dir")


def add_arguments(parser: Parser) -> None:
    add_overrides(parser)
    add_own(parser)
    add_json(parser)
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="start a run for each combination of values, as in seed=1,2,3"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with cluster=slurm: print the job script and submit nothing"
    )


def run(arguments: Arguments) -> int:
    if arguments.multirun:
        from pipetrain.cli.multirun import run_all

        return run_all(arguments, check_train)
    if is_rank():
        from pipetrain.train import main as train_as_rank

        return train_as_rank(arguments.overrides)
    notes: list[str] = []  # said once nothing is wrong
    config = load_config(arguments.overrides, notes.append)
    if config.plan.auto:
        arguments.overrides = with_plan(config, arguments.overrides)
        config = load_config(arguments.overrides)
    becomes_a_job = config.cluster.name == "slurm" and config.cluster.rendezvous is None
    if arguments.dry_run and not becomes_a_job:
        raise ValueError("--dry-run: prints the job script of cluster=slurm; add cluster=slurm")
    if becomes_a_job and config.resume not in (None, AUTO):
        raise ValueError(
            f"resume={config.resume}: a job resumes from the snapshots of its own run folder, so that it can return to the queue; use "
            "resume=auto run_dir=THAT_RUN, or init_from= for a new run from its weights"
        )
    plan = check_train(config).plan
    for note in notes:
        say(note)
    ranks_per_node = choose_ranks_per_node(config.cluster, config.pipeline, plan.num_ranks, plan.num_replicas)
    return (_submit_job if becomes_a_job else _start)(config, arguments, ranks_per_node)


def with_plan(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """The overrides of the run that `config` asks to plan: those that were typed, its folder, and the keys of the plan.

    Raises:
        ValueError: nothing fits the budget; ranks on several machines, which could not agree on one plan.
    """
    if config.cluster.name == "slurm" or config.cluster.num_nodes > 1:
        raise ValueError(
            "plan=auto: plans a run on this machine; for several type the keys that `pipetrain plan` prints"
        )
    typed = [text for text in overrides if text.partition("=")[0] not in _SELF]
    before = _planned_before(config)
    if before is not None:
        return [
            *typed,
            *([] if config.run_dir is None else [f"run_dir={config.run_dir}"]),
            *fitted(tuple[str, ...], read_json(before, "remove it to plan again")),
        ]
    if config.resume != AUTO:
        check_free(config.run_dir)
    folder = reserve_folder(config.run_dir, config.experiment)
    if not folder.layers.is_file():
        replace_file(folder.layers, _profile_of(config).as_json())
    given = load_config([*typed, f"plan.profile={folder.layers}"])
    planned = plan_of_config(given, typed)
    if not planned.fitting:
        raise ValueError(planned.refusal())
    first = planned.fitting[0]
    replace_file(folder.planned, json.dumps(first.overrides) + "\n")
    budget = config.plan.memory_budget_bytes
    within = "" if budget is None else f", {size(first.peak_bytes)} of {size(budget)}"
    say(f"plan=auto: step {first.timeline.step_seconds:.3g} s predicted{within}: {' '.join(first.overrides)}")
    return [*typed, f"run_dir={folder.path}", *first.overrides]


def _profile_of(config: RunConfig) -> Profile:
    """The layers of `plan.profile`, else measured now."""
    if config.plan.profile is not None:
        return read_profile(config.plan.profile)
    say("plan=auto: measuring the layers; plan.profile=FILE takes a file of `pipetrain profile` instead")
    return measure_profile(config, ROUNDS)


def _planned_before(config: RunConfig) -> Path | None:
    """The keys of the run that this one resumes, if that was planned."""
    folders = [Path(config.run_dir)] if config.resume == AUTO and config.run_dir is not None else []
    if config.resume not in (None, AUTO):
        folders = list(Path(str(config.resume)).resolve().parents)
    return next((path for path in (RunFolder(folder).planned for folder in folders) if path.is_file()), None)


def check_train(config: RunConfig) -> Run:
    """Checks all of a run that can be checked before a process starts.

    Raises:
        ValueError: it cannot run; the message has the key, the value and what to type instead.
    """
    bring_model(config.model, timeout_seconds=config.timeout_seconds)
    phases = prepare_phases(config)
    check_trackers(config.observe)
    if config.resume != AUTO:
        check_free(config.run_dir)
    check_start(config.resume, config.init_from, config.run_dir)
    check_unclaimed(config.run_dir, again=config.resume == AUTO)
    check_available(config)
    from pipetrain.data.dataset import check_data  # loads torch, so after the checks that do not need it
    from pipetrain.models.own import own_loss

    own_loss(config.model)
    for phase in phases_of(config):
        with naming_phase(phase, config):
            check_data(phase.config.data, config.model.path)
    for prepared in phases:
        if prepared.run.found is not None:
            proof = proof_of(prepared.run.found.seconds, prepared.run.found.least_seconds)
            of = f" of phases[{prepared.number}]" if config.phases else ""
            say(f"the step of pipeline.schedule=auto{of}: {proof} (seconds of its costs)")
    return phases[0].run


def _start(config: RunConfig, arguments: Arguments, ranks_per_node: int) -> int:
    """Starts the ranks of this machine and waits until they have ended."""
    from pipetrain.cli.tokenize_command import tokenize_ahead

    tokenize_ahead(config)
    outcome = launch(
        "pipetrain.train",
        arguments.overrides,
        num_ranks=ranks_per_node,
        threads_per_rank=config.threads_per_rank,
        nodes=_nodes(config),
    )
    if (report := reported(outcome.run_dir)) is not None:
        present(arguments, str, lambda: report)
    return tell(outcome, quiet=arguments.json == STDOUT)


def _nodes(config: RunConfig) -> Nodes | None:
    """The machines of the run; None: only this one."""
    cluster = config.cluster
    if cluster.rendezvous is not None:
        node_rank = node_rank_in_slurm(cluster.num_nodes)
        return Nodes(cluster.num_nodes, cluster.rendezvous, node_rank, config.timeout_seconds)
    if cluster.num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes={cluster.num_nodes}: set cluster.rendezvous=HOST:PORT of the first, where they meet, and type the "
            "same command on each of them; or cluster=slurm, which does that in a job"
        )
    check_not_a_slurm_task()
    return None


def _submit_job(config: RunConfig, arguments: Arguments, ranks_per_node: int) -> int:
    """`cluster=slurm`: writes the job script and submits it, or prints it (`--dry-run`); returns the exit code."""
    if not arguments.dry_run:
        check_commands()
    run_dir = (choose_folder if arguments.dry_run else reserve_folder)(config.run_dir, config.experiment).path
    script = job_script(config, arguments.overrides, run_dir, ranks_per_node)
    if config.snapshot.every_steps is None and config.snapshot.every_minutes is None:
        say(
            "neither snapshot.every_steps nor snapshot.every_minutes is set: the job saves only when it is asked to stop, and a lost machine "
            "costs the whole run; snapshot=minutes saves every 10 minutes"
        )
    if arguments.dry_run:
        print(script, end="")
        return Exit.DONE
    job = submit(script, run_dir)
    told = f"{how_to_go_on(job, run_dir)}\nrun folder: {run_dir}"
    present(arguments, lambda: told, lambda: {"job": job, "run_dir": str(run_dir)})
    return Exit.DONE
