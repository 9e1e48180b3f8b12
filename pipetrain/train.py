"""The training entry: config -> plan and schedule -> steps -> report. `torchrun -m pipetrain.train KEY=VALUE ...`."""

from __future__ import annotations

import gc

gc.disable()  # torch makes some 400,000 objects, which all stay: looking through them again and again is a quarter of an import

import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.comm.address import is_rank
from pipetrain.comm.failure import PipelineError
from pipetrain.comm.group import Group, join_group
from pipetrain.comm.own_device import set_variables_of_gpus
from pipetrain.comm.transport import PINNED
from pipetrain.config.load import as_yaml, load, read
from pipetrain.config.phases import Phase, naming_phase, phases_of
from pipetrain.config.records import HUGGING_FACE, WEIGHTS_IN, RunConfig
from pipetrain.config.together import check_run, with_steps
from pipetrain.data.batches import PhasedBatches
from pipetrain.data.dataset import Data, open_data
from pipetrain.engine.available import check_available, check_engine
from pipetrain.engine.engine import make_engine
from pipetrain.launcher.outcome import Exit, Outcome, announce, announce_run_dir, run_as_rank
from pipetrain.launcher.stop import StopRequest, ending_with_the_launcher
from pipetrain.models.hf.source import bring_model
from pipetrain.models.size import size_of
from pipetrain.models.spec import ModelSpec, make_spec
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.recorder import Recorder
from pipetrain.monitor.report import measured_steps
from pipetrain.monitor.stragglers import StragglerWatch
from pipetrain.monitor.trackers.tracker import check_trackers
from pipetrain.plan.mesh import RankPlace, rank_places
from pipetrain.plan.world import world_of
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import AUTO
from pipetrain.snapshot.session import Snapshots
from pipetrain.snapshot.start import AUTO as AUTO_RESUME
from pipetrain.snapshot.start import check_start
from pipetrain.trainer.agree import agreed_folder, check_all_read_the_same
from pipetrain.trainer.guard import Guard
from pipetrain.trainer.over_replicas import OverReplicas, TokensSeen
from pipetrain.trainer.prepare import PreparedPhase, prepare_phases
from pipetrain.trainer.steps import PhaseSteps, Steps, equal_work, phase_of

gc.freeze()  # nor is any of them looked at later
gc.enable()


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
        phases = prepare_phases(config, group.size, _agreed_orders(config, group))
        if phases[0].run.note and group.rank == 0:
            print(f"pipetrain: {phases[0].run.note}", file=sys.stderr, flush=True)
        data = _data(config, group)
        check_all_read_the_same(data[0].fingerprint, group)
        spec = _spec(config, data)
        config = with_steps(config, *(own.train.samples_per_epoch for own in data))
        again = config.resume == AUTO_RESUME
        folder = stack.enter_context(
            agreed_folder(config.run_dir, config.experiment, group, again=again, announce=announce_run_dir)
        )
        _keep_model_files(config, folder, group)
        steps = _steps(config, phases, data, spec, folder, group, stack)
        signum = steps.run(lambda: group.largest(stop.signum))
        steps.report(signum)
        steps.finish(folder.weights, group)
        group.largest(0)  # nobody leaves before everything is written
    told = str(folder.path) if group.rank == 0 else None
    if signum:
        return Outcome(group.rank, Exit.STOPPED, _stopped(signum, steps.snapshots), told)
    return Outcome(group.rank, Exit.DONE, "", told)


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
        shares_gpus=config.transport.backend == PINNED,
        num_replicas=world.num_replicas,
        order=config.parallel.order,
    )


def _data(config: RunConfig, group: Group) -> list[Data]:
    """What each phase of the run reads, with the tokenizer of its model where it has one."""
    own, wait = config.model.path, config.timeout_seconds
    phases, data, told = phases_of(config), list[Data](), 0
    with naming_phase(phases[0], config):
        opened = open_data(phases[0].config.data, config.seed, own_tokenizer=own, timeout_seconds=wait)
    for phase in phases:
        with naming_phase(phase, config):
            data.append(opened.cut(phase.config.data))
        if data[-1].num_skipped not in (0, told) and group.rank == 0:
            told = data[-1].num_skipped
            skipped = f"{told} documents are no samples and left out (data.on_error=skip), the first of them: "
            print(f"pipetrain: {skipped}{data[-1].first_skipped}", file=sys.stderr, flush=True)
    return data


