"""`pipeline.schedule=auto` in a run: rank 0 searches for the order or takes that of the resumed run, all ranks run the same."""

import json
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from commands import PIPETRAIN, begin, complete, wait_until
from ranks import NEVER_SECONDS, PATIENCE_SECONDS
from small_text import make_text

from pipetrain import train as rank
from pipetrain.config.load import as_yaml, load_config
from pipetrain.config.records import RunConfig
from pipetrain.monitor.folder import RunFolder
from pipetrain.schedule.csv_file import write_csv
from pipetrain.trainer.prepare import PreparedPhase, prepare, prepare_phases

TYPED = [
    "experiment=smoke", "pipeline.schedule=auto", "pipeline.num_stages=3", "pipeline.num_microbatches=6",
    "data.global_batch_size=6", "pipeline.search_seconds=0",
]  # fmt: skip


class Ranks:
    """The ranks of a run one after the other: rank 0 first, what it says is what the others hear."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.said: list[Any] = []

    def from_first(self, value: Any) -> Any:
        if self.rank == 0:
            self.said.append(json.loads(json.dumps(value)))
        return self.said[-1]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations for which an order was sought."""
    found: list[RunConfig] = []

    def counted(config: RunConfig, num_ranks: int, orders: Sequence[str | None] = ()) -> tuple[PreparedPhase, ...]:
        found.append(config)
        return prepare_phases(config, num_ranks, orders)

    monkeypatch.setattr(rank, "prepare_phases", counted)
    return found


def agreed_on_phases(ranks: Ranks, config: RunConfig) -> list[list[str | None]]:
    """What each of the ranks gets."""
    found = []
    for number in range(ranks.size):
        ranks.rank = number
        found.append(rank._agreed_orders(config, ranks))  # type: ignore[arg-type]
    return found


def agreed(ranks: Ranks, config: RunConfig) -> list[str | None]:
    """The same, of a run without phases."""
    return [order for (order,) in agreed_on_phases(ranks, config)]


def test_one_rank_seeks_and_all_have_the_same(prepared: list[RunConfig]) -> None:
    config = load_config(TYPED)
    orders = agreed(Ranks(3), config)
    assert len(prepared) == 1
    assert len(set(orders)) == 1
    schedules = [prepare(config, 3, order).schedule for order in orders]
    assert write_csv(schedules[0]) == orders[0]
    assert schedules[0] == schedules[1] == prepare(config, 3).schedule
    assert agreed_on_phases(Ranks(3), load_config(["pipeline.num_stages=3"])) == [[]] * 3


def test_every_rank_hears_what_is_wrong() -> None:
    ranks, config = Ranks(3), load_config([*TYPED, "plan.profile=/nowhere"])
    for number in range(3):
        ranks.rank = number
        with pytest.raises(ValueError, match=r"plan.profile=/nowhere: .* is not there"):
            rank._agreed_orders(config, ranks)  # type: ignore[arg-type]


def test_a_run_goes_on_in_its_order(tmp_path: pathlib.Path, prepared: list[RunConfig]) -> None:
    folder = RunFolder(tmp_path)
    config = load_config([*TYPED, f"run_dir={tmp_path}"])
    (tmp_path / "snapshots" / "step-00000002").mkdir(parents=True)
    folder.config.write_text(as_yaml(config))
    # Another order than would be sought: in that of 1F1B stage 0 has less in flight.
    other = write_csv(prepare(load_config([*TYPED, "recompute.stash=2"]), 3).schedule)
    assert other != write_csv(prepare(config, 3).schedule)
    folder.schedule.write_text(other)
    for resume in ("auto", tmp_path, tmp_path / "snapshots", tmp_path / "snapshots" / "step-00000002"):
        changed = [f"resume={resume}", "steps=9", "pipeline.search_seconds=5"]
        assert set(agreed(Ranks(3), load_config([*TYPED, f"run_dir={tmp_path}", *changed]))) == {other}
    assert not prepared
    for change in ("recompute.sets=2", "recompute.mode=early", "cost.hop_seconds=0.5"):
        agreed(Ranks(3), load_config([*TYPED, f"run_dir={tmp_path}", "resume=auto", change]))
    assert len(prepared) == 3, "sought again for what has changed"


