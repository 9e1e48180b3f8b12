"""A Hugging Face causal language model as layers of ours, without a line for any family.

    token ids [batch, sequence], or a dict of them with a mask and positions
      layer 0        HfEmbedding      the base model's own forward, up to its first decoder layer
      layers 1 .. n  HfDecoderLayer   a decoder layer, called as the base model's own forward would
      layer n + 1    HfHead           what follows the last one, then the causal model's own forward: logits
                     HfScore          of a sequence classification: scores of each sample's last token

Between them goes a dict: `hidden [batch, sequence, width]`, of the batch what later stages need (`attention_mask`, `position_ids`), and
`frame`, which stays in its stage (`frame.py`). Layers keep nothing from call to call, so R does what F did.

`ModelSpec`s of such layers are made at the end: of a model that a user has, or of the one that `model.path` names.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import output_capturing

from pipetrain.config.records import ModelConfig
from pipetrain.models.hf.batch_check import BatchCheck, what_mixes_documents
from pipetrain.models.hf.frame import Frame, FrameMaker, Given, StageCache, given_in, run_to_layers
from pipetrain.models.hf.hf_size import HfShape, check_hf, hf_size_of
from pipetrain.models.hf.lora import add_adapters, check_targets
from pipetrain.models.hf.parts import Elsewhere, Parts, hollowed, model_parts
from pipetrain.models.hf.pruned import empty_model, pruned_model
from pipetrain.models.hf.source import HfSource, find_source
from pipetrain.models.loss import UnmadeLogits, are_large, causal_loss, count_tokens, score_loss
from pipetrain.models.sharing import tied_parameters
from pipetrain.models.spec import ModelSpec
from pipetrain.stage.microbatch import StageLocal
from pipetrain.stage.past import Past


class _NotCompiled(nn.Module):
    """A layer that gains nothing from it: a look into a table beside masks that plain Python makes, or one product of matrices."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class HfEmbedding(_NotCompiled):
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
        # None where the layer is the first of its stage.
        frame = tree.get("frame") or StageLocal(self.frames(tree["hidden"], given_in(tree)))
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
            self._frame(past.kept(HfDecoderLayer, Tensor), past)  # it is there: the first call has kept it

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:
        """The hidden state of the new tokens; a router's loss is not asked for."""
        past.kept(HfDecoderLayer, hidden[:, -1:].clone)
        return self._frame(hidden, past).run(self.number, self.layer, hidden)

    def _frame(self, hidden: Tensor, past: Past) -> Frame:
        frame: Frame = past.once(Frame, lambda: self.frames(hidden, given_of(past, self.frames.owner.config)))
        return frame


class HfHead(_NotCompiled):
    """The dict -> logits `[batch, sequence, vocabulary]`; with a router loss a dict of `logits` and `router_loss [1]`.

    `loss_makes_logits`: large logits that are to be trained on are left to `causal_loss`, which makes them piece by piece.
    """

    def __init__(self, model: PreTrainedModel, parts: Parts, router: Router | None) -> None:
        super().__init__()
        self.model = _with_after(model, parts)
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

    def forward_cached(self, hidden: Tensor, past: Past) -> Tensor:  # noqa: ARG002
        """The logits of the last token alone, `[batch, 1, vocabulary]`."""
        return _logits(self.model, hidden[:, -1:])