def _keep_model_files(config: RunConfig, folder: RunFolder, group: Group) -> None:
    """What `export` and `generate` need of a Hugging Face model besides weights, into the run folder."""
    if config.model.name == HUGGING_FACE and group.rank == 0:
        from pipetrain.models.hf.export import keep_files
        from pipetrain.models.hf.source import find_source

        assert config.model.path is not None
        keep_files(find_source(config.model.path, config.model.revision), folder.model)


def _spec(config: RunConfig, data: Sequence[Data]) -> ModelSpec:
    """The model, with weights in the dtype that is trained.

    Raises:
        ValueError: it is none, or cannot take such samples; on every rank, before there is a run folder.
    """
    model = replace(config.model, dtype=config.model.dtype or WEIGHTS_IN[config.precision])
    spec = make_spec(model, data[0].vocabulary_size)
    for phase, own in zip(phases_of(config), data):
        if spec.take_batch is not None:
            with naming_phase(phase, config):
                spec.take_batch(*own.train.batch(0))
    return spec


def _agreed_orders(config: RunConfig, group: Group) -> list[str | None]:
    """The orders of pipeline.schedule=auto, one for each phase, which rank 0 knows from the run that goes on, or seeks; none for another
    schedule.

    Raises:
        ValueError: one cannot be sought; on every rank.
    """
    if config.pipeline.schedule != AUTO:
        return []
    orders, problem = list[str | None](), ""
    if group.rank == 0:
        try:
            orders = [_order_before(config, phase) for phase in phases_of(config)]
            if None in orders:
                orders = [write_csv(phase.run.schedule) for phase in prepare_phases(config, group.size, orders)]
        except ValueError as error:
            problem = str(error)
    orders, problem = group.from_first((orders, problem))
    if problem:
        raise ValueError(problem)
    return orders


def _order_before(config: RunConfig, phase: Phase) -> str | None:
    """The order of the run that goes on, where it was sought for the same in one of its phases; None: it is to be sought."""
    given = config.run_dir if config.resume == AUTO_RESUME else config.resume
    if given is None:
        return None
    start = Path(given).absolute()  # a run folder, its snapshots, one of them
    for folder in map(RunFolder, (start, start.parent, start.parent.parent)):
        if folder.config.is_file() and folder.schedule.is_file():
            before = read(folder.config)
            for own in phases_of(before):
                schedule = (folder.phase(own.number) if before.phases else folder).schedule
                if _sought_for(own.config) == _sought_for(phase.config) and schedule.is_file():
                    return schedule.read_text()
            return None
    return None


def _sought_for(config: RunConfig) -> tuple[object, ...]:
    """What an order depends on."""
    pipeline = replace(config.pipeline, search_seconds=0.0, balance="auto")
    return pipeline, replace(config.recompute, verify="off"), config.transport.prefetch, config.plan, config.cost


def _mfu_of_a_token_per_second(config: RunConfig, vocabulary_size: int, num_devices: int) -> float | None:
    """What a token per second is of what the devices could do; None where that is not known."""
    size = size_of(config.model, vocabulary_size=vocabulary_size, sequence_length=config.data.sequence_length)
    peak, flops = config.observe.peak_flops_per_second, size.flops_per_token
    return None if peak is None or flops is None else flops / (peak * num_devices)


