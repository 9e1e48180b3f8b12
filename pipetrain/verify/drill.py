"""Whether faults are handled as promised on this machine: real runs of the command line, real faults.

Each drill starts `pipetrain train` with a fault in the environment or damage on the disk, looks at what the user would see,
and starts it again with `resume=auto`. What comes out must be what a run computes that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipetrain.launcher.outcome import Exit
from pipetrain.monitor.draw.table import Table
from pipetrain.runtime.faults import VARIABLE

STEPS = 8
TIMEOUT_SECONDS = 15  # longer than ranks that start on a busy machine wait for each other
MARGIN_SECONDS = 15  # all ranks have ended by then: after a death, and after the time-out of a hang
_MARK = "PIPETRAIN_DRILL"  # in the environment of every process of a drill
_LIMIT_SECONDS = 180
_NEWEST, _BEFORE = "step-00000004", "step-00000002"


@dataclass(frozen=True)
class Result:
    """What was seen. `seconds` is from the fault until all ranks had ended; `problem` is what was not as promised."""

    fault: str
    num_ranks: int
    exit_code: int | None
    seconds: float | None
    message: str
    resume: str
    problem: str | None


@dataclass(frozen=True)
class _Drill:
    """A fault in a step, and what is promised: a message that matches, within so many seconds."""

    name: str
    num_ranks: int
    fault: str
    says: str
    within_seconds: float = MARGIN_SECONDS
    exit_code: int = Exit.FAILED
    resumes: bool = True
    num_replicas: int = 1

    @property
    def run(self) -> str:
        """The folder of its run: no other drill has such a one."""
        return re.sub(r"\W+", "-", f"{self.name} {self.num_ranks}")


_HANG = rf"rank \d waits .*and nothing came for {TIMEOUT_SECONDS} s.*no word from rank 1; rank 0 waits"
_GONE = r"rank \d is gone: rank \d lost its connection in"
_HANG_SECONDS = TIMEOUT_SECONDS + MARGIN_SECONDS
# In step 5 the snapshot of step 2 is whole: the save of step 4 has waited for it.
_DRILLS = (
    # Said by the rank itself, or by its neighbour: whichever has ended first.
    _Drill("an op raises", 2, "raise rank=1 op=1B1 step=5", r"rank 1\b.*a fault was injected at 1B1"),
    _Drill("a rank is killed", 2, "kill rank=1 op=1F1 step=5", _GONE),
    _Drill("a rank is stopped", 2, "stop rank=1 op=1F2 step=5", _HANG, _HANG_SECONDS),
    _Drill("a connection breaks", 2, "drop rank=0 op=0SEND_F1 step=5", _GONE),
    _Drill("a rank is slow for 3 steps", 2, "slow rank=0 step=3 num_steps=3 seconds=0.05", "", 60, Exit.DONE, False),
    _Drill("a rank is killed", 4, "kill rank=2 op=2B1 step=5", _GONE),
    _Drill("a rank is stopped", 4, "stop rank=1 op=1F2 step=5", _HANG, _HANG_SECONDS, resumes=False),
    _Drill("a connection breaks", 4, "drop rank=1 op=1F2 step=5", _GONE, resumes=False),
    # Two replicas of two stages: a rank at each place.
    *(
        _Drill(
            f"a rank is killed: {where}",
            4,
            f"kill rank={rank} op={op} step=5",
            rf"rank {rank} \({where}\) is gone: rank \d \(replica \d, stage \d\) lost its connection in",
            num_replicas=2,
        )
        for rank, where, op in (
            (0, "replica 0, stage 0", "0F1"),
            (1, "replica 0, stage 1", "1B0"),
            (2, "replica 1, stage 0", "0REDUCE_GRAD.0"),
            (3, "replica 1, stage 1", "1F1"),
        )
    ),
    _Drill(
        "a rank is stopped: replica 1, stage 0",
        4,
        "stop rank=2 op=0B1 step=5",
        rf"rank \d \(replica \d, stage \d\) waits .*nothing came for {TIMEOUT_SECONDS} s.*"
        r"no word from rank 2 \(replica 1, stage 0\); rank 0",
        _HANG_SECONDS,
        resumes=False,
        num_replicas=2,
    ),
)


@dataclass(frozen=True)
class _Damage:
    """A file in each of these snapshots is damaged, and what is promised: how a resume ends, and what it says in one line."""

    name: str
    snapshots: tuple[str, ...]
    file: str
    damage: Callable[[Path], None]
    says: str = rf"set aside, going on from \S*{_BEFORE}$"
    exit_code: int = Exit.DONE


def flip(path: Path, position: int = -1) -> None:
    """Flips one bit of the byte at `position` (from the end, where it is negative)."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