@pytest.mark.slow
def test_each_phase_has_its_order_and_goes_on_in_it(tmp_path: pathlib.Path, prepared: list[RunConfig]) -> None:
    folder, phases = RunFolder(tmp_path), "phases=[{from:0,recompute:{sets:2}},{from:3,recompute:{stash:2}}]"
    config = load_config([*TYPED, f"run_dir={tmp_path}", phases])
    first, *others = agreed_on_phases(Ranks(3), config)
    assert [first] * 2 == others
    assert len(prepared) == 1
    assert first == [
        write_csv(prepare(load_config([*TYPED, key]), 3).schedule) for key in ("recompute.sets=2", "recompute.stash=2")
    ]
    assert first[0] != first[1]
    (tmp_path / "snapshots" / "step-00000002").mkdir(parents=True)
    folder.config.write_text(as_yaml(config))
    folder.schedule.write_text(str(first[0]))
    for number, order in enumerate(first):
        folder.phase(number).path.mkdir(parents=True)
        folder.phase(number).schedule.write_text(str(order))
    again = [*TYPED, f"run_dir={tmp_path}", "resume=auto"]
    assert agreed_on_phases(Ranks(1), load_config([*again, phases])) == [first]
    # Whichever phase has it now, and in a run without any.
    turned = "phases=[{from:0,recompute:{stash:2}},{from:5,recompute:{sets:2}}]"
    assert agreed_on_phases(Ranks(1), load_config([*again, turned])) == [first[::-1]]
    assert agreed(Ranks(1), load_config([*again, "recompute.stash=2"])) == [first[1]]
    assert len(prepared) == 1, "nothing was sought again"
    added = "phases=[{from:0,recompute:{stash:2}},{from:5,recompute:{sets:3}}]"
    orders = agreed_on_phases(Ranks(3), load_config([*again, added]))[0]
    assert (orders[0], len(prepared)) == (first[1], 2)


def test_search_is_shorter_than_what_ranks_wait() -> None:
    with pytest.raises(
        ValueError, match=r"pipeline.search_seconds=30.0: the other ranks wait timeout_seconds=20.0 at most"
    ):
        prepare(load_config(["experiment=smoke", "pipeline.schedule=auto", "timeout_seconds=20"]))


@pytest.mark.slow
def test_a_run_in_the_best_order(tmp_path: pathlib.Path) -> None:
    make_text(tmp_path / "text")
    typed = [*TYPED[:-1], "pipeline.search_seconds=3", "data=text", f"data.path={tmp_path / 'text'}"]
    typed.append("pipeline.split_backward=true")
    plain = complete(tmp_path, [*PIPETRAIN, *typed, "pipeline.schedule=gpipe", "run_dir=plain"])
    assert plain.returncode == 0, plain.stderr
    done = complete(tmp_path, ["env", f"XDG_CACHE_HOME={tmp_path}", *PIPETRAIN, *typed, "run_dir=best"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("searching for an order") <= 1, "the ranks do not search again"
    assert "the step of pipeline.schedule=auto" in done.stderr
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "best")
    ]
    assert losses[0] == losses[1]
    assert (tmp_path / "best" / "schedule.csv").read_text().startswith("0F0,0F1")
    again = complete(
        tmp_path,
        [*PIPETRAIN[:-1], "show", "plan.profile=best", "pipeline.schedule=auto", "pipeline.search_seconds=0", "--json"],
    )
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["peak_sets"]) == 3


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ctrl_c_ends_a_search(tmp_path: pathlib.Path) -> None:
    """Well before the time that it may take, which is longer than this test waits."""
    typed = "show pipeline.schedule=auto pipeline.num_stages=8 pipeline.num_microbatches=32"
    times = [f"pipeline.search_seconds={2 * PATIENCE_SECONDS}", f"timeout_seconds={NEVER_SECONDS}"]
    with begin(tmp_path, [*PIPETRAIN[:-1], *typed.split(), *times], XDG_CACHE_HOME=str(tmp_path)) as process:
        assert process.stderr is not None
        assert "searching for an order" in process.stderr.readline()
        before = cpu_seconds(process.pid)
        wait_until(lambda: cpu_seconds(process.pid) > before + 0.5, process)  # into the search
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode not in (0, 2)
        assert not list(tmp_path.rglob("*.json")), "nothing half found is kept"
