"""Several machines, played by process groups of this one: scripts, signals, and a folder that not all of them see."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from commands import PIPETRAIN, Process, begin, end, free_port, wait_until
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, run_outcomes
from resumed import metrics_of, num_steps_of
from small_text import make_text

from pipetrain.comm.group import join_group
from pipetrain.launcher.nodes import EndedEarly, passing_signals_on

RUN = ["experiment=smoke"]


@pytest.mark.slow
def test_the_command_on_each_machine_stops_them_all_and_goes_on(tmp_path: pathlib.Path) -> None:
    """A signal to one machine is a stop of all, with one message; what comes out is what one machine computes."""

    text = make_text(tmp_path / "text")

    def on_both(run: str, *options: str) -> list[Process]:
        where = ["cluster.num_nodes=2", "cluster.ranks_per_node=1", f"cluster.rendezvous=127.0.0.1:{free_port()}"]
        command = [*PIPETRAIN, *RUN, *text, "steps=60", f"run_dir={run}", *where, *options]
        return [begin(tmp_path, command) for _ in range(2)]

    machines = on_both("stopped", "resume=auto")
    for machine in machines:
        wait_until(lambda: num_steps_of(tmp_path / "stopped") > 0, machine)
    machines[1].send_signal(signal.SIGUSR1)
    ended = [end(machine) for machine in machines]
    assert [code for code, _ in ended] == [75, 75], ended
    assert sum("stopped by SIGUSR1" in err for _, err in ended) == 1, ended
    assert [code for code, _ in map(end, on_both("stopped", "resume=auto"))] == [0, 0]

    alone = [*PIPETRAIN, *RUN, *text, "steps=60", "run_dir=alone"]
    assert end(begin(tmp_path, alone))[0] == 0
    stopped, undisturbed = (metrics_of(tmp_path / run) for run in ("stopped", "alone"))
    assert [line["loss"] for line in stopped] == [line["loss"] for line in undisturbed]


@pytest.mark.slow
def test_a_machine_that_waits_in_vain_says_where(tmp_path: pathlib.Path) -> None:
    port = free_port()
    where = ["cluster.num_nodes=2", "cluster.ranks_per_node=1", f"cluster.rendezvous=127.0.0.1:{port}"]
    command = [*PIPETRAIN, *RUN, *make_text(tmp_path / "text"), "timeout_seconds=3", *where]
    code, err = end(begin(tmp_path, command))
    assert code == 1, err
    assert err.splitlines()[-1].startswith(
        "pipetrain: this machine of 2 did not meet the others at cluster.rendezvous=127.0.0.1:"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize("num_announced", [1, 2])
def test_a_signal_before_all_ranks_are_there_ends_at_once(num_announced: int) -> None:
    """Later it goes to them."""
    told: list[bool] = []
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        with passing_signals_on(lambda: [process.pid] * num_announced, 2):
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            except EndedEarly as error:
                told.append(error.code == 75 and str(error).startswith("stopped by SIGUSR1 before the ranks"))
        assert told == ([True] if num_announced == 1 else [])
        if num_announced == 2:
            assert process.wait(PATIENCE_SECONDS) == -signal.SIGUSR1
    finally:
        process.kill()
        process.wait()


def agree_on(folder: str, port: int) -> None:
    from pipetrain.trainer.agree import check_shared

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    meeting = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in meeting.items()}
    with join_group(timeout_seconds=NEVER_SECONDS) as group:
        own = pathlib.Path(folder) / f"disk-of-machine-{rank // 2}"
        own.mkdir(exist_ok=True)
        check_shared(own, group, timeout_seconds=0.2)


def test_a_folder_that_one_machine_does_not_see(tmp_path: pathlib.Path) -> None:
    for outcome in run_outcomes(4, agree_on, str(tmp_path), free_port()):
        assert outcome.error is not None
        assert "the machine of rank 2 does not see this folder" in outcome.error, outcome.error
        assert "file system that all machines share" in outcome.error
    assert [list(disk.iterdir()) for disk in tmp_path.iterdir()] == [[], []]