class HfScore(_NotCompiled):
    """The dict -> scores `[batch, labels]` of a sequence classification: those of each sample's last token that the mask does not leave out."""

    def __init__(self, model: PreTrainedModel, parts: Parts) -> None:
        super().__init__()
        self.model, self.owner = _with_after(model, parts), parts.owner

    def forward(self, tree: Mapping[str, Any]) -> Tensor:
        hidden, mask = self.model.get_submodule(self.owner)(inputs_embeds=tree["hidden"])[0], tree.get("attention_mask")
        scores: Tensor = self.model.score(hidden)
        if mask is None:
            return scores[:, -1]
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
        return scores[torch.arange(len(last), device=last.device), last]


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether it is one of AutoModelForSequenceClassification over a causal model, whose scores are those of the last token."""
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), ())
    return isinstance(model, kind) and isinstance(getattr(model, "score", None), nn.Linear)


def _with_after(model: PreTrainedModel, parts: Parts) -> Any:
    """The model, with what follows the last decoder layer in the place of the owner."""
    owner = model.get_submodule(parts.owner)
    after = _After(OrderedDict((name, owner.get_submodule(name)) for name in parts.after), owner)
    return hollowed(model, {parts.owner: after})


def _logits(model: nn.Module, hidden: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    return logits


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many tokens the model tells apart; rows of its embedding."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


class _After(nn.Sequential):
    """In the owner's place: takes the last hidden state as `inputs_embeds`, and runs what follows the last decoder layer. It has the owner's
    plain attributes, which a causal model may read."""

    def __init__(self, modules: OrderedDict[str, nn.Module], owner: nn.Module) -> None:
        super().__init__(modules)
        known = vars(nn.Module())
        self.__dict__ |= {
            name: value
            for name, value in vars(owner).items()
            if name not in known and not isinstance(value, (Tensor, nn.Module))
        }

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> _Output:  # type: ignore[override]
        hidden = inputs_embeds
        for module in self:
            hidden = module(hidden)
        return _Output(hidden)


class _Output(BaseModelOutput):  # type: ignore[misc]  # transformers has no types for it
    """What a base model returns, as far as a causal model's forward looks at it: the hidden state; all else is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def given_of(past: Past, config: PreTrainedConfig) -> Given:
    """What decoder layers need of the tokens before: `past` knows it on every stage, so none of it travels."""
    cache = past.kept(StageCache, lambda: StageCache(config)).at(past.length)
    return {**given_in({"attention_mask": past.mask, "position_ids": past.positions}), "past_key_values": cache}


def layers_of(model: PreTrainedModel, first: int, last: int, parts: Parts | None = None) -> list[nn.Module]:
    """Our layers `first` to `last - 1`, around the modules of `model`, of which others may be `Elsewhere`."""
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
            made.append(HfScore(model, parts) if is_classifier(model) else HfHead(model, parts, router))
    return made


