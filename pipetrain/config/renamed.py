"""Keys and values of earlier versions, and their current names, which are those of torchtitan, Megatron and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_KEYS = {
    "cluster.gpus_per_node": "cluster.ranks_per_node",
    "data.batch_size": "data.global_batch_size",
    # Of a profile.
    "data.batch_size / (parallel.num_replicas * pipeline.num_microbatches)": "data.global_batch_size / (parallel.num_replicas * "
    "pipeline.num_microbatches)",
    "data.counted": "data.assistant_only_loss",
    "data.heldout_bytes": "data.eval_bytes",
    "data.heldout_fraction": "data.eval_fraction",
    "data.heldout_path": "data.eval_path",
    "data.heldout_split": "data.eval_split",
    "model.max_sequence_length": "model.max_position_embeddings",
    "model.mlp_size": "model.intermediate_size",
    "model.num_blocks": "model.num_hidden_layers",
    "model.num_heads": "model.num_attention_heads",
    "model.num_kv_heads": "model.num_key_value_heads",
    "model.rope_base": "model.rope_theta",
    "model.vocabulary_size": "model.vocab_size",
    "observe.evaluate_every_steps": "observe.eval_every_steps",
    "optim.clip_norm": "optim.max_grad_norm",
    "parallel.zero": "parallel.zero_stage",
    "transport.ahead": "transport.prefetch",
    "transport.edges": "transport.backend",
}
_VALUES: dict[str, dict[Any, Any]] = {
    "data.assistant_only_loss": {"answers": True, "all": False},
    "precision": {"bf16": "bf16-true", "bf16_autocast": "bf16-mixed"},
}
Tell = Callable[[str], object]


def current_key(path: str) -> str:
    """The current name of the key `path` of an earlier version."""
    return _KEYS.get(path, path)


def current_overrides(overrides: Sequence[str], tell: Tell) -> list[str]:
    """The overrides with current keys and values; `tell` gets one line for each that changes."""
    found = []
    for text in overrides:
        old, equals, value = text.partition("=")
        key = current_key(old)
        now = _VALUES.get(key, {}).get(value, value)
        found.append(f"{key}{equals}{str(now).lower() if isinstance(now, bool) else now}")
        if found[-1] != text:
            tell(f"{text}: this is {found[-1]} now")
    return found


def current_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration of plain values (of a run or a phase) with current keys and values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = current_key(f"{prefix}{name}")
        if path == "phases" and isinstance(value, (list, tuple)):
            value = [current_values(phase) if isinstance(phase, Mapping) else phase for phase in value]
        elif isinstance(value, Mapping):
            value = current_values(value, f"{path}.")
        elif isinstance(value, str):
            value = _VALUES.get(path, {}).get(value, value)
        if path == f"{prefix}{name}":
            found.setdefault(name, value)
        else:  # the old key was given, the new one is there by default
            found[path.removeprefix(prefix)] = value
    return found
