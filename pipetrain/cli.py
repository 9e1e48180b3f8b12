"""The `pipetrain` command. Each subcommand imports what it needs when it runs, so that the light ones stay fast."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetrain.launcher.outcome import Exit
from pipetrain.observe.output import STDOUT, write_json

if TYPE_CHECKING:
    from pipetrain.config.records import RunConfig
    from pipetrain.launcher.nodes import Nodes
    from pipetrain.observe.folder import RunFolder
    from pipetrain.timeline.shown import Shown

Parser = argparse.ArgumentParser
Arguments = argparse.Namespace
BENCH = "bench"  # has options of its own
_OVERRIDES = "KEY=VALUE, as in steps=50 recompute.mode=inline; or a group by name, as in data=text model=gpt2"


@dataclass(frozen=True)
class _Command:
    """A subcommand: its line in the help, its options, and what it does (the exit code is what it returns)."""

    help: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[Arguments], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pipetrain ARGV` and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return Exit.DONE if words else Exit.WRONG_INPUT
    if words[0] == BENCH and (benchmarks := _benchmarks()) is not None:
        return _bench(benchmarks, words[1:])
    if words[0] not in COMMANDS:
        return _refuse(f"{words[0]}: there is no such command; there are {', '.join(COMMANDS)}")
    command = COMMANDS[words[0]]
    parser = Parser(prog=f"pipetrain {words[0]}", description=command.help, allow_abbrev=False)
    command.add_arguments(parser)
    # `--json` alone must not take the override behind it for its file
    arguments = parser.parse_intermixed_args([f"--json={STDOUT}" if word == "--json" else word for word in words[1:]])
    try:
        return command.run(arguments)
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return _refuse("interrupted", Exit.FAILED)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return Exit.DONE


def _refuse(message: str, code: Exit = Exit.WRONG_INPUT) -> int:
    print(f"pipetrain: {message}", file=sys.stderr)
    return code


def _help() -> str:
    helps = {name: command.help for name, command in COMMANDS.items()}
    if _benchmarks() is not None:
        helps[BENCH] = "comparisons with other systems, measured on this machine"
    width = max(map(len, helps))
    lines = [f"  {name:<{width}}  {text}" for name, text in helps.items()]
    return "\n".join(["usage: pipetrain COMMAND ...", "", *lines, "", "pipetrain COMMAND --help says more."])


def _benchmarks() -> Path | None:
    """The folder of the benchmarks: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    folders = (package / "benchmarks", package.parent / "benchmarks")
    return next((folder for folder in folders if (folder / "command.py").is_file()), None)


def _bench(folder: Path, words: Sequence[str]) -> int:
    if folder.parent.name == "pipetrain":
        module = importlib.import_module("pipetrain.benchmarks.command")
    else:
        sys.path.insert(0, str(folder.parent))
        module = importlib.import_module("benchmarks.command")
    code: int = module.main(words)
    return code


def _add_overrides(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDES)


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="JSON to stdout, and nothing else there; --json=FILE writes it")


def _add_train(parser: Parser) -> None:
    _add_overrides(parser)
    _add_json(parser)
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="a run for each combination of values, as in seed=1,2,3"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with cluster=slurm: print the job script, submit nothing"
    )


def _train(arguments: Arguments) -> int:
    from pipetrain.config.load import load
    from pipetrain.launcher.launch import is_rank, launch
    from pipetrain.launcher.outcome import tell
    from pipetrain.plan.from_config import choose_ranks_per_node

    if arguments.multirun:
        return _sweep(arguments)
    if is_rank():
        from pipetrain.train import main as train_as_rank

        return train_as_rank(arguments.overrides)
    config = load(arguments.overrides)
    becomes_a_job = config.cluster.name == "slurm" and config.cluster.rendezvous is None
    if arguments.dry_run and not becomes_a_job:
        raise ValueError("--dry-run: prints the job script of cluster=slurm; add cluster=slurm")
    if becomes_a_job:
        _check_job(config)
    num_ranks = _check_train(config)
    ranks_per_node = choose_ranks_per_node(config, num_ranks)
    if becomes_a_job:
        return _submit(config, arguments, ranks_per_node)
    outcome = launch(
        "pipetrain.train",
        arguments.overrides,
        num_ranks=ranks_per_node,
        threads_per_rank=config.threads_per_rank,
        nodes=_nodes(config),
    )
    if arguments.json is not None and outcome.run_dir is not None:
        report = _report_of(outcome.run_dir)
        if report is not None:
            write_json(report, arguments.json)
    return tell(outcome, quiet=arguments.json == STDOUT)


