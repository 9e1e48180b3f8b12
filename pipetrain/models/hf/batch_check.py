"""What a user gives to a causal language model, as its first layer and its loss get it; refused where it would be silently wrong.

    inputs   token ids `[batch, sequence]`, int64, or a dict: `input_ids`, and any of `attention_mask` and `position_ids`, as long
    targets  `[batch, sequence]`, int64: the token after each position, IGNORED where it does not count

Hugging Face style `labels` in the dict stand where the tokens stand, so they are shifted here: position i is to tell label i + 1. Those of
a classification are of samples, and are the targets.

Whether the documents of a packed sample see each other in the decoder layers is tried by value, not read off masks:

    row 0   a b | c d     positions 0 1 0 1
    row 1   e f | c d     the same second document: what a layer makes of it must be the same in both rows

Each kind of decoder layer runs once, in float32 on the CPU, with noise for weights. So the answer is one of the model's code and config: the same
whether the model is whole, on the meta device or on a GPU, and whatever its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from pipetrain.models.hf.frame import Frame, FrameMaker
from pipetrain.models.hf.parts import Elsewhere, Parts
from pipetrain.models.hf.source import reason_of
from pipetrain.models.loss import IGNORED
from pipetrain.stage.seeding import generators_restored

_IDS, _MASK, _POSITIONS, _LABELS = "input_ids", "attention_mask", "position_ids", "labels"


@dataclass(frozen=True)
class BatchCheck:
    """Takes the batches of a model with so many tokens in its embedding, and positions for so many (None: any number).

    `what_mixes`: why its layers let packed documents see each other; None: they keep them apart. `classifies`: targets are of samples, whose
    last token is the one before `padding`.
    """

    vocabulary_size: int
    most_positions: int | None
    what_mixes: Callable[[], str | None]
    classifies: bool = False
    padding: int | None = None

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """The inputs of the first layer, and the targets of the loss.

        Values are looked at where they are on the host. None is what a rank without the first or the last stage may give.
        Raises ValueError: with what is wrong, and what to give.
        """
        if isinstance(inputs, Mapping):
            inputs, targets = self._from_dict(inputs, targets)
        ids = inputs.get(_IDS) if isinstance(inputs, Mapping) else inputs
        if isinstance(ids, Tensor):
            self._check_ids(ids)
            has_mask = isinstance(inputs, Mapping) and inputs.get(_MASK) is not None
            padding = self.padding if self.classifies and not has_mask else None
            if padding is not None and ids.device.type == "cpu" and bool((ids == padding).any()):
                raise ValueError(
                    f"{_IDS} have the padding token {padding} and no {_MASK}, which says where each sample ends: give one"
                )
        return inputs, targets

    def _from_dict(self, inputs: Mapping[str, Any], targets: Any) -> tuple[Any, Any]:
        unknown = sorted(set(inputs) - {_IDS, _MASK, _POSITIONS, _LABELS})
        if unknown or _IDS not in inputs:
            raise ValueError(
                f"inputs have the keys {', '.join(map(str, inputs))}: allowed are {_IDS}, which is needed, {_MASK}, {_POSITIONS} and {_LABELS}"
            )
        given = {key: value for key, value in inputs.items() if value is not None}
        labels = given.pop(_LABELS, None)
        ids, mask, positions = (given.get(key) for key in (_IDS, _MASK, _POSITIONS))
        for key, value in (*given.items(), *([] if self.classifies else [(_LABELS, labels)])):
            if isinstance(value, Tensor) and isinstance(ids, Tensor) and value.shape != ids.shape:
                raise ValueError(
                    f"{key} has the shape {list(value.shape)}, {_IDS} {list(ids.shape)}: both are [batch, sequence]"
                )
        # Beside any mask transformers does not look at positions that start again. (A mask on a GPU would make the host wait.)
        if isinstance(mask, Tensor) and isinstance(positions, Tensor) and mask.device.type == "cpu":
            are_tokens = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
            if _start_again(positions, are_tokens):
                raise ValueError(
                    f"{_POSITIONS} start again within a sample, beside an {_MASK}: transformers then lets the packed documents see each "
                    f"other. Leave {_MASK} out, and make the padded tail a document of its own, with {IGNORED} as its targets"
                )
        if mask is None and isinstance(positions, Tensor) and _start_again(positions) and (why := self.what_mixes()):
            raise ValueError(
                f"{_POSITIONS} start again within a sample, and the layers of this model let packed documents see each other: {why}; give "
                "one document per sample, padded, with an attention_mask (data.layout=padded)"
            )
        if labels is not None and targets is not None:
            raise ValueError(
                "both `labels` and targets are given: targets are shifted already, labels are not; give one of them"
            )
        if labels is not None:
            targets = labels if self.classifies else shifted(labels, positions)
        return given, targets

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"token ids are a tensor {list(ids.shape)} of {str(ids.dtype).removeprefix('torch.')}: give [batch, sequence], int64"
            )
        if self.most_positions is not None and ids.shape[1] > self.most_positions:
            raise ValueError(
                f"a sample has {ids.shape[1]} tokens, and the model has positions for {self.most_positions}: cut the samples"
            )
        if ids.device.type == "cpu" and ids.numel():
            lowest, highest = (int(value) for value in ids.aminmax())
            if lowest < 0 or highest >= self.vocabulary_size:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(
                    f"token id {wrong} is none of the model's, which are 0 to {self.vocabulary_size - 1}: its tokenizer has more tokens than "
                    "its embedding has rows; take the model's own tokenizer"
                )


def shifted(labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """Targets for `labels`, both `[batch, sequence]`: at each position the label of the next one.

    The last position has none; nor has the last of a packed document, after which positions start again: both are IGNORED.
    """
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if positions is not None:
        targets[:, :-1].masked_fill_(positions[:, 1:] != positions[:, :-1] + 1, IGNORED)
    return targets


def _start_again(positions: Tensor, where: Tensor | None = None) -> bool:
    """Whether a position does not follow the one before it, `where` that counts; values on a device are not looked at."""
    if positions.device.type != "cpu":
        return False
    jumps = positions[:, 1:] != positions[:, :-1] + 1
    return bool((jumps if where is None else jumps & where).any())


# Packed documents ---------------------------------------------------------------------------------------------------

_RESTARTING = (0, 1, 0, 1)
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
            what = f"{type(error).__name__}: {reason_of(error)}"
            return f"whether {type(model).__name__} keeps them apart cannot be tried ({what})"


def _what_mixes(model: PreTrainedModel, parts: Parts) -> str | None:
    config, generator = copy.copy(model.config), torch.Generator().manual_seed(0)
    # Attention and experts that run on the CPU; eager experts multiply by those of these few tokens alone.
    if config._attn_implementation not in _ON_CPU:
        config._attn_implementation_internal = "sdpa" if model._supports_sdpa else "eager"
    config._experts_implementation_internal = "eager"
    first, other, second = torch.randn(3, 2, model.config.hidden_size, generator=generator, dtype=torch.float32)
    rows = torch.stack([torch.cat([first, second]), torch.cat([other, second])])
    frames = _stand_in(FrameMaker(model.get_submodule(parts.owner), parts), model, config, generator)
    frame = frames(rows, {"position_ids": torch.tensor([_RESTARTING, _RESTARTING])})
    seen = set()
    for number, layer in enumerate(model.get_submodule(parts.layers).children()):
        kind = _kind_of(layer, frame, number)
        if kind in seen or isinstance(layer, Elsewhere):
            continue
        seen.add(kind)
        output = frame.run(number, _stand_in(layer, model, config, generator), rows)
        one, same = output[:, _RESTARTING.index(0, 1) :]  # the second documents of both rows
        if not (one - same).abs().max() <= _ROUNDING * output.abs().max():  # also where it is not a number
            return f"decoder layer {number} ({type(layer).__name__}) carries one document into the next"
    return None


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
