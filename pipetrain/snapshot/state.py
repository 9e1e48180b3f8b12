"""What is saved: the tensors of a rank under names that do not depend on the split, and what JSON can say of the run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipetrain.config.read_files import fitted, parse_json
from pipetrain.models.trained import Model, Optimizer, Sharded
from pipetrain.snapshot.files import Part as Part


@dataclass(frozen=True)
class RunState:
    """state.json: where the run was, and what it was.

    The batch of a step is a function of (seed, step, `guard`) and the learning rate one of the step, so neither has a
    state of its own. Nothing is scaled: bfloat16 needs no loss scaler.
    """

    step: int  # optimizer steps that were done
    num_ranks: int  # ranks that wrote
    config: Mapping[str, Any]  # the whole configuration, as nested dicts
    plan: Mapping[str, Any]  # layers per stage, and who held them
    data: str | None = None  # fingerprint of the text; None: written by a version that had none
    guard: Mapping[str, Any] = field(default_factory=dict)  # which batches are skipped, and what the guard remembers
    tokens: Mapping[str, Any] = field(default_factory=dict)  # how many tokens the run has seen
    # Of a loop of the user's own: `extra` and perhaps `scheduler`, as JSON; None: of a run.
    loop: Mapping[str, str] | None = None


Tensors = dict[str, Tensor]


def tensors_of(
    model: Model, optimizer: Optimizer, device: torch.device, *, replica: int = 0, num_replicas: int = 1
) -> dict[Part, Tensors]:
    """This rank's share of each part; nothing of it changes before the next optimizer step.

    Parameters and optimizer state are the tensors themselves; buffers, which a forward pass may change, are copies. What all replicas
    have alike each writes a part of; buffers are those of replica 0. Of a `Sharded` optimizer each has its own.
    """
    # By their memory: one that two layers share has two names in the state, and one here.
    parameters = {parameter.untyped_storage()._cdata for _, parameter in model.named_parameters()}
    weights, buffers = Tensors(), Tensors()
    for name, value in _only_tensors(model.state_dict()):
        (weights if value.untyped_storage()._cdata in parameters else buffers)[name] = value
    states = optimizer.state
    values = {f"{n}/{key}": value for n, one in model.named_parameters() for key, value in states.get(one, {}).items()}
    state = dict(_only_tensors(values))
    return {
        Part.WEIGHTS: {
            **_share_of(weights, replica, num_replicas),
            **{name: value.clone() for name, value in buffers.items() if replica == 0},
        },
        Part.OPTIMIZER: state if isinstance(optimizer, Sharded) else _share_of(state, replica, num_replicas),
        Part.GENERATORS: _generators(device),
    }


def _share_of(tensors: Tensors, replica: int, num_replicas: int) -> Tensors:
    """What one of several that have the same tensors writes: each about as many bytes, and the largest go to whoever has least."""
    share, taken = Tensors(), [0] * num_replicas
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        least = taken.index(min(taken))
        taken[least] += tensor.nbytes
        if least == replica:
            share[name] = tensor
    return share


def restore_optimizer(model: Model, optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Give each parameter its state back. Learning rate and other options stay as they are: they come from the config.

    A parameter without state in `saved` (it never had a gradient) starts without one, as it did.
    """
    names = _names_of(model, optimizer)
    keys_of: dict[str, list[str]] = {}
    for entry in saved:
        name, _, key = entry.rpartition("/")
        keys_of.setdefault(name, []).append(key)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wanted = filter(optimizer.holds, order) if isinstance(optimizer, Sharded) else order
    restored = {names[id(parameter)] for parameter in wanted} & keys_of.keys()
    state = {
        number: {key: saved[f"{name}/{key}"] for key in keys_of[name]}
        for number, parameter in enumerate(order)
        if (name := names[id(parameter)]) in restored
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def options_of(model: Model, optimizer: Optimizer) -> Tensors:
    """The options (learning rate, ...) of each parameter of the optimizer, so that ranks with other parameters find theirs.

    Raises ValueError: an option that JSON does not know, or a parameter that is not the model's.
    """
    names, options = _names_of(model, optimizer), Tensors()
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key != "params"}
        data = _bytes_of(known_to_json(own, "an option of the optimizer"))
        for parameter in group["params"]:
            options[names[id(parameter)]] = data
    return options


def restore_options(model: Model, optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Give each group of the optimizer the options that its parameters had.

    Raises ValueError: they had different ones.
    """
    names = _names_of(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        had = {bytes(saved[name].tolist()) for one in group["params"] if (name := names[id(one)]) in saved}
        if len(had) > 1:
            raise ValueError(
                f"group {number} of the optimizer has parameters that were in groups with other options; make the groups as before"
            )
        for key, value in fitted(dict[str, Any], parse_json(had.pop())).items() if had else ():
            group[key] = tuple(value) if isinstance(value, list) else value


def known_to_json(value: Any, what: str) -> Any:
    """`value` as JSON gives it back: tuples are lists.

    Raises ValueError: it would come back as something else; the message says where in `what` that stands.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [known_to_json(one, f"{what}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{what} has the key {key!r}: JSON has text as keys; use {str(key)!r}")
        return {key: known_to_json(one, f"{what}[{key!r}]") for key, one in value.items()}
    raise ValueError(
        f"{what} is a {type(value).__name__}: a snapshot holds what JSON knows (numbers, text, true, false, None, lists and dicts of these)"
    )


def restore_generators(saved: Mapping[str, Tensor], device: torch.device) -> None:
    """The default generators of torch, Python and numpy as they were; those that were not saved stay.

    Dropout does not need it: its seeds are functions of the step.
    """
    if "cpu" in saved:
        torch.set_rng_state(saved["cpu"])
    if "cuda" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)
    if "python" in saved:
        version, numbers, gauss = _json_of(saved["python"])
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in saved:
        np.random.set_state(tuple(_json_of(saved["numpy"])))


def _names_of(model: Model, optimizer: Optimizer) -> dict[int, str]:
    """Raises ValueError: the optimizer has a parameter that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the pipeline's: make it of "
                    "pipeline.parameters() alone"
                )
    return names


def _generators(device: torch.device) -> Tensors:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    kind, numbers, *rest = np.random.get_state(legacy=True)
    states["python"] = _bytes_of(random.getstate())
    states["numpy"] = _bytes_of((kind, np.asarray(numbers).tolist(), *rest))
    return states


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_of(data: Tensor) -> Any:
    return parse_json(bytes(data.tolist()))


def _only_tensors(values: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}: a snapshot holds tensors, and nothing that needs pickle"
            )
        yield name, value
