"""A stage's share of a Hugging Face model: built without memory, then only what the stage has is read or drawn.

    whole model on meta ── model_parts ──► foreign modules become Elsewhere ──► transformers loads what is left
                                                                             │ renames, fuses experts, ties
                                                      weights by name ───────┘ read when it asks for one

transformers is given every name in the files and asks only for those that the pruned model has. So files of other stages are not
opened, and no name of a family stands here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from pipetrain.config.read_files import opened_tensors
from pipetrain.models.hf.parts import Elsewhere, Parts, model_parts
from pipetrain.models.hf.source import BRING, HfSource, check_loadable, reason_of
from pipetrain.stage.seeding import generators_restored, weight_seed

PRETRAINED, RANDOM = "pretrained", "random"


def pruned_model(
    source: HfSource,
    first: int,
    last: int,
    *,
    weights: str = PRETRAINED,
    seed: int = 0,
    dtype: str = "auto",
    attention: str | None = None,
) -> PreTrainedModel:
    """The causal language model of `source` with our layers `first` to `last - 1`; all else of it never had memory.

    Args:
        weights: `pretrained` reads them; `random` draws each layer from (seed, its number).
        dtype: of the weights; `auto`: what they are stored in.
        attention: how transformers computes attention (`sdpa`, `eager`, ...); None: its own choice.

    Raises ValueError: no such layers; a model that cannot be loaded or cut; weights that do not make it.
    """
    config, held = config_of(source), range(first, last)
    if attention is not None:
        config._attn_implementation = attention
    chosen = getattr(torch, source.dtype if dtype == "auto" else dtype, None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"model.dtype={dtype}: allowed are auto, float32, bfloat16 and float16")
    whole = causal_class(config)
    pruned = _pruned_class(whole, held, draws=weights == RANDOM)
    with _quiet_transformers(), generators_restored(torch.device("cpu")):
        if weights == PRETRAINED:
            check_loadable(source)
            model = _read(pruned, config, source, chosen)
        else:
            with torch.device("meta"):
                model = pruned._from_config(config, dtype=chosen)
            _draw(model, seed)
    model.__class__, parts = whole, model.whole_parts
    # What stayed for what is tied to it goes; the held one keeps the tensor.
    _replace(model, parts, set(held))
    model.all_tied_weights_keys = {
        target: root
        for target, root in model.all_tied_weights_keys.items()
        if parts.layer_of(target) in held and parts.layer_of(root) in held
    }
    return model


def empty_model(source: HfSource) -> PreTrainedModel:
    """The whole model without memory: names, shapes, what is tied."""
    config = config_of(source)
    with _quiet_transformers(), torch.device("meta"):
        model: PreTrainedModel = causal_class(config)._from_config(config)
    return model


def config_of(source: HfSource) -> PretrainedConfig:
    """The config as transformers has it. Code beside it is not run. Raises ValueError: a kind that transformers does not have itself."""
    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        kind = source.config.get("model_type")
        raise ValueError(
            f"model.path={source.name}: transformers has no model_type {kind!r} of its own, and code that comes with a model is "
            f"not run ({reason_of(error)})"
        ) from error


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The family's causal language model. Raises ValueError: it has none."""
    try:
        found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ValueError(
            f"model_type {config.model_type!r} has no causal language model in transformers: name a model that goes on with text"
        ) from None
    return found


