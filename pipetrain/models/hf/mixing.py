"""Whether the documents of a packed sample see each other in a model's decoder layers: tried by value, not read off masks.

    row 0   a b | c d     positions 0 1 0 1
    row 1   e f | c d     the same second document: what a layer makes of it must be the same in both rows

Each kind of decoder layer runs once, in float32 on the CPU, with noise for weights. So the answer is one of the model's code and config: the same
whether the model is whole, on the meta device or on a GPU, and whatever its weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from pipetrain.models.hf.frame import Frame, FrameMaker
from pipetrain.models.hf.parts import Elsewhere, Parts
from pipetrain.models.hf.source import first_line
from pipetrain.stage.seeding import generators_restored

_POSITIONS = (0, 1, 0, 1)
_ROUNDING = 1e-4  # of the largest number of an output; documents that mix differ by far more with weights of noise
_ON_CPU = ("eager", "sdpa")  # attention that is tried as it is; for any other one of these stands in


@torch.no_grad()
def what_mixes_documents(model: PreTrainedModel, parts: Parts) -> str | None:
    """Which decoder layer lets packed documents see each other, as part of an error; None: none does.

    A model that cannot be tried is taken to be one that does.
    """
    with torch.autocast("cpu", enabled=False), torch.device("cpu"), generators_restored(torch.device("cpu")):
        try:
            return _what_mixes(model, parts)
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            return f"whether {type(model).__name__} keeps them apart cannot be tried ({what})"


def _what_mixes(model: PreTrainedModel, parts: Parts) -> str | None:
    config, generator = _config_on_cpu(model), torch.Generator().manual_seed(0)
    first, other, second = torch.randn(3, 2, model.config.hidden_size, generator=generator, dtype=torch.float32)
    rows = torch.stack([torch.cat([first, second]), torch.cat([other, second])])
    frames = _stand_in(FrameMaker(model.get_submodule(parts.owner), parts), model, config, generator)
    frame = frames(rows, {"position_ids": torch.tensor([_POSITIONS, _POSITIONS])})
    seen = set()
    for number, layer in enumerate(model.get_submodule(parts.layers).children()):
        kind = _kind_of(layer, frame, number)
        if kind in seen or isinstance(layer, Elsewhere):
            continue
        seen.add(kind)
        tried = _stand_in(layer, model, config, generator)
        if not _keeps_apart(frame.run(number, tried, rows)):
            return f"decoder layer {number} ({type(layer).__name__}) carries one document into the next"
    return None


def _keeps_apart(output: Tensor) -> bool:
    """Whether the second documents of both rows came out equal."""
    one, other = output[:, _POSITIONS.index(0, 1) :]
    return bool((one - other).abs().max() <= _ROUNDING * output.abs().max())


def _kind_of(layer: nn.Module, frame: Frame, number: int) -> Any:
    """Equal for layers that do the same with other weights: modules, shapes, and the very masks and tables that they are called with."""
    args, kwargs = frame.calls[number]
    modules = tuple(type(module) for module in layer.modules())
    shapes = tuple(parameter.shape for parameter in layer.parameters())
    return modules, shapes, tuple(map(id, args)), tuple((name, id(value)) for name, value in kwargs.items())


def _stand_in(module: nn.Module, model: PreTrainedModel, config: PreTrainedConfig, generator: torch.Generator) -> Any:
    """A copy in eval mode on the CPU: noise for weights, buffers as they are, or (on the meta device) as the family makes them."""
    memo: dict[int, Any] = {id(model.config): config}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_noise(parameter.shape, generator), requires_grad=False)
        memo[id(parameter)]._is_hf_initialized = True  # so that the family draws nothing into it
    for buffer in module.buffers():
        memo[id(buffer)] = torch.ones_like(buffer, device="cpu") if buffer.is_meta else buffer.detach().cpu().clone()
    made = copy.deepcopy(module, memo)
    with initialization.guard_torch_init_functions():
        for own, original in zip(made.modules(), module.modules(), strict=True):
            if any(buffer.is_meta for buffer in original.buffers(recurse=False)):
                model._initialize_weights(own)
    return made.eval()


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Weights of which a sum over a row is about 1. Rows overlap in memory, so those of the largest layer take some kilobytes."""
    if len(shape) < 2:
        return 1 + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float32)
    strides = [1 + 2 * place for place in reversed(range(len(shape)))]
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    noise: Tensor = torch.randn(length, generator=generator, dtype=torch.float32) / shape[-1] ** 0.5
    return noise.as_strided(shape, strides)


def _config_on_cpu(model: PreTrainedModel) -> PreTrainedConfig:
    """The model's config, with attention and experts that run on the CPU."""
    config = copy.copy(model.config)
    if config._attn_implementation not in _ON_CPU:
        config._attn_implementation_internal = "sdpa" if model._supports_sdpa else "eager"
    config._experts_implementation_internal = "eager"  # it multiplies by the experts of these few tokens alone
    return config
