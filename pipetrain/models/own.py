"""model=python: the layers that a function of the user's gives, with loss and count; `python -m pipetrain.models.own` counts them.

Every rank calls the function with the same seed. Of factories a rank calls its own alone; a whole model is made on each rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetrain.config.own_code import call_target, check_target, function_of
from pipetrain.config.problem import ConfigError
from pipetrain.config.records import ModelConfig
from pipetrain.models.loss import IGNORED, count_tokens
from pipetrain.models.own_size import forget_count, own_size
from pipetrain.models.size import ModelSize
from pipetrain.models.spec import ModelSpec, flops_of, spec_of


def own_spec(config: ModelConfig, _vocabulary_size: int | None) -> ModelSpec:
    """The model that `model.target` gives.

    Raises:
        ValueError: it gives none, or another number of layers than were counted.
    """
    spec, loss_fn = _made(config)
    if spec.num_layers != own_size(config, None, 0).num_layers:
        forget_count(config)
        raise ConfigError(
            f"model.target={config.target}: gives {spec.num_layers} layers, and gave another number when they were counted; start again: "
            "they are counted anew"
        )
    count_fn = spec.count_fn
    if (loss_fn := own_loss(config) or loss_fn or spec.loss_fn) is None:
        loss_fn, count_fn = cross_entropy, count_fn or count_tokens
    if config.count is not None:
        count_fn = function_of("model.count", config.count, config.count_args)
    names = {number: type(layer).__name__ for number, layer in spec.modules.items()}
    own = {"target": config.target, "args": dict(config.args), "file": config.file_sha256, "layers": names}
    return replace(
        spec, loss_fn=loss_fn, count_fn=count_fn, fingerprint=json.loads(json.dumps({**spec.fingerprint, "own": own}))
    )


def own_loss(config: ModelConfig) -> Callable[..., Any] | None:
    """What `model.loss` names. Raises ConfigError: there is no such function, or its `reduction` gives a loss for each sample."""
    if config.loss is None:
        return None
    loss = function_of("model.loss", config.loss, config.loss_args)
    if "none" in (getattr(loss, "reduction", None), getattr(loss, "keywords", {}).get("reduction")):
        raise ConfigError(f"model.loss={config.loss}: reduction=none gives a loss for each row; leave it out")
    return (
        loss if isinstance(loss, nn.Module) else partial(_scalar, loss, config.loss)
    )  # stages look at a module's buffers


def _scalar(loss_fn: Callable[..., Any], spelling: str, output: Any, targets: Any) -> Tensor:
    loss = loss_fn(output, targets)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ConfigError(f"model.loss={spelling}: returned {found}: it must return a 0-dim tensor, the mean over the rows")


def cross_entropy(output: Any, targets: Any) -> Tensor:
    """The loss where the user names none: the mean over the targets other than -100, in nats, 0-dim.

    `output [..., classes]`, `targets [...]`: the number of the right class.

    Raises:
        ValueError: they have other shapes.
    """
    shapes = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (output, targets)]
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or output.shape[:-1] != targets.shape:
        raise ValueError(
            f"model.loss: cross_entropy, the default, takes an output [..., classes] and targets [...]; here they are {shapes[0]} and "
            f"{shapes[1]}; name another loss, as in model.loss=my_model:my_loss"
        )
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def _made(config: ModelConfig) -> tuple[ModelSpec, Callable[..., Any] | None]:
    """What the function gives: a model, or as `pipetrain verify` takes it a tuple that begins with model and loss."""
    assert config.target is not None, "it was checked"
    model, loss_fn = call_target("model.target", config.target, config.args), None
    if isinstance(model, tuple) and len(model) in (2, 4) and not isinstance(model[1], nn.Module):
        model, loss_fn = model[:2]
    try:
        return spec_of(model), loss_fn
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.target={config.target}: {error}") from error


def count(config: ModelConfig) -> ModelSize:
    """The size of the model that `model.target` gives: made without memory for weights, where that is possible.

    Raises:
        ValueError: it gives no model.
    """
    assert config.target is not None, "it was checked"
    # Outside of meta: what a module makes when it is imported is no part of the model.
    check_target("model.target", config.target, config.args)
    try:
        with torch.device("meta"):
            spec, _ = _made(config)
    except Exception:  # it reads values of its weights, perhaps from a file
        spec, _ = _made(config)
    if len(spec.modules) < spec.num_layers:  # of factories, or a ModelSpec, which may know more
        return spec.size
    layers = [spec.modules[number] for number in range(spec.num_layers)]
    places = sorted({(int(a.partition(".")[0]), int(b.partition(".")[0])) for a, b in spec.tied})
    return ModelSize(
        spec.num_layers,
        kinds=tuple(f"{type(layer).__name__} {[list(p.shape) for p in layer.parameters()]}" for layer in layers),
        flops_per_layer=tuple(map(flops_of, layers)),
        parameters_per_layer=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
        tied=tuple(places),
    )


def main() -> None:
    """Answers the question on stdin, of `own_size`. What the user's code prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    config = ModelConfig(target=asked["target"], args=asked["args"], file_sha256=asked["file_sha256"])
    try:
        told = asdict(count(config))
    except ValueError as error:
        told = {"problem": str(error)}
    json.dump(told, answer)
    answer.flush()


if __name__ == "__main__":
    main()