def check_plain(model: PreTrainedModel) -> None:
    """Raises ValueError: the model takes or gives more than text, or was switched to what stages do themselves; with what to do."""
    kind, config = type(model).__name__, model.config
    has_encoder = getattr(config, "is_encoder_decoder", False)
    more = config.get_text_config(decoder=True) is not config or getattr(config, "vision_config", None) is not None
    if more and not has_encoder:
        raise ValueError(
            f"{kind} is a model of more than text, and stages take text alone: give the causal language model in it, as "
            "AutoModelForCausalLM.from_config(model.config.get_text_config()) makes one"
        )
    reasons = {
        "it has an encoder": has_encoder,
        "its tokens attend to later ones": any(getattr(one, "is_causal", True) is False for one in model.modules()),
        "it ends in no logits of the next token": not is_classifier(model) and model.get_output_embeddings() is None,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ValueError(f"{kind} is no causal language model: {reason}; give one of AutoModelForCausalLM")
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


# The loss that balances experts -----------------------------------------------------------------------------------------

_KEY = "router_logits"  # under which transformers records what routers say

Sums = tuple[Tensor, Tensor, Tensor]
"""Over the layers so far: tokens `[E]` and probabilities `[E]` of each expert, rows `[1]` (token times layer), float32."""


@dataclass(frozen=True)
class Router:
    """How a model weighs the use of its experts: the coefficient, and how many experts each token is sent to.

        loss = coefficient x E x sum over experts e of (T_e / rows) (P_e / rows)

    T_e are the tokens sent to expert e and P_e the sum of their router probabilities, over all tokens and layers: Fedus et al., "Switch
    Transformers", 2021, equations (4) to (6), as transformers adds them up. So three small tensors are all that a later stage needs of a
    layer: they travel with the hidden state.
    """

    coefficient: float
    top_k: int

    @staticmethod
    def of(model: PreTrainedModel) -> Router | None:
        """None: no experts, or `output_router_logits` of its config does not ask for the loss. Raises ValueError: it is not known how."""
        if not getattr(model.config, "output_router_logits", False):
            return None
        coefficient = getattr(model, "router_aux_loss_coef", None)
        top_k = getattr(model, "num_experts_per_tok", None)
        if _KEY not in (getattr(model, "_can_record_outputs", None) or {}) or coefficient is None or top_k is None:
            raise ValueError(
                f"output_router_logits is set, and {type(model).__name__} has no router loss that is known here: set it to false in the "
                "model's config.json (or model.config.output_router_logits = False)"
            )
        output_capturing.maybe_install_capturing_hooks(model)
        return Router(float(coefficient), int(top_k))

    @staticmethod
    @contextmanager
    def watching() -> Iterator[list[Tensor]]:
        """What routers say in the block: logits `[rows, E]` each, as transformers' own forward records them."""
        logits: list[Tensor] = []
        token = output_capturing._active_collector.set({_KEY: logits})
        try:
            yield logits
        finally:
            output_capturing._active_collector.reset(token)

    def added(self, sums: Sums | None, logits: list[Tensor], mask: Tensor | None) -> Sums | None:
        """The sums with those of one more layer; `mask [batch, sequence]`: tokens that are padding count nothing."""
        for each in logits:
            more = self._sums_of(each, mask)
            sums = more if sums is None else (sums[0] + more[0], sums[1] + more[1], sums[2] + more[2])
        return sums

    def _sums_of(self, logits: Tensor, mask: Tensor | None) -> Sums:
        probabilities = torch.softmax(logits, dim=-1)
        rows, experts = probabilities.shape
        chosen = probabilities.topk(self.top_k, dim=-1).indices.flatten()
        zeros = torch.zeros(experts, dtype=torch.float32, device=logits.device)
        weights = torch.ones(rows, device=logits.device) if mask is None else mask.reshape(-1).float()
        tokens = zeros.scatter_add(0, chosen, weights.repeat_interleave(self.top_k))
        ours = probabilities.float()
        added = (ours if mask is None else ours * weights.unsqueeze(-1)).sum(dim=0)
        return tokens, added, weights.sum().reshape(1)

    def loss(self, sums: Sums | None) -> Tensor:
        """0-dim, float32; 0 where no layer has had experts."""
        if sums is None:
            return torch.zeros(())
        tokens, probabilities = sums[0] / sums[2], sums[1] / sums[2]
        return self.coefficient * (torch.sum(tokens * probabilities.unsqueeze(0)) * len(tokens))


# The bundle -------------------------------------------------------------------------------------------------------------

_ANY_LENGTH = 2048  # tokens of a sample, for a model whose config tells no longest one


def spec_of_hf(model: PreTrainedModel) -> ModelSpec:
    """The bundle of a model that every rank has whole: its stages train its very parameters. Raises ValueError: it cannot be cut."""
    check_plain(model)
    parts = model_parts(model)
    modules = dict(enumerate(layers_of(model, 0, parts.num_layers, parts)))

    def build(first: int, last: int, *, device: torch.device, **_: Any) -> Sequence[nn.Module]:
        return [layer.to(device) for layer in layers_of(model, first, last, parts)]  # around the modules that are there

    return replace(_spec_of(model, parts, build), modules=modules, tied=tied_parameters(modules))


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
    if has_adapters:
        check_targets(whole, parts, config.lora)
    spec = _spec_of(whole, parts, partial(_read_of, config, source, parts))
    tied = {} if has_adapters else whole.all_tied_weights_keys
    own = {"lora": asdict(config.lora) if has_adapters else None, "attention": config.attention}
    return replace(
        spec,
        tied=tuple((parts.in_layers(first), parts.in_layers(again)) for again, first in tied.items()),
        fingerprint=json.loads(json.dumps({**spec.fingerprint, **own})),
    )


def _read_of(
    config: ModelConfig, source: HfSource, parts: Parts, first: int, last: int, *, seed: int, device: torch.device
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
    )
    if config.lora.rank is not None:
        add_adapters(model, parts, config.lora, seed=seed)
    return [layer.to(device) for layer in layers_of(model.train(), first, last, parts)]


def _spec_of(model: PreTrainedModel, parts: Parts, build: Any) -> ModelSpec:
    """All of the bundle but what layers share; `model` may be on the meta device."""
    config = model.config.to_dict()
    fingerprint: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", "architectures", "dtype"):  # where it came from, what wrote it
        fingerprint.pop(key, None)
    classifies = is_classifier(model)
    return ModelSpec(
        size=hf_size_of(config, HfShape(config).most_positions or _ANY_LENGTH),
        build_layers=build,
        loss_fn=score_loss if classifies else causal_loss,
        count_fn=None if classifies else count_tokens,
        fingerprint={**fingerprint, "attention": model.config._attn_implementation},
        to_file=parts.to_file,
        from_file=parts.from_file,
        take_batch=BatchCheck(
            vocabulary_of(model),
            _most_positions(model, parts),
            cache(partial(what_mixes_documents, model, parts)),
            classifies,
            model.config.pad_token_id,
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
