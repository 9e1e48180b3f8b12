"""The training entry: config -> plan -> schedule -> run -> report. `torchrun -m pipetrain.train KEY=VALUE ...`."""

from __future__ import annotations

import math
import os
import secrets
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipetrain.config.load import as_yaml, load
from pipetrain.config.records import RunConfig
from pipetrain.config.together import check_run
from pipetrain.data.batch import Batch
from pipetrain.data.dataset import Data, make_data
from pipetrain.engine.available import check_available
from pipetrain.engine.engine import Engine, StepFigures, StepResult
from pipetrain.engine.which import make_engine
from pipetrain.group.failure import PipelineError
from pipetrain.group.group import Group, join_group
from pipetrain.launcher.outcome import Exit, Outcome, announce, announce_run_dir, end
from pipetrain.launcher.stop import StopRequest, ending_with_the_launcher
from pipetrain.loop.guard import Action, Guard, Incident
from pipetrain.loop.incident import advice_on_stop, explain, folder_of, write_incident
from pipetrain.model.size import ModelSize
from pipetrain.model.spec import make_spec
from pipetrain.model.style import check_model
from pipetrain.observe.folder import RunFolder, choose_folder, sees
from pipetrain.observe.metrics import StepMetrics
from pipetrain.observe.recorder import Recorder
from pipetrain.observe.report import RunReport
from pipetrain.observe.trackers.chosen import check_trackers
from pipetrain.plan.from_config import choose_plan, choose_schedule
from pipetrain.plan.measured import FIRST_COMPARED_STEP, MEASURED_STEPS, measure_costs
from pipetrain.plan.plan import Plan
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.schedule import Schedule
from pipetrain.snapshot.session import AUTO, Snapshots, check_start
from pipetrain.snapshot.weights import save_weights
from pipetrain.timeline.breakdown import bubble_fraction
from pipetrain.timeline.shown import Shown, show_schedule
from pipetrain.timeline.step_report import Report
from pipetrain.timeline.stragglers import StragglerWatch

_SHARED_SECONDS = 30.0  # network file systems may show a new file that late


