"""The bundle of a Hugging Face causal language model: one that a user has, or the one that `model.path` names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipetrain.model.hf.adapter import check_plain, layers_of, vocabulary_of
from pipetrain.model.hf.causal_loss import causal_loss
from pipetrain.model.hf.hf_names import HfNames
from pipetrain.model.hf.hf_size import HfShape, hf_size_of
from pipetrain.model.hf.labels import BatchCheck
from pipetrain.model.hf.parts import Parts, parts_of
from pipetrain.model.loss import count_tokens
from pipetrain.model.sharing import tied_parameters
from pipetrain.model.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_ANY_LENGTH = 2048  # tokens of a sample, for a model whose config tells no longest one


def spec_of_hf(model: PreTrainedModel) -> ModelSpec:
    """The bundle of a model that every rank has whole: its stages train the very parameters of `model`.

    Raises:
        ValueError: it cannot be cut into stages; the message has the reason.
    """
    check_plain(model)
    parts = parts_of(model)
    modules = dict(enumerate(layers_of(model, 0, parts.num_layers, parts)))
    spec = _spec_of(model, parts, partial(_taken_of, model, parts))
    return replace(spec, modules=modules, tied=tied_parameters(modules))


def _taken_of(
    model: PreTrainedModel,
    parts: Parts,
    first: int,
    last: int,
    *,
    seed: int,  # noqa: ARG001
    device: torch.device,
    makes_pieces: bool,
) -> Sequence[nn.Module]:
    """Layers around the modules of a model that is there, with what they share of their own."""
    return [layer.to(device) for layer in layers_of(model, first, last, parts, makes_pieces=makes_pieces)]


def _spec_of(model: PreTrainedModel, parts: Parts, build: Any) -> ModelSpec:
    """All of the bundle but what layers share; `model` may be on the meta device."""
    names, config = HfNames(parts), model.config.to_dict()
    return ModelSpec(
        size=hf_size_of(config, HfShape(config).most_positions or _ANY_LENGTH),
        build_layers=partial(build, makes_pieces=True),
        build_for_other_loss=partial(build, makes_pieces=False),
        loss_fn=causal_loss,
        count_fn=count_tokens,
        fingerprint=_fingerprint(model.config),
        to_file=names.to_file,
        from_file=names.from_file,
        take_batch=BatchCheck(vocabulary_of(model), _most_positions(model, parts)),
    )


def _fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    """What makes it this model; where it came from and what wrote it does not."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        found.pop(key, None)
    return {**found, "attention": config._attn_implementation}


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