_DAMAGES = (
    _Damage("a bit of a snapshot is flipped", (_NEWEST,), "weights/rank-0001.safetensors", flip),
    _Damage("a manifest is cut", (_NEWEST,), "manifest.json", lambda path: os.truncate(path, 100)),
    _Damage(
        "all snapshots are damaged",
        (_NEWEST, _BEFORE),
        "optimizer/rank-0000.safetensors",
        lambda path: os.truncate(path, 500),
        "is whole: remove them to start from step 1",
        Exit.WRONG_INPUT,
    ),
)


def drill(*, quick: bool = False, say: Callable[[str], None]) -> list[Result]:
    """All drills, or with `quick` those of two ranks that need no damage on the disk. `say` is told of each as it ends."""
    results, faults = [], list[_Drill | _Damage]([*_DRILLS, *_DAMAGES])
    with TemporaryDirectory(prefix="pipetrain-drill-") as name, _Ground(Path(name)) as ground:
        for one in faults:
            if quick and (isinstance(one, _Damage) or one.num_ranks > 2):
                continue
            result = _resume_damaged(one, ground) if isinstance(one, _Damage) else _run(one, ground)
            results.append(result)
            seconds = "" if result.seconds is None else f", all ranks ended after {result.seconds:.1f} s"
            say(f"{result.fault} ({result.num_ranks} ranks): {_verdict(result)}{seconds}")
    return results


def _verdict(result: Result) -> str:
    return "as promised" if result.problem is None else "NOT HANDLED"


def drill_table(results: list[Result]) -> str:
    """A line per drill with its verdict, what the user would have read below it, and a last line that sums up."""
    head = ("fault", "ranks", "exit", "seconds", "verdict", "resume")
    rows = []
    for one in results:
        code = "" if one.exit_code is None else str(one.exit_code)
        seconds = "" if one.seconds is None else f"{one.seconds:.1f}"
        rows.append((one.fault, str(one.num_ranks), code, seconds, _verdict(one), one.resume))
    table = Table(head, rows, left=frozenset({0, 4, 5}))
    first, *told = table.as_text().splitlines()
    lines = [first]
    for line, result in zip(told, results, strict=True):
        lines += [line, *(f"    {text}" for text in (result.message, result.problem) if text)]
    wrong = sum(result.problem is not None for result in results)
    verdict = f"{wrong} not handled as promised" if wrong else "all handled as promised"
    return "\n".join([*lines, "", f"{len(results)} faults, {verdict}"])


class _Ground:
    """A folder with text, a run that nobody disturbed, and one that ended early with two snapshots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = secrets.token_hex(8)
        self._whole: dict[int, str] = {}  # by number of replicas, a run that nobody disturbed

    def __enter__(self) -> _Ground:
        (self.folder / "text").mkdir()
        for number in range(8):
            words = " ".join(f"stage {number * at % 17} waits" for at in range(1500))
            (self.folder / "text" / f"{number}.txt").write_text(words)
        self.whole()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    def whole(self, num_replicas: int = 1) -> str:
        """A run that nobody disturbed; of how many stages makes no difference, but each replica adds up a part of a gradient."""
        if num_replicas not in self._whole:
            run = self._whole[num_replicas] = f"whole-{num_replicas}"
            done, _ = self.train(run, 2 * num_replicas, num_replicas=num_replicas)
            if done.returncode != Exit.DONE:
                raise RuntimeError(f"a run without any fault ended with {done.returncode}: {done.stderr.strip()}")
        return self._whole[num_replicas]

    def train(
        self, run: str, num_ranks: int, *options: str, fault: str = "", num_replicas: int = 1
    ) -> tuple[Any, float]:
        """A run of the command line to its end, and how long after its last step that was."""
        words = [
            *("experiment=smoke", "data=text", f"data.path={self.folder / 'text'}", "observe.progress=false"),
            *(f"run_dir={self.folder / run}", f"timeout_seconds={TIMEOUT_SECONDS if fault else _LIMIT_SECONDS}"),
            *(f"pipeline.num_stages={num_ranks // num_replicas}", f"parallel.num_replicas={num_replicas}"),
            *(f"steps={STEPS}", "snapshot.every_steps=2", "model.dropout=0.1", *options),
        ]
        hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", VARIABLE)
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        environment |= {_MARK: self._mark, "CUDA_VISIBLE_DEVICES": ""} | ({VARIABLE: fault} if fault else {})
        done = subprocess.run(
            [sys.executable, "-m", "pipetrain.cli", "train", *words],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=_LIMIT_SECONDS,
        )
        metrics = self.folder / run / "metrics.jsonl"
        return done, time.time() - metrics.stat().st_mtime if metrics.exists() else 0.0

    def left(self) -> list[int]:
        """Processes of the drills that are still there."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue  # it has ended meanwhile, or is another user's
        return found

    def end_all(self) -> None:
        for process in self.left():
            os.kill(process, 9)

    def losses(self, run: str) -> list[tuple[int, float, float]]:
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]

    def resume(self, run: str, num_ranks: int, num_replicas: int) -> tuple[str, str | None]:
        """Type the same again with resume=auto: what happened, and what was wrong about it."""
        done, _ = self.train(run, num_ranks, "resume=auto", num_replicas=num_replicas)
        if done.returncode != Exit.DONE or "going on from" not in done.stderr:
            return f"exit code {done.returncode}", f"resume=auto: {_last_line(done.stderr)}"
        (step,) = re.findall(r"going on from \S*step-(\d+)\n", done.stderr)
        if self.losses(run) != self.losses(self.whole(num_replicas)):
            return f"from step {int(step)}", "the losses are not those of the undisturbed run"
        return f"from step {int(step)}, equal bit for bit", None


