"""`pipetrain plan` for machines that are not here and for other runtimes: what it prints, and that it calls an estimate one."""

import json
from pathlib import Path

import pytest

from pipetrain.cli.main import main
from pipetrain.schedule.csv_file import size_of_csv

TOY = (
    "plan plan.cluster=2xh100-80gb+nvlink precision=bf16-mixed model.vocab_size=512 data.global_batch_size=8 "
    "model.num_hidden_layers=4 data.sequence_length=32 pipeline.search_seconds=0 parallel.num_replicas=1"
)


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*TOY.split(), *words]) == 0
    return capsys.readouterr().out


def test_an_estimate_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(planned("--json", capsys=capsys))
    assert values["estimated"] is True
    assert values["memory_budget_bytes"] == 81_559 * 2**20
    first = values["plans"][0]
    assert (first["num_stages"] % 2, first["num_replicas"]) == (0, 1)
    assert 0 < first["mfu"] < 1
    assert not any(key.startswith("plan.profile") for key in first["keys"])
    assert planned(capsys=capsys).startswith("Estimated for plan.cluster=2xh100-80gb+nvlink")


def test_layers_that_are_kept_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "recompute.mode=inline recompute.last_stage=always recompute.sets=1 pipeline.schedule=gpipe --json "
        "pipeline.num_microbatches=4 pipeline.stages_per_rank=1 pipeline.balance=[3,3]"
    )
    plans = [
        json.loads(planned(*words.split(), *more, capsys=capsys))["plans"]
        for more in ([], ["recompute.keep_layers=1-4"])
    ]
    plain, kept = (max(max(one["peak_activation_bytes"]) for one in found) for found in plans)
    assert kept > 2 * plain


def test_a_peers_plan_is_printed_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "order.csv"
    text = planned("--for=torchtitan", f"--csv={order}", capsys=capsys)
    said = ("Estimated for", "torchtitan (main of", "_parallel_degree = 2", "It cannot express:", "pipetrain's plan 1:")
    assert [part for part in said if part not in text] == []
    values = json.loads(planned("--for=torchtitan", "--json", capsys=capsys))
    assert size_of_csv(order) == (len(values["balance"]), 2, values["num_microbatches"])
    assert values["ours"][0]["step_seconds"] <= values["step_seconds"] * (1 + 1e-9)


@pytest.mark.slow
def test_405b_on_1024_h100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From config.json alone: its plans fit 80 GB."""
    from decoders import LLAMA_405B

    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA_405B.config, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131_072})
    )
    words = (
        "plan.cluster=128x8xh100-80gb+nvlink+ib400 plan.tensor=8 model=hf data.global_batch_size=512 --json "
        "data.sequence_length=8192 precision=bf16-mixed parallel.zero_stage=1 pipeline.search_seconds=0"
    )
    assert main(["plan", *words.split(), f"model.path={tmp_path}"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"]
    for plan in values["plans"]:
        assert plan["num_stages"] // plan["stages_per_rank"] * plan["num_replicas"] == 128
        assert plan["peak_bytes"] <= 81_559 * 2**20
        assert 0.2 < plan["mfu"] < 0.6


def test_an_estimate_needs_a_model_whose_layers_have_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "plan.cluster=2xcpu-4gb", "model.name=python", "model.target=json:loads"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "sizes of its layers" in told
    assert "plan.profile" in told
