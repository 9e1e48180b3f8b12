"""Low-rank adapters (LoRA, Hu et al. 2021) beside the linear layers of a stage, made by PEFT, merged or written as PEFT does.

A linear layer W x becomes W x + (alpha / rank) B A x, and A and B alone are trained. A is drawn from a seed of its decoder layer, so it
does not depend on the split, and B is zero. Stages below the first adapter train nothing, so they run no R and no B.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipetrain.config.problem import nearest
from pipetrain.config.records import LoraConfig
from pipetrain.models.hf.parts import Parts
from pipetrain.models.weights import LazyTensors
from pipetrain.stage.seeding import generators_restored, mix, weight_seed

_ADAPTER = "default"  # what PEFT calls the only adapter of a layer
_SALT = 0x10A  # the adapters' seeds are none of the weights' own


def add_adapters(model: PreTrainedModel, parts: Parts, config: LoraConfig, *, seed: int) -> None:
    """Puts adapters beside linear layers of `model`, whole or pruned; all else is trained no more. Raises ValueError: PEFT is missing."""
    assert config.rank is not None
    targets = _targets(model, parts, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if not targets:
        return  # a stage without any: of embeddings alone, or below model.lora.layers
    settings = _settings(model, config, sorted(targets))
    from peft import inject_adapter_in_model

    with generators_restored(torch.device("cpu")), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by names that it gives up
        inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        for number in sorted(set(targets.values())):
            torch.default_generator.manual_seed(mix(weight_seed(seed, number), _SALT))
            for name in (name for name, layer in targets.items() if layer == number):
                # As PEFT draws it, on the host, so that a GPU begins with the same numbers.
                down = model.get_submodule(name).lora_A[_ADAPTER].weight
                drawn = nn.init.kaiming_uniform_(torch.empty(down.shape, dtype=torch.float32), a=math.sqrt(5))
                with torch.no_grad():
                    down.copy_(drawn)


def check_targets(model: PreTrainedModel, parts: Parts, config: LoraConfig) -> None:
    """Raises ValueError: one of `model.lora.targets` is no linear layer of the whole `model`, which may be on the meta device."""
    count = parts.num_decoder_layers
    for number in config.layers or ():
        if not 0 <= number < count:
            raise ValueError(f"model.lora.layers={list(config.layers or ())}: decoder layers are 0 to {count - 1}")
    linear = {name.removeprefix(f"{parts.layers}.") for name in _linear_layers(model, parts)}
    found = _targets(model, parts, config)
    for target in config.targets:
        if not any(_is_meant(name, target) for name in found):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in sorted(linear))
            raise ValueError(
                f"model.lora.targets: no linear layer of the chosen decoder layers is called {target!r}; there are {', '.join(ends)}"
                f"{nearest(target, [*ends, *linear])}"
            )


def merged_weights(tensors: Mapping[str, Tensor], model: PreTrainedModel, config: LoraConfig) -> Mapping[str, Tensor]:
    """The weights of a model with adapters, under transformers' names, as those of a model without: W + (alpha / rank) B A.

    `tensors` are those of the model with adapters; `model` is the whole one without, on any device. Each is made when it is asked for, in
    float32, and has the dtype of W.
    """

    def merged(stored: str) -> Tensor:
        weight = tensors[stored]
        module, _, kind = stored.rpartition(".base_layer.")
        if kind != "weight":
            return weight
        down, up = (tensors[f"{module}.lora_{letter}.{_ADAPTER}.weight"].float() for letter in "AB")
        update = up @ down * scale_of(config)
        if not isinstance(model.get_submodule(module), nn.Linear):  # GPT-2's have their weights the other way round
            update = update.T
        return (weight.float() + update).to(weight.dtype)

    names = {name.replace(".base_layer.", "."): name for name in tensors if not is_adapter(name)}
    return LazyTensors({name: partial(merged, stored) for name, stored in names.items()})


def write_adapters(
    tensors: Mapping[str, Tensor], model: PreTrainedModel, parts: Parts, config: LoraConfig, base: str, out: Path
) -> None:
    """The adapters alone, as PEFT reads them beside the model `base`: adapter_config.json and adapter_model.safetensors."""
    settings = _settings(model, config, sorted(_targets(model, parts, config)))
    settings.base_model_name_or_path, settings.inference_mode, settings.task_type = base, True, "CAUSAL_LM"
    settings.save_pretrained(out)
    own = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensors[name].contiguous()
        for name in tensors
        if is_adapter(name)
    }
    save_file(own, out / "adapter_model.safetensors", metadata={"format": "pt"})


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return f".lora_A.{_ADAPTER}." in name or f".lora_B.{_ADAPTER}." in name


def scale_of(config: LoraConfig) -> float:
    """What an adapter's output is multiplied by."""
    assert config.rank is not None
    return 1.0 if config.alpha is None else config.alpha / config.rank


def _settings(model: PreTrainedModel, config: LoraConfig, targets: list[str]) -> Any:
    """The configuration for PEFT. Raises ValueError: it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "model.lora.rank: adapters are made by PEFT, which is not installed; pip install 'pipetrain[hf]'"
        ) from error
    assert config.rank is not None
    is_transposed = any(not isinstance(model.get_submodule(name), nn.Linear) for name in targets)
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=scale_of(config) * config.rank,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=is_transposed,
    )


def _targets(model: PreTrainedModel, parts: Parts, config: LoraConfig) -> dict[str, int]:
    """The linear layers of `model` that get adapters, each with the number of our layer it is in."""
    found = {}
    for name in _linear_layers(model, parts):
        number = parts.layer_of(name)
        assert number is not None
        is_chosen = config.layers is None or number - 1 in config.layers
        if is_chosen and any(_is_meant(name, target) for target in config.targets):
            found[name] = number
    return found


def _linear_layers(model: PreTrainedModel, parts: Parts) -> Iterator[str]:
    """Names of the linear layers inside decoder layers, of torch or (GPT-2) of transformers."""
    for name, module in model.named_modules():
        if name.startswith(f"{parts.layers}.") and isinstance(module, (nn.Linear, Conv1D)):
            yield name


def _is_meant(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
