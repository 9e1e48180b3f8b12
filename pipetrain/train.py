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
from pipetrain.comm.device import set_variables_of_gpus
from pipetrain.comm.failure import PipelineError
from pipetrain.comm.group import Group, join_group, made_by_first
from pipetrain.comm.transport import PINNED
from pipetrain.config.load import as_yaml, load_config, read
from pipetrain.config.phases import Phase, naming_phase, phases_of
from pipetrain.config.records import HUGGING_FACE, NATIVE, PYTHON, WEIGHTS_IN, RunConfig
from pipetrain.config.terminal import say
from pipetrain.config.together import check_run, with_steps
from pipetrain.data.batches import Data, PhasedBatches
from pipetrain.data.dataset import OpenData
from pipetrain.data.own import OwnData, check_length, sizes_of
from pipetrain.engine.available import check_available, check_engine
from pipetrain.engine.engine import make_engine
from pipetrain.launcher.outcome import (
    Exit,
    Outcome,
    StopRequest,
    announce_run_dir,
    ending_with_the_launcher,
    leave_process,
    run_as_rank,
)
from pipetrain.models.hf.source import bring_model
from pipetrain.models.size import size_of
from pipetrain.models.spec import ModelSpec, make_spec
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.recorder import Recorder
from pipetrain.monitor.report import measured_steps
from pipetrain.monitor.stragglers import StragglerWatch
from pipetrain.monitor.trackers import check_trackers
from pipetrain.plan.mesh import RankPlace, rank_places
from pipetrain.plan.plan import Plan
from pipetrain.plan.world import world_of
from pipetrain.schedule.csv_file import write_csv
from pipetrain.schedule.families import AUTO
from pipetrain.snapshot.session import Snapshots
from pipetrain.snapshot.start import AUTO as AUTO_RESUME
from pipetrain.snapshot.start import check_start
from pipetrain.trainer.agree import agreed_folder, check_all_read_the_same
from pipetrain.trainer.guard import Guard
from pipetrain.trainer.prepare import PreparedPhase, foreseen_bytes, prepare_phases
from pipetrain.trainer.steps import PhaseSteps, Steps, TokensSeen, equal_work, phase_of

gc.freeze()  # nor is any of them looked at later
gc.enable()


def train(config: RunConfig) -> Outcome:
    """Trains as one of the ranks that torch.distributed knows, and leaves the run folder behind.

    Raises ValueError: the configuration, the data or the number of ranks does not make a run; PipelineError: a rank failed.
    """
    # Replicas of so many stages need another number of ranks, perhaps: that is said before anybody waits for anybody.
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    world = world_of(config.pipeline, config.parallel, config.cluster, num_ranks)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        with ending_with_the_launcher():
            joined = join_group(
                timeout_seconds=config.timeout_seconds,
                starts_alone=True,
                uses_torch=config.engine.name != NATIVE,
                shares_gpus=config.transport.backend == PINNED,
                num_replicas=world.num_replicas,
                order=config.parallel.order,
            )
            group = stack.enter_context(joined)
        phases = prepare_phases(config, group.size, _agreed_orders(config, group))
        if phases[0].run.note and group.rank == 0:
            say(phases[0].run.note)
        data = _data(config, group, phases[0].run.plan)
        for own in data:
            stack.callback(own.train.close)
        check_all_read_the_same(data[0].fingerprint, group)
        spec = _spec(config, data)
        config = with_steps(config, *(own.train.samples_per_epoch for own in data))
        again = config.resume == AUTO_RESUME
        folder = stack.enter_context(
            agreed_folder(config.run_dir, config.experiment, group, again=again, announce=announce_run_dir)
        )
        if config.model.name == HUGGING_FACE and group.rank == 0:
            from pipetrain.models.hf.export import keep_files
            from pipetrain.models.hf.source import find_source

            keep_files(find_source(str(config.model.path), config.model.revision), folder.model)
        steps = _steps(config, phases, data, spec, folder, group, stack)
        signum = steps.run(lambda: group.largest(steps.request(stop.signum)), group.largest)
        steps.report(signum)
        steps.finish()
        group.largest(0)  # nobody leaves before everything is written
    run_dir = str(folder.path) if group.rank == 0 else None
    if not signum:
        return Outcome(group.rank, Exit.DONE, "", run_dir)
    newest = steps.snapshots.newest
    then = "a snapshot could not be" if newest is None else f"and resume={newest} goes on"
    told = f"stopped by {signal.Signals(signum).name}; the report is written, {then}"
    return Outcome(group.rank, Exit.STOPPED, told, run_dir)


def _data(config: RunConfig, group: Group, plan: Plan) -> list[Data]:
    """What each phase of the run reads, with the tokenizer of its model where it has one."""
    own, wait = config.model.path, config.timeout_seconds
    phases, data, told = phases_of(config), list[Data](), 0
    if config.data.name == PYTHON:
        sizes = made_by_first(lambda: sizes_of(config.data), group)
        check_length(config, (sizes[0], sizes[1]))
        stages = plan.stages_of(group.coordinates.stage)
        is_read = group.rank == 0 or not {0, plan.num_stages - 1}.isdisjoint(stages)
        opened_own = OwnData(config.data, config.seed, (sizes[0], sizes[1]), is_read, wait)
        return [opened_own.cut(phase.config.data) for phase in phases]
    with naming_phase(phases[0], config):
        opened = OpenData(phases[0].config.data, config.seed, own_tokenizer=own, timeout_seconds=wait)
    for phase in phases:
        with naming_phase(phase, config):
            data.append(opened.cut(phase.config.data))
        if data[-1].num_skipped not in (0, told) and group.rank == 0:
            told = data[-1].num_skipped
            skipped = f"{told} documents are no samples and left out (data.on_error=skip), the first of them: "
            say(f"{skipped}{data[-1].first_skipped}")
    return data


