"""report.json and report.md: what a run did, beside what it was predicted to do; how they are made, written and read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipetrain.config.read_files import DamagedFile, fitted
from pipetrain.config.write_files import replace_file
from pipetrain.monitor.draw.table import Table, number, size
from pipetrain.monitor.folder import FORMAT_VERSION, read_current
from pipetrain.monitor.measured_costs import FIRST_COMPARED_STEP, MEASURED_STEPS, measure_costs
from pipetrain.monitor.shown import Shown, show_schedule
from pipetrain.monitor.step_report import PerRank, Report, StepFigures, StepMetrics, perplexity_of
from pipetrain.monitor.stragglers import Straggler
from pipetrain.plan.mesh import RankPlace, name_of, num_replicas_of
from pipetrain.schedule.bound import bound_of
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.events import Timeline
from pipetrain.schedule.schedule import Schedule


@dataclass(frozen=True)
class RunReport:
    """One run. None: not known. Tuples: a number per rank, in rank order. Seconds, bytes; medians over steps, peaks of all."""

    experiment: str
    schedule: str
    recompute_mode: str
    balance: tuple[int, ...]  # layers per stage
    steps: int  # that were trained
    loss: float | None  # of the last step, nats per token
    heldout_loss: float | None  # nats per token, over text that training never saw
    tokens_per_second: float | None
    step_seconds_measured: float | None
    step_seconds_predicted: float | None
    bubble_fraction: float | None
    stopped_by: str | None  # the signal that ended the run early
    recompute_hidden_seconds: PerRank
    recompute_exposed_seconds: PerRank
    peak_activation_bytes: PerRank
    peak_activation_bytes_never: PerRank  # without recomputation
    peak_activation_bytes_predicted: PerRank = ()  # by a profile of layers; none where there is none
    format_version: int = FORMAT_VERSION
    skipped_steps: int = 0  # steps that did not change the weights, because of their loss or gradient
    rollbacks: int = 0  # how often the run rolled back to an older snapshot, because of a loss or gradient
    stragglers: tuple[Straggler, ...] = ()  # ranks whose ops became slower, or are slower than their like
    mfu: float | None = None  # median share of what the devices could do (observe.peak_flops_per_second)
    set_bytes: PerRank = ()  # of one microbatch, the most of any stage of the rank; empty if not known
    input_bytes: PerRank = ()  # likewise, the stage's input that waits for R
    kept_bytes: PerRank = ()  # likewise, outputs that are kept for R (recompute.selective)
    host_bytes: PerRank = ()  # of the host's memory, reserved for offloaded sets (recompute.offload)
    deferred_share: PerRank = ()  # of the last step's seconds of backward, those of W; none where that is not known
    perplexity: float | None = None  # e to the loss of the last step
    heldout_perplexity: float | None = None
    tokens_seen: int | None = None  # by all steps that changed the weights, those before a resume too; with padding
    counted_tokens_seen: int | None = None  # of these, those that counted in the loss
    ranks: tuple[RankPlace, ...] = ()  # the replica and the stages of each
    batch_size: int | None = None  # samples of a step; this and the next two: of the last phase
    sequence_length: int | None = None  # tokens of a sample
    num_microbatches: int | None = None
    first_step: int | None = None  # of those that medians and peaks are of; None: an older version wrote it
    phase: int | None = None  # the phase that it is the report of, from 0; None: it is that of the run
    phases: tuple[RunReport, ...] = ()  # that of each phase that is over, and of the last one


def write_report(path: Path, report: RunReport) -> None:
    replace_file(path, json.dumps(asdict(report), indent=2) + "\n")


def read_report(path: Path) -> RunReport:
    """The report of a run.

    Raises:
        ValueError: there is none, or another version wrote it; DamagedFile: it is no report.
    """
    todo = "its run's metrics.jsonl may still be whole"
    values = read_current(path, "there is no report; the run is still going on, or it failed", todo)
    try:
        report: RunReport = fitted(RunReport, values)
    except ValueError as error:
        raise DamagedFile(path, f"this is not a report of this version: {error}", todo) from error
    return report


# What a row or a column of the tables below is, by how its name begins.
_WORDS = {
    "loss": "of the last step, mean over the targets of the batch that count; nats per token.",
    "held-out loss": "the same over text that training never sees, after the last step.",
    "perplexity": "e to the loss.",
    "held-out perplexity": "e to the held-out loss.",
    "tokens seen": "positions of all batches so far, with padding.",
    "tokens per second": "positions of a batch over the whole step, with optimizer and bookkeeping; median.",
    "tokens/s": "positions of a batch over the whole step, with optimizer and bookkeeping; median.",
    "step": "seconds from the first op to the last one of any rank; median.",
    "step, measured": "from the first op to the last one of any rank; median from step 5 on.",
    "step, predicted": "the schedule simulated with the op times of steps 2 to 4; in brackets its error.",
    "bubble": "share of the step in which a rank computes nothing, over all ranks; median.",
    "model FLOPs": "FLOPs of forward and backward over observe.peak_flops_per_second of all devices; R does not count.",
    "recompute hidden": "seconds of R in which the rank would have waited; median.",
    "recompute exposed": "seconds of R for which the next op had to wait; median.",
    "backward deferred": "share of the backward that ran later, as gradients of weights.",
    "peak activations": "most bytes held for a backward, messages included.",
    "foreseen by the profile": "peak activations, from the layers that were measured before the run.",
    "without recomputation": "what the rank would hold at most if all sets were kept.",
    "set of a microbatch": "bytes of activations that a backward needs; of several stages the largest.",
    "its input": "bytes of the stage's input, from F to R.",
    "sets in host memory": "bytes of the host that are reserved for copied sets (recompute.offload).",
    "its outputs": "bytes of outputs that stay from F to B although R runs.",
    "phase": "number of the phase, from 0.",
    "steps": "its first and last step.",
    "batch": "samples of a step x tokens of a sample.",
    "microbatches": "slices of a batch.",
    "recompute": "recompute.mode of the phase.",
    "predicted": "as above, from steps 2 to 4 of the phase.",
    "R exposed, most": "of the rank that has most.",
    "run": "the name of the folder.",
    "experiment": "its `experiment` key.",
    "differs in": "keys whose values are not those of all runs.",
    "held-out": "loss over text that training never sees, after the last step.",
    "exposed R": "seconds of R for which the next op had to wait, summed over ranks; median.",
}


def words_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """A sentence for each of these rows or columns that has one."""
    longest = sorted(_WORDS, key=len, reverse=True)
    found = ((name, next((key for key in longest if name.startswith(key)), None)) for name in names)
    return [(name, _WORDS[key]) for name, key in found if key is not None]


def as_markdown(report: RunReport) -> str:
    """The report as a page that reads well as text, too."""
    stopped = f", stopped by {report.stopped_by}" if report.stopped_by else ""
    steps = f"{report.steps} steps" if report.phase is None else f"phase {report.phase}, {_steps_of(report)}"
    parts = [part if isinstance(part, str) else part.as_markdown() for part in report_parts(report)]
    notes = ["\n".join(found)] if (found := remarks(report)) else []
    return "\n\n".join([f"# {report.experiment}: {steps}{stopped}", in_a_line(report), *parts, *notes]) + "\n"


def report_parts(report: RunReport) -> list[str | Table]:
    """What stands below each other in a report: tables, and what to know before one."""
    parts: list[str | Table] = [_totals(report), _rank_totals(report)]
    if not report.phases:
        return parts
    of_last = f"times and shares above are of the last one, peaks of all since step {report.first_step}."
    return [*parts, f"The run had {len(report.phases)} phases: {of_last}", _phase_totals(report)]


def in_a_line(report: RunReport) -> str:
    """How the model was split and its activations were kept."""
    layers = ", ".join(map(str, report.balance))
    replicas = num_replicas_of(report.ranks)
    copies = f", {replicas} replicas" if replicas > 1 else ""
    return f"Schedule {report.schedule}, recompute {report.recompute_mode}, stages of {layers} layers{copies}."


def remarks(report: RunReport) -> list[str]:
    """What did not go as it should, a sentence each; nothing where all is well."""
    found = []
    if report.skipped_steps:
        found.append(f"Steps skipped because of their loss or gradient: {report.skipped_steps}.")
    if report.rollbacks:
        found.append(f"Rollbacks to a snapshot because of a loss or gradient: {report.rollbacks}.")
    slow = {one.rank for one in report.stragglers}
    quick = {where.replica for where in report.ranks if where.rank not in slow}
    for replica in sorted({where.replica for where in report.ranks} - quick) if quick else ():
        found.append(
            f"Replica {replica} is slow: each of its ranks is, so all others wait for it at the end of a step."
        )
    for one in report.stragglers:
        than = "as at the start" if one.against == "start" else "as on ranks with equal work"
        found.append(
            f"{name_of(one.rank, report.ranks).capitalize()} is slow: its {one.kind} takes {one.ratio:.1f} times as long {than}, from step {one.since_step} on."
        )
    return found


def _totals(report: RunReport) -> Table:
    """The run in a column of numbers; of tokens, how many counted where not all did."""
    is_known = report.counted_tokens_seen not in (None, report.tokens_seen)
    counted = f", {report.counted_tokens_seen:,} counted" if is_known else ""
    predicted = number(report.step_seconds_predicted, "{:.4f} s")
    if report.step_seconds_measured and report.step_seconds_predicted is not None:
        predicted += f" ({report.step_seconds_predicted / report.step_seconds_measured - 1:+.1%})"
    rows = [
        ("loss of the last step, nats per token", number(report.loss, "{:.3f}")),
        ("held-out loss, nats per token", number(report.heldout_loss, "{:.3f}")),
        ("perplexity of the last step", number(report.perplexity, "{:,.2f}")),
        ("held-out perplexity", number(report.heldout_perplexity, "{:,.2f}")),
        *([] if report.tokens_seen is None else [("tokens seen", f"{report.tokens_seen:,}{counted}")]),
        ("tokens per second", number(report.tokens_per_second, "{:,.0f}")),
        ("step, measured (median)", number(report.step_seconds_measured, "{:.4f} s")),
        ("step, predicted", predicted),
        ("bubble", number(report.bubble_fraction, "{:.1%}")),
        *([] if report.mfu is None else [("model FLOPs of the devices' peak (mfu)", number(report.mfu, "{:.1%}"))]),
    ]
    return Table(("", "run"), rows, words=words_of(name for name, _ in rows))


def _phase_totals(report: RunReport) -> Table:
    """A line per phase."""
    rows = [
        {
            "phase": str(one.phase),
            "steps": _steps_of(one).removeprefix("steps "),
            "batch": f"{one.batch_size} x {one.sequence_length}",
            "microbatches": str(one.num_microbatches),
            "recompute": one.recompute_mode,
            "step measured": number(one.step_seconds_measured, "{:.4f} s"),
            "predicted": number(one.step_seconds_predicted, "{:.4f} s"),
            "bubble": number(one.bubble_fraction, "{:.1%}"),
            "R exposed, most": number(most(one.recompute_exposed_seconds), "{:.4f} s"),
            "peak activations, most": size(most(one.peak_activation_bytes)),
            "loss": number(one.loss, "{:.3f}"),
            "held-out loss": number(one.heldout_loss, "{:.3f}"),
        }
        for one in report.phases
    ]
    return Table(tuple(rows[0]), [tuple(row.values()) for row in rows], words=words_of(rows[0]))


def most(of_ranks: PerRank | None) -> float | None:
    """The largest value of any rank; None where none is known."""
    return max((value for value in of_ranks or () if value is not None), default=None)


def _steps_of(report: RunReport) -> str:
    return f"steps {report.first_step} to {report.steps}"


def _rank_totals(report: RunReport) -> Table:
    """Recomputation and memory, a column per rank; without the rows of which nothing is known, or which are 0 on each rank."""

    def sizes(of_ranks: PerRank, *, rare: bool = False) -> list[str]:
        return [] if rare and not any(of_ranks) else list(map(size, of_ranks))

    places = report.ranks if num_replicas_of(report.ranks) > 1 else ()
    rows = {
        "replica": [str(where.replica) for where in places],
        "stages": [" ".join(map(str, where.stages)) for where in places],
        "recompute hidden": [number(value, "{:.4f} s") for value in report.recompute_hidden_seconds],
        "recompute exposed": [number(value, "{:.4f} s") for value in report.recompute_exposed_seconds],
        "backward deferred to W": [
            f"{share or 0:.0%}" for share in report.deferred_share if any(report.deferred_share)
        ],
        "peak activations": sizes(report.peak_activation_bytes),
        "foreseen by the profile": sizes(report.peak_activation_bytes_predicted),
        "without recomputation": sizes(report.peak_activation_bytes_never),
        "set of a microbatch": sizes(report.set_bytes),
        "its input, held for R": sizes(report.input_bytes),
        "its outputs kept for R": sizes(report.kept_bytes, rare=True),
        "sets in host memory": sizes(report.host_bytes, rare=True),
    }
    known = {name: cells for name, cells in rows.items() if cells}
    head = ("", *(f"rank {rank}" for rank in range(len(report.peak_activation_bytes))))
    return Table(head, [(name, *cells) for name, cells in known.items()], words=words_of(known))


# From what the steps did to the report ----------------------------------------------------------------------------


def measured_steps(first_step: int) -> range:
    """The steps of a run that begins with `first_step` whose op times the prediction is made from."""
    return range(first_step - 1 + MEASURED_STEPS.start, first_step - 1 + MEASURED_STEPS.stop)


def measured_and_predicted(
    schedule: Schedule, last: Report | None, early: Sequence[Sequence[Timeline]]
) -> tuple[tuple[Shown, ...], Shown | None]:
    """The last step on each replica, and the step that the op times of `early` steps predict; neither where nobody tells of ops."""
    if last is None:
        return (), None
    predicted = show_schedule(schedule, with_bytes(measure_costs(schedule.num_stages, early), last)) if early else None
    several = len(last.timelines) > 1

    def shown(number: int, timeline: Timeline) -> Shown:
        # Its own, not those of other steps: it may have been faster.
        costs = measure_costs(schedule.num_stages, [last.timelines], replica=number)
        return Shown(
            last.schedule,
            with_bytes(costs, last),
            timeline,
            # The step itself is an order of its ops: what their medians say of the least time can be no more.
            min(bound_of(last.schedule, costs), last.step_seconds),
            last.breakdown_of(number),
            ranks=last.ranks_of(number) if several else (),
            span=(last.start, last.start + last.step_seconds) if several else None,
        )

    return tuple(shown(number, timeline) for number, timeline in enumerate(last.timelines)), predicted


def with_bytes(costs: Costs, last: Report) -> Costs:
    """With what a microbatch took in `last`: of several stages of a rank each is charged as the largest."""
    holders = {stage: report for report in last.of_ranks if report.replica == 0 for stage in report.stages}
    if not any(last.per_rank("set_bytes")) or len(holders) != costs.num_stages:  # or nobody said who holds what
        return costs

    def bytes_of(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(holders[stage], name)) for stage in range(costs.num_stages))

    kept = bytes_of("kept_bytes")
    return replace(
        costs,
        set_bytes=bytes_of("set_bytes"),
        input_bytes=bytes_of("input_bytes"),
        kept_bytes=kept if any(kept) else costs.kept_bytes,
    )


_HELD = ("set_bytes", "input_bytes", "kept_bytes", "host_bytes")


def make_report(
    schedule: Schedule,
    metrics: Sequence[StepMetrics],
    last: StepFigures,
    *,
    first_step: int,
    predicted: Shown | None,
    heldout_loss: float | None,
    **known: Any,
) -> RunReport:
    """The report of the run: medians over the steps that were predicted (all, where there are too few), peaks of all; `known` are the other
    fields.

    The report of a resumed run, or of a phase, covers its own steps alone, from `first_step` on: earlier ones may have run on another number
    of ranks.
    """
    compared = [step for step in metrics if step.step >= first_step - 1 + FIRST_COMPARED_STEP]
    settled = compared or metrics

    held: dict[str, Any] = {name: last.ops.per_rank(name) for name in _HELD} if last.ops else {}

    def median(name: str) -> float | None:
        return _median(getattr(step, name) for step in settled)

    def medians(name: str) -> PerRank:
        return tuple(map(_median, zip(*(getattr(step, name) for step in settled))))

    return RunReport(
        schedule=schedule.family,
        recompute_mode=schedule.policy.mode.value,
        steps=metrics[-1].step,
        loss=metrics[-1].loss,
        heldout_loss=heldout_loss,
        perplexity=perplexity_of(metrics[-1].loss),
        heldout_perplexity=perplexity_of(heldout_loss),
        tokens_per_second=median("tokens_per_second"),
        step_seconds_measured=median("step_seconds"),
        step_seconds_predicted=predicted.step_seconds if predicted and compared else None,
        bubble_fraction=median("bubble_fraction"),
        recompute_hidden_seconds=medians("recompute_hidden_seconds"),
        recompute_exposed_seconds=medians("recompute_exposed_seconds"),
        peak_activation_bytes=peak_activation_bytes(metrics),
        peak_activation_bytes_never=last.ops.per_rank("peak_activation_bytes_never")
        if last.ops
        else (None,) * last.num_ranks,
        mfu=median("mfu"),
        deferred_share=tuple(rank.deferred_share for rank in last.ops.breakdown) if last.ops else (),
        first_step=first_step,
        **held,
        **known,
    )


def peak_activation_bytes(metrics: Sequence[StepMetrics]) -> PerRank:
    """The most that each rank held in any of these steps."""
    return tuple(map(most, zip(*(step.peak_activation_bytes for step in metrics))))


def _median(values: Iterable[float | None]) -> float | None:
    """Of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
