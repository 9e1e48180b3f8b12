"""`--for`: plans of other runtimes obey those runtimes, and torch's runs the order that is written for it."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import llama
from ranks import run_ranks

from pipetrain.plan.cluster import parse_cluster
from pipetrain.plan.estimate import Estimator
from pipetrain.plan.footprint import Holdings
from pipetrain.plan.foreign import PEERS, ForeignPlan, Option, Pricing, best_foreign, layer_groups, least_difference
from pipetrain.plan.space import PlanProblem

TOY = llama(6, 512, 16, 1024, 1000)
BATCH = 8


def problem(ranks: int = 2, **held: Any) -> PlanProblem:
    """8 layers with embedding and head, on `ranks` ranks of one replica."""
    profile = Estimator(TOY, parse_cluster("8xh100-80gb+nvlink"), 64, precision="bf16-mixed").profile()
    keys = {f"pipeline.{name}": value for name, value in held.items()} | {"parallel.num_replicas": 1}
    return PlanProblem(profile, BATCH, ranks, held=keys, holdings=Holdings(casts=True, on_cuda=True))


def lines(plan: ForeignPlan) -> str:
    return "\n".join(plan.lines)


# torch's runtime ---------------------------------------------------------------------------------------------------------


def gradients_by_torch(folder: Path, balance: tuple[int, ...], microbatches: int) -> Any:
    """Gradients of this rank's stages after one step of torch's runtime by the file, and those of the plain loop."""
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(sum(balance))]
    inputs, targets = torch.randn(2 * microbatches, 6), torch.randn(2 * microbatches, 6)
    plain = torch.nn.Sequential(*layers)
    for one, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches)):
        torch.nn.functional.mse_loss(plain(one), target).backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    order, rank = (folder / "order.csv").read_text().splitlines(), torch.distributed.get_rank()
    own = sorted({int(re.match(r"\d+", cell)[0]) for cell in order[rank].split(",")})  # type: ignore[index]
    starts = [sum(balance[:stage]) for stage in range(len(balance) + 1)]
    stages = [
        PipelineStage(plain[starts[stage] : starts[stage + 1]], stage, len(balance), torch.device("cpu"))
        for stage in own
    ]
    runtime = _PipelineScheduleRuntime(
        stages, n_microbatches=microbatches, loss_fn=torch.nn.functional.mse_loss, scale_grads=False
    )
    runtime._load_csv(str(folder / "order.csv"))
    runtime.step(*([inputs] if 0 in own else []), **({"target": targets} if len(balance) - 1 in own else {}))
    per_layer = len(expected) // len(layers)
    compared = [
        (parameter.grad, expected[starts[stage] * per_layer + number])
        for stage in own
        for number, parameter in enumerate(plain[starts[stage] : starts[stage + 1]].parameters())
    ]
    return [bool(torch.allclose(given, wanted, rtol=1e-5, atol=1e-6)) for given, wanted in compared]


@pytest.mark.parametrize("order", PEERS["torchtitan"].orders, ids=lambda order: "-".join(map(str, order[:2])))
def test_torch_runs_the_order_that_is_written_for_it(
    order: tuple[str, int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gloo, with the gradients of the plain loop."""
    monkeypatch.setitem(PEERS, "torchtitan", replace(PEERS["torchtitan"], orders=(order,)))
    plan = best_foreign("torchtitan", problem(num_microbatches=4))
    assert (plan.option.order, len(plan.option.balance) // 2) == order[:2]
    (tmp_path / "order.csv").write_text(plan.csv)
    found = run_ranks(2, gradients_by_torch, tmp_path, plan.option.balance, plan.option.num_microbatches)
    assert all(found)
    assert all(map(all, found))


# In their words ------------------------------------------------------------------------------------------------------------


def test_torchtitan_gets_names_of_modules() -> None:
    plan = best_foreign("torchtitan", problem(num_microbatches=4), sequence_length=64)
    (parts,) = re.findall(r"module_fqns_per_model_part = (.+)", lines(plan))
    names = [name for part in json.loads(parts) for name in part]
    assert names == ["tok_embeddings", *(f"layers.{n}" for n in range(6)), "norm", "lm_head"]
    assert "pipeline_parallel_degree = 2" in lines(plan)
    assert "num_pp_microbatches = 4" in lines(plan)
    assert "num_tokens_per_microbatch_per_dp_rank = 128" in lines(plan)
    assert f"pipeline_parallel_schedule = {json.dumps(plan.option.name)}" in lines(plan)


def test_megatron_gets_a_layout_of_all_layers() -> None:
    plan = best_foreign("megatron", problem(), sequence_length=64, tensor=2)
    (layout,) = re.findall(r'--pipeline-model-parallel-layout "(.+)"', lines(plan))
    assert layout.startswith("E")
    assert layout.endswith("L")
    assert sum(map(int, re.findall(r"t\*(\d+)", layout))) == 6
    assert layout.count("|") + 1 == len(plan.option.balance)
    assert "--tensor-model-parallel-size 2 --sequence-parallel" in lines(plan)


def test_deepspeed_gets_a_cut_that_it_makes_itself() -> None:
    plan = best_foreign("deepspeed", problem(ranks=3))
    assert plan.option.order == "1f1b"
    assert f'partition_method="{plan.option.cut}"' in lines(plan)
    assert f'"gradient_accumulation_steps": {plan.option.num_microbatches}' in lines(plan)


@pytest.mark.parametrize(
    "weights", [[1.0] * 9, [5.0, 1, 1, 1, 1, 9], [0.0, 1, 1, 1, 1, 1, 0], [3.0, 1, 4, 1, 5, 9, 2, 6]]
)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_layers_are_cut_as_deepspeed_cuts_them(weights: list[float], stages: int) -> None:
    utils = pytest.importorskip("deepspeed.runtime.utils")
    ends = [int(end) for end in utils.partition_balanced(weights, stages)]
    assert least_difference(weights, stages) == tuple(b - a for a, b in itertools.pairwise(ends))


# Recomputation inside B -------------------------------------------------------------------------------------------------


def option(groups: Any, balance: tuple[int, ...] = (4, 4)) -> Option:
    return Option("1f1b", "1F1B", 1, len(balance), 4, balance, "", "", groups)


def test_recomputation_is_a_part_of_b() -> None:
    pricing = Pricing(problem(), PEERS["megatron"])
    kept, recomputed = (pricing.costs(option(groups)) for groups in (((), ()), layer_groups((4, 4), 1)))
    decoder = pricing.given(option(((), ()))).layer(1)
    assert recomputed.backward[0] == pytest.approx(kept.backward[0] + 3 * decoder.recompute_seconds)
    assert recomputed.forward == kept.forward
    assert recomputed.set_bytes[0] == kept.set_bytes[0] - 3 * decoder.inner_bytes


def test_layers_recomputed_together_hold_one_input() -> None:
    pricing = Pricing(problem(), PEERS["megatron"])
    alone, paired = (pricing.costs(option(layer_groups((4, 4), size))) for size in (1, 2))
    assert paired.set_bytes[1] == alone.set_bytes[1] - pricing.given(option(((), ()))).layer(1).input_bytes
    assert paired.backward == alone.backward


def test_the_first_layers_of_each_stage_alone() -> None:
    assert layer_groups((4, 4), 1, 2) == ((range(1, 2), range(2, 3)), (range(4, 5), range(5, 6)))
    assert layer_groups((4, 4), 3, decoder=False) == ((range(3), range(3, 4)), (range(4, 7), range(7, 8)))


def test_less_memory_makes_a_peer_recompute() -> None:
    free = best_foreign("megatron", problem(num_microbatches=4))
    assert not any(free.option.groups)
    tight = best_foreign("megatron", problem(num_microbatches=4), free.peak_bytes - 1)
    assert tight.peak_bytes < free.peak_bytes
    assert tight.step_seconds >= free.step_seconds
    with pytest.raises(
        ValueError, match=r"^--for=megatron: no plan of Megatron-LM .* plan\.memory_budget_bytes=1: one rank needs"
    ):
        best_foreign("megatron", problem(), 1)


@pytest.mark.parametrize("name", PEERS)
def test_the_bound_by_which_plans_are_tried_holds(name: str) -> None:
    from pipetrain.plan.foreign import foreign_options
    from pipetrain.schedule.families import ALWAYS_SPLIT
    from pipetrain.schedule.make import make
    from pipetrain.schedule.simulate import simulate

    pricing = Pricing(problem(num_microbatches=4), PEERS[name])
    for one in foreign_options(pricing):
        made = make(pricing.spec(one))
        assert pricing.least_seconds(one) <= simulate(made, pricing.costs(one)).step_seconds * (1 + 1e-9)
        held = (pricing.memory(one, schedule) for schedule in (pricing.draft(one), made))
        drafted, peak = (max(rank.total for rank in ranks) for ranks in held)
        assert pricing.least_bytes(one) <= drafted <= peak
        assert drafted == peak or one.order in ALWAYS_SPLIT