def _run(one: _Drill, ground: _Ground) -> Result:
    run = one.run
    done, seconds = ground.train(run, one.num_ranks, fault=one.fault, num_replicas=one.num_replicas)
    message = _last_line(done.stderr)
    problems = []
    if done.returncode != one.exit_code:
        problems.append(f"exit code {done.returncode} in place of {int(one.exit_code)}")
    if not re.search(one.says, message):
        problems.append("the message does not say what happened")
    if seconds > one.within_seconds:
        problems.append(f"all ranks ended after {seconds:.1f} s, {one.within_seconds} s are promised")
    if left := ground.left():
        problems.append(f"processes are left: {left}")
        ground.end_all()
    resumed = "not needed" if one.exit_code == Exit.DONE else "not tried"
    if one.exit_code == Exit.DONE and ground.losses(run) != ground.losses(ground.whole()):
        problems.append("the losses are not those of the undisturbed run")
    if one.resumes:
        resumed, problem = ground.resume(run, one.num_ranks, one.num_replicas)
        problems += [problem] if problem else []
    ended = seconds if one.exit_code != Exit.DONE else None
    shown = message if one.exit_code != Exit.DONE else ""
    return Result(one.name, one.num_ranks, done.returncode, ended, shown, resumed, "; ".join(problems) or None)


def _resume_damaged(one: _Damage, ground: _Ground) -> Result:
    """A resume of a run that ended early, with snapshots of steps 2 and 4."""
    run = one.name.replace(" ", "-")
    snapshots = _four_steps(ground, run)
    for name in one.snapshots:
        one.damage(snapshots / name / one.file)
    done, _ = ground.train(run, 2, "resume=auto")
    told = [line for line in done.stderr.splitlines() if re.search(one.says, line)]
    is_right = done.returncode == one.exit_code and len(told) == 1
    resumed = "refused"
    if one.exit_code == Exit.DONE:
        is_right = is_right and ground.losses(run) == ground.losses(ground.whole())
        resumed = "from step 2, equal bit for bit"
    problem = None if is_right else f"exit code {done.returncode}: {_last_line(done.stderr)}"
    return Result(one.name, 2, done.returncode, None, "".join(told[:1]), resumed if is_right else "wrong", problem)


def _four_steps(ground: _Ground, run: str) -> Path:
    """A copy of a run that ended early and has snapshots of steps 2 and 4; returns their folder."""
    first = ground.folder / "four"
    if not first.exists():
        # The save of step 6 waits for that of step 4, so by step 7 both wanted ones are whole, and perhaps a third.
        done, _ = ground.train("four", 2, "snapshot.keep_last=3", fault="kill rank=0 op=0F0 step=7")
        if done.returncode != Exit.FAILED:
            raise RuntimeError(f"a run to make snapshots ended with {done.returncode}: {done.stderr.strip()}")
        for path in (first / "snapshots").iterdir():
            if path.name not in (_NEWEST, _BEFORE):
                shutil.rmtree(path)
    shutil.copytree(first, ground.folder / run)
    return ground.folder / run / "snapshots"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
