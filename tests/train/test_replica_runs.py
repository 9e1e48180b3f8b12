"""Runs of several replicas: what is trained, saved and gone on with."""

import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable

import pytest
import torch
from commands import begin, children_of, end, free_port, listening, wait_until
from ranks import run_outcomes, run_ranks
from resumed import assert_same_weights, metrics_of, num_steps_of
from safetensors.torch import load_file
from small_text import make_text
from torch import Tensor

from pipetrain.comm.failure import PipelineError
from pipetrain.config.load import load_config
from pipetrain.models.weights import read_weights
from pipetrain.train import main
from pipetrain.train import train as train_as_rank
from pipetrain.trainer.steps import Steps

STEPS = 8
RUN = (
    *(
        "experiment=smoke",
        "data=text",
        "data.path=text",
        "observe.progress=false",
        f"steps={STEPS}",
        "snapshot.every_steps=4",
    ),
    *("snapshot.keep_last=9", "pipeline.num_microbatches=2", "model.dropout=0.1", "parallel.check_every_steps=3"),
)
TWO_BY_TWO = ("parallel.num_replicas=2", "pipeline.num_stages=2")
HALF = "resume=whole/snapshots/step-00000004"


def train(folder: str, *runs: tuple[str, ...]) -> list[int]:
    """Exit codes of runs, one after the other, of this rank."""
    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return [main([*RUN, *words]) for words in runs]


