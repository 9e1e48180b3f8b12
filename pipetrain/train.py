"""The training entry: config -> plan and schedule -> steps -> report. `torchrun -m pipetrain.train KEY=VALUE ...`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from pipetrain.config.load import as_yaml, load, read
from pipetrain.config.records import HUGGING_FACE, WEIGHTS_IN, RunConfig
from pipetrain.config.together import check_run, with_steps
from pipetrain.data.dataset import Data, make_data
from pipetrain.engine.available import check_available
from pipetrain.engine.which import make_engine
from pipetrain.group.address import is_rank
from pipetrain.group.failure import PipelineError
from pipetrain.group.group import Group, join_group
from pipetrain.group.own_device import set_variables_of_gpus
from pipetrain.launcher.outcome import Exit, Outcome, announce, announce_run_dir, end
from pipetrain.launcher.stop import StopRequest, ending_with_the_launcher
from pipetrain.loop.agree import agreed_folder, check_all_read_the_same
from pipetrain.loop.guard import Guard
from pipetrain.loop.over_replicas import OverReplicas
from pipetrain.loop.steps import Steps, equal_work
from pipetrain.loop.tokens import TokensSeen
from pipetrain.model.hf.download import bring_model
from pipetrain.model.size import size_of
from pipetrain.model.spec import ModelSpec, make_spec
from pipetrain.observe.folder import RunFolder
from pipetrain.observe.recorder import Recorder
from pipetrain.observe.run_report import measured_steps
from pipetrain.observe.trackers.chosen import check_trackers
from pipetrain.plan.mesh import rank_places
from pipetrain.plan.world import world_of
from pipetrain.prepare import Run, prepare
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import AUTO
from pipetrain.snapshot.session import Snapshots
from pipetrain.snapshot.start import AUTO as AUTO_RESUME
from pipetrain.snapshot.start import check_start
from pipetrain.timeline.stragglers import StragglerWatch
from pipetrain.transport.carrier import PINNED


def train(config: RunConfig) -> Outcome:
    """Trains as one of the ranks that torch.distributed knows, and leaves the run folder behind.

    Raises:
        ValueError: the configuration, the data or the number of ranks does not make a run.
        PipelineError: a rank failed.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        with ending_with_the_launcher():
            group = stack.enter_context(_join(config))
        run = prepare(config, group.size, _agreed_order(config, group))
        data = _data(config, group)
        check_all_read_the_same(data.fingerprint, group)
        spec = _spec(config, data)
        config = with_steps(config, data.train.samples_per_epoch)
        again = config.resume == AUTO_RESUME
        folder = stack.enter_context(
            agreed_folder(config.run_dir, config.experiment, group, again=again, announce=announce_run_dir)
        )
        _keep_model_files(config, folder, group)
        steps = _steps(config, run, data, spec, folder, group, stack)
        signum = steps.run(lambda: group.largest(stop.signum))
        steps.report(config.experiment, run.plan, run.schedule, signum)
        steps.finish(folder.weights, group)
        group.largest(0)  # nobody leaves before everything is written
    if signum:
        return Outcome(group.rank, Exit.STOPPED, _stopped(signum, steps.snapshots), _told(folder, group))
    return Outcome(group.rank, Exit.DONE, "", _told(folder, group))


