"""Nothing that a stranger on the machine sends is executed, and no connection of theirs holds up a run."""

import pathlib

from commands import PIPETRAIN, begin, end
from resumed import metrics_of, num_steps_of
from small_text import make_text
from strangers import disturb, forge, num_descriptors, ports_of, run_of

RUN = [*PIPETRAIN, "experiment=smoke"]
NUM_CONNECTIONS = 10_000
MOST_MORE = 20  # descriptors of a process


def test_a_forged_pickle_is_not_executed(tmp_path: pathlib.Path) -> None:
    """Under every key of every store that answers, from the start of the processes to their end."""
    process = begin(tmp_path, [*RUN, "run_dir=run", *make_text(tmp_path / "text"), "steps=150"])
    answers = 0
    while process.poll() is None:
        answers += sum(forge(port, f"touch {tmp_path}/executed") for port in ports_of(run_of(process.pid)))
    code, stderr = end(process)
    assert not (tmp_path / "executed").exists()
    assert code == 0, stderr
    assert answers == 0, "a store of the run is open to others"


def most_descriptors(pid: int, before: dict[int, int]) -> dict[int, int]:
    """The most that each process of the run has had, by its place in it."""
    now = {at: num_descriptors(one) for at, one in enumerate(run_of(pid))}
    return {at: max(now.get(at, 0), before.get(at, 0)) for at in now | before}


def test_strangers_who_connect_change_nothing(tmp_path: pathlib.Path) -> None:
    """At each port that the run has had, from the start of its processes; and once the steps have begun it has none."""
    text = [*make_text(tmp_path / "text"), "steps=150"]
    alone, most = begin(tmp_path, [*RUN, "run_dir=alone", *text]), dict[int, int]()
    while alone.poll() is None:
        most = most_descriptors(alone.pid, most)
    code, stderr = end(alone)
    assert code == 0, stderr

    process, ports, refused, disturbed = begin(tmp_path, [*RUN, "run_dir=run", *text]), set[int](), 0, dict[int, int]()
    num = 0
    while process.poll() is None and num < NUM_CONNECTIONS:
        open_now = ports_of(run_of(process.pid))
        ports |= open_now
        assert not (open_now and num_steps_of(tmp_path / "run"))
        for port in ports:
            for _ in range(4 if port in open_now else 100):
                refused += not disturb(port, num)
                num += 1
        disturbed = most_descriptors(process.pid, disturbed)
    code, stderr = end(process)
    assert code == 0, stderr
    assert num >= NUM_CONNECTIONS
    assert ports
    assert refused > NUM_CONNECTIONS / 2
    assert {at: number - most[at] for at, number in disturbed.items() if number > most[at] + MOST_MORE} == {}
    losses = [[line["loss"] for line in metrics_of(tmp_path / run)] for run in ("alone", "run")]
    assert losses[0] == losses[1]
