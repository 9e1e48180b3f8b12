"""Adapters: the same whatever the split, alone in being trained, merged or written as PEFT reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf.test_load_pruned import STAGES
from hf.tiny import saved, token_ids
from ranks import run_ranks
from rounding import rounding
from torch import Tensor

from pipetrain import Pipeline, make_plan
from pipetrain.config.records import LoraConfig, ModelConfig
from pipetrain.models.hf.export import export_model, keep_files
from pipetrain.models.hf.hf_spec import hf_spec
from pipetrain.models.hf.lora import add_adapters, check_targets, is_adapter
from pipetrain.models.hf.parts import model_parts
from pipetrain.models.hf.pruned import empty_model, pruned_model
from pipetrain.models.hf.source import HfSource, find_source

TARGETS = {
    "llama": ("q_proj", "layers.1.mlp.up_proj"),
    "gpt2": ("c_attn", "mlp.c_fc"),
    "mixtral": ("q_proj", "v_proj"),
}
families = pytest.mark.parametrize("family", ["llama", "gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])

# Sums over the 48 numbers between the halves of an MLP in each of four layers: with an adapter merged or beside, of all rows or of some.
WITHIN = rounding(torch.float32, terms=4 * 48)


def config_of(family: str, **options: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 3, "targets": TARGETS[family], "alpha": 6.0, **options})


def with_adapters(source: HfSource, layers: range, config: LoraConfig, seed: int = 4) -> Any:
    model = pruned_model(source, layers.start, layers.stop)
    add_adapters(model, model_parts(model), config, seed=seed)
    return model


def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As after some training: B is zero at first, and an adapter does nothing."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=generator) / 10 if ".lora_B." in name else value
        for name, value in tensors.items()
    }


@families
def test_adapters_do_not_depend_on_the_split(family: str, tmp_path: Path) -> None:
    source, config = find_source(str(saved(family, tmp_path))), config_of(family)
    whole = with_adapters(source, range(6), config)
    trained = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in whole.state_dict() if is_adapter(name)}
    assert len(trained) >= 8
    expected, found = whole.state_dict(), {}
    for layers in STAGES:
        found.update(with_adapters(source, layers, config).state_dict())
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    down = [value for name, value in expected.items() if ".lora_A." in name]
    assert all(value.std() > 0 for value in down)
    assert not torch.equal(down[0], down[-1])
    other = with_adapters(source, range(6), config, seed=5).state_dict()
    assert not any(torch.equal(other[name], expected[name]) for name in trained if ".lora_A." in name)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@families
def test_merged_and_apart_they_say_the_same(family: str, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    source, ids = find_source(str(saved(family, tmp_path))), token_ids(2, 9)
    keep_files(source, tmp_path / "kept")
    whole = with_adapters(source, range(6), config_of(family)).eval()
    tensors = moved(whole.state_dict())
    whole.load_state_dict(tensors)
    expected = whole(ids).logits
    export_model(tensors, STAGES, tmp_path / "kept", tmp_path / "merged", lora=config_of(family))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    within = WITHIN * float(expected.detach().std())
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=within)
    apart = config_of(family, merge=False)
    export_model(tensors, STAGES, tmp_path / "kept", tmp_path / "apart", lora=apart, base=str(source.folder))
    plain = AutoModelForCausalLM.from_pretrained(source.folder).eval()
    assert (plain(ids).logits - expected).abs().max() > 0.1
    torch.testing.assert_close(peft.PeftModel.from_pretrained(plain, tmp_path / "apart")(ids).logits, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("q_prj",)}, r"is called 'q_prj'; there are .*q_proj, v_proj; did you mean 'q_proj'\?"),
        ({"targets": ("q_proj", "lm_head")}, "is called 'lm_head'; there are down_proj"),
        ({"targets": ("layers.1.mlp.up_proj",), "layers": (0,)}, r"is called .layers\.1\.mlp\.up_proj."),
        ({"layers": (2, 4)}, r"model.lora.layers=\[2, 4\]: decoder layers are 0 to 3"),
    ],
)
def test_targets_that_match_nothing_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = empty_model(find_source(str(saved("llama", tmp_path))))
    with pytest.raises(ValueError, match=message):
        check_targets(model, model_parts(model), config_of("llama", **options))


# What runs ---------------------------------------------------------------------------------------------------------

DEEP = {"num_hidden_layers": 12}
HIDDEN_BYTES = 8 * 32 * 4  # of a microbatch of 8 tokens
TOP = LoraConfig(rank=4, targets=("q_proj", "v_proj"), layers=(9, 10, 11))


def step_with_adapters(path: str) -> dict[str, Any]:
    """A step of 12 decoder layers with adapters in the top three, as one of three ranks: its ops, and what was held and trained."""
    ops: list[str] = []
    spec = hf_spec(ModelConfig(name="hf", path=path, lora=TOP), 1)
    plan = make_plan(14, num_ranks=3, num_microbatches=4, balance=[5, 4, 5])
    with Pipeline(spec, plan=plan, recompute="overlap", on_event=lambda event: ops.append(str(event.op))) as pipeline:
        ids = token_ids(4, 8)
        losses = [float(pipeline.step(ids, ids)) for _ in range(2)]
        gradients = {
            name: value.grad.norm().item() for name, value in pipeline.named_parameters() if value.grad is not None
        }
        peak = pipeline.report.peak_activation_bytes
    return {"ops": ops, "losses": losses, "gradients": gradients, "peak": peak}


@pytest.mark.slow
def test_nothing_runs_back_below_the_first_adapter(tmp_path: Path) -> None:
    """No R, no B, and no message of a gradient to or from the two stages below; what they hold is their output."""
    path = str(saved("llama", tmp_path, **DEEP))
    below, middle, top = run_ranks(3, step_with_adapters, path)
    for frozen in (below, middle):
        kinds = {op.lstrip("0123456789").rstrip("0123456789") for op in frozen["ops"]}
        assert kinds <= {"F", "SEND_F", "RECV_F"}
        assert frozen["gradients"] == {}
        assert frozen["peak"] <= 4 * HIDDEN_BYTES  # its outputs, until they have left
    kinds = {op.lstrip("0123456789").rstrip("0123456789") for op in top["ops"]}
    assert {"F", "B", "RECV_F"} <= kinds
    assert "SEND_B" not in kinds
    assert top["peak"] > 20 * HIDDEN_BYTES
    assert len(top["gradients"]) == 12
    assert below["losses"] == top["losses"]


def test_stages_with_adapters_train_as_the_whole_model_does(tmp_path: Path) -> None:
    """On one rank with three stages: gradients of the adapters equal those of the whole model with them."""
    source = find_source(str(saved("llama", tmp_path)))
    config = LoraConfig(rank=2, layers=(2, 3))
    spec = hf_spec(ModelConfig(name="hf", path=str(source.folder), lora=config), 1)
    whole = with_adapters(source, range(6), config, seed=0)
    ids = token_ids(4, 8)
    with Pipeline(spec, num_stages=3, stages_per_rank=3, num_microbatches=2) as pipeline:
        weights = moved({name: value.clone() for name, value in pipeline.state_dict().items()})
        pipeline.load_state_dict(weights)
        loss = pipeline.step(ids, ids)
        found = {name: value.grad for name, value in pipeline.named_parameters() if value.grad is not None}
        assert all(is_adapter(name) for name in found)
        whole.load_state_dict(dict(spec.to_file(weights)))
        logits = whole(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    named = spec.to_file(found)
    assert gradients.keys() == set(named)
    assert len(gradients) == 8
    for name, gradient in gradients.items():
        torch.testing.assert_close(named[name], gradient, rtol=WITHIN, atol=WITHIN * float(gradient.std()))
