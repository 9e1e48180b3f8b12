"""Weights & Biases. Offline unless asked for otherwise: everything lies in the run folder's wandb/, and `wandb sync` sends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipetrain.config.records import WandbConfig
from pipetrain.monitor.folder import RunFolder
from pipetrain.monitor.lines import read_lines
from pipetrain.monitor.metrics import StepMetrics
from pipetrain.monitor.trackers.tracker import Ending, Tracker, figures, first_line

# A process that is killed loses the rows of so many seconds; wandb's own default is 15.
_FLUSH_SECONDS = 1.0
_INIT_SECONDS = 20.0  # for a server that does not answer
_FINISH_SECONDS = 60.0
_ATTEMPTS = 3  # to start its process again


class WandbTracker(Tracker):
    """A wandb run that keeps its id as long as its run folder is used.

    A run that goes on writes the steps before from metrics.jsonl again, where wandb may lack them: offline, each folder
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
        with _temporary_files_in(self._temporary):
            import wandb

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
                print(
                    f"pipetrain: wandb is not reached ({first_line(error)}); going on offline, and "
                    f"`wandb sync {self._folder.wandb}/latest-run` sends this run later",
                    file=sys.stderr,
                    flush=True,
                )
                with contextlib.suppress(OSError, SystemExit):
                    wandb.teardown()  # its process still holds the id of the run that it could not begin
        return init("offline")

    def _run_id(self) -> str:
        """The id of this run folder, made at the first call."""
        file = self._folder.wandb / "run-id"
        if not file.is_file():
            file.parent.mkdir(mode=0o750, exist_ok=True)
            draft = file.with_suffix(".draft")
            draft.write_text(secrets.token_hex(4))
            draft.replace(file)
        return file.read_text()


def _process_is_gone() -> tuple[type[Exception], ...]:
    """What wandb raises then: where it writes to the socket, and where it waits for an answer."""
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return OSError, HandleAbandonedError, MailboxClosedError


def _tell(run: Any, ending: Ending) -> None:
    """The page is made anew for each wandb run: it ties it to itself."""
    import wandb

    report = ending.report
    values: dict[str, Any] = {"timeline_page": wandb.Html(ending.page, inject=False)}
    if report.heldout_loss is not None:
        values["heldout_loss"] = report.heldout_loss
    run.log(values, step=report.steps)
    run.summary.update({"report": asdict(report)})


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """wandb makes folders when it is imported and removes them when Python ends; a rank leaves without that."""
    folder.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
