"""How large the layers of a Hugging Face model are, from its config.json alone. Without torch and transformers.

Families write the same sizes under a few names; what is not found under any is taken as most have it. So operations are a good guess, for
balancing stages and for utilisation; what a family adds beside attention, MLP and experts (small convolutions, biases) is not seen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pipetrain.config.records import HUGGING_FACE, ModelConfig
from pipetrain.models.hf.source import HfSource, check_loadable, find_source
from pipetrain.models.size import ModelSize, Style, intermediate_size

_MORE_THAN_TEXT = ("vision_config", "audio_config", "text_config", "thinker_config")
# Activations of an MLP with a gate, so with three matrices instead of two; the kinds of models whose config does not tell.
_GATED = ("silu", "swish", "swiglu")
_GATED_KINDS = ("gemma",)


class HfShape:
    """A config.json, read by what a field means; 0 where the config does not tell."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.num_decoder_layers = self.number("num_hidden_layers", "n_layer", "num_layers")
        self.width = self.number("hidden_size", "n_embd", "d_model")
        self.heads = max(1, self.number("num_attention_heads", "n_head"))
        self.head_size = self.number("head_dim", default=self.width // self.heads)
        self.vocabulary_size = self.number("vocab_size")
        self.num_experts = self.number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        self.most_positions = self.number("max_position_embeddings", "n_positions")  # of the longest sample
        act = str(config.get("hidden_act") or config.get("hidden_activation") or "")
        self.is_gated = act in _GATED or str(config.get("model_type", "")).startswith(_GATED_KINDS)

    def number(self, *names: str, default: int = 0) -> int:
        """The first of these fields that is set."""
        return next(
            (int(self.config[name]) for name in names if isinstance(self.config.get(name), int | float)), default
        )

    # One layer ----------------------------------------------------------------------------------------------------

    def kind(self, number: int) -> str:
        """Decoder layers of one kind do the same work: by attention, and with or without experts."""
        types = self.config.get("layer_types")
        attention = str(types[number]) if isinstance(types, list) and number < len(types) else "decoder"
        return f"{attention}, experts" if self.has_experts(number) else attention

    def has_experts(self, number: int) -> bool:
        return (
            self.num_experts > 1
            and number >= self.number("first_k_dense_replace")
            and number not in (self.config.get("mlp_only_layers") or ())
            and (number + 1) % max(1, self.number("decoder_sparse_step")) == 0
        )

    def mixing(self, number: int) -> int:
        """Entries of the matrices of attention, or of what stands in its place."""
        width = self.width
        if self.kind(number).startswith("linear_attention"):
            keys = self.number("linear_num_key_heads", default=1) * self.number("linear_key_head_dim")
            heads = self.number("linear_num_value_heads", default=1)
            values = heads * self.number("linear_value_head_dim")
            return width * (2 * keys + 2 * values + 2 * heads) + values * width
        if rank := self.number("kv_lora_rank"):
            rotary, plain = self.number("qk_rope_head_dim"), self.number("qk_nope_head_dim")
            values, query_rank = self.number("v_head_dim"), self.number("q_lora_rank")
            queries = self.heads * (rotary + plain)
            queries = width * query_rank + query_rank * queries if query_rank else width * queries
            keys = width * (rank + rotary) + rank * self.heads * (plain + values)
            return queries + keys + self.heads * values * width
        keys = self.number("num_key_value_heads", default=1 if self.config.get("multi_query") else self.heads)
        return 2 * width * self.head_size * (self.heads + keys)

    def feeding(self, number: int) -> tuple[int, int]:
        """Entries of the matrices of the MLP or the experts: of all, and of those that a token passes."""
        inner = self.number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * self.width)
        matrices = 3 if self.is_gated else 2
        if not self.has_experts(number):
            dense = matrices * self.width * self.number("intermediate_size_mlp", default=inner)
            return dense, dense
        expert = matrices * self.width * self.number("moe_intermediate_size", default=inner)
        shared = self.number("n_shared_experts") * expert
        shared += matrices * self.width * self.number("shared_expert_intermediate_size")
        router = self.width * self.num_experts
        chosen = self.number("num_experts_per_tok", "moe_topk", default=1)
        return shared + router + self.num_experts * expert, shared + router + chosen * expert

    def looked_at(self, number: int, sequence_length: int) -> int:
        """How many positions a token's attention goes over at most."""
        kind = self.kind(number)
        if kind.startswith("linear_attention"):
            return 0
        window = self.number("sliding_window", "attention_chunk_size", default=sequence_length)
        is_local = kind.startswith(("sliding_attention", "chunked_attention")) or not self.config.get("layer_types")
        uses_window = self.config.get("use_sliding_window", True) is not False
        return min(window, sequence_length) if is_local and uses_window else sequence_length


