"""engine=deepspeed: the numbers of the native engine, its snapshots, its run folder, and how it fails."""

import contextlib
import json
import os
import pathlib
import signal

import pytest
import torch
from commands import PIPETRAIN, children_of, complete, end, wait_until
from deepspeed_runs import Run, config_of, interrupted_all, train_all, train_on_data
from ranks import NEVER_SECONDS, run_ranks
from resumed import num_steps_of, start
from small_text import make_text

from pipetrain.cli.main import main
from pipetrain.data.batch import Batch
from pipetrain.engine.deepspeed.engine_deepspeed import DeepSpeedEngine
from pipetrain.models.spec import spec_of

CASES = [(0, "inline"), (1, "never")]
OPTIONS = ["pipeline=1f1b", "recompute=inline", "engine=deepspeed"]


def options_of(zero: int, mode: str) -> list[str]:
    return ["engine=deepspeed", f"parallel.zero_stage={zero}", f"recompute={mode}"]


def assert_same(run: Run, native: Run, tolerance: float) -> None:
    assert run.losses == pytest.approx(native.losses, rel=tolerance)
    assert run.norms == pytest.approx(native.norms, rel=tolerance)


def test_numbers_are_those_of_the_native_engine() -> None:
    """Also with dropout, whose masks come from the same seeds; the last stage recomputes where it is told to."""
    configs = [
        config_of("recompute=never"),
        *(config_of(*options_of(*case)) for case in CASES),
        config_of("recompute=never", "model.dropout=0.1"),
        config_of(*options_of(1, "inline"), "model.dropout=0.1", "recompute.last_stage=always"),
    ]
    ranks = run_ranks(2, train_all, configs)
    native, *runs, with_dropout, last = ranks[0]
    assert native.losses[-1] < native.losses[0]
    assert max(native.norms) > 1.0  # some step is clipped
    for run in runs:
        assert_same(run, native, 1e-4)
        assert run.heldout == pytest.approx(native.heldout, rel=1e-4)
    assert with_dropout.losses != pytest.approx(native.losses, rel=1e-3)
    assert_same(last, with_dropout, 1e-4)
    for natives, *others, _, _ in ranks:  # each rank has its own part
        for run in others:
            assert run.weights.keys() == natives.weights.keys()
            for name, weight in run.weights.items():
                # DeepSpeed's own arithmetic, for twenty steps; and Adam makes of a gradient that is rounding alone a step of full size.
                torch.testing.assert_close(weight, natives.weights[name], rtol=1e-2, atol=1e-3)


def test_a_batch_of_more_than_two_tensors_is_refused() -> None:
    engine, ids = object.__new__(DeepSpeedEngine), torch.zeros(4, 3, dtype=torch.int64)
    engine._spec = spec_of([torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"engine=deepspeed: the inputs of a batch are a dict, .* use engine=native"):
        engine._cut(Batch({"ids": ids}, ids))
    with pytest.raises(ValueError, match=r"engine=deepspeed: the targets of a batch are a tuple"):
        engine._cut(Batch(ids, (ids, ids)))


@pytest.mark.slow
def test_snapshots_are_exact_and_fit_the_other_engine() -> None:
    zero_0, zero_1 = (config_of(*options_of(zero, "inline"), "steps=6") for zero in (0, 1))
    native = config_of("recompute=inline", "steps=6")
    cases = [(zero_0, zero_0), (zero_1, zero_1), (zero_1, zero_0), (native, zero_1), (zero_1, native)]
    same_0, same_1, less, to_sharded, from_sharded = run_ranks(2, interrupted_all, cases, 3)[0]
    for expected, losses, _ in (same_0, same_1):
        assert losses == expected
    for expected, losses, names in (less, to_sharded, from_sharded):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert names == same_0[2]
    assert "0.tokens.weight/exp_avg" in same_1[2]
    assert "0.tokens.weight/step" in same_1[2]


@pytest.mark.slow
def test_a_run_leaves_what_a_run_leaves(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_text(tmp_path / "text")
    command = [*PIPETRAIN, "experiment=smoke", "data=text", "data.path=text", *OPTIONS, "run_dir=run", "--json"]
    done = complete(tmp_path, command)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    assert json.loads(done.stdout) == report  # and nothing of what DeepSpeed prints
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert all(line[key] > 0 for key in ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds"))
        assert all(bytes_ > 0 for bytes_ in line["peak_memory_bytes"])
        assert (line["bubble_fraction"], line["mfu"]) == (None, None)
        for key in ("recompute_hidden_seconds", "recompute_exposed_seconds", "peak_activation_bytes"):
            assert line[key] == [None, None]
    assert report["step_seconds_measured"] > 0
    assert report["heldout_loss"] > 0
    assert report["step_seconds_predicted"] is None
    assert not (run / "timeline.html").exists()
    assert main(["report", str(run)]) == 0
    assert "| recompute hidden      |      - |      - |" in capsys.readouterr().out
    assert main(["generate", str(run), "--prompt=the ", "--tokens=5", "--ranks=1"]) == 0


@pytest.mark.slow
def test_the_quickstart_over_20_steps() -> None:
    tiny = ("data.sequence_length=256", "pipeline.balance=auto", "optim.warmup_steps=20")
    quickstart = ("experiment=quickstart", "model.num_hidden_layers=4", "model.hidden_size=128", *tiny)
    configs = [config_of(*quickstart, "recompute=never")]
    configs += [config_of(*quickstart, *options_of(*case)) for case in CASES]
    native, *runs = run_ranks(2, train_on_data, configs)[0]
    for run in runs:
        assert_same(run, native, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "words"), [(signal.SIGSTOP, "timeout_seconds"), (signal.SIGKILL, "is gone")])
def test_a_rank_that_hangs_or_dies_ends_the_others(sent: signal.Signals, words: str, tmp_path: pathlib.Path) -> None:
    """Rank 0 waits no longer than timeout_seconds, and says for whom."""
    make_text(tmp_path / "text")
    timeout = f"timeout_seconds={8 if sent is signal.SIGSTOP else NEVER_SECONDS}"
    options = [*OPTIONS, "steps=100000", timeout, "snapshot.every_steps=null", "run_dir=run"]
    process = start(tmp_path, PIPETRAIN, *options)
    wait_until(lambda: num_steps_of(tmp_path / "run") >= 2, process)
    rank_0, rank_1 = children_of(process.pid)
    os.kill(rank_1, sent)
    wait_until(lambda: process.poll() is not None or rank_0 not in children_of(process.pid), process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank_1, signal.SIGKILL)  # torchrun would wait for it
    code, stderr = end(process)
    assert code == 1, stderr
    assert "rank 1" in stderr.splitlines()[-1]
    assert words in stderr.splitlines()[-1]


@pytest.mark.slow
def test_cpu_adam_is_adamw_and_resumes() -> None:
    """The first use compiles DeepSpeed's extension."""
    adamw = config_of("recompute=inline", "steps=6")
    host = config_of("recompute=inline", "steps=6", "optim=deepspeed_cpu_adam", "optim.warmup_steps=2")
    expected, run = run_ranks(2, train_all, [adamw, host])[0]
    assert_same(run, expected, 1e-4)
    cases = [(host, host), (adamw, host), (host, adamw)]
    (exact, resumed, names), *mixed = run_ranks(2, interrupted_all, cases, 3)[0]
    assert resumed == exact
    for theirs, ours, other in mixed:
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert other == names