def _spec(config: RunConfig, data: Sequence[Data]) -> ModelSpec:
    """The model, with weights in the dtype that is trained.

    Raises ValueError: it is none, or cannot take such samples; on every rank, before there is a run folder.
    """
    model = replace(config.model, dtype=config.model.dtype or WEIGHTS_IN[config.precision])
    spec = make_spec(model, data[0].vocabulary_size, config.seed)
    for phase, own in zip(phases_of(config), data):
        if spec.take_batch is not None:
            with naming_phase(phase, config):
                spec.take_batch(*own.train.batch(0))
    return spec


def _agreed_orders(config: RunConfig, group: Group) -> list[str | None]:
    """The orders of pipeline.schedule=auto, one per phase: rank 0 takes them from the run that it resumes, or searches. Empty for another
    schedule.

    Raises ValueError: a search is impossible; on every rank.
    """
    if config.pipeline.schedule != AUTO:
        return []

    def orders() -> list[str | None]:
        known = [_order_before(config, phase) for phase in phases_of(config)]
        if None not in known:
            return known
        return [write_csv(phase.run.schedule) for phase in prepare_phases(config, group.size, known)]

    return made_by_first(orders, group)


def _order_before(config: RunConfig, phase: Phase) -> str | None:
    """The order that the resumed run found for the same keys, in any of its phases; None: a search is needed."""
    given = config.run_dir if config.resume == AUTO_RESUME else config.resume
    start = Path(given or "").absolute()  # a run folder, its snapshots, one of them
    folders = map(RunFolder, (start, start.parent, start.parent.parent) if given is not None else ())
    folder = next((one for one in folders if one.config.is_file() and one.schedule.is_file()), None)
    if folder is None:
        return None
    before = read(folder.config)
    for own in phases_of(before):
        schedule = (folder.phase(own.number) if before.phases else folder).schedule
        if _sought_for(own.config) == _sought_for(phase.config) and schedule.is_file():
            return schedule.read_text()
    return None


def _sought_for(config: RunConfig) -> tuple[object, ...]:
    """The keys that an order depends on."""
    pipeline = replace(config.pipeline, search_seconds=0.0, balance="auto")
    return pipeline, replace(config.recompute, verify="off"), config.transport.prefetch, config.plan, config.cost


def _mfu_of_a_token_per_second(config: RunConfig, vocabulary_size: int, num_devices: int) -> float | None:
    """What a token per second is of what the devices could do; None where that is not known."""
    if config.model.name == PYTHON:  # what it does with a sample is not known
        return None
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
    """All that the steps need, in the state of the snapshot from which the run starts; `stack` closes it."""
    plan = phases[0].run.plan
    snapshots = Snapshots(config, plan, folder.path, group, data=data[0].fingerprint)
    first = snapshots.first_step
    of_steps = {"num_steps": config.num_steps, "first_step": first}
    recorder = Recorder(folder, group.rank, config.observe, keep=measured_steps(first), **of_steps)
    stack.enter_context(closing(recorder))
    planned = ((phase.run.plan, phase.run.schedule) for phase in phases)
    recorder.start(as_yaml(config), asdict(config), *planned, kinds=phases[0].run.size.kinds or ())
    ranks = rank_places(plan, group.grid)
    of_phases = _phase_steps(config, phases, data, ranks, folder)
    now = phase_of(of_phases, first)
    engine = make_engine(config, spec, now.plan, now.schedule, device=group.device, on_event=recorder.on_event)
    stack.enter_context(closing(engine))
    guard, seen = Guard(config.guard), TokensSeen(data[0].train)
    snapshots.attach(engine.model, engine.optimizer, guard, seen, from_file=spec.from_file)
    return Steps(
        config=config,
        phases=of_phases,
        batches=PhasedBatches([(phase.first_step - 1, own.train) for phase, own in zip(phases, data)]),
        spec=spec,
        engine=engine,
        recorder=recorder,
        snapshots=snapshots,
        guard=guard,
        seen=seen,
        ranks=ranks,
        folder=folder,
        group=group,
    )


def _phase_steps(
    config: RunConfig,
    phases: Sequence[PreparedPhase],
    data: Sequence[Data],
    ranks: tuple[RankPlace, ...],
    folder: RunFolder,
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
            mfu_of_a_token_per_second=_mfu_of_a_token_per_second(phase.config, own.vocabulary_size, len(ranks)),
            watch=StragglerWatch(equal_work(phase.run.plan, phase.run.size), ranks),
            foreseen_bytes=foreseen_bytes(phase.config, phase.run, folder.layers),
        )
        for phase, last_step, own in zip(phases, ends, data)
    )


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within it, what the library warns of is one line, as all that a command says; others' warnings look as they always do."""
    package = Path(__file__).parent
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], filename: str, *others: Any, **named: Any) -> None:
            if Path(filename).is_relative_to(package):
                say(str(message))
            else:
                show(message, category, filename, *others, **named)

        warnings.showwarning = tell
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with the overrides in `arguments` as one rank; returns the exit code."""
    os.umask(os.umask(0o077) | 0o027)  # what a run writes is the owner's, the group may read it

    def work(rank: int) -> Outcome:
        try:
            config = load_config(sys.argv[1:] if arguments is None else arguments)
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
            go_on = "resume=auto run_dir=PATH resumes from the last snapshot"
            return Outcome(rank, Exit.FAILED, f"rank {rank}: {error}; {go_on}")

    return run_as_rank(work, PipelineError)


if __name__ == "__main__":
    leave_process(main())
