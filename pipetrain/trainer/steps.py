"""The steps of a run, one after the other: batch, engine, guard, figures, snapshot.

engine.step ── accepted ──► figures ──► held-out evaluation ──► snapshot ──► next step, perhaps of another phase
     │ refused: diagnose, keep the batch, then
     ▼
stop    or    go on with the next batch    or    roll back: an older step comes again, with another batch

Loss, learning rate and gradient norm are known on every rank and written after each step. Events go up the chain of ranks and are taken
apart and drawn by rank 0: after the first steps, then after every n-th. Rank 0 fixes n once, by what the first reports cost.
"""

from __future__ import annotations

import gc
import json
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.comm.chain import Chain
from pipetrain.comm.coordinates import Coordinates
from pipetrain.comm.failure import PipelineError
from pipetrain.comm.group import Group
from pipetrain.config.read_files import fitted
from pipetrain.config.records import RunConfig
from pipetrain.data.batch import Batch, Share
from pipetrain.data.batches import Batches, PhasedBatches
from pipetrain.engine.engine import Engine
from pipetrain.models.size import ModelSize
from pipetrain.models.spec import ModelSpec
from pipetrain.models.weights import Shard, save_weights
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.recorder import Recorder
from pipetrain.monitor.report import (
    RunReport,
    make_report,
    measured_and_predicted,
    measured_steps,
    peak_activation_bytes,
)
from pipetrain.monitor.step_report import StepFigures, StepResult, metrics_of
from pipetrain.monitor.stragglers import StragglerWatch
from pipetrain.plan.mesh import RankPlace
from pipetrain.plan.plan import Plan
from pipetrain.schedule.schedule import Schedule
from pipetrain.snapshot.session import Snapshots
from pipetrain.trainer.guard import Action, Guard, Incident, advice_on_stop, explain, folder_of, write_incident

FIRST_STEPS = 10  # all of which report: this is where a run goes wrong or settles
MOST_SHARE = 0.01  # of the time of steps, which reports may cost


class Tokens(NamedTuple):
    """all: positions of the targets, with padding and all else that does not count. counted: those that the loss is a mean over."""

    all: int
    counted: int


def tokens_of(batch: Batch, spec: ModelSpec) -> Tokens:
    """The tokens of a batch; `spec` knows which count."""
    if batch.targets is None:  # this rank reads none
        return Tokens(0, 0)
    leaves = pytree.tree_leaves(batch.targets)
    return Tokens(sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), int(spec.count(batch.targets)))


