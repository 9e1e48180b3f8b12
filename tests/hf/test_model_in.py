"""What `Pipeline` and `model=hf` take, and what they refuse in one line."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf.loops import differing_gradients, loop_step
from hf.tiny import FAMILIES, VOCABULARY, saved, tiny, tiny_config, token_ids
from rounding import rounding
from torch import nn

from pipetrain import Pipeline
from pipetrain.config.records import ModelConfig
from pipetrain.models.hf.batch_check import shifted
from pipetrain.models.hf.hf_size import hf_size_of
from pipetrain.models.hf.hf_spec import spec_of_hf
from pipetrain.models.loss import IGNORED
from pipetrain.models.size import size_of
from pipetrain.models.spec import make_spec, spec_of


def hf(path: Path | str | None, **keys: Any) -> ModelConfig:
    return ModelConfig(name="hf", path=None if path is None else str(path), **keys)


# A model on disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
def test_a_model_on_disk_trains_as_the_model(family: str, tmp_path: Path) -> None:
    """Under its own names, which stand for the very tensors, both ways."""
    spec, theirs = make_spec(hf(saved(family, tmp_path)), 50), tiny(family)
    ids, targets = token_ids(6, 12), token_ids(6, 12, seed=9)
    with Pipeline(spec, num_microbatches=3, stages_per_rank=3) as pipeline:
        assert torch.equal(pipeline.step(ids, targets), loop_step(theirs, ids, targets, num_microbatches=3))
        ours = spec.to_file(dict(pipeline.named_parameters()))
        for name, parameter in theirs.named_parameters():
            assert torch.equal(ours[name].grad, parameter.grad)
        state = pipeline.state_dict()
        assert set(spec.to_file(state)) == set(theirs.state_dict())
        assert set(spec.from_file(spec.to_file(state))) == set(state)


def test_first_weights_depend_on_seed_and_layer_alone(tmp_path: Path) -> None:
    spec = make_spec(hf(saved("llama", tmp_path), weights="random"), 50)
    whole = spec.build(0, 6, seed=3)
    for first, last in ((0, 2), (2, 5), (5, 6)):
        for part, wanted in zip(spec.build(first, last, seed=3), whole[first:last]):
            for name, value in part.state_dict().items():
                assert torch.equal(value, wanted.state_dict()[name])
    assert not torch.equal(next(spec.build(0, 1, seed=4)[0].parameters()), next(whole[0].parameters()))


def test_tied_weights_are_said(tmp_path: Path) -> None:
    on_disk = make_spec(hf(saved("gpt2", tmp_path, tie_word_embeddings=True)), 50)
    assert on_disk.tied == (("0.owner.wte.weight", "5.model.lm_head.weight"),)
    assert spec_of(tiny("gpt2", tie_word_embeddings=True)).tied == on_disk.tied
    assert spec_of(tiny("gpt2")).tied == ()


def test_ranks_and_runs_can_compare_what_a_model_is(tmp_path: Path) -> None:
    fingerprint = make_spec(hf(saved("llama", tmp_path)), 50).fingerprint
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    other = make_spec(hf(saved("llama", tmp_path / "other", rms_norm_eps=1e-3)), 50).fingerprint
    assert other != fingerprint
    (tmp_path / "again").mkdir()
    assert make_spec(hf(saved("llama", tmp_path / "again")), 50).fingerprint == fingerprint


# Labels -----------------------------------------------------------------------------------------------------------


def test_labels_are_shifted_as_transformers_does() -> None:
    theirs, ours, ids = tiny("llama"), tiny("llama"), token_ids(4, 12)
    labels = ids.clone()
    labels[:, :4] = IGNORED
    with Pipeline(ours, num_microbatches=2, stages_per_rank=2) as pipeline:
        loss = pipeline.step({"input_ids": ids, "labels": labels})
    wanted = theirs(input_ids=ids, labels=labels, use_cache=False).loss
    wanted.backward()
    # The longest sums are over the vocabulary; those over all tokens are made microbatch by microbatch here.
    torch.testing.assert_close(loss, wanted.detach(), rtol=rounding(torch.float32, terms=VOCABULARY), atol=0)
    assert not differing_gradients(ours, theirs, within=1e-4)


def test_the_last_token_of_a_document_has_no_label() -> None:
    labels = torch.tensor([[10, 11, 12, 20, 21, 30]])
    assert shifted(labels).tolist() == [[11, 12, 20, 21, 30, IGNORED]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert shifted(labels, positions).tolist() == [[11, 12, IGNORED, 21, IGNORED, IGNORED]]


def take(inputs: Any, targets: Any = None, family: str = "llama") -> Any:
    check = spec_of_hf(tiny(family)).take_batch
    assert check is not None
    return check(inputs, targets)


IDS = token_ids(2, 8)
BAD_BATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown key": (
        lambda: take({"input_ids": IDS, "token_type_ids": IDS}),
        "inputs have the keys input_ids, token_type_ids: allowed are",
    ),
    "no ids": (lambda: take({"attention_mask": IDS}), "allowed are input_ids, which is needed"),
    "both": (lambda: take({"input_ids": IDS, "labels": IDS}, IDS), "both `labels` and targets are given"),
    "mask shape": (
        lambda: take({"input_ids": IDS, "attention_mask": IDS[:, :5]}),
        r"attention_mask has the shape \[2, 5\], input_ids \[2, 8\]",
    ),
    "floats": (
        lambda: take(IDS.float()),
        r"token ids are a tensor \[2, 8\] of float32: give \[batch, sequence\], int64",
    ),
    "one sample": (lambda: take(IDS[0]), r"token ids are a tensor \[8\] of int64: give \[batch, sequence\]"),
    "over the embedding": (
        lambda: take(IDS + 60),
        "is none of the model's, which are 0 to 60: its tokenizer has more tokens",
    ),
    "below": (lambda: take(IDS - 70), "token id -.* is none of the model's"),
    "too long": (
        lambda: take(token_ids(1, 65), family="gpt2"),
        "a sample has 65 tokens, and the model has positions for 64",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches(case: str) -> None:
    act, message = BAD_BATCHES[case]
    with pytest.raises(ValueError, match=message):
        act()


def test_ranks_without_first_or_last_stage_give_nothing() -> None:
    assert take(None, None) == (None, None)
    inputs, targets = take({"input_ids": IDS, "attention_mask": None}, IDS)
    assert list(inputs) == ["input_ids"]
    assert targets is IDS


# Refused ----------------------------------------------------------------------------------------------------------


def multi_modal() -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = tiny_config("gemma3_text").to_dict()
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config={**vision, "model_type": "siglip_vision_model"}
    )
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def with_checkpointing() -> Any:
    model = tiny("llama")
    model.model.layers[1].gradient_checkpointing = True
    return model


def with_shared_embedding() -> Any:
    """Each decoder layer gets the embedding, too."""
    model = tiny("llama")
    forward = type(model.model).forward

    class Passing(type(model.model)):  # type: ignore[misc]
        def forward(self, *args: Any, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            return forward(self, *args, inputs_embeds=inputs_embeds, first=inputs_embeds, **kwargs)

    model.model.__class__ = Passing
    return model


def with_a_sum() -> Any:
    """Something happens between the decoder layers that is no layer."""
    model = tiny("llama")

    class Adding(type(model.model)):  # type: ignore[misc]
        def forward(self, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            hidden = inputs_embeds
            for layer in self.layers:
                hidden = layer(hidden, **kwargs) + inputs_embeds
            return (hidden,)

    model.model.__class__ = Adding
    return model


def failing() -> Any:
    model = tiny("llama")

    class Failing(type(model.model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **_kwargs: Any) -> Any:
            assert input_ids is not None

    model.model.__class__ = Failing
    return model


def quantised() -> Any:
    model = tiny("llama")
    model.is_quantized = True
    return model


def of_kind(family: str, kind: str, **changed: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    return getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(family, **sizes, **changed))


def without_head() -> Any:
    return tiny("llama").model


BAD_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "more than text": (
        multi_modal,
        "Gemma3ForConditionalGeneration is a model of more than text, and stages take text alone",
    ),
    "checkpointing": (
        with_checkpointing,
        r"gradient checkpointing is on, so its layers would be recomputed twice: switch it off",
    ),
    "layerdrop": (lambda: tiny("opt", layerdrop=0.1), "layerdrop=0.1 leaves out layers by chance"),
    "quantised": (quantised, "the weights of this LlamaForCausalLM are quantised"),
    "no head": (
        without_head,
        "LlamaModel is no causal language model: it ends in no logits of the next token; give one of AutoModelForCausalLM",
    ),
    "token classes": (
        lambda: of_kind("llama", "AutoModelForTokenClassification"),
        "LlamaForTokenClassification is no causal language model: it ends in no logits",
    ),
    "encoder": (
        lambda: of_kind("t5", "AutoModelForSeq2SeqLM"),
        "T5ForConditionalGeneration is no causal language model: it has an encoder",
    ),
    "masked": (
        lambda: of_kind("bert", "AutoModelForMaskedLM"),
        "BertForMaskedLM is no causal language model: its tokens attend to later ones",
    ),
    "masked, of one module": (
        lambda: of_kind("modernbert", "AutoModelForMaskedLM", pad_token_id=0),
        "ModernBertForMaskedLM is no causal language model: its tokens attend to later ones",
    ),
    "decoder in a module that takes no embeddings": (
        lambda: of_kind("bert", "AutoModelForCausalLM", is_decoder=True),
        r"BertLMHeadModel cannot be cut into stages: its BertEncoder, which calls the decoder layers, takes no embeddings \(inputs_embeds\)",
    ),
    "an embedding per layer": (
        lambda: tiny("gemma4_text", hidden_size_per_layer_input=8, vocab_size_per_layer_input=61),
        r"Gemma4ForCausalLM cannot be cut into stages: each decoder layer gets its own embedding of each token \(hidden_size_per_layer_input=8",
    ),
    "keys of other layers": (
        lambda: tiny("gemma4_text", num_kv_shared_layers=2),
        r"Gemma4ForCausalLM cannot be cut into stages: its last decoder layers use keys and values of earlier ones \(num_kv_shared_layers=2",
    ),
    "more than hidden": (
        with_shared_embedding,
        "cannot be cut into stages: decoder layer 0 gets first beside the hidden state",
    ),
    "between": (with_a_sum, "cannot be cut into stages: a decoder layer does not get what the one before it returned"),
    "failing": (
        failing,
        r"cannot be cut into stages: the forward of its Failing fails on inputs_embeds alone \(AssertionError",
    ),
    "no layers": (lambda: _without_list(), "cannot be cut into stages: it has no list of 4 decoder layers"),
}


def _without_list() -> Any:
    model = tiny("llama")
    model.model.layers = nn.Sequential(*model.model.layers)
    return model


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(case: str) -> None:
    make, message = BAD_MODELS[case]
    with pytest.raises(ValueError, match=message) as caught:
        spec_of(make())
    assert "\n" not in str(caught.value)


def test_a_router_loss_that_is_not_known_is_refused() -> None:
    model = tiny("deepseek_v3", output_router_logits=True)
    with pytest.raises(
        ValueError, match="output_router_logits is set, and DeepseekV3ForCausalLM has no router loss that is known here"
    ):
        spec_of(model)


BAD_CONFIGS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "more than text": (
        {"text_config": {}, "vision_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]},
        "Gemma3ForCond.* of more than text",
    ),
    "encoder": (
        {"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
        "T5ForConditionalGeneration is no causal language model; name one",
    ),
    "masked": (
        {"architectures": ["ModernBertForMaskedLM"]},
        "ModernBertForMaskedLM is no causal language model; name one",
    ),
    "classifier": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification is no causal language model; model=python trains it, from a function that returns",
    ),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    "no path": (None, "model=hf needs model.path: a folder that save_pretrained of transformers wrote"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str, tmp_path: Path) -> None:
    """Before any process starts, from config.json alone."""
    changed, message = BAD_CONFIGS[case]
    path = None
    if changed is not None:
        path = saved("llama", tmp_path)
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(ValueError, match=message):
        size_of(hf(path))


def test_samples_longer_than_the_model_was_made_for(tmp_path: Path) -> None:
    config = hf(saved("llama", tmp_path))
    size_of(config, sequence_length=64)
    with pytest.raises(
        ValueError,
        match=r"data.sequence_length=65 is longer than the 64 positions that model.path=.*: set data.sequence_length=64",
    ):
        size_of(config, sequence_length=65)


def test_a_tokenizer_with_more_tokens_than_the_embedding(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the tokenizer has 62 tokens, the embedding of model.path=.* 61: set data.tokenizer=null"
    ):
        make_spec(hf(saved("llama", tmp_path)), 62)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf(saved("llama", tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(
        ValueError, match=r"model=hf needs transformers, which is not installed: pip install 'pipetrain\[hf\]'"
    ):
        size_of(config)


# Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3_next", "opt", "llama4_text"}))
def test_parameters_are_those_of_each_layer(family: str) -> None:
    """Matrices, within 8 %. (Three families have some that no common field tells: convolutions, projections, a shared expert.)"""
    model = tiny(family)
    size = hf_size_of(model.config.to_dict(), 16)
    assert size.parameters_per_layer is not None
    for layer, guessed in zip(spec_of(model).build(0, size.num_layers), size.parameters_per_layer, strict=True):
        matrices = sum(
            weight.numel()
            for name, weight in layer.named_parameters()
            if weight.dim() > 1 and "position" not in name and "wpe" not in name
        )
        assert guessed == pytest.approx(matrices, rel=0.08)


def test_a_head_counts_as_what_it_is() -> None:
    """Qwen2.5-0.5B: 152 000 tokens of 896 numbers."""
    config = {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_act": "silu",
    }  # fmt: skip
    flops = hf_size_of(config, 1024).flops_per_layer
    assert flops is not None
    assert flops[0] == 0
    assert flops[-1] == 2 * 151936 * 896
    assert flops[1] == 2 * (2 * 896 * 64 * (14 + 2) + 3 * 896 * 4864) + 4 * 14 * 64 * 1024


def test_layers_of_one_kind_do_the_same_work() -> None:
    size = hf_size_of(tiny_config("gemma3_text", num_hidden_layers=6).to_dict(), 32)
    assert size.kinds == ("embedding", *["sliding_attention"] * 5, "full_attention", "head")
    assert size.flops_per_layer is not None
    assert size.flops_per_layer[1] < size.flops_per_layer[6]
    experts = hf_size_of(tiny_config("deepseek_v3").to_dict(), 32).kinds
    assert experts is not None
    assert [kind.endswith("experts") for kind in experts] == [False, False, True, True, True, False]


def test_a_model_is_left_as_it_was() -> None:
    """What a user has goes on to work by itself: its forward, its names."""
    model, untouched = tiny("llama"), tiny("llama")
    names, ids = list(model.state_dict()), token_ids(2, 8)
    with Pipeline(model, num_microbatches=2, stages_per_rank=2) as pipeline:
        pipeline.step(ids, ids)
        pipeline.zero_grad()
    assert list(model.state_dict()) == names
    assert torch.equal(model(ids, use_cache=False).logits, untouched(ids, use_cache=False).logits)
    copy.deepcopy(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_says_what_is_tied_as_the_model_does(family: str, tied: bool) -> None:
    model = tiny(family, tie_word_embeddings=tied)
    size = hf_size_of(model.config.to_dict(), 16)
    assert size.tied == (((0, size.num_layers - 1),) if tied else ())
    assert bool(model.all_tied_weights_keys) is tied
