"""Kills ranks of real runs again and again, and compares what comes out with a run that nobody disturbed.

    python -m tests.soak --kills=200 --stages=2,4 --json=soak.json

Each run is started by torchrun, which starts its ranks again after a kill. A kill is SIGKILL to a random rank that
computes, at a random moment of a step, or while a save is on its way. It counts when it has ended that rank.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from commands import Process, children_of, end, is_alive, torchrun, wait_until  # noqa: E402
from resumed import STEPS, assert_same_training, finish, has_reached, num_steps_of, start  # noqa: E402
from small_text import make_text  # noqa: E402

from pipetrain.snapshot.files import steps_in  # noqa: E402
from pipetrain.snapshot.manifest import check_whole  # noqa: E402

KILLS_PER_RUN = 10
STEPS_BETWEEN = 6  # at most, from a restart to the next kill
SECONDS_OF_A_STEP = 0.08  # the moment in a step, or between steps, is random within this
SHARE_OF_SAVES = 0.4  # of the kills wait for a save to be on its way


@dataclass
class Run:
    """What happened to one run."""

    num_stages: int
    seed: int
    hits: int = 0  # kills that ended a rank that computed
    hits_in_saves: int = 0  # of these, the ones that left half a save behind
    resumed: int = 0  # restarts that went on from a snapshot
    afresh: int = 0  # restarts before there was one
    seconds: float = 0.0
    longest_restart_seconds: float = 0.0  # from a kill until all ranks of that attempt were gone
    problems: list[str] = field(default_factory=list)


def soak(folder: pathlib.Path, stages: list[int], num_kills: int, seed: int) -> list[Run]:
    """Runs until `num_kills` hits are spread over the numbers of stages."""
    make_text(folder / "text")
    finish(folder, "run_dir=whole", "snapshot.every_steps=null")
    chance, runs = random.Random(seed), []
    for number, num_stages in enumerate(stages):
        left = num_kills // len(stages) + (number < num_kills % len(stages))
        while left > 0 and not any(run.problems for run in runs[-3:]):
            run = one_run(folder, num_stages, min(left, KILLS_PER_RUN), chance.randrange(1 << 30), len(runs))
            runs.append(run)
            left -= run.hits
            print(json.dumps(asdict(run)), file=sys.stderr, flush=True)
    return runs


def one_run(folder: pathlib.Path, num_stages: int, num_kills: int, seed: int, number: int) -> Run:
    """One run under torchrun, whose ranks are killed `num_kills` times, compared with the undisturbed one."""
    run, path, began = Run(num_stages, seed), folder / f"run-{number}", time.monotonic()
    launcher = [*torchrun(), f"--nproc-per-node={num_stages}", f"--max-restarts={num_kills}", "--monitor-interval=0.1"]
    options = [f"run_dir={path.name}", "resume=auto", f"pipeline.num_stages={num_stages}"]
    process = start(folder, [*launcher, "-m", "pipetrain.train"], *options)
    seen: set[int] = set()
    try:
        hit_again_and_again(process, path, num_kills, run, seen)
        code, stderr = end(process)
        run.resumed = stderr.count("going on from")
        run.afresh = run.hits - run.resumed
        if code != 0 or "damaged" in stderr or "set aside" in stderr:
            run.problems.append(f"exit code {code}: {stderr[-2000:]}")
        assert_same_training(path, folder / "whole")
    except Exception as error:
        run.problems.append(f"{type(error).__name__}: {error}")
    finally:
        if process.poll() is None:
            for pid in children_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
    run.problems += [f"process {pid} is left" for pid in seen if is_alive(pid)]
    run.problems += damage_in(path)
    run.seconds = round(time.monotonic() - began, 1)
    return run


def hit_again_and_again(process: Process, path: pathlib.Path, num_kills: int, run: Run, seen: set[int]) -> None:
    chance = random.Random(run.seed)
    for kill in range(num_kills):
        latest = STEPS * (kill + 1) // (num_kills + 1)  # the kills are spread: the run must not be done before the last
        if not has_reached(process, path, min(num_steps_of(path) + chance.randint(1, STEPS_BETWEEN), latest)):
            return
        if chance.random() < SHARE_OF_SAVES:
            wait_for_a_save(process, path)
            time.sleep(chance.uniform(0.0, 0.01))
        else:
            time.sleep(chance.uniform(0.0, SECONDS_OF_A_STEP))
        ranks = children_of(process.pid)
        if not ranks:
            return
        seen.update(ranks)
        victim, killed = chance.choice(ranks), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda ranks=ranks: not set(ranks) & set(children_of(process.pid)), process)
        run.longest_restart_seconds = max(run.longest_restart_seconds, round(time.monotonic() - killed, 2))
        run.hits += 1
        # The ranks of the next attempt still import torch: what lies there now is what the kill has left.
        run.hits_in_saves += any((path / "snapshots").glob("*.partial-*"))
        run.problems += damage_in(path)


def wait_for_a_save(process: Process, path: pathlib.Path, seconds: float = 5.0) -> None:
    """Until a save is on its way; not for ever, because the run may be done."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline and not any((path / "snapshots").glob("*.partial-*")):
        time.sleep(0.0005)


def damage_in(path: pathlib.Path) -> list[str]:
    problems = []
    for step in steps_in(path / "snapshots"):
        try:
            check_whole(path / "snapshots" / f"step-{step:08d}")
        except ValueError as error:
            problems.append(str(error))
    return problems


def summary(runs: list[Run]) -> dict[str, object]:
    def total(name: str) -> int:
        return sum(getattr(run, name) for run in runs)

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "runs": len(runs),
        "hits": total("hits"),
        "hits_by_stages": {
            str(stages): sum(run.hits for run in runs if run.num_stages == stages)
            for stages in sorted({run.num_stages for run in runs})
        },
        "hits_in_saves": total("hits_in_saves"),
        "restarts_that_resumed": total("resumed"),
        "restarts_before_the_first_snapshot": total("afresh"),
        "longest_seconds_until_all_ranks_ended": max((run.longest_restart_seconds for run in runs), default=0.0),
        "seconds": round(sum(run.seconds for run in runs), 1),
        "problems": [problem for run in runs for problem in run.problems],
        "each": [asdict(run) for run in runs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=200, help="hits, over all numbers of stages (default: %(default)s)"
    )
    parser.add_argument("--stages", default="2,4", help="numbers of stages (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written (default: stdout only)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipetrain-soak-") as folder:
        runs = soak(
            pathlib.Path(folder),
            [int(stages) for stages in arguments.stages.split(",")],
            arguments.kills,
            arguments.seed,
        )
    result = summary(runs)
    text = json.dumps(result, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    print(text)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
