"""A Hugging Face causal language model as layers of ours, without a line for any family.

    token ids [batch, sequence], or a dict of them with a mask and positions
      layer 0        HfEmbedding      the base model's own forward, up to its first decoder layer
      layers 1 .. n  HfDecoderLayer   a decoder layer, called as the base model's own forward would
      layer n + 1    HfHead           what follows the last one, then the causal model's own forward: logits

Between them goes a dict: `hidden [batch, sequence, width]`, of the batch what later stages need (`attention_mask`, `position_ids`), and
`frame`, which stays in its stage (`frame.py`). Layers keep nothing from call to call, so R does what F did.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pipetrain.models.hf.frame import Frame, FrameMaker, Given, StageCache, given_in, local_frame, run_to_layers
from pipetrain.models.hf.parts import Elsewhere, Parts, hollowed, model_parts
from pipetrain.models.hf.router import Router
from pipetrain.models.loss import UnmadeLogits, are_large
from pipetrain.stage.local import StageLocal
from pipetrain.stage.past import Past


class HfEmbedding(nn.Module):
    """Token ids `[batch, sequence]`, int64, or a dict with them as `input_ids` -> the dict that goes through the model."""

    def __init__(self, owner: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.owner = hollowed(owner, {parts.list_name: None} | dict.fromkeys(parts.after))
        self.parts = parts

    def forward(self, inputs: Tensor | Mapping[str, Any]) -> dict[str, Any]:
        batch = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
        given = given_in(batch)
        hidden, frame = run_to_layers(self.owner, self.parts, given, input_ids=batch["input_ids"])
        return {"hidden": hidden, **given, "frame": StageLocal(frame)}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a look into a table, beside masks that are made as plain Python says."""

    def forward_cached(self, ids: Tensor, past: Past) -> Tensor:
        """The hidden state of the new tokens, which is all that travels then."""
        hidden, frame = run_to_layers(self.owner, self.parts, given_of(past, self.owner.config), input_ids=ids)
        past.once(Frame, lambda: frame)
        return hidden