def train(config: RunConfig) -> Outcome:
    """Trains as one of the ranks that torch.distributed knows, and leaves the run folder behind.

    Raises:
        ValueError: the configuration, the data or the number of ranks does not make a run.
        PipelineError: a rank failed.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        with ending_with_the_launcher():
            world = stack.enter_context(join_group(timeout_seconds=config.timeout_seconds, starts_alone=True))
        plan, schedule = choose_plan(config, world.size), choose_schedule(config, world.size)
        data = make_data(config.data, config.seed)
        _check_same_data(data, world)
        folder = _agree_on_folder(config, world)
        snapshots = Snapshots(config, plan, folder.path, world, data=data.fingerprint)
        first = snapshots.first_step
        keep = range(first - 1 + MEASURED_STEPS.start, first - 1 + MEASURED_STEPS.stop)
        recorder = stack.enter_context(closing(Recorder(folder, world.rank, config, keep, first)))
        recorder.start(as_yaml(config), plan)
        spec = make_spec(config.model, data.vocabulary_size)
        engine = make_engine(config, spec, plan, schedule, device=world.device, on_event=recorder.on_event)
        stack.enter_context(closing(engine))
        guard = Guard(config.guard)
        snapshots.attach(engine.model, engine.optimizer, guard)
        watch = StragglerWatch(_equal_work(plan, spec.size))

        run = _Run(config, data, engine, recorder, snapshots, guard, watch, folder)
        signum = _run_steps(run, world, stop)
        last = engine.gather_report() if first <= config.steps else None  # None: all steps were done before
        heldout_loss = None if signum else engine.evaluate(data.heldout)
        if last is not None:
            measured, predicted = _compare(schedule, last.ops, recorder.timelines)
            report = _sum_up(config, plan.balance, last, recorder.metrics, predicted, heldout_loss, signum, first)
            report = replace(
                report,
                skipped_steps=guard.num_skipped,
                rollbacks=guard.num_rollbacks,
                stragglers=watch.stragglers(),
            )
            recorder.finish(report, measured, predicted, last.ops.clock_error_seconds if last.ops else None)
        weights = engine.weights()
        if weights is not None:
            save_weights(folder.weights, weights, spec)
        snapshots.finish()
        world.largest(0)  # nobody leaves before everything is written
    code = Exit.STOPPED if signum else Exit.DONE
    message = _stopped(signum, snapshots) if signum else ""
    return Outcome(world.rank, code, message, str(folder.path) if world.rank == 0 else None)


def _stopped(signum: int, snapshots: Snapshots) -> str:
    """What to type to go on."""
    name = signal.Signals(signum).name
    if snapshots.newest is None:
        return f"stopped by {name}; the report is written, a snapshot could not be"
    return f"stopped by {name}; the report is written, and resume={snapshots.newest} goes on"


@dataclass(frozen=True)
class _Run:
    """What the steps of a run work with."""

    config: RunConfig
    data: Data
    engine: Engine
    recorder: Recorder
    snapshots: Snapshots
    guard: Guard
    watch: StragglerWatch
    folder: RunFolder


def _run_steps(run: _Run, world: Group, stop: StopRequest) -> int:
    """All steps, or as many as there were before a rank was asked to stop; returns the signal, or 0."""
    config, engine, guard = run.config, run.engine, run.guard
    every = config.observe.evaluate_every_steps
    step = run.snapshots.first_step
    engine.start_at(step)

    def accepts(step: int, loss: float, grad_norm: float | None) -> bool:
        is_accepted = guard.accepts(step, loss, grad_norm)
        run.snapshots.before_update()
        return is_accepted

    while step <= config.steps:
        started = time.perf_counter()
        batch = run.data.train.batch(guard.batch_of(step))
        result = engine.step(step, batch, accepts)
        figures = engine.gather_report()
        seconds = time.perf_counter() - started
        if guard.incident is not None and (back_at := _respond(run, guard.incident, batch)) is not None:
            step = back_at
            continue
        num_tokens = config.data.batch_size * config.data.sequence_length
        if figures is None:
            run.recorder.end_step(step)
        else:
            timeline = None if figures.ops is None else figures.ops.timeline
            run.recorder.end_step(step, _metrics(step, result, figures, num_tokens / seconds), timeline)
            if timeline is not None:
                run.watch.add(step, timeline)
        if every is not None and step % every == 0 and step < config.steps:
            run.recorder.evaluated(step, engine.evaluate(run.data.heldout))
        signum = world.largest(stop.signum)
        run.snapshots.after_step(step, stopping=bool(signum))
        if signum:
            return signum
        step += 1
    return 0


def _respond(run: _Run, incident: Incident, batch: Batch) -> int | None:
    """A step was refused: say where it went wrong, keep its batch, and do what the guard decided.

    Returns:
        The step to go on with after a rollback; None: with the next one.

    Raises:
        PipelineError: the run stops.
    """
    diagnosis = run.engine.diagnose(batch)
    state = run.snapshots.roll_back() if incident.action is Action.ROLLBACK else None
    if incident.action is Action.ROLLBACK and state is None:
        incident = run.guard.cannot_go_back()
    folder = folder_of(run.folder.inspect, incident)
    if run.recorder.is_first:
        try:
            write_incident(folder, incident, diagnosis, batch, run.config.seed)
        except OSError as error:
            run.recorder.say(f"{folder} could not be written ({error.strerror})")
    if incident.action is Action.STOP:
        raise PipelineError(f"{explain(incident, diagnosis)}; {advice_on_stop(incident, folder)}")
    run.recorder.say(f"{explain(incident, diagnosis)}; the batch is in {folder}")
    if state is None:
        return None
    run.guard.rolled_back(state.step, state.guard)
    run.recorder.rewind(state.step + 1)
    run.engine.start_at(state.step + 1)
    run.recorder.say(f"back to step {state.step}; batches passed over because of it: {incident.step - state.step}")
    return state.step + 1


def _equal_work(plan: Plan, size: ModelSize) -> dict[int, tuple[tuple[str, ...], ...]]:
    """What each rank has to do, stage by stage; empty where it is not known."""
    if size.kinds is None:
        return {}
    return {
        rank: tuple(size.kinds[layers.start : layers.stop] for layers in map(plan.layers_of, plan.stages_of(rank)))
        for rank in range(plan.num_ranks)
    }


def _metrics(step: int, result: StepResult, figures: StepFigures, tokens_per_second: float) -> StepMetrics:
    ops, unknown = figures.ops, (None,) * figures.num_ranks

    def per_rank(name: str) -> tuple[float | None, ...]:
        return unknown if ops is None else tuple(getattr(rank, name) for rank in ops.breakdown)

    return StepMetrics(
        step=step,
        loss=result.loss if math.isfinite(result.loss) else None,
        lr=result.learning_rate,
        grad_norm=result.grad_norm if result.grad_norm is not None and math.isfinite(result.grad_norm) else None,
        tokens_per_second=tokens_per_second,
        step_seconds=figures.step_seconds,
        bubble_fraction=None if ops is None else bubble_fraction(ops.breakdown),
        mfu=None,
        recompute_hidden_seconds=per_rank("recompute_hidden_seconds"),
        recompute_exposed_seconds=per_rank("recompute_exposed_seconds"),
        wait_activation_seconds=per_rank("wait_activation_seconds"),
        wait_gradient_seconds=per_rank("wait_gradient_seconds"),
        fill_seconds=per_rank("fill_seconds"),
        drain_seconds=per_rank("drain_seconds"),
        imbalance_seconds=per_rank("imbalance_seconds"),
        unexplained_seconds=per_rank("other_seconds"),
        peak_activation_bytes=unknown if ops is None else ops.peak_activation_bytes,
        peak_memory_bytes=figures.peak_memory_bytes,
        skipped=not result.is_accepted,
    )


def _compare(schedule: Schedule, last: Report | None, early: Sequence[Timeline]) -> tuple[Shown | None, Shown | None]:
    """The last step, and the step that the op times of `early` steps predict; neither where nobody tells of ops."""
    if last is None:
        return None, None
    costs = measure_costs(schedule.num_stages, early or [last.timeline])
    measured = Shown(schedule, costs, last.timeline, bound_of(schedule, costs), last.breakdown)
    return measured, show_schedule(schedule, costs) if early else None


def _sum_up(
    config: RunConfig,
    balance: tuple[int, ...],
    last: StepFigures,
    metrics: Sequence[StepMetrics],
    predicted: Shown | None,
    heldout_loss: float | None,
    signum: int,
    first_step: int,
) -> RunReport:
    """The report of the run: medians over the steps that were predicted (all, where there are too few), peaks of all.

    A run that goes on reports the steps since then: before, it may have had another number of ranks.
    """
    compared = [step for step in metrics if step.step >= first_step - 1 + FIRST_COMPARED_STEP]
    settled = compared or metrics

    def median(name: str) -> float | None:
        return _known(statistics.median, [getattr(step, name) for step in settled])

    def medians(name: str) -> tuple[float | None, ...]:
        return tuple(_known(statistics.median, values) for values in zip(*(getattr(step, name) for step in settled)))

    return RunReport(
        experiment=config.experiment,
        schedule=config.pipeline.schedule,
        recompute_mode=config.recompute.mode,
        balance=balance,
        steps=metrics[-1].step,
        loss=metrics[-1].loss,
        heldout_loss=heldout_loss,
        tokens_per_second=median("tokens_per_second"),
        step_seconds_measured=median("step_seconds"),
        step_seconds_predicted=predicted.step_seconds if predicted and compared else None,
        bubble_fraction=median("bubble_fraction"),
        stopped_by=signal.Signals(signum).name if signum else None,
        recompute_hidden_seconds=medians("recompute_hidden_seconds"),
        recompute_exposed_seconds=medians("recompute_exposed_seconds"),
        peak_activation_bytes=tuple(
            _known(max, values) for values in zip(*(step.peak_activation_bytes for step in metrics))
        ),
        peak_activation_bytes_never=last.ops.peak_activation_bytes_never if last.ops else (None,) * last.num_ranks,
    )


def _check_same_data(data: Data, world: Group) -> None:
    """Each rank reads for itself: on several machines, inputs and targets might be of different text.

    Raises:
        ValueError: on every rank.
    """
    if world.largest(int(world.from_first(data.fingerprint) != data.fingerprint)):
        raise ValueError(
            "the ranks do not read the same text (its SHA-256 differs): every machine needs the same files under data.path, or, "
            "with data=stdlib, the same Python"
        )


def _known(sum_up: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """`sum_up` of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum_up(known) if known else None