def _steps(
    config: RunConfig,
    phases: Sequence[PreparedPhase],
    data: Sequence[Data],
    spec: ModelSpec,
    folder: RunFolder,
    group: Group,
    stack: ExitStack,
) -> Steps:
    """All that the steps need, from the snapshot that the run goes on from; `stack` closes it."""
    at, plan = group.coordinates, phases[0].run.plan
    snapshots = Snapshots(config, plan, folder.path, group, data=data[0].fingerprint, replica=at.replica)
    first = snapshots.first_step
    of_steps = {"num_steps": config.num_steps, "first_step": first}
    recorder = Recorder(folder, group.rank, config.observe, keep=measured_steps(first), **of_steps)
    stack.enter_context(closing(recorder))
    recorder.start(as_yaml(config), asdict(config), *((phase.run.plan, phase.run.schedule) for phase in phases))
    ranks = rank_places(plan, group.grid)
    replicas = OverReplicas.of(plan, at, group.replicas, config.parallel.check_every_steps)
    of_phases = _phase_steps(config, phases, data, group, ranks)
    now = phase_of(of_phases, first)
    engine = make_engine(config, spec, now.plan, now.schedule, device=group.device, on_event=recorder.on_event)
    stack.enter_context(closing(engine))
    guard = Guard(config.guard)
    seen = TokensSeen()
    snapshots.attach(engine.model, engine.optimizer, guard, seen, from_file=spec.from_file)
    return Steps(
        experiment=config.experiment,
        num_steps=config.num_steps,
        eval_every_steps=config.observe.eval_every_steps,
        seed=config.seed,
        phases=of_phases,
        batches=PhasedBatches([(phase.first_step - 1, own.train) for phase, own in zip(phases, data)]),
        spec=spec,
        engine=engine,
        recorder=recorder,
        snapshots=snapshots,
        guard=guard,
        seen=seen,
        ranks=ranks,
        inspect=folder.inspect,
        replicas=replicas,
    )


def _phase_steps(
    config: RunConfig,
    phases: Sequence[PreparedPhase],
    data: Sequence[Data],
    group: Group,
    ranks: tuple[RankPlace, ...],
) -> tuple[PhaseSteps, ...]:
    """What the steps of each phase work with."""
    ends = [*(phase.first_step - 1 for phase in phases[1:]), config.num_steps]
    return tuple(
        PhaseSteps(
            number=phase.number if config.phases else None,
            first_step=phase.first_step,
            last_step=last_step,
            config=phase.config,
            plan=phase.run.plan,
            schedule=phase.run.schedule,
            heldout=own.heldout,
            share=OverReplicas.of(phase.run.plan, group.coordinates, group.replicas, None).share,
            mfu_of_a_token_per_second=_mfu_of_a_token_per_second(phase.config, own.vocabulary_size, group.size),
            watch=StragglerWatch(equal_work(phase.run.plan, phase.run.size), ranks),
        )
        for phase, last_step, own in zip(phases, ends, data)
    )


def _stopped(signum: int, snapshots: Snapshots) -> str:
    """What to type to go on."""
    newest = snapshots.newest
    then = "a snapshot could not be" if newest is None else f"and resume={newest} goes on"
    return f"stopped by {signal.Signals(signum).name}; the report is written, {then}"


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within it, what the library warns of is one line, as all that a command says; others' warnings look as they always do."""
    package = Path(__file__).parent
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], filename: str, *others: Any, **named: Any) -> None:
            if Path(filename).is_relative_to(package):
                print(f"pipetrain: {message}", file=sys.stderr, flush=True)
            else:
                show(message, category, filename, *others, **named)

        warnings.showwarning = tell
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with the overrides in `arguments` as one rank; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    announce(rank)
    os.umask(os.umask(0o077) | 0o027)  # what a run writes is the owner's, the group may read it

    def work() -> Outcome:
        try:
            config = load(sys.argv[1:] if arguments is None else arguments)
            check_run(config)
            check_engine(config)
            check_trackers(config.observe)
            check_available(config)
            check_start(config.resume, config.init_from, config.run_dir)
            set_variables_of_gpus()
            torch.set_num_threads(config.threads_per_rank)
            bring_model(config.model, timeout_seconds=config.timeout_seconds)
            with _warnings_as_lines():
                return train(config)
        except OSError as error:
            go_on = "resume=auto run_dir=PATH goes on from the last snapshot"
            return Outcome(rank, Exit.FAILED, f"rank {rank}: {error}; {go_on}")

    return run_as_rank(rank, work, PipelineError)


if __name__ == "__main__":
    # Past a failure, threads may still wait for ranks that are gone: nothing is joined.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