def _join(config: RunConfig) -> Group:
    """This rank among all, of which each stands somewhere in one of the replicas.

    Raises:
        ValueError: there are not as many ranks as replicas of so many stages need; before anybody waits for anybody.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    world = world_of(config.pipeline, config.parallel, config.cluster, num_ranks)
    return join_group(
        timeout_seconds=config.timeout_seconds,
        starts_alone=True,
        shares_gpus=config.transport.edges == PINNED,
        num_replicas=world.num_replicas,
        order=config.parallel.order,
    )


def _data(config: RunConfig, group: Group) -> Data:
    """What the run reads, with the tokenizer of its model where it has one."""
    data = make_data(config.data, config.seed, own_tokenizer=config.model.path, timeout_seconds=config.timeout_seconds)
    if data.num_skipped and group.rank == 0:
        skipped = f"{data.num_skipped} documents are no samples and left out (data.on_error=skip), the first of them: "
        print(f"pipetrain: {skipped}{data.first_skipped}", file=sys.stderr, flush=True)
    return data


def _keep_model_files(config: RunConfig, folder: RunFolder, group: Group) -> None:
    """What `export` and `generate` need of a Hugging Face model besides weights, into the run folder."""
    if config.model.name == HUGGING_FACE and group.rank == 0:
        from pipetrain.model.hf.source import find_source
        from pipetrain.snapshot.export import keep_files

        assert config.model.path is not None
        keep_files(find_source(config.model.path, config.model.revision), folder.model)


def _spec(config: RunConfig, data: Data) -> ModelSpec:
    """The model, with weights in the dtype that is trained.

    Raises:
        ValueError: it is none, or cannot take such samples; on every rank, before there is a run folder.
    """
    model = replace(config.model, dtype=config.model.dtype or WEIGHTS_IN[config.precision])
    spec = make_spec(model, data.vocabulary_size)
    if spec.take_batch is not None:
        spec.take_batch(*data.train.batch(0))
    return spec


def _agreed_order(config: RunConfig, group: Group) -> str | None:
    """The order of pipeline.schedule=auto, which rank 0 knows from the run that goes on, or seeks; None for another schedule.

    Raises:
        ValueError: it cannot be sought; on every rank.
    """
    if config.pipeline.schedule != AUTO:
        return None
    order, problem = "", ""
    if group.rank == 0:
        try:
            order = _order_before(config) or write_csv(prepare(config, group.size).schedule)
        except ValueError as error:
            problem = str(error)
    order, problem = group.from_first((order, problem))
    if problem:
        raise ValueError(problem)
    return order


def _order_before(config: RunConfig) -> str | None:
    """The order of the run that goes on, where it was sought for the same; None: it is to be sought."""
    given = config.run_dir if config.resume == AUTO_RESUME else config.resume
    if given is None:
        return None
    start = Path(given).absolute()
    for folder in map(
        RunFolder, (start, start.parent, start.parent.parent)
    ):  # a run folder, its snapshots, one of them
        if folder.config.is_file() and folder.schedule.is_file():
            before = read(folder.config)
            same = _sought_for(before) == _sought_for(config)
            return folder.schedule.read_text() if same else None
    return None


def _sought_for(config: RunConfig) -> tuple[object, ...]:
    """What an order depends on."""
    pipeline = replace(config.pipeline, search_seconds=0.0, balance="auto")
    return pipeline, replace(config.recompute, verify="off"), config.transport.ahead, config.plan, config.cost


def _mfu_of_a_token_per_second(config: RunConfig, vocabulary_size: int, num_devices: int) -> float | None:
    """What a token per second is of what the devices could do; None where that is not known."""
    size = size_of(config.model, vocabulary_size=vocabulary_size, sequence_length=config.data.sequence_length)
    peak, flops = config.observe.peak_flops_per_second, size.flops_per_token
    return None if peak is None or flops is None else flops / (peak * num_devices)


def _steps(
    config: RunConfig, run: Run, data: Data, spec: ModelSpec, folder: RunFolder, group: Group, stack: ExitStack
) -> Steps:
    """All that the steps need, from the snapshot that the run goes on from; `stack` closes it."""
    at = group.coordinates
    snapshots = Snapshots(config, run.plan, folder.path, group, data=data.fingerprint, replica=at.replica)
    first = snapshots.first_step
    recorder = Recorder(
        folder,
        group.rank,
        config.observe,
        num_steps=config.num_steps,
        keep=measured_steps(first),
        first_step=first,
    )
    stack.enter_context(closing(recorder))
    recorder.start(as_yaml(config), asdict(config), run.plan, run.schedule)
    engine = make_engine(config, spec, run.plan, run.schedule, device=group.device, on_event=recorder.on_event)
    stack.enter_context(closing(engine))
    guard = Guard(config.guard)
    seen = TokensSeen()
    ranks = rank_places(run.plan, group.grid)
    snapshots.attach(engine.model, engine.optimizer, guard, seen, from_file=spec.from_file)
    return Steps(
        num_steps=config.num_steps,
        mfu_of_a_token_per_second=_mfu_of_a_token_per_second(config, data.vocabulary_size, group.size),
        evaluate_every_steps=config.observe.evaluate_every_steps,
        seed=config.seed,
        data=data,
        spec=spec,
        engine=engine,
        recorder=recorder,
        snapshots=snapshots,
        guard=guard,
        seen=seen,
        watch=StragglerWatch(equal_work(run.plan, run.size), ranks),
        ranks=ranks,
        inspect=folder.inspect,
        replicas=OverReplicas.of(run.plan, at, group.replicas, config.parallel.check_every_steps),
    )


def _told(folder: RunFolder, group: Group) -> str | None:
    """The run folder, which rank 0 tells."""
    return str(folder.path) if group.rank == 0 else None


def _stopped(signum: int, snapshots: Snapshots) -> str:
    """What to type to go on."""
    name = signal.Signals(signum).name
    if snapshots.newest is None:
        return f"stopped by {name}; the report is written, a snapshot could not be"
    return f"stopped by {name}; the report is written, and resume={snapshots.newest} goes on"


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within it, what the library warns of is one line, as all that a command says; others' warnings look as they always do."""
    package = Path(__file__).parent
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            *others: object,
            **named: object,
        ) -> None:
            if Path(filename).is_relative_to(package):
                print(f"pipetrain: {message}", file=sys.stderr, flush=True)
            else:
                show(message, category, filename, lineno, *others, **named)  # type: ignore[arg-type]

        warnings.showwarning = tell
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with the overrides in `arguments` as one rank; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    announce(rank)
    os.umask(os.umask(0o077) | 0o027)  # what a run writes is the owner's, the group may read it
    try:
        config = load(sys.argv[1:] if arguments is None else arguments)
        check_run(config)
        check_trackers(config.observe)
        check_available(config)
        check_start(config.resume, config.init_from, config.run_dir)
        set_variables_of_gpus()
        torch.set_num_threads(config.threads_per_rank)
        bring_model(config.model, timeout_seconds=config.timeout_seconds)
        with _warnings_as_lines():
            outcome = train(config)
    except ValueError as error:
        outcome = Outcome(rank, Exit.WRONG_INPUT, str(error))
    except PipelineError as error:
        outcome = Outcome(rank, Exit.FAILED, str(error))
    except OSError as error:
        outcome = Outcome(
            rank, Exit.FAILED, f"rank {rank}: {error}; resume=auto run_dir=PATH goes on from the last snapshot"
        )
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(rank, Exit.FAILED, f"rank {rank}: {type(error).__name__}: {error}")
    return end(outcome)


if __name__ == "__main__":
    # Past a failure, threads may still wait for ranks that are gone: nothing is joined.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
