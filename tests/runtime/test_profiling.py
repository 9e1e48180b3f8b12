"""Layers measured alone say what stages of them hold, to the byte; and what `pipetrain profile` writes is read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from one_rank import CPU
from parity_cases import mean_square
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipetrain.cli.main import main
from pipetrain.config.records import ModelConfig
from pipetrain.models.spec import ModelSpec, spec_of
from pipetrain.models.transformer import transformer_spec
from pipetrain.plan.footprint import Footprint, Holdings
from pipetrain.plan.profile import Profile, read_profile
from pipetrain.plan.stage_costs import costs_of_layers
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.profiling import profile_layers
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.schedule.simulate import simulate
from pipetrain.stage.meter import ActivationMeter
from pipetrain.stage.microbatch import StageInput
from pipetrain.stage.stage import Stage


def transformer(**keys: object) -> ModelSpec:
    config = ModelConfig(**{"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, **keys})  # type: ignore[arg-type]
    return transformer_spec(config, 256)


def tokens() -> Tensor:
    return torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))


def held_by_stages(spec: ModelSpec, balance: Sequence[int], selective: Sequence[str]) -> tuple[list[int], list[int]]:
    """Per stage what one microbatch holds after its R, with the stage's input, and what is kept before it."""
    meter = ActivationMeter()
    wanted = RecomputePolicy(selective=selective).selective
    stages: list[Stage] = []
    for count in balance:
        first = sum(len(stage.layers) for stage in stages)
        loss = spec.loss_fn if first + count == spec.num_layers else None
        layers = spec.build(first, first + count)
        stages.append(
            Stage(len(stages), layers, first_layer=first, device=CPU, meter=meter, selective=wanted, loss_fn=loss)
        )
    meter.exclude(one for stage in stages for layer in stage.layers for one in (*layer.parameters(), *layer.buffers()))
    held, kept = [0] * len(balance), [0] * len(balance)
    for microbatch in range(2):  # the first is proved, and so says where R may end
        value, wants = tokens(), frozenset[int]()
        for stage in stages:
            given = StageInput((value,), pytree.tree_flatten(value)[1], wants, list, tokens(), 1.0)
            (value,), wants = stage.forward(microbatch, given, keep=False, prove=not microbatch).leaves, frozenset([0])
        del given, value
        gradients: Sequence[Tensor | None] = ()
        for stage in reversed(stages):
            kept[stage.index] = stage.kept_bytes[microbatch]
            before = meter.current_bytes - kept[stage.index] - stage.stash_bytes[microbatch]
            stage.recompute(microbatch)
            held[stage.index] = meter.current_bytes - before
            gradients = stage.backward(microbatch, gradients)
    return held, kept


@pytest.mark.parametrize("keys", [{}, {"name": "gpt2", "dropout": 0.1}], ids=["llama", "gpt2"])
def test_what_stages_hold_is_what_the_profile_of_their_layers_says(keys: dict[str, object]) -> None:
    spec, balance = transformer(**keys), [2, 2, 1]
    profile = Profile(layers=profile_layers(spec, tokens(), tokens(), device=CPU, rounds=1))
    for selective in ([], ["matmul"], ["attention", "matmul"], ["1-2.mlp"], ["2:matmul"]):
        costs = costs_of_layers(profile, balance, RecomputePolicy(selective=selective).selective)
        held, kept = held_by_stages(spec, balance, selective)
        assert costs.set_bytes == pytest.approx(held, rel=0.01), selective  # of a word here or there
        assert list(costs.kept_bytes or (0, 0, 0)) == kept, selective


def test_layers_that_look_the_same_are_measured_once() -> None:
    spec = transformer()
    embedding, block, head, loss = profile_layers(spec, tokens(), tokens(), device=CPU, rounds=1)
    assert [one.numbers for one in (embedding, block, head, loss)] == [(0,), (1, 2, 3), (4,), (5,)]
    assert block.kind == "Block"
    weights = sum(one.nbytes for one in spec.build(1, 2)[0].parameters())
    assert (block.parameter_bytes, block.gradient_bytes, block.optimizer_bytes) == (weights, weights, 2 * weights)
    assert block.output_bytes == block.input_bytes == 2 * 16 * 32 * 4
    assert [one.bytes for one in block.largest] == sorted((one.bytes for one in block.largest), reverse=True)
    assert len(block.largest) == 10
    assert block.staying_bytes == block.inner_bytes  # all are too small to be copied
    product = next(one for one in block.largest if one.op == "mm")
    assert product.recompute_seconds > 0
    assert {(op.path, op.calls) for op in block.ops if op.op == "mm"} >= {("attention.query", 1), ("mlp.down", 1)}
    (attention,) = (op for op in block.ops if op.word == "attention")
    assert attention.path == "attention"
    assert 0 < attention.seconds < block.forward_seconds + block.recompute_seconds + 1.0