def _agree_on_folder(config: RunConfig, world: Group) -> RunFolder:
    """Rank 0 chooses and makes it; the others are told, also what went wrong."""
    chosen, problem = "", ""
    if world.rank == 0:
        try:
            folder = choose_folder(config.run_dir, config.experiment)
            folder.create(again=config.resume == AUTO)
            chosen = str(folder.path)
            announce_run_dir(chosen)
        except ValueError as error:
            problem = str(error)
    chosen, problem = world.from_first((chosen, problem))
    if problem:
        raise ValueError(problem)
    if world.size > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        _check_shared(Path(chosen), world)
    return RunFolder(Path(chosen))


def _check_shared(run_dir: Path, world: Group) -> None:
    """Ranks of several machines write into one run folder, and go on from its snapshots.

    Raises:
        ValueError: a machine does not see the folder of the first; on every rank.
    """
    mark = f".seen-from-all-machines-{world.from_first(secrets.token_hex(4))}"
    if world.rank == 0:
        (run_dir / mark).touch()
    try:
        seen = sees(run_dir, mark, _SHARED_SECONDS)
        first_blind = world.largest(0 if seen else world.size - world.rank)
    finally:
        if world.rank == 0:
            (run_dir / mark).unlink()
    if first_blind:
        raise ValueError(
            f"run_dir={run_dir}: the machine of rank {world.size - first_blind} does not see this folder of the first "
            "machine; choose a folder on a file system that all machines share"
        )


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
        check_start(config)
        check_model(config.model, sequence_length=config.data.sequence_length)
        # Read when CUDA starts. With 1, streams would wait on each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.set_num_threads(config.threads_per_rank)
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
