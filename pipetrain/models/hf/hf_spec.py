"""The bundle of a Hugging Face causal language model: one that a user has, or the one that `model.path` names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipetrain.config.records import ModelConfig
from pipetrain.models.hf.adapter import check_plain, layers_of, vocabulary_of
from pipetrain.models.hf.batch_check import BatchCheck, what_mixes_documents
from pipetrain.models.hf.hf_size import HfShape, check_hf, hf_size_of
from pipetrain.models.hf.lora import add_adapters, check_targets
from pipetrain.models.hf.parts import HfNames, Parts, model_parts
from pipetrain.models.hf.pruned import empty_model, pruned_model
from pipetrain.models.hf.source import HfSource, find_source
from pipetrain.models.loss import causal_loss, count_tokens
from pipetrain.models.sharing import tied_parameters
from pipetrain.models.spec import ModelSpec

_ANY_LENGTH = 2048  # tokens of a sample, for a model whose config tells no longest one


def spec_of_hf(model: PreTrainedModel) -> ModelSpec:
    """The bundle of a model that every rank has whole: its stages train its very parameters. Raises ValueError: it cannot be cut."""
    check_plain(model)
    parts = model_parts(model)
    modules = dict(enumerate(layers_of(model, 0, parts.num_layers, parts)))

    def build(first: int, last: int, *, device: torch.device, **_: Any) -> Sequence[nn.Module]:
        return [layer.to(device) for layer in layers_of(model, first, last, parts)]  # around the modules that are there

    spec = _spec_of(model, parts, build)
    return replace(spec, modules=modules, tied=tied_parameters(modules))


def hf_spec(config: ModelConfig, vocabulary_size: int) -> ModelSpec:
    """The bundle of the model that `model.path` names: a stage reads, or draws, its own layers and never has another.

    `vocabulary_size` is the tokenizer's. Raises ValueError: it cannot be trained in stages, or not on these tokens; the message has the reason.
    """
    check_hf(config)
    assert config.path is not None
    source = find_source(config.path, config.revision)
    whole = empty_model(source)
    check_plain(whole)
    if vocabulary_size > vocabulary_of(whole):
        raise ValueError(
            f"the tokenizer has {vocabulary_size} tokens, the embedding of model.path={config.path} {vocabulary_of(whole)}: set "
            "data.tokenizer=null, the model's own"
        )
    parts, has_adapters = model_parts(whole), config.lora.rank is not None
    names = HfNames(parts)
    if has_adapters:
        check_targets(whole, parts, config.lora)
    spec = _spec_of(whole, parts, partial(_read_of, config, source, parts))
    tied = {} if has_adapters else whole.all_tied_weights_keys
    own = {"lora": asdict(config.lora) if has_adapters else None, "attention": config.attention}
    return replace(
        spec,
        tied=tuple((names.in_layers(first), names.in_layers(again)) for again, first in tied.items()),
        fingerprint=json.loads(json.dumps({**spec.fingerprint, **own})),
    )


def _read_of(
    config: ModelConfig,
    source: HfSource,
    parts: Parts,
    first: int,
    last: int,
    *,
    seed: int,
    device: torch.device,
) -> Sequence[nn.Module]:
    """Layers of a model that is on disk: these are read, or drawn, and no others."""
    model = pruned_model(
        source,
        first,
        last,
        weights=config.weights,
        seed=seed,
        dtype=config.dtype or "auto",
        attention=config.attention,
        device=device,
    )
    if config.lora.rank is not None:
        add_adapters(model, parts, config.lora, seed=seed)
    return [layer.to(device) for layer in layers_of(model.train(), first, last, parts)]


def _spec_of(model: PreTrainedModel, parts: Parts, build: Any) -> ModelSpec:
    """All of the bundle but what layers share; `model` may be on the meta device."""
    names, config = HfNames(parts), model.config.to_dict()
    fingerprint: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", "architectures", "dtype"):  # where it came from, what wrote it
        fingerprint.pop(key, None)
    return ModelSpec(
        size=hf_size_of(config, HfShape(config).most_positions or _ANY_LENGTH),
        build_layers=build,
        loss_fn=causal_loss,
        count_fn=count_tokens,
        fingerprint={**fingerprint, "attention": model.config._attn_implementation},
        to_file=names.to_file,
        from_file=names.from_file,
        take_batch=BatchCheck(
            vocabulary_of(model),
            _most_positions(model, parts),
            cache(partial(what_mixes_documents, model, parts)),
        ),
    )


def _most_positions(model: PreTrainedModel, parts: Parts) -> int | None:
    """How long a sample may be where positions are learned; None: they are computed, for any length."""
    tokens = model.get_input_embeddings()
    tables = [
        module
        for name in parts.embedding
        for module in model.get_submodule(name).modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    most = getattr(model.config, "max_position_embeddings", None)
    return min(most, *(table.num_embeddings for table in tables)) if tables and most is not None else None