def test_any_layers_are_told_apart_by_their_looks() -> None:
    """Frozen weights, another width and layers without weights are not the same; without a loss there is none."""
    frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), frozen, nn.Tanh(), nn.Linear(4, 2)]
    found = profile_layers(spec_of(layers), torch.randn(3, 4), device=CPU, rounds=1)
    assert [one.numbers for one in found] == [(0,), (1, 2), (3,), (4,), (5,)]  # the first hands no gradient on
    assert (found[2].gradient_bytes, found[2].parameter_bytes) == (0, 4 * 4 * 4 + 4 * 4)
    assert (found[3].saves_input, found[3].saves_output, found[3].inner_bytes) == (False, True, 0)


class Counting(nn.Sequential):
    """A layer that no R may run."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:layer:UserWarning")
@pytest.mark.parametrize(
    ("kinds", "entries"),
    [
        ([nn.Sequential] * 4, []),
        ([nn.Sequential] * 4, ["0"]),
        ([nn.Sequential] * 4, ["1-2"]),
        ([nn.Sequential] * 4, ["Sequential"]),
        ([nn.Sequential, Counting, nn.Sequential, nn.Sequential], []),
    ],
    ids=["none", "first", "middle", "all", "found"],
)
def test_a_plan_counts_layers_that_no_r_runs(kinds: list[type[nn.Sequential]], entries: list[str]) -> None:
    """What is found to change its attributes, and what `recompute.keep_layers` names, stays from F to B."""
    width, rows, m = 64, 32, 6

    def layers() -> list[nn.Module]:
        return [kind(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for kind in kinds]

    x = torch.randn(m * rows, width)
    one = x[:rows].clone()
    measured = profile_layers(spec_of(layers()), one, one, device=CPU, loss_fn=mean_square, rounds=1)
    profile = Profile(layers=measured).keeping(entries)
    policy = RecomputePolicy("inline", last_stage="always", keep_layers=entries)  # type: ignore[arg-type]
    with Pipeline(layers(), mean_square, num_microbatches=m, recompute=policy, device=CPU) as pipeline:
        peaks = []
        for _ in range(2):
            pipeline.step(x, x)
            peaks.append(pipeline.report.peak_activation_bytes)
        schedule = pipeline.schedule
    timeline = simulate(schedule, costs_of_layers(profile, [len(kinds)]))
    (foreseen,) = Footprint(profile, [len(kinds)], schedule.policy, m, Holdings()).of_step(schedule, timeline)
    assert foreseen == pytest.approx(max(peaks), rel=0.03)


KEYS = """
    data.eval_fraction=0 data.sequence_length=16 data.global_batch_size=4 pipeline.num_microbatches=4
    model.num_hidden_layers=2 model.hidden_size=32 model.num_attention_heads=2
"""


def test_the_command_writes_what_show_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    keys = ["data=text", f"data.path={tmp_path}", *KEYS.split()]
    file = tmp_path / "mine.json"
    assert main(["profile", *keys, f"--out={file}", "--rounds=1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["selective"].partition(":")[2] for one in told["advice"]} == {"attention", "matmul"}
    assert len(told["layers"]) == len(read_profile(str(file)).layers) == 4

    def seconds_of_r(*more: str) -> float:
        options = ["pipeline.balance=[2,2]", f"plan.profile={file}", "recompute=inline"]
        assert main(["show", *keys, *options, *more, "--json"]) == 0
        (one,) = (one for one in json.loads(capsys.readouterr().out)["ops"] if one["op"] == "0R0")
        return float(one["end"] - one["start"])

    assert seconds_of_r() == pytest.approx(costs_of_layers(read_profile(str(file)), [2, 2]).recompute[0])
    wanted = RecomputePolicy(selective="1:matmul").selective
    kept = costs_of_layers(read_profile(str(file)), [2, 2], wanted).recompute[0]
    assert seconds_of_r("recompute.selective='1:matmul'") == pytest.approx(kept)
    for words, said in (
        (("show", f"plan.profile={file}", "model.hidden_size=64"), "with model.hidden_size=32, and this has 64"),
        (("show", f"plan.profile={file}", "precision=bf16-mixed"), "precision=auto, and this has bf16-mixed; measure"),
        (("profile", "--rounds=0"), "--rounds=0: allowed is 1 or more"),
    ):
        assert main([words[0], *keys, *words[1:]]) == 2
        assert said in capsys.readouterr().err
