"""`pipetrain train cluster=slurm`: the run as a job of its own."""

from __future__ import annotations

import sys

from pipetrain.cli.command import Arguments
from pipetrain.config.records import RunConfig
from pipetrain.launcher.outcome import Exit
from pipetrain.launcher.slurm.job import check_commands, how_to_go_on, job_script, submit
from pipetrain.observe.folder import choose_folder, reserve_folder
from pipetrain.observe.output import STDOUT, write_json
from pipetrain.snapshot.start import AUTO


def check_job(resume: str | None) -> None:
    """Raises:
    ValueError: `resume` names a snapshot, from which a job that is put back into the queue would start again.
    """
    if resume not in (None, AUTO):
        raise ValueError(
            f"resume={resume}: a job goes on from the snapshots of its own run folder, so that it can be put back into the "
            "queue; use resume=auto run_dir=THAT_RUN, or init_from= for a new run from its weights"
        )


def submit_job(config: RunConfig, arguments: Arguments, ranks_per_node: int) -> int:
    """Writes the job script and submits it, or prints it (`--dry-run`); returns the exit code."""
    if not arguments.dry_run:
        check_commands()
    run_dir = (choose_folder if arguments.dry_run else reserve_folder)(config.run_dir, config.experiment).path
    script = job_script(
        config.cluster,
        arguments.overrides,
        run_dir=run_dir,
        ranks_per_node=ranks_per_node,
        threads_per_rank=config.threads_per_rank,
        python=sys.executable,
        name=config.experiment,
    )
    if config.snapshot.every_steps is None:
        print(
            "pipetrain: snapshot.every_steps is not set: the job saves when it is told to stop, and a machine that is lost costs "
            "the whole run; snapshot=regular saves every 100 steps",
            file=sys.stderr,
        )
    if arguments.dry_run:
        print(script, end="")
        return Exit.DONE
    job = submit(script, run_dir)
    if arguments.json is not None:
        write_json({"job": job, "run_dir": str(run_dir)}, arguments.json)
    if arguments.json != STDOUT:
        print(f"{how_to_go_on(job, run_dir)}\nrun folder: {run_dir}")
    return Exit.DONE