def figures(run: pathlib.Path, *keys: str) -> list[list[object]]:
    return [[line[key] for key in keys] for line in metrics_of(run)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Runs of four ranks: `whole` of two replicas of two stages; from its step 4 on as it was, and on other meshes."""
    folder = tmp_path_factory.mktemp("replicas")
    make_text(folder / "text")
    runs = (
        ("run_dir=whole", *TWO_BY_TWO),
        ("run_dir=again", HALF, *TWO_BY_TWO),
        ("run_dir=zero", HALF, *TWO_BY_TWO, "parallel.zero_stage=1", "parallel.order=stage-replica"),
        ("run_dir=deep", HALF, "pipeline.num_stages=4", "steps=4"),
        ("run_dir=wide", HALF, "parallel.num_replicas=auto", "pipeline.num_stages=1", "steps=4"),
        ("run_dir=wider", HALF, "parallel.num_replicas=4", "pipeline.num_microbatches=1"),
    )
    assert run_ranks(4, train, str(folder), *runs) == [[0] * len(runs)] * 4
    return folder


def test_figures_are_those_of_all_replicas(folder: pathlib.Path) -> None:
    lines = metrics_of(folder / "whole")
    assert {(line["tokens"], line["counted_tokens"]) for line in lines} == {(8 * 32, 8 * 32)}
    report = json.loads((folder / "whole" / "report.json").read_text())
    assert report["tokens_seen"] == lines[-1]["tokens_seen"] == STEPS * 8 * 32
    assert len(list((folder / "whole" / "events").iterdir())) == 4


def test_a_run_goes_on_bit_for_bit(folder: pathlib.Path) -> None:
    again, whole = (figures(folder / run, "step", "loss", "grad_norm", "tokens_seen") for run in ("again", "whole"))
    assert again == whole[4:]
    assert_same_weights(folder / "again", folder / "whole")


def test_it_goes_on_with_its_state_shared_out_over_the_replicas(folder: pathlib.Path) -> None:
    """ZeRO 1 makes the same updates, and the order of the ranks changes none of them."""
    assert figures(folder / "zero", "step", "loss") == figures(folder / "whole", "step", "loss")[4:]
    assert_same_weights(folder / "zero", folder / "whole")


def test_other_replicas_and_stages_begin_with_the_same_weights(folder: pathlib.Path) -> None:
    """They do no step, so what they leave is what they read."""
    for run in ("deep", "wide"):
        assert json.loads((folder / run / "plan.json").read_text())["num_replicas"] == {"deep": 1, "wide": 4}[run]
    assert_same_weights(folder / "deep", folder / "wide")
    snapshot = folder / "whole" / "snapshots" / "step-00000004" / "weights"
    saved = {name: value for path in sorted(snapshot.iterdir()) for name, value in load_file(path).items()}
    ours = read_weights(folder / "deep" / "weights")
    assert {name for name in ours if torch.equal(ours[name], saved[name])} == saved.keys()


def test_slices_of_a_batch_are_the_same_whoever_takes_them(folder: pathlib.Path) -> None:
    """Four replicas of one microbatch take the slices of two replicas of two, with the same dropout: seeds are of slices."""
    ours, theirs = figures(folder / "wider", "loss"), figures(folder / "whole", "loss")[4:]
    assert [row[0] for row in ours] == pytest.approx([row[0] for row in theirs], abs=1e-5)


# A step that cannot be right ------------------------------------------------------------------------------------------


def with_a_gradient_of_one_replica_that_is_not_finite(folder: str) -> list[dict[str, Tensor]]:
    """Rank 2, the first of the second replica, has one in step 3; returns its weights after each step of the run."""
    rank, after, run = torch.distributed.get_rank(), list[dict[str, Tensor]](), Steps.run

    def run_watched(steps: Steps, asked_to_stop: Callable[[], int], largest: Callable[[int], int]) -> int:
        def look() -> int:
            after.append({name: value.detach().clone() for name, value in steps.engine.model.named_parameters()})
            return asked_to_stop()

        if rank == 2:
            count = [0]

            def spoil(gradient: Tensor) -> Tensor:
                count[0] += 1
                # microbatches of step 3, and of its repetition
                return gradient * math.inf if 4 < count[0] <= 8 else gradient

            next(iter(steps.engine.model.named_parameters()))[1].register_hook(spoil)
        return run(steps, look, largest)

    Steps.run = run_watched  # type: ignore[method-assign]
    options = ("guard=skip", "steps=4", "parallel.check_every_steps=1")
    assert train(folder, ("run_dir=refused", *TWO_BY_TWO, *options)) == [0]
    return after


@pytest.mark.slow
def test_what_one_replica_cannot_use_is_refused_by_all(folder: pathlib.Path) -> None:
    ranks = run_ranks(4, with_a_gradient_of_one_replica_that_is_not_finite, str(folder))
    assert [line["skipped"] for line in metrics_of(folder / "refused")] == [False, False, True, False]
    for after in ranks:
        assert all(torch.equal(before, after[2][name]) for name, before in after[1].items())
        assert not all(torch.equal(before, after[3][name]) for name, before in after[2].items())
    for first, second in ((0, 2), (1, 3)):
        assert all(torch.equal(value, ranks[second][-1][name]) for name, value in ranks[first][-1].items())
    incident = json.loads((folder / "refused" / "inspect" / "step-00000003" / "incident.json").read_text())
    assert (incident["rank"], incident["stage"]) == (2, 0)
    assert 2 <= incident["microbatch"] < 4  # those of the second replica
    assert len(incident["microbatch_losses"]) == 4
    batch = load_file(folder / "refused" / "inspect" / "step-00000003" / "batch.safetensors")
    assert batch["inputs"].shape == (8, 32)


def with_a_weight_that_changes_in_one_replica(folder: str, every: str) -> list[str]:
    """As a fault of a machine's memory would; returns what the run ended with, and the snapshots that there are."""
    rank, run = torch.distributed.get_rank(), Steps.run

    def run_watched(steps: Steps, asked_to_stop: Callable[[], int], largest: Callable[[int], int]) -> int:
        asked = [0]

        def look() -> int:
            asked[0] += 1
            if rank == 1 and asked[0] == 3:
                next(iter(steps.engine.model.named_parameters()))[1].data.view(-1)[5] += 1e-7
            return asked_to_stop()

        return run(steps, look, largest)

    Steps.run = run_watched  # type: ignore[method-assign]
    os.chdir(folder)
    mesh = ("parallel.num_replicas=2", "pipeline.num_stages=1", f"parallel.check_every_steps={every}")
    try:
        train_as_rank(load_config([*RUN, "run_dir=differs", *mesh]))
    except PipelineError as error:
        return [str(error), *sorted(path.name for path in pathlib.Path("differs/snapshots").glob("step-*"))]
    return []


@pytest.mark.parametrize(("every", "found"), [("3", 3), ("100", 4)], ids=["in its time", "before a snapshot"])
def test_replicas_that_differ_end_the_run_before_anything_is_saved(
    every: str, found: int, tmp_path: pathlib.Path
) -> None:
    make_text(tmp_path / "text")
    for message, *snapshots in run_ranks(2, with_a_weight_that_changes_in_one_replica, str(tmp_path), every):
        assert f"seen after step {found}" in message
        assert "rank 0 (replica 0" in message
        assert "rank 1 (replica 1" in message
        assert "\n" not in message
        assert snapshots == []


# Ranks that are gone --------------------------------------------------------------------------------------------------

LONG = 25
PLAIN = (*TWO_BY_TWO, "model.dropout=0", f"steps={LONG}")


def killed(folder: str, *words: str) -> None:
    os.environ["PIPETRAIN_FAULTS"] = "kill rank=3 op=1F1 step=7"
    os.chdir(folder)
    train_as_rank(load_config([*RUN, *words]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An undisturbed run without dropout."""
    folder = tmp_path_factory.mktemp("gone")
    make_text(folder / "text")
    assert run_ranks(4, train, str(folder), ("run_dir=plain", *PLAIN)) == [[0]] * 4
    return folder


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_bit_for_bit(plain: pathlib.Path) -> None:
    *others, lost = run_outcomes(4, killed, str(plain), "run_dir=killed", *PLAIN)
    assert lost.exit_code == -signal.SIGKILL
    assert all(outcome.error for outcome in others)
    assert any("rank 3 (replica 1, stage 1)" in str(outcome.error) for outcome in others)
    assert run_ranks(4, train, str(plain), ("run_dir=killed", "resume=auto", *PLAIN)) == [[0]] * 4
    ours, theirs = (figures(plain / run, "step", "loss", "grad_norm") for run in ("killed", "plain"))
    assert ours == theirs
    assert_same_weights(plain / "killed", plain / "plain")


@pytest.mark.slow
def test_torchrun_goes_on_with_the_machines_that_are_left(plain: pathlib.Path) -> None:
    """Two scripts are two machines with a replica each; one of them is killed, with its ranks."""
    port = free_port()
    script = ["bash", str(pathlib.Path(__file__).resolve().parents[2] / "launch" / "multinode.sh")]
    variables = {
        "NODES": "1:2", "RANKS_PER_NODE": "2", "RENDEZVOUS": f"127.0.0.1:{port}", "MAX_RESTARTS": "3", "PYTHON": sys.executable,
    }  # fmt: skip
    words = ("run_dir=elastic", "resume=auto", *PLAIN, "parallel.num_replicas=auto", "snapshot.every_steps=2")
    first, second = (begin(plain, [*script, *RUN, *words], **variables) for _ in range(2))
    run = plain / "elastic"
    wait_until(lambda: num_steps_of(run) >= 5, first)
    assert json.loads((run / "plan.json").read_text())["num_replicas"] == 2
    lost, left = (first, second) if port in {open_port for _, open_port in listening(second.pid)} else (second, first)
    for pid in (*children_of(lost.pid), lost.pid):
        os.kill(pid, signal.SIGKILL)
    code, stderr = end(left)
    assert code == 0, stderr
    end(lost)
    assert "1 replica, the run had 2" in stderr
    assert json.loads((run / "plan.json").read_text())["num_replicas"] == 1
    ours, theirs = figures(run, "step", "loss"), figures(plain / "plain", "step", "loss")
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    assert [row[1] for row in ours] == pytest.approx([row[1] for row in theirs], abs=1e-5)