def hf_size_of(config: Mapping[str, Any], sequence_length: int) -> ModelSize:
    """The layers of the model of this config.json, in samples of `sequence_length` tokens: embedding, decoder layers, head."""
    shape = HfShape(config)
    numbers = range(shape.num_decoder_layers)
    logits = shape.vocabulary_size * shape.width
    mixing, feeding = [shape.mixing(number) for number in numbers], [shape.feeding(number) for number in numbers]
    scores = [4.0 * shape.heads * shape.head_size * shape.looked_at(number, sequence_length) for number in numbers]
    return ModelSize(
        len(numbers) + 2,
        kinds=("embedding", *map(shape.kind, numbers), "head"),
        flops_per_layer=(
            0.0,
            *(2.0 * (each + used) + score for each, (_, used), score in zip(mixing, feeding, scores)),
            2.0 * logits,
        ),
        parameters_per_layer=(logits, *(each + all_ for each, (all_, _) in zip(mixing, feeding)), logits),
        width=shape.width,
        # Older versions of transformers left out of the file what was true.
        tied=((0, len(numbers) + 1),) if config.get("tie_word_embeddings", True) else (),
    )


# Of a run's config -------------------------------------------------------------------------------------------------


def check_transformers() -> None:
    """Raises ValueError: transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("model=hf needs transformers, which is not installed: pip install 'pipetrain[hf]'")


_CAUSAL = ("ForCausalLM", "LMHeadModel", "Model")  # how classes with its weights are called; the last has no head


def check_hf(config: ModelConfig) -> None:
    """Raises ValueError: it is no causal language model of text, here on this machine, whose weights can be trained."""
    if config.path is None:
        raise ValueError(
            "model=hf needs model.path: a folder that save_pretrained of transformers wrote, or a name of the hub, as in Qwen/Qwen2.5-7B-Instruct"
        )
    check_transformers()
    source = _source(config)
    if more := next((key for key in _MORE_THAN_TEXT if source.config.get(key) is not None), None):
        raise ValueError(
            f"model.path={config.path}: {_class_name(source)} is a model of more than text (its config.json has {more}), and stages take text "
            "alone: save the language model in it as a causal language model of its own, and name that folder"
        )
    named = source.config.get("architectures") or []
    if source.config.get("is_encoder_decoder") or (named and not any(str(name).endswith(_CAUSAL) for name in named)):
        what = "name one, as of AutoModelForCausalLM"
        if any("ForSequenceClassification" in str(name) for name in named):
            what = "model=python trains it, from a function that returns AutoModelForSequenceClassification.from_pretrained(...)"
        raise ValueError(f"model.path={config.path}: {_class_name(source)} is no causal language model; {what}")
    if config.weights == "pretrained":
        check_loadable(source)


def hf_size(config: ModelConfig, vocabulary_size: int | None, sequence_length: int) -> ModelSize:  # noqa: ARG001
    """The layers of the model that `model.path` names, in samples of `sequence_length` tokens; its vocabulary is its own."""
    size = hf_size_of(_source(config).config, sequence_length)
    frozen = config.lora.rank is not None  # embedding and head are, so there is no gradient to exchange
    return replace(size, tied=()) if frozen else size


def decoder_sizes(config: ModelConfig, vocabulary_size: int | None) -> HfShape:
    """The sizes of a decoder: of the config.json that `model.path` names, or of the keys of `model`.

    Raises:
        ValueError: its vocabulary is not known.
    """
    if config.name == HUGGING_FACE:
        return HfShape(_source(config).config)
    size = config.vocab_size or vocabulary_size
    if size is None:
        raise ValueError(
            "model.vocab_size is not set, and its tokenizer is not loaded; set it, as in model.vocab_size=50304"
        )
    own = {"intermediate_size": intermediate_size(config), "vocab_size": size, "tie_word_embeddings": False}
    return HfShape({**asdict(config), "hidden_act": "silu" if config.name == Style.LLAMA else "gelu", **own})


def longest_hf_sample(config: ModelConfig) -> int | None:
    """Tokens of the longest sample that the model of `model.path` was made for."""
    return HfShape(_source(config).config).most_positions or None


def _source(config: ModelConfig) -> HfSource:
    assert config.path is not None
    return find_source(config.path, config.revision)


def _class_name(source: HfSource) -> str:
    return ", ".join(source.config.get("architectures") or [str(source.config.get("model_type"))])