def _pruned_class(whole: type[PreTrainedModel], held: range, *, draws: bool) -> Any:
    """The family's class, whose instances lose what no layer of `held` owns as soon as they are made: `from_pretrained` loads what is left.

    An instance has the parts of the whole model as `whole_parts`, and what is tied in what is left, target to source, as `tied_here`.
    `draws`: what is tied stays with its whole layer, whose weights come from one seed.
    """

    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(model, *args, **kwargs)
        parts = model.whole_parts = model_parts(model)
        if not 0 <= held.start < held.stop <= parts.num_layers:
            raise ValueError(
                f"layers {held.start} to {held.stop - 1} were asked for, the model has 0 to {parts.num_layers - 1}"
            )
        model.tied_here = {
            target: root
            for target, root in model.all_tied_weights_keys.items()
            if {parts.layer_of(target), parts.layer_of(root)} & set(held)
        }
        model.all_tied_weights_keys = dict(model.tied_here)
        # A file has a tied tensor once: its module stays until all is loaded.
        names = [name for pair in model.tied_here.items() for name in pair]
        of_tied: set[int | None] = {parts.layer_of(name) for name in names} if draws else set()
        _replace(model, parts, of_tied | set(held), names)

    # The module's name: transformers takes a class of another module for code that came with a model.
    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def _replace(model: PreTrainedModel, parts: Parts, kept: set[int | None], tied: Sequence[str] = ()) -> None:
    """Puts `Elsewhere` in the place of the modules of all layers but `kept`, and but those that have tensors named in `tied`."""
    for number in range(parts.num_layers):
        for name in parts.modules_of(number) if number not in kept else ():
            if not any(each.startswith(f"{name}.") for each in tied):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, Elsewhere(number))


def _read(pruned: Any, config: PretrainedConfig, source: HfSource, dtype: torch.dtype) -> Any:
    """Loads what a model of the class `pruned` has, and nothing else."""
    # Else threads of transformers read ahead of what is stacked (experts): by up to the whole stage where the machine is busy.
    one_by_one = mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1")
    with contextlib.ExitStack() as files, one_by_one:
        open_file = cache(
            lambda path: files.enter_context(opened_tensors(path, BRING, framework="pt", backend="pread"))
        )
        try:
            model, info = pruned.from_pretrained(
                None,
                config=config,
                state_dict={name: _Stored(partial(open_file, path), name) for name, path in source.weight_map.items()},
                dtype=dtype,
                ignore_mismatched_sizes=True,  # to tell which in a line
                output_loading_info=True,
            )
        except (RuntimeError, OSError, OverflowError, SafetensorError) as error:
            raise ValueError(f"model.path={source.name}: its weights cannot be loaded ({reason_of(error)})") from error
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise ValueError(
            f"model.path={source.name}: {name} is {list(found)} in the files, {list(wanted)} by config.json (and {len(mismatched) - 1} "
            "more): they are not of one model"
        )
    if untied := sorted(model.tied_here.keys() - model.all_tied_weights_keys.keys()):
        raise ValueError(
            f"model.path={source.name}: its config ties {untied[0]} to {model.tied_here[untied[0]]}, and its files have two that differ: set "
            "tie_word_embeddings to false in its config.json, or take one of them out of the files"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"model.path={source.name}: the weights have no {missing[0]} (and {len(missing) - 1} more), which "
            f"{type(model).__name__} needs: they are of another model, or not whole; model.weights=random draws all"
        )
    return model


@dataclass(frozen=True)
class _Stored:
    """A tensor of a safetensors file, read when transformers asks for `value[...]`, into memory of its own.

    Not mapped: a mapped file whose tensors are stacked (experts) stays in memory beside the stack, and a file that is written anew
    changes under who maps it.
    """

    open_file: Callable[[], Any]
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self.open_file().get_tensor(self.name)
        return tensor[index]


def _draw(model: Any, seed: int) -> None:
    """First weights as the family draws them, those of each layer from a seed of its own."""
    model.to_empty(device="cpu")
    for name in model.all_tied_weights_keys:
        model.get_parameter(name)._is_hf_initialized = True  # it becomes its source below, so nothing is drawn for it
    with torch.no_grad(), initialization.guard_torch_init_functions():
        for number in range(model.whole_parts.num_layers):
            torch.default_generator.manual_seed(weight_seed(seed, number))
            for name in model.whole_parts.modules_of(number):
                model.get_submodule(name).apply(model._initialize_weights)
    model.initialize_weights()  # rotary tables and what else belongs to no layer
    model.tie_weights(recompute_mapping=False)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bar per rank and its tables of the weights of other stages: we raise errors for what is wrong."""
    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()