def _check_train(config: RunConfig) -> int:
    """All that can be said of a run before a process starts; returns its number of ranks."""
    from pipetrain.config.together import check_run
    from pipetrain.engine.available import check_available
    from pipetrain.model.style import check_model
    from pipetrain.observe.folder import check_free
    from pipetrain.observe.trackers.chosen import check_trackers
    from pipetrain.plan.from_config import choose_num_ranks, choose_plan, choose_schedule

    check_run(config)
    check_available(config)
    check_trackers(config.observe)
    check_model(config.model, sequence_length=config.data.sequence_length)
    num_ranks = choose_num_ranks(config)
    choose_plan(config, num_ranks)
    choose_schedule(config, num_ranks)
    if config.resume != "auto":
        check_free(config.run_dir)
    from pipetrain.data.dataset import check_data  # with torch, so after what can be refused without
    from pipetrain.snapshot.session import check_start

    check_data(config.data)
    check_start(config)
    return num_ranks


def _report_of(run_dir: str) -> Any:
    """What a run has reported, as plain values; None: nothing."""
    from pipetrain.observe.folder import RunFolder

    report = RunFolder(Path(run_dir)).report
    return json.loads(report.read_text()) if report.is_file() else None


def _sweep(arguments: Arguments) -> int:
    from dataclasses import asdict

    from pipetrain.sweep import sweep
    from pipetrain.timeline.draw.table import Table

    folder, jobs = sweep(arguments.overrides, _check_train)
    if arguments.json is not None:
        reports = [None if job.run_dir is None else _report_of(job.run_dir) for job in jobs]
        write_json([{**asdict(job), "report": report} for job, report in zip(jobs, reports)], arguments.json)
    if arguments.json != STDOUT:
        shared = set.intersection(*(set(job.overrides) for job in jobs))
        swept = [" ".join(text for text in job.overrides if text not in shared) for job in jobs]
        rows = [(str(job.number), words, str(job.code), job.run_dir or "-") for job, words in zip(jobs, swept)]
        print(Table(("job", "overrides", "exit code", "run folder"), rows).as_markdown())
        print(f"sweep folder: {folder}", flush=True)
    bad = [job for job in jobs if job.code not in (Exit.DONE, Exit.STOPPED)]
    for job in bad:
        how = f"ended with exit code {job.code}: see its messages" if job.code else "did not say how it ended"
        how = "was not started" if job.run_dir is None else how
        _refuse(f"job {job.number} ({' '.join(job.overrides)}) {how}; its files: {job.run_dir or folder}")
    if any(job.run_dir is not None for job in bad) or all(job.run_dir is None for job in jobs):
        return Exit.FAILED
    return Exit.STOPPED if any(job.code != Exit.DONE for job in jobs) else Exit.DONE


def _nodes(config: RunConfig) -> Nodes | None:
    """The machines that meet; None: this one alone."""
    from pipetrain.launcher.launch import check_not_a_slurm_task
    from pipetrain.launcher.nodes import Nodes, node_rank_in_slurm

    cluster = config.cluster
    if cluster.rendezvous is not None:
        node_rank = node_rank_in_slurm(cluster.num_nodes)
        return Nodes(cluster.num_nodes, cluster.rendezvous, node_rank, config.timeout_seconds)
    if cluster.num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes={cluster.num_nodes}: say where they meet, cluster.rendezvous=HOST:PORT of the first, and type the "
            "same command on each of them; or cluster=slurm, which does that in a job"
        )
    check_not_a_slurm_task()
    return None


def _check_job(config: RunConfig) -> None:
    if config.resume not in (None, "auto"):
        raise ValueError(
            f"resume={config.resume}: a job goes on from the snapshots of its own run folder, so that it can be put back into the "
            "queue; use resume=auto run_dir=THAT_RUN, or init_from= for a new run from its weights"
        )