class TokensSeen:
    """Tokens of all steps that changed the weights, those before a resume too; and how far the `batches` are read. Its state belongs into a
    snapshot."""

    def __init__(self, batches: Batches | None = None) -> None:
        self.total = Tokens(0, 0)
        self._batches = batches

    def add(self, tokens: Tokens) -> None:
        """Another step."""
        self.total = Tokens(self.total.all + tokens.all, self.total.counted + tokens.counted)

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        stream = {} if self._batches is None else self._batches.state_dict()
        return {**self.total._asdict(), **({"stream": stream} if stream else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what `state_dict` gave; an empty mapping (a snapshot of an older version) begins at 0."""
        self.total = Tokens(*(fitted(int, state.get(key, 0), key) for key in Tokens._fields))
        if self._batches is not None:
            self._batches.load_state_dict(state.get("stream", {}))


def share_of(plan: Plan, replica: int) -> Share | None:
    """Which samples of a batch are this replica's; None: all, as there is one replica."""
    return Share(replica, plan.num_replicas, plan.num_microbatches) if plan.num_replicas > 1 else None


def shard_of(plan: Plan, at: Coordinates) -> Shard:
    """Which file of weights the rank `at` these coordinates writes at the end of the run: those of the first replica write."""
    return Shard(at.stage if at.replica == 0 else None, plan.num_ranks)


def of_all_replicas(own: Tokens, replicas: Chain) -> Tokens:
    """The tokens of all replicas, where this one has `own`. Collective over `replicas`, the ranks at this place in each.

    Raises PipelineError: a rank is gone, or did not come.
    """
    parts = [json.loads(part) for part in replicas.concatenate(json.dumps(own).encode(), "tokens of a step")]
    return Tokens(sum(part[0] for part in parts), sum(part[1] for part in parts))


def are_compared(plan: Plan, every: int | None, step: int, *, saving: bool) -> bool:
    """Whether it is time to see that all replicas have the same weights after `step`; it is before each save."""
    return every is not None and plan.num_replicas > 1 and (saving or step % every == 0)


@dataclass
class PhaseSteps:
    """Steps `first_step` to `last_step` of a run: what they run by, and what they leave for the report. A run without phases is one."""

    number: int | None  # from 0; None: the run has no phases
    first_step: int
    last_step: int
    config: RunConfig
    plan: Plan
    schedule: Schedule
    heldout: Iterable[Batch]
    mfu_of_a_token_per_second: float | None  # None: what the model does, or a device can do, is not known
    watch: StragglerWatch
    foreseen_bytes: tuple[int, ...] = ()  # of activations, the most of each rank of a replica
    last: StepFigures | None = None  # of its last step that was reported so far, on rank 0


def phase_of(phases: Sequence[PhaseSteps], step: int) -> PhaseSteps:
    """The phase of `step`; past the end of the run the last one."""
    return next(phase for phase in reversed(phases) if phase.first_step <= step)


class Reports:
    """One per rank; `agree` gives the largest number that any rank gave. `is_first`: whether it is rank 0, whose clock counts."""

    def __init__(self, agree: Callable[[int], int], *, is_first: bool) -> None:
        self.every: int | None = None  # None: not fixed yet
        self._agree = agree
        self._is_first = is_first
        self._cost = 0.0  # of this step
        self._costs: list[float] = []
        self._steps: list[float] = []

    def are_due(self, step: int) -> bool:
        """Whether the ranks report `step`; the same on every rank."""
        return self.every is None or step % self.every == 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what a report costs: the time that this thread computes, because it would wait for the other ranks anyway."""
        before = time.thread_time()
        yield
        self._cost += time.thread_time() - before

    def end_step(self, seconds: float) -> None:
        """A step took so long. Collective after the last of the first ones."""
        cost, self._cost = self._cost, 0.0
        if self.every is not None:
            return
        self._costs.append(cost)
        self._steps.append(seconds)
        if len(self._steps) == FIRST_STEPS:
            share = statistics.median(self._costs) / max(statistics.median(self._steps), 1e-9)
            self.every = self._agree(max(1, math.ceil(share / MOST_SHARE)) if self._is_first else 0)


@dataclass(frozen=True)
class Steps:
    """What the steps of a run work with; every rank has one and runs it."""

    config: RunConfig
    phases: tuple[PhaseSteps, ...]
    batches: PhasedBatches
    spec: ModelSpec
    engine: Engine
    recorder: Recorder
    snapshots: Snapshots
    guard: Guard
    seen: TokensSeen
    ranks: tuple[RankPlace, ...]
    folder: RunFolder
    group: Group

    def request(self, signum: int) -> int:
        """What this rank asks for after a step: one number for a signal and for a snapshot by the clock, whose largest all ranks obey.

        A signal hides the clock of another rank, but a run that stops saves anyway.
        """
        return 2 * signum + self.snapshots.clock_asks()

    def run(self, asked: Callable[[], int], agree: Callable[[int], int]) -> int:
        """Runs all steps from the snapshots' first or until `asked`, the largest `request` of all ranks, has a signal; returns it or 0. `agree`
        gives the largest number that any rank gave.

        The engine was made for the phase of the first of them.

        Raises PipelineError: a step was refused, and the guard ends the run.
        """
        step = self.snapshots.first_step
        self.engine.start_at(step)
        phase, predicts = phase_of(self.phases, step), measured_steps(step)
        reports = Reports(agree, is_first=self.recorder.is_first)
        replica = self.group.coordinates.replica
        while step <= self.config.num_steps:
            if (other := phase_of(self.phases, step)) is not phase:
                phase, predicts = other, measured_steps(step)
                self.engine.change(phase.plan, phase.schedule)
                self.recorder.begin_phase(phase.number, step, predicts)
            started = time.perf_counter()
            batch = self.batches.batch(step, self.guard.passed_over, share_of(phase.plan, replica))
            result = self.engine.step(step, batch, self._accepts)
            figures = None
            if is_due := reports.are_due(step) or step in predicts or step == phase.last_step:
                with reports.working():
                    figures = self.engine.gather_report()
            seconds = time.perf_counter() - started
            if self.guard.incident is not None and (back_at := self._respond(self.guard.incident, batch)) is not None:
                step = back_at
                continue
            tokens = of_all_replicas(tokens_of(batch, self.spec), self.group.replicas)
            if result.is_accepted:
                self.seen.add(tokens)
            signum, by_clock = divmod(asked(), 2)
            if signum and not is_due:
                figures = self.engine.gather_report()
            with reports.working():
                self._record(phase, step, result, figures, tokens, seconds)
            self._evaluate(phase, step)
            reports.end_step(seconds)
            self._compare_replicas(step, saves=bool(signum or by_clock))
            self.snapshots.after_step(step, stopping=bool(signum), by_clock=bool(by_clock))
            if signum:
                return signum
            if step == self.snapshots.first_step:
                # All this lives as long as the run. A collection that looked at it would stop this rank, and its neighbours, for 0.15 s.
                gc.collect()
                gc.freeze()
            step += 1
        return 0

    def report(self, signum: int) -> None:
        """What was predicted and what was done, with the held-out loss where no signal ended the run. Collective."""
        last_step = self.recorder.last_step
        phase = phase_of(self.phases, self.config.num_steps if last_step is None else last_step)
        heldout_loss = None if signum else self.engine.evaluate(phase.heldout)
        self._report_phase(phase, heldout_loss, stopped_by=signal.Signals(signum).name if signum else None)

    def _report_phase(
        self, phase: PhaseSteps, heldout_loss: float | None, *, stopped_by: str | None = None, is_last: bool = True
    ) -> None:
        """What the steps of `phase` did that this process has seen, and with the last phase what the run did."""
        if phase.last is None:  # all steps were done before, or this is not rank 0
            return
        measured, predicted = measured_and_predicted(phase.schedule, phase.last.ops, self.recorder.timelines)
        metrics = [one for one in self.recorder.metrics if phase.first_step <= one.step <= phase.last_step]
        report = make_report(
            phase.schedule,
            metrics,
            phase.last,
            first_step=metrics[0].step,
            predicted=predicted,
            heldout_loss=heldout_loss,
            experiment=self.config.experiment,
            balance=phase.plan.balance,
            stopped_by=stopped_by,
            tokens_seen=self.seen.total.all,
            counted_tokens_seen=self.seen.total.counted,
            skipped_steps=self.guard.num_skipped,
            rollbacks=self.guard.num_rollbacks,
            stragglers=phase.watch.stragglers(),
            ranks=self.ranks,
            peak_activation_bytes_predicted=tuple(
                phase.foreseen_bytes[one.place] for one in self.ranks if phase.foreseen_bytes
            ),
            batch_size=phase.config.data.global_batch_size,
            sequence_length=phase.config.data.sequence_length,
            num_microbatches=phase.plan.num_microbatches,
            phase=phase.number,
        )
        reports = [report] if phase.number is None or not is_last else [report, self._of_all_phases(report)]
        for one in reports:
            self.recorder.finish(one, measured, predicted, phase.last.ops)

    def _of_all_phases(self, last: RunReport) -> RunReport:
        """The report of the run: that of its last phase, with what is of all, and each phase by itself."""
        metrics = self.recorder.metrics
        before = (self.recorder.report_of_phase(number) for number in range(last.phase or 0))
        phases = (*(report for report in before if report is not None), last)
        return replace(
            last,
            phase=None,
            phases=phases,
            first_step=metrics[0].step,
            peak_activation_bytes=peak_activation_bytes(metrics),
            stragglers=tuple(straggler for phase in self.phases for straggler in phase.watch.stragglers()),
        )

    def finish(self) -> None:
        """Each rank of the first replica writes its part of the model, for `generate`, `export` and `init_from`; then a save is
        waited for. Collective.
        """
        shard = shard_of(self.phases[0].plan, self.group.coordinates)
        save_weights(self.folder.weights, self.engine.weights(), self.spec, self.group, shard)
        self.snapshots.finish()

    def _compare_replicas(self, step: int, *, saves: bool) -> None:
        """Where it is time to, and before each snapshot: what differs must not be saved."""
        every, is_saved = self.config.parallel.check_every_steps, self.snapshots.is_due(step, asked=saves)
        if not are_compared(self.phases[0].plan, every, step, saving=is_saved):
            return
        try:
            self.engine.check_replicas()
        except PipelineError as error:
            raise PipelineError(
                f"{error} (seen after step {step}, and in no snapshot; resume=auto resumes from the newest snapshot, in which they "
                "were the same)"
            ) from error

    def _accepts(self, step: int, loss: float, grad_norm: float | None) -> bool:
        is_accepted = self.guard.accepts(step, loss, grad_norm)
        self.snapshots.before_update()
        return is_accepted

    def _record(
        self,
        phase: PhaseSteps,
        step: int,
        result: StepResult,
        figures: StepFigures | None,
        tokens: Tokens,
        seconds: float,
    ) -> None:
        """Writes what the step did; rank 0 has the figures, of the steps that are reported."""
        if not self.recorder.is_first:
            self.recorder.end_step(step)
            return
        phase.last = figures or phase.last
        known = figures or StepFigures(None, (None,) * len(self.ranks))
        seen, mfu = self.seen.total.all, phase.mfu_of_a_token_per_second
        metrics = metrics_of(step, result, known, tokens, seen, seconds, mfu, phase.number)
        self.recorder.end_step(step, metrics, known.ops)
        if known.ops is not None:
            phase.watch.add(step, *known.ops.timelines)

    def _evaluate(self, phase: PhaseSteps, step: int) -> None:
        """Evaluates when due. Collective."""
        if step == self.config.num_steps:
            return
        every = self.config.observe.eval_every_steps
        if every is not None and step % every == 0:
            self.recorder.evaluated(step, self.engine.evaluate(phase.heldout))
        if step == phase.last_step:
            self._report_phase(phase, self.engine.evaluate(phase.heldout), is_last=False)

    def _respond(self, incident: Incident, batch: Batch) -> int | None:
        """A step was refused, by all replicas: say where it went wrong, keep its whole batch, and do what the guard decided.

        Returns:
            The step to go on with after a rollback; None: with the next one.

        Raises PipelineError: the run stops.
        """
        diagnosis = self.engine.diagnose(batch)
        state = self.snapshots.roll_back() if incident.action is Action.ROLLBACK else None
        if incident.action is Action.ROLLBACK and state is None:
            incident = self.guard.cannot_go_back()
        folder = folder_of(self.folder.inspect, incident)
        if self.recorder.is_first:
            whole = self.batches.batch(incident.step, self.guard.passed_over)
            try:
                write_incident(folder, incident, diagnosis, whole, self.config.seed)
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
        self.recorder.say(f"back to step {state.step}; batches skipped because of it: {incident.step - state.step}")
        return state.step + 1


def equal_work(plan: Plan, size: ModelSize) -> dict[int, tuple[tuple[str, ...], ...]]:
    """The kinds of each rank's layers, stage by stage; empty where they are not known."""
    if size.kinds is None:
        return {}
    return {
        rank: tuple(size.kinds[layers.start : layers.stop] for layers in map(plan.layers_of, plan.stages_of(rank)))
        for rank in range(plan.num_ranks)
    }