class HfDecoderLayer(nn.Module):
    """Decoder layer `number` of the model, from 0."""

    def __init__(self, layer: nn.Module, number: int, frames: FrameMaker, router: Router | None) -> None:
        super().__init__()
        self.layer = layer
        self.number = number
        self.frames = frames
        self.router = router

    def forward(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        frame = local_frame(tree, self.frames)
        if self.router is None:
            return {**tree, "hidden": frame.value.run(self.number, self.layer, tree["hidden"]), "frame": frame}
        with self.router.watching() as logits:
            hidden = frame.value.run(self.number, self.layer, tree["hidden"])
        sums = self.router.added(tree.get("router"), logits, tree.get("attention_mask"))
        return {**tree, "hidden": hidden, **({} if sums is None else {"router": sums}), "frame": frame}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The family's own layer, without the frame around it: so one code serves all of a kind, wherever they stand.

        Nothing where a router is watched: its hooks append to a list.
        """
        if self.router is None:
            self.layer.compile(*args, **kwargs)

    def prepare_cached(self, past: Past) -> None:
        """The frame of the next tokens, one of each sample, which is like that of those before."""
        if past.length > 0 and past.new == 1:
            self._frame(past.kept(HfDecoderLayer, _unknown), past)

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:
        """The hidden state of the new tokens; a router's loss is not asked for."""
        past.kept(HfDecoderLayer, hidden[:, -1:].clone)
        return self._frame(hidden, past).run(self.number, self.layer, hidden)

    def _frame(self, hidden: Tensor, past: Past) -> Frame:
        frame: Frame = past.once(Frame, lambda: self.frames(hidden, given_of(past, self.frames.owner.config)))
        return frame


def _unknown() -> Tensor:
    raise AssertionError("no hidden state has come yet")


class HfHead(nn.Module):
    """The dict -> logits `[batch, sequence, vocabulary]`; with a router loss a dict of `logits` and `router_loss [1]`.

    `loss_makes_logits`: large logits that are to be trained on are left to `causal_loss`, which makes them piece by piece.
    """

    def __init__(self, model: PreTrainedModel, parts: Parts, router: Router | None) -> None:
        super().__init__()
        owner = model.get_submodule(parts.owner)
        after = _After(OrderedDict((name, owner.get_submodule(name)) for name in parts.after))
        self.model = hollowed(model, {parts.owner: after})
        self.router = router
        self.vocabulary_size = vocabulary_of(model)
        self.loss_makes_logits = True

    def forward(self, tree: Mapping[str, Any]) -> Any:
        hidden = tree["hidden"]
        router_loss = None if self.router is None else self.router.loss(tree.get("router")).reshape(1)
        if self.loss_makes_logits and torch.is_grad_enabled() and are_large(hidden, self.vocabulary_size):
            return UnmadeLogits(hidden, partial(_logits, self.model), self.vocabulary_size, router_loss)
        logits = _logits(self.model, hidden)
        return logits if router_loss is None else {"logits": logits, "router_loss": router_loss}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: it is one product of matrices, which has no other form."""

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:  # noqa: ARG002
        """The logits of the last token alone, `[batch, 1, vocabulary]`."""
        return _logits(self.model, hidden[:, -1:])


def _logits(model: nn.Module, hidden: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    return logits


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many tokens the model tells apart; rows of its embedding."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


class _After(nn.Sequential):
    """In the owner's place: takes the last hidden state as `inputs_embeds`, and runs what follows the last decoder layer."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> _Output:  # type: ignore[override]
        hidden = inputs_embeds
        for module in self:
            hidden = module(hidden)
        return _Output(hidden)


class _Output(tuple[Any, ...]):
    """What a base model returns, as far as a causal model's forward looks at it: the hidden state; all else is None."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> _Output:
        output = super().__new__(cls, (hidden,))
        output.last_hidden_state = hidden
        return output

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def given_of(past: Past, config: PreTrainedConfig) -> Given:
    """What decoder layers need of the tokens before: `past` knows it on every stage, so none of it travels."""
    cache = past.kept(StageCache, lambda: StageCache(config)).at(past.length)
    return {**given_in({"attention_mask": past.mask, "position_ids": past.positions}), "past_key_values": cache}


def layers_of(model: PreTrainedModel, first: int, last: int, parts: Parts | None = None) -> list[nn.Module]:
    """Our layers `first` to `last - 1`, around the modules of `model`, of which others may be `Elsewhere`. Raises ValueError as `check_plain`."""
    check_plain(model)
    parts = parts or model_parts(model)
    owner = model.get_submodule(parts.owner)
    frames, router = FrameMaker(owner, parts), Router.of(model)
    decoder_layers = model.get_submodule(parts.layers)
    made: list[nn.Module] = []
    for number in range(first, last):
        if number == 0:
            made.append(HfEmbedding(owner, parts))
        elif number <= parts.num_decoder_layers:
            layer = decoder_layers.get_submodule(str(number - 1))
            assert not isinstance(layer, Elsewhere), f"layer {number} is on another stage"
            made.append(HfDecoderLayer(layer, number - 1, frames, router))
        else:
            made.append(HfHead(model, parts, router))
    return made


def check_plain(model: PreTrainedModel) -> None:
    """Raises ValueError: the model takes or gives more than text, or was switched to what stages do themselves; with what to do."""
    kind, config = type(model).__name__, model.config
    if config.get_text_config(decoder=True) is not config or getattr(config, "vision_config", None) is not None:
        raise ValueError(
            f"{kind} is a model of more than text, and stages take text alone: give the causal language model in it, as "
            "AutoModelForCausalLM.from_config(model.config.get_text_config()) makes one"
        )
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(f"{kind} is no causal language model: give one of AutoModelForCausalLM, which ends in logits")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            f"the weights of this {kind} are quantised, and no gradient moves such: load the model that they were made from"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "the model's own gradient checkpointing is on, so its layers would be recomputed twice: switch it off, and choose "
            "with recompute.mode (recompute= of a Pipeline)"
        )
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"layerdrop={config.layerdrop} leaves out layers by chance, and a stage always runs its own: set layerdrop to 0 in the model's config"
        )