def _submit(config: RunConfig, arguments: Arguments, ranks_per_node: int) -> int:
    from pipetrain.launcher.slurm.script import job_script
    from pipetrain.launcher.slurm.submit import check_commands, how_to_go_on, submit
    from pipetrain.observe.folder import choose_folder

    if not arguments.dry_run:
        check_commands()
    run_dir = choose_folder(config.run_dir, config.experiment).path
    script = job_script(
        config,
        arguments.overrides,
        run_dir=run_dir,
        ranks_per_node=ranks_per_node,
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


def _add_show(parser: Parser) -> None:
    _add_overrides(parser)
    _add_json(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="write FILE.svg, .html, .json, .csv or .trace.json (for Perfetto)"
    )
    parser.add_argument("--against", metavar="'KEY=VALUE ...'", help="a second schedule: the first with these changes")
    parser.add_argument("--width", type=int, help="columns of the drawing (default: the terminal's)")


def _show(arguments: Arguments) -> int:
    from pipetrain.observe.drawing import draw, write_drawing

    shown = [_simulated(arguments.overrides)]
    if arguments.against is not None:
        shown.append(_simulated([*arguments.overrides, *shlex.split(arguments.against)]))
    if arguments.json is not None:
        values = [one.as_json() for one in shown]
        write_json(values[0] if len(values) == 1 else values, arguments.json)
    if arguments.out is not None:
        write_drawing(shown, Path(arguments.out))
    if arguments.json != STDOUT:
        print(draw(shown, width=arguments.width))
    return Exit.DONE


def _simulated(overrides: Sequence[str]) -> Shown:
    from pipetrain.config.load import load
    from pipetrain.config.together import check_schedule
    from pipetrain.plan.from_config import choose_costs, choose_num_ranks, choose_schedule
    from pipetrain.timeline.shown import show_schedule

    config = load(overrides)
    check_schedule(config)
    num_ranks = choose_num_ranks(config)
    costs = choose_costs(config, num_ranks * config.pipeline.stages_per_rank)
    return show_schedule(choose_schedule(config, num_ranks, costs), costs)


def _add_report(parser: Parser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run folder, `latest` (default) or a sweep folder; several are compared",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write FILE.svg, .png or .html: the loss of each run over its steps"
    )
    _add_json(parser)


def _report(arguments: Arguments) -> int:
    from dataclasses import asdict

    from pipetrain.observe.folder import find_folders
    from pipetrain.observe.report import as_markdown, read_report

    folders = [folder for run in arguments.runs or ["latest"] for folder in find_folders(run)]
    if len(folders) > 1 or arguments.out is not None:
        return _compare(folders, arguments)
    report = read_report(folders[0].report)
    if arguments.json is not None:
        write_json(asdict(report), arguments.json)
    if arguments.json != STDOUT:
        print(as_markdown(report), end="")
    return Exit.DONE


def _compare(folders: Sequence[RunFolder], arguments: Arguments) -> int:
    """What can be read is told; a run that cannot is named, and then the exit code is not 0."""
    from pipetrain.observe.compare import check_format, compare, runs_table, write_plot

    if arguments.out is not None:
        check_format(Path(arguments.out))
    runs, problems = compare(folders)
    if arguments.json is not None:
        write_json([run.as_json() for run in runs], arguments.json)
    if runs and arguments.json != STDOUT:
        print(runs_table(runs).as_markdown())
    if runs and arguments.out is not None:
        write_plot(runs, Path(arguments.out))
    for problem in problems:
        _refuse(problem)
    return Exit.WRONG_INPUT if problems else Exit.DONE


def _add_generate(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")
    parser.add_argument("--prompt", default="import ", help="the text to go on from (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to draw (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest each time (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (default: 0)")


def _generate(arguments: Arguments) -> int:
    from pipetrain.config.load import read
    from pipetrain.observe.folder import find_folder

    folder = find_folder(arguments.run)
    config = read(folder.config)
    from pipetrain.loop.generate import generate

    text = generate(
        config,
        folder.weights,
        arguments.prompt,
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(text)
    return Exit.DONE


def _add_verify(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="two ranks only")
    parser.add_argument(
        "--faults", action="store_true", help="runs with faults on purpose instead: killed ranks and the like"
    )
    _add_json(parser)


def _verify(arguments: Arguments) -> int:
    if arguments.faults:
        return _verify_faults(arguments)
    from pipetrain.proof.verify import parity_table, verify

    rows = verify(quick=arguments.quick)
    if arguments.json is not None:
        write_json([row.as_json() for row in rows], arguments.json)
    if arguments.json != STDOUT:
        print(parity_table(rows))
    return Exit.DONE if all(row.is_equal for row in rows) else Exit.DIFFERENT


def _verify_faults(arguments: Arguments) -> int:
    from pipetrain.proof.drill import drill, drill_records, drill_table

    results = drill(quick=arguments.quick, say=lambda text: print(f"pipetrain: {text}", file=sys.stderr, flush=True))
    if arguments.json is not None:
        write_json(drill_records(results), arguments.json)
    if arguments.json != STDOUT:
        print(drill_table(results))
    return Exit.DONE if all(result.problem is None for result in results) else Exit.DIFFERENT


COMMANDS = {
    "train": _Command("train a model over pipeline stages", _add_train, _train),
    "show": _Command("draw a schedule and say what it costs", _add_show, _show),
    "report": _Command(
        "what a run did, and what it was predicted to do; or several runs compared", _add_report, _report
    ),
    "verify": _Command("compare every schedule and mode with one process, bit for bit", _add_verify, _verify),
    "generate": _Command("text from a trained model", _add_generate, _generate),
}


if __name__ == "__main__":
    sys.exit(main())
