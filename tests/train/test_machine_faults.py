"""What a machine does to a run: a rank that stands still, a clock that is set, a disk that turns read-only, a sample that is not finite,
and a resume on another number of ranks. No step is lost, and each is told in a line."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import PIPETRAIN, Process, begin, children_of, complete, end, environment, wait_until
from ranks import PATIENCE_SECONDS
from resumed import assert_same_training, metrics_of, num_steps_of
from small_text import make_text

pytestmark = pytest.mark.slow

STEPS = 24
RUN = [
    *PIPETRAIN, "experiment=smoke", "data=text", "data.path=text", "model.dropout=0.1", f"steps={STEPS}",
    "snapshot.every_steps=5", "snapshot.keep_last=9", "observe.progress=false",
]  # fmt: skip
PAUSE_SECONDS = 5.0  # a rank that waits looks once a second whether another has failed
HOUR = 3600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the text is, and the run `alone` that nothing disturbed."""
    folder = tmp_path_factory.mktemp("faults")
    make_text(folder / "text")
    done = complete(folder, [*RUN, "run_dir=alone"])
    assert done.returncode == 0, done.stderr
    return folder


def test_a_rank_that_stands_still_for_less_than_the_time_out(folder: pathlib.Path) -> None:
    process = begin(folder, [*RUN, "run_dir=paused", f"timeout_seconds={PATIENCE_SECONDS:.0f}"])
    wait_until(lambda: num_steps_of(folder / "paused") >= 3, process)
    rank = children_of(process.pid)[1]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    os.kill(rank, signal.SIGCONT)
    code, stderr = end(process)
    assert (code, stderr) == (0, "")
    assert_same_training(folder / "paused", folder / "alone", steps=STEPS)


# The clock that can be set, and none of the others, is as many seconds ahead as a file says. (libfaketime 0.9.10 breaks Python's sleep.)
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now), file;
    char text[32] = {0};
    if (which == CLOCK_REALTIME && (file = open(getenv("CLOCK_FILE"), O_RDONLY | O_CLOEXEC)) >= 0) {
        if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
        close(file);
    }
    return code;
}
"""


def test_a_clock_that_is_set_back_and_forth_by_an_hour(folder: pathlib.Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("a clock of its own for a run needs a C compiler: apt-get install gcc")
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=folder, check=True)
    variables = {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_FILE": str(folder / "clock")}

    def set_clock(hours: int) -> None:
        (folder / "next").write_text(f"{hours * HOUR:.0f}")
        (folder / "next").rename(folder / "clock")
        command = [sys.executable, "-c", "import time; print(time.time())"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={**environment(), **variables})
        assert float(told.stdout) - time.time() == pytest.approx(hours * HOUR, abs=HOUR / 2)

    set_clock(0)
    process = begin(folder, [*RUN, "run_dir=clock-run", "snapshot.every_minutes=10"], **variables)
    for hours, steps in ((-1, 3), (1, 10), (0, 17)):
        wait_until(lambda steps=steps: num_steps_of(folder / "clock-run") >= steps, process)
        set_clock(hours)
    code, stderr = end(process)
    assert (code, stderr) == (0, "")
    assert_same_training(folder / "clock-run", folder / "alone", steps=STEPS)
    seconds = [line["step_seconds"] for line in metrics_of(folder / "clock-run")]
    told = [one for one in seconds if one is not None]  # steps whose events came up: where these cost much, not all
    assert told
    assert all(0.0 < one < HOUR / 2 for one in told)


# A disk ---------------------------------------------------------------------------------------------------------------

ON_A_DISK = 'mount -o loop image disk || exit; code=0; "$@" || code=$?; if [ -d disk/run ]; then cp -r disk/run "$KEEP"; fi; exit $code'


def on_a_disk(folder: pathlib.Path, keep: str, *command: str) -> Process:
    """A command in a mount namespace of its own, which sees the image as `disk`; `disk/run` is then copied to `keep`."""
    return begin(folder, ["unshare", "--mount", "bash", "-c", ON_A_DISK, "bash", *command], KEEP=keep)


def make_disk(folder: pathlib.Path) -> None:
    """An empty disk in a file; skipped aloud where it cannot be mounted."""
    tools = ("unshare", "nsenter", "mkfs.ext4", "e2fsck")
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in tools):
        pytest.skip(f"a disk of its own for a run needs root and {', '.join(tools)}")
    (folder / "disk").mkdir()
    with (folder / "image").open("wb") as image:
        image.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "image"], cwd=folder, check=True)
    code, stderr = end(on_a_disk(folder, "nothing", "true"))
    if code:
        pytest.skip(f"no disk of its own for a run: {stderr.strip()}")


@pytest.mark.root
def test_a_disk_that_turns_read_only(folder: pathlib.Path) -> None:
    """As ext4 makes it after an error of the device."""
    make_disk(folder)
    run = [*RUN, "run_dir=disk/run", "resume=auto"]
    process = on_a_disk(folder, "broken", *run)
    seen = pathlib.Path(f"/proc/{process.pid}/root{folder}/disk/run")
    wait_until(lambda: num_steps_of(seen) >= 12 and (seen / "snapshots" / "step-00000010").is_dir(), process)
    abort = ["nsenter", f"--target={process.pid}", "--mount", "mount", "-o", "remount,abort", str(folder / "disk")]
    subprocess.run(abort, check=True, capture_output=True)
    code, stderr = end(process)
    assert code == 1, stderr
    assert "Traceback" not in stderr
    assert "Read-only file system" in stderr.splitlines()[-1]
    assert "resume=auto" in stderr.splitlines()[-1]
    subprocess.run(["e2fsck", "-fy", "image"], cwd=folder, check=False, capture_output=True)
    code, stderr = end(on_a_disk(folder, "mended", *run))
    assert code == 0, stderr
    start = re.search(r"going on from .*step-0*(\d+)", stderr)
    assert start is not None
    assert int(start[1]) >= 10
    assert_same_training(folder / "mended", folder / "alone", steps=STEPS)


# Data and ranks -------------------------------------------------------------------------------------------------------
