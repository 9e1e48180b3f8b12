"""Tiny Hugging Face models by family, from a config: nothing is downloaded. `tiny("llama")`, `saved("mixtral", tmp_path)`."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 61
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EAGER = {"attn_implementation": "eager"}
_WIDE = {"head_dim": 8, "sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 24}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {  # DeepSeek's attention
    "num_key_value_heads": 4,
    "n_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    **_ROUTED,
}
_LINEAR = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_OLD = {"num_key_value_heads": None, "intermediate_size": None}
_BARE = {**_OLD, "max_position_embeddings": None}
_MAMBA = {"state_size": 8, "num_attention_heads": None, **_BARE, **_EAGER}
_LEARNED = {**_BARE, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_CONVOLVING = {"layer_types": ["conv", "full_attention"] * 2}
# What differs from _SMALL, by the family's `model_type`. None takes a key away.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"query_pre_attn_scalar": 8, **_WIDE, **_EAGER},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": None, **_WIDE},
    "gpt_neox": {"num_key_value_heads": None},
    "phi3": {"attention_dropout": 0.0},
    "mixtral": {"sliding_window": None, **_LOCAL_EXPERTS},
    "qwen3_moe": {"head_dim": 8, **_SMALL_EXPERTS},
    "gpt2": _LEARNED,
    "olmo2": {},
    "glm4": {"head_dim": 8},
    "smollm3": {"sliding_window": None},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 8},
    "deepseek_v3": {"num_mtp_layers": 0, **_LATENT},
    "qwen3_next": {**_LINEAR, **_SHARED_EXPERT},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 24, "dropout": 0.0, "pad_token_id": 0, **_OLD},
    "falcon": {"alibi": False, "new_decoder_architecture": False, **_OLD},
    "bloom": {**_BARE, **_EAGER},
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
    },
}
# Families that are the model in stages, too, in `make test-slow`.
MORE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {
        "num_key_value_heads": None,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
        "pad_token_id": 0,
    },
    "bitnet": {},
    "codegen": {"rotary_dim": 4, **_LEARNED, **_EAGER},
    "cohere": {},
    "deepseek_v2": {"head_dim": 8, **_LATENT},
    "diffllama": {},
    "doge": {"keep_window_size": 64},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "sliding_window": 8, "layer_types": None, **_ROUTED},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "moe_layer_start_index": 1,
    },
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 4},
    "exaone_moe": {"sliding_window": 8, **_SMALL_EXPERTS},
    "falcon_mamba": _MAMBA,
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 64, **_HYBRID},
    "flex_olmo": _EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma4_text": {  # without embeddings per layer, which stages cannot send
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **_WIDE,
    },
    "glm": {"head_dim": 8},
    "glm4_moe": {"n_group": 1, "head_dim": 8, **_ROUTED},
    "gpt_bigcode": _LEARNED,
    "gptj": {"rotary_dim": 4, **_LEARNED, **_EAGER},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoehybrid": {
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"] * 2,
        **_LOCAL_EXPERTS,
        **_HYBRID,
    },
    "granitemoeshared": {"shared_intermediate_size": 24, **_LOCAL_EXPERTS},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "pad_token_id": 0,
        **_EXPERTS,
    },
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 4, **_LOCAL_EXPERTS},
    "lfm2": {"block_multiple_of": 8, **_CONVOLVING},
    "lfm2_moe": {"num_dense_layers": 1, **_CONVOLVING, **_SMALL_EXPERTS},
    "mamba": _MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4, **_MAMBA},
    "minimax": {"head_dim": 8, "block_size": 4, **_LOCAL_EXPERTS},
    "minimax_m2": {"head_dim": 8, **_LOCAL_EXPERTS},
    "ministral": _WIDE,
    "ministral3": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "olmo3": {"sliding_window": 8},
    "olmo_hybrid": {},
    "olmoe": {"num_key_value_heads": 4, **_EXPERTS},
    "persimmon": {"num_key_value_heads": None},
    "phi": {"num_key_value_heads": 4},
    "qwen2_moe": _SHARED_EXPERT,
    "qwen3_5_moe_text": {**_LINEAR, **_SHARED_EXPERT},
    "qwen3_5_text": _LINEAR,
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "stablelm": {},
    "starcoder2": {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "vaultgemma": {"query_pre_attn_scalar": 8, **_WIDE, **_EAGER},
}
# Families that packed documents are refused for, for reasons that no other family has.
MIXING: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "pad_token_id": 0},
    "gpt_oss": {"layer_types": None, **_WIDE, **_LOCAL_EXPERTS, **_EAGER},
}


def tiny_config(family: str, **changed: Any) -> PreTrainedConfig:
    """The config of a model with four decoder layers, 32 numbers per token and no dropout; `changed` are keys of its config.json."""
    from transformers import AutoConfig

    keys = {**_SMALL, **(FAMILIES | MIXING | MORE)[family], **changed}
    attention = keys.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(family, **{key: value for key, value in keys.items() if not _is_left_out(key, value)})
    config._attn_implementation = attention
    return config


def _is_left_out(key: str, value: Any) -> bool:
    return value is None and key != "pad_token_id"


def tiny(family: str, **changed: Any) -> PreTrainedModel:
    """A causal language model of the family in float32 and training mode, its own copy; equal for equal arguments."""
    return copy.deepcopy(_made(family, tuple(sorted(changed.items()))))


@functools.cache
def _made(family: str, changed: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **dict(changed)))
        # Weights of a fresh model are so small that a wrong mask hardly shows.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3 if "embed" in name or "wte" in name else 0.15)
    return model.train()


def saved(family: str, folder: Path, **changed: Any) -> Path:
    """A folder as `save_pretrained` leaves it, in files of at most 40 kB."""
    path = folder / family
    tiny(family, **changed).save_pretrained(path, max_shard_size="40KB")
    return path


def token_ids(rows: int, length: int, *, seed: int = 5) -> torch.Tensor:
    """`[rows, length]`, int64, none of them the padding token 0."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding_mask(rows: int, length: int) -> torch.Tensor:
    """`[rows, length]`, int64: row i has its last `i % 4` places padded; so one row in four has none."""
    ends = length - torch.arange(rows) % 4
    return (torch.arange(length) < ends[:, None]).long()
