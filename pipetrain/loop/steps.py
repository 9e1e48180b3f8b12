"""The steps of a run, one after the other: batch, engine, guard, figures, snapshot.

engine.step ── accepted ──► figures ──► held-out evaluation ──► snapshot ──► next step
     │ refused: diagnose, keep the batch, then
     ▼
stop    or    go on with the next batch    or    roll back: an older step comes again, with another batch
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipetrain.data.batch import Batch
from pipetrain.data.dataset import Data
from pipetrain.engine.engine import Engine
from pipetrain.group.failure import PipelineError
from pipetrain.loop.guard import Action, Guard, Incident
from pipetrain.loop.incident import advice_on_stop, explain, folder_of, write_incident
from pipetrain.loop.over_replicas import OverReplicas
from pipetrain.loop.tokens import Tokens, TokensSeen, tokens_of
from pipetrain.model.size import ModelSize
from pipetrain.model.spec import ModelSpec
from pipetrain.observe.recorder import Recorder
from pipetrain.observe.run_report import TokenFigures, make_report, measured_and_predicted, metrics_of
from pipetrain.plan.plan import Plan
from pipetrain.schedule.schedule import Schedule
from pipetrain.snapshot.session import Ranks, Snapshots
from pipetrain.snapshot.weights import save_weights
from pipetrain.timeline.rank_place import RankPlace
from pipetrain.timeline.step_report import StepFigures, StepResult
from pipetrain.timeline.stragglers import StragglerWatch


@dataclass(frozen=True)
class Steps:
    """What the steps of a run work with; every rank has one and runs it. `inspect` is where batches of refused steps go."""

    num_steps: int
    mfu_of_a_token_per_second: float | None  # None: what the model does, or a device can do, is not known
    evaluate_every_steps: int | None  # None: nothing is evaluated on the way
    seed: int
    data: Data
    spec: ModelSpec
    engine: Engine
    recorder: Recorder
    snapshots: Snapshots
    guard: Guard
    seen: TokensSeen
    watch: StragglerWatch
    ranks: tuple[RankPlace, ...]
    inspect: Path
    replicas: OverReplicas

    def run(self, asked_to_stop: Callable[[], int]) -> int:
        """All steps from the snapshots' first on, or until `asked_to_stop` tells all ranks of a signal; returns it, or 0.

        Raises:
            PipelineError: a step was refused, and the guard ends the run.
        """
        step = self.snapshots.first_step
        self.engine.start_at(step)
        while step <= self.num_steps:
            started = time.perf_counter()
            batch = self.data.train.batch(self.guard.batch_of(step), self.replicas.share)
            result = self.engine.step(step, batch, self._accepts)
            figures = self.engine.gather_report()
            seconds = time.perf_counter() - started
            if self.guard.incident is not None and (back_at := self._respond(self.guard.incident, batch)) is not None:
                step = back_at
                continue
            tokens = self.replicas.add_up(tokens_of(batch, self.spec))
            if result.is_accepted:
                self.seen.add(tokens)
            self._record(step, result, figures, tokens, seconds)
            signum = asked_to_stop()
            self._compare_replicas(step, stopping=bool(signum))
            self.snapshots.after_step(step, stopping=bool(signum))
            if signum:
                return signum
            step += 1
        return 0

    def report(self, experiment: str, plan: Plan, schedule: Schedule, signum: int) -> None:
        """What was predicted and what was done, with the held-out loss where no signal ended the run. Collective."""
        first = self.snapshots.first_step
        last = self.engine.gather_report() if first <= self.num_steps else None  # None: all steps were done before
        heldout_loss = None if signum else self.engine.evaluate(self.data.heldout)
        if last is None:
            return
        measured, predicted = measured_and_predicted(schedule, last.ops, self.recorder.timelines)
        report = make_report(
            experiment,
            plan,
            schedule,
            self.recorder.metrics,
            last,
            first_step=first,
            predicted=predicted,
            heldout_loss=heldout_loss,
            stopped_by=signal.Signals(signum).name if signum else None,
        )
        report = replace(
            report,
            tokens_seen=self.seen.total.all,
            counted_tokens_seen=self.seen.total.counted,
            skipped_steps=self.guard.num_skipped,
            rollbacks=self.guard.num_rollbacks,
            stragglers=self.watch.stragglers(),
            ranks=self.ranks,
        )
        self.recorder.finish(report, measured, predicted, last.ops.clock_error_seconds if last.ops else None)

    def finish(self, folder: Path, ranks: Ranks) -> None:
        """Each rank of the first replica writes its part of the model into `folder`, for `generate`, `export` and `init_from`; then a
        snapshot on its way. Collective.
        """
        save_weights(folder, self.engine.weights(), self.spec, ranks, self.replicas.shard)
        self.snapshots.finish()

    def _compare_replicas(self, step: int, *, stopping: bool) -> None:
        """Where it is time to, and before each snapshot: what differs must not be saved."""
        if not self.replicas.are_compared(step, saving=self.snapshots.is_due(step, stopping=stopping)):
            return
        try:
            self.engine.check_replicas()
        except PipelineError as error:
            raise PipelineError(
                f"{error} (seen after step {step}, nothing was saved since; resume=auto goes on from the newest snapshot, in which they "
                "were the same)"
            ) from error

    def _accepts(self, step: int, loss: float, grad_norm: float | None) -> bool:
        is_accepted = self.guard.accepts(step, loss, grad_norm)
        self.snapshots.before_update()
        return is_accepted

    def _record(
        self, step: int, result: StepResult, figures: StepFigures | None, tokens: Tokens, seconds: float
    ) -> None:
        """Writes what the step did, and evaluates where it is time to; rank 0 has the figures."""
        if figures is None:
            self.recorder.end_step(step)
        else:
            timelines = () if figures.ops is None else figures.ops.timelines
            of_tokens = TokenFigures(tokens.all, tokens.counted, self.seen.total.all, tokens.all / seconds)
            metrics = metrics_of(step, result, figures, of_tokens, self.mfu_of_a_token_per_second)
            self.recorder.end_step(step, metrics, timelines)
            if timelines:
                self.watch.add(step, *timelines)
        every = self.evaluate_every_steps
        if every is not None and step % every == 0 and step < self.num_steps:
            self.recorder.evaluated(step, self.engine.evaluate(self.data.heldout))

    def _respond(self, incident: Incident, batch: Batch) -> int | None:
        """A step was refused, by all replicas: say where it went wrong, keep its whole batch, and do what the guard decided.

        Returns:
            The step to go on with after a rollback; None: with the next one.

        Raises:
            PipelineError: the run stops.
        """
        diagnosis = self.engine.diagnose(batch)
        state = self.snapshots.roll_back() if incident.action is Action.ROLLBACK else None
        if incident.action is Action.ROLLBACK and state is None:
            incident = self.guard.cannot_go_back()
        folder = folder_of(self.inspect, incident)
        if self.recorder.is_first:
            try:
                write_incident(folder, incident, diagnosis, self.data.train.batch(incident.batch), self.seed)
            except OSError as error:
                self.recorder.say(f"{folder} could not be written ({error.strerror})")
        if incident.action is Action.STOP:
            raise PipelineError(f"{explain(incident, diagnosis)}; {advice_on_stop(incident, folder)}")
        self.recorder.say(f"{explain(incident, diagnosis)}; the batch is in {folder}")
        if state is None:
            return None
        self.guard.rolled_back(state.step, state.guard)
        self.seen.load_state_dict(state.tokens)
        self.recorder.rewind(state.step + 1)
        self.engine.start_at(state.step + 1)
        self.recorder.say(f"back to step {state.step}; batches passed over because of it: {incident.step - state.step}")
        return state.step + 1


def equal_work(plan: Plan, size: ModelSize) -> dict[int, tuple[tuple[str, ...], ...]]:
    """What each rank of a replica has to do, stage by stage; empty where it is not known."""
    if size.kinds is None:
        return {}
    return {
        rank: tuple(size.kinds[layers.start : layers.stop] for layers in map(plan.layers_of, plan.stages_of(rank)))
        for rank in range(plan.num_ranks)
    }
