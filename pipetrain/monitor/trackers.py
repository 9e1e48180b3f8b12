"""What a run tells whoever keeps its figures: metrics.jsonl, and wandb and TensorBoard where they are asked for. One that fails is left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipetrain.config.records import ObserveConfig, WandbConfig
from pipetrain.config.target import TRACKERS, load_extension
from pipetrain.config.terminal import say
from pipetrain.config.write_files import replace_file
from pipetrain.monitor.draw.terminal import staircase
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import LineFile, read_lines
from pipetrain.monitor.report import RunReport
from pipetrain.monitor.shown import Shown
from pipetrain.monitor.step_report import StepMetrics


@dataclass(frozen=True)
class Ending:
    """A run that has come to its end, or was stopped on request."""

    report: RunReport
    pictures: Sequence[Shown]  # the step as predicted, where it was, and the last one as measured
    page: str  # both as HTML


class Tracker:
    """Keeps the figures of a run somewhere. Every method may raise: the run goes on without it then."""

    def start(self, config: Mapping[str, Any]) -> None:
        """The run begins, or goes on; `config` is all that it was asked to do, as plain values."""

    def step(self, metrics: StepMetrics) -> None:
        """A step is over."""

    def evaluated(self, step: int, heldout_loss: float) -> None:
        """A held-out evaluation after `step`."""

    def rewind(self, first_step: int) -> None:
        """Training rolled back to an older snapshot: steps from `first_step` on will be reported again."""

    def finish(self, ending: Ending) -> None:
        """All steps are over. Not called where the run fails."""

    def close(self) -> None:
        """Writes what is still on its way. Called once, whatever happened before."""


class Trackers:
    """Several trackers by name. One that raises is named on stderr, once, and hears nothing more."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def close(self) -> None:
        self.tell(lambda tracker: tracker.close())
        self._trackers.clear()

    def tell(self, call: Callable[[Tracker], None]) -> None:
        """Calls each, as in `tell(lambda tracker: tracker.step(metrics))`."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a library of others raises: no tracker is worth a run
                del self._trackers[name]
                say(
                    f"{name} keeps nothing from here on ({first_line(error)}); the run goes on, and metrics.jsonl has its steps"
                )
                with contextlib.suppress(Exception):
                    tracker.close()


class JsonLines(Tracker):
    """metrics.jsonl, a line for each step, and heldout.jsonl, a line for each evaluation on the way.

    Whole lines are appended at once: what a killed run has written stays. Lines of steps that are run again are dropped.
    """

    def __init__(self, folder: RunFolder, first_step: int = 1, *, evaluates: bool = False) -> None:
        files = (folder.metrics, folder.heldout) if evaluates else (folder.metrics,)
        self._files = [LineFile(file, first_step) for file in files]

    def step(self, metrics: StepMetrics) -> None:
        in_order = sorted(asdict(metrics).items(), key=lambda entry: isinstance(entry[1], tuple))  # those per rank last
        self._files[0].write([json.dumps(dict(in_order)) + "\n"])

    def evaluated(self, step: int, heldout_loss: float) -> None:
        self._files[1].write([json.dumps({"step": step, "heldout_loss": heldout_loss}) + "\n"])

    def rewind(self, first_step: int) -> None:
        for file in self._files:
            file.rewind(first_step)

    def close(self) -> None:
        for file in self._files:
            file.close()


def check_trackers(config: ObserveConfig) -> None:
    """Raises:
    ValueError: a tracker is asked for whose package is not installed, or whose module cannot be imported.
    """
    for key, value, is_off, package in (
        ("observe.wandb.mode", config.wandb.mode, "disabled", "wandb"),
        ("observe.tensorboard", str(config.tensorboard).lower(), "false", "tensorboard"),
    ):
        if value != is_off and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{key}={value}: the package {package} is not installed; pip install 'pipetrain[train]' brings it, "
                f"and {key}={is_off} does without"
            )
    _given(config)


def _given(config: ObserveConfig) -> dict[str, Callable[[RunFolder, int], Tracker]]:
    return {name: load_extension("observe.trackers", name, TRACKERS) for name in config.trackers}


def make_trackers(config: ObserveConfig, folder: RunFolder, first_step: int) -> dict[str, Tracker]:
    """The trackers, by name. Files of steps that will be repeated lose those lines now.

    Raises:
        ValueError: what a class or function of `observe.trackers` gives is no `Tracker`.
    """
    evaluates = config.eval_every_steps is not None
    trackers: dict[str, Tracker] = {"metrics.jsonl": JsonLines(folder, first_step, evaluates=evaluates)}
    if config.wandb.mode != "disabled":
        trackers["wandb"] = WandbTracker(folder, config.wandb, first_step)
    if config.tensorboard:
        trackers["tensorboard"] = TensorBoardTracker(folder, first_step)
    for name, make in _given(config).items():
        trackers[name] = make(folder, first_step)
        if not isinstance(trackers[name], Tracker):
            raise ValueError(f"observe.trackers=[{name}]: gives a {type(trackers[name]).__name__}, and no Tracker")
    return trackers


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, flat: `mfu`, and `wait_gradient_seconds/rank-1` for those per rank."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, (list, tuple)):
            found |= {f"{key}/rank-{rank}": entry for rank, entry in enumerate(value) if entry is not None}
        elif value is not None and key != "step":
            found[key] = value
    return found


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


# Weights & Biases: all lies in the run folder's wandb/, and `wandb sync` sends it ------------------------------------

# A process that is killed loses the rows of so many seconds; wandb's own default is 15.
_FLUSH_SECONDS = 1.0
_INIT_SECONDS = 20.0  # for a server that does not answer
_FINISH_SECONDS = 60.0
_ATTEMPTS = 3  # to start its process again


class WandbTracker(Tracker):
    """A wandb run that keeps its id as long as its run folder is used.

    A resumed run writes its earlier steps from metrics.jsonl again, where wandb may lack them: offline, each folder
    that wandb makes has all steps from 1 on.
    """

    def __init__(self, folder: RunFolder, config: WandbConfig, first_step: int = 1) -> None:
        self._folder = folder
        self._config = config
        self._first_step = first_step
        self._values: dict[str, Any] = {}
        self._run: Any = None
        self._began_again = False
        self._ending: Ending | None = None  # once it has been told
        self._temporary = folder.wandb / "tmp"
        self._exit_code = 1  # until the run has come to its end

    def start(self, config: Mapping[str, Any]) -> None:
        self._values = dict(config)
        self._begin_at(self._first_step)

    def step(self, metrics: StepMetrics) -> None:
        self._call(lambda run: run.log(figures(asdict(metrics)), step=metrics.step))

    def evaluated(self, step: int, heldout_loss: float) -> None:
        self._call(lambda run: run.log({"heldout_loss": heldout_loss}, step=step))

    def finish(self, ending: Ending) -> None:
        self._exit_code = 0
        self._call(lambda run: _tell(run, ending))
        self._ending = ending

    def close(self) -> None:
        if self._run is None:
            return
        import wandb

        try:
            self._call(lambda run: run.finish(exit_code=self._exit_code))
        finally:
            self._run = None
            with contextlib.suppress(SystemExit):  # it exits with the code of its process
                wandb.teardown()  # its process ends now, and not when it notices that this one has
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _call(self, call: Callable[[Any], None]) -> None:
        """Where wandb's process is gone, a new one gets all that metrics.jsonl has, and then this call: once in a run.

        A SLURM that cancels a job sends SIGTERM to that process too, and it ends with what it has not written.
        """
        try:
            call(self._run)
        except _process_is_gone():
            if self._began_again:
                raise
            self._began_again = True
            self._begin_again()
            call(self._run)

    def _begin_again(self) -> None:
        """Forget the process that is gone, and have a new one write all steps so far."""
        import wandb

        for attempts_left in reversed(range(_ATTEMPTS)):
            for forget in (self._run.finish, wandb.teardown):  # else a new run would try to end this one first
                with contextlib.suppress(*_process_is_gone(), SystemExit):  # it exits with the code of its process
                    forget()
            try:
                self._begin_at(sys.maxsize)
                break
            except _process_is_gone():  # what is left of the old connection
                if not attempts_left:
                    raise
        if self._ending is not None:
            _tell(self._run, self._ending)

    def _begin_at(self, first_step: int) -> None:
        """A wandb run that has the steps before `first_step`."""
        self._run = self._begin()
        known = self._run.starting_step  # the server has the steps before
        heldout = {line["step"]: line for line in read_lines(self._folder.heldout)}
        for line in read_lines(self._folder.metrics):
            if known <= line["step"] < first_step:
                self._run.log(figures(line | heldout.get(line["step"], {})), step=line["step"])

    def _begin(self) -> Any:
        run_id = self._run_id()
        # Read when wandb is imported: nothing on the terminal, no question there, no reports of its own errors.
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._temporary.mkdir(exist_ok=True)
        before, tempfile.tempdir = tempfile.tempdir, str(self._temporary)
        try:  # it makes folders when it is imported and removes them when Python ends; a rank leaves without that
            import wandb
        finally:
            tempfile.tempdir = before

        def init(mode: str) -> Any:
            return wandb.init(
                id=run_id,
                project=self._config.project,
                name=self._config.name or self._folder.path.name,
                group=self._config.group,
                tags=self._config.tags or None,  # None: those of WANDB_TAGS
                dir=str(self._folder.path),
                mode=mode,  # type: ignore[arg-type]
                resume="allow" if mode == "online" else None,  # offline there is nobody who could know the run
                config=dict(self._values),
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    disable_job_creation=True,
                    use_dot_wandb=False,
                    init_timeout=_INIT_SECONDS,
                    finish_timeout=_FINISH_SECONDS,
                    x_disable_stats=True,
                    x_save_requirements=False,
                    x_transaction_log_flush_interval=_FLUSH_SECONDS,
                ),
            )

        if self._config.mode == "online":
            try:
                return init("online")
            except Exception as error:  # no key, no network, a server that refuses
                say(
                    f"wandb is not reached ({first_line(error)}); going on offline, and "
                    f"`wandb sync {self._folder.wandb}/latest-run` sends this run later"
                )
                with contextlib.suppress(OSError, SystemExit):
                    wandb.teardown()  # its process still holds the id of the run that it could not begin
        return init("offline")

    def _run_id(self) -> str:
        """The id of this run folder, made at the first call."""
        file = self._folder.wandb / "run-id"
        if not file.is_file():
            file.parent.mkdir(mode=0o750, exist_ok=True)
            replace_file(file, secrets.token_hex(4))
        return file.read_text()


def _process_is_gone() -> tuple[type[Exception], ...]:
    """What wandb raises then: where it writes to the socket, and where it waits for an answer."""
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return OSError, HandleAbandonedError, MailboxClosedError


def _tell(run: Any, ending: Ending) -> None:
    """A new page for each wandb run, as wandb ties it to the run."""
    import wandb

    report = ending.report
    values: dict[str, Any] = {"timeline_page": wandb.Html(ending.page, inject=False)}
    if report.heldout_loss is not None:
        values["heldout_loss"] = report.heldout_loss
    run.log(values, step=report.steps)
    run.summary.update({"report": asdict(report)})


# TensorBoard: event files in the run folder's tensorboard/ -----------------------------------------------------------

_WIDTH = 120  # columns of the timeline


class TensorBoardTracker(Tracker):
    """Writes with the `tensorboard` package itself: the writers of torch and of tensorboardX would load torch here.

    Each step is on the disk before the next. A resumed run writes a mark that makes readers drop the steps that it repeats.
    """

    def __init__(self, folder: RunFolder, first_step: int = 1) -> None:
        self._folder = folder
        self._first_step = first_step
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:  # noqa: ARG002 (there is no place for it in an event file)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder.tensorboard))
        self.rewind(self._first_step)

    def step(self, metrics: StepMetrics) -> None:
        self._scalars(metrics.step, figures(asdict(metrics)))

    def evaluated(self, step: int, heldout_loss: float) -> None:
        self._scalars(step, {"heldout_loss": heldout_loss})

    def rewind(self, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def finish(self, ending: Ending) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        report = ending.report
        if report.heldout_loss is not None:
            self._scalars(report.steps, {"heldout_loss": report.heldout_loss})
        drawn = [f"{one.title}\n\n{staircase(one.timeline, width=_WIDTH)}" for one in ending.pictures]
        text = "\n\n".join(["```", *drawn, "```"])  # markdown: as it stands
        self._write(report.steps, summary=text_pb("timeline", text))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=Summary(value=entries))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **content))
        self._writer.flush()
