"""What a model config is refused for, and what the message says to type."""

import dataclasses

import pytest

from pipetrain.config.records import ModelConfig
from pipetrain.models.size import check_model
from pipetrain.models.transformer import transformer_layers

REFUSED = {
    "unknown name": ({"name": "lama"}, r"model.name=lama: allowed are llama, gpt2, hf, python; did you mean 'llama'\?"),
    "path": ({"path": "saved"}, "model.path=saved: .* type model.path=null"),
    "no blocks": ({"num_hidden_layers": 0}, "model.num_hidden_layers=0: allowed is 1 or more"),
    "no mlp": ({"intermediate_size": 0}, "model.intermediate_size=0: allowed is 1 or more"),
    "heads": (
        {"hidden_size": 128, "num_attention_heads": 5},
        "model.num_attention_heads=5 does not divide model.hidden_size=128: set model.num_attention_heads=4",
    ),
    "kv heads": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "model.num_key_value_heads=3 does not divide model.num_attention_heads=4: set model.num_key_value_heads=2",
    ),
    "more kv heads": (
        {"num_attention_heads": 4, "num_key_value_heads": 8},
        "model.num_key_value_heads=8 does not divide model.num_attention_heads=4",
    ),
    "gpt2 groups": (
        {"name": "gpt2", "num_key_value_heads": 2},
        "model.num_key_value_heads=2: gpt2 blocks have no grouped queries",
    ),
    "odd heads": ({"hidden_size": 12, "num_attention_heads": 4}, "need an even size; set model.hidden_size=8"),
    "dropout": ({"dropout": 1.0}, "model.dropout=1.0 is a probability"),
    "epsilon": ({"norm_epsilon": 0.0}, "model.norm_epsilon=0.0: allowed is more than 0"),
    "base": ({"rope_theta": -1.0}, "model.rope_theta=-1.0: allowed is more than 0"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(fields: dict[str, object], message: str) -> None:
    config = dataclasses.replace(ModelConfig(), **fields)
    with pytest.raises(ValueError, match=message):
        check_model(config)
    with pytest.raises(ValueError, match=message):
        transformer_layers(config, 256)


def test_samples_longer_than_the_positions() -> None:
    check_model(ModelConfig(max_position_embeddings=64), sequence_length=64)
    with pytest.raises(
        ValueError, match=r"data.sequence_length=65 is longer than .*: set model.max_position_embeddings=65"
    ):
        check_model(ModelConfig(max_position_embeddings=64), sequence_length=65)


def test_a_vocabulary_smaller_than_the_tokenizers() -> None:
    check_model(ModelConfig(vocab_size=256), vocabulary_size=256)
    with pytest.raises(ValueError, match=r"model.vocab_size=255 is smaller than the tokenizer's 256"):
        check_model(ModelConfig(vocab_size=255), vocabulary_size=256)
