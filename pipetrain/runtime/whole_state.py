"""The tensors of a rank under the whole model's names, and of all ranks on rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.comm.chain import Chain
from pipetrain.comm.forms import Form, compact, flat_bytes, pack, unpack

_PIECE_BYTES = 1 << 24

Layers = Mapping[int, nn.Module]  # by global index


def named_parameters(layers: Layers) -> Iterator[tuple[str, nn.Parameter]]:
    """In the order and under the names of `nn.Sequential(*layers)`; a parameter that two layers share once."""
    seen: set[int] = set()
    for number, layer in sorted(layers.items()):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{number}.{name}", parameter


def parameters_of(layers_of: Mapping[int, Layers]) -> dict[int, list[nn.Parameter]]:
    """Per stage its parameters in the whole model's order; one that two stages share in the first of them alone."""
    seen: set[int] = set()
    found: dict[int, list[nn.Parameter]] = {}
    for stage, layers in sorted(layers_of.items()):
        found[stage] = [parameter for _, parameter in named_parameters(layers) if id(parameter) not in seen]
        seen.update(map(id, found[stage]))
    return found


def state_dict(layers: Layers) -> dict[str, Any]:
    return {
        f"{number}.{name}": value
        for number, layer in sorted(layers.items())
        for name, value in layer.state_dict().items()
    }


def load_state_dict(layers: Layers, state: Mapping[str, Any]) -> None:
    """Load this rank's part of `state`, which may be the whole model's.

    Raises:
        ValueError: a tensor of this rank is missing in `state`, or has another shape; a name that its layers do not have.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}: give tensors by name, as state_dict() returns them")
    for number, layer in sorted(layers.items()):
        own = layer.state_dict()
        _check_names(number, own, state)
        part = {name: state[f"{number}.{name}"] for name in own}
        for name, value in own.items():
            _check_fits(f"{number}.{name}", value, part[name])
        layer.load_state_dict(part)


def _check_names(number: int, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing = [name for name in own if f"{number}.{name}" not in state]
    if missing:
        raise ValueError(f"the state has no {number}.{missing[0]} (and {len(missing) - 1} more of layer {number})")
    start = f"{number}."
    unknown = [name for name in state if name.startswith(start) and name.removeprefix(start) not in own]
    if unknown:
        raise ValueError(
            f"the state has {unknown[0]} (and {len(unknown) - 1} more of layer {number}), which the model does not: leave it out, or "
            "load it into the model that it is of"
        )


def _check_fits(name: str, own: Any, given: Any) -> None:
    if not isinstance(own, Tensor):
        return
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is a {type(given).__name__} in the state, the model has a tensor {list(own.shape)}")
    if given.shape != own.shape:
        raise ValueError(f"{name} is {list(given.shape)} in the state, the model has {list(own.shape)}")


def gather(own: Mapping[str, Any], chain: Chain) -> dict[str, Any] | None:
    """`own` of every rank, merged, on the CPU of rank 0; None on the others. Collective.

    Tensors come up the chain one by one, in pieces of 16 MiB. So rank 0 needs room for the whole model on the host, and any
    other rank for a copy of one of its own tensors (where it is on a GPU, or has gaps) and for a few pieces under way.

    Raises:
        TypeError: a value that is neither a tensor nor a number, string or None.
        PipelineError: another rank failed meanwhile.
    """
    manifest = {name: pack([value], [False], None)[0].to_json().decode() for name, value in own.items()}
    _, *others = map(json.loads, chain.concatenate(json.dumps(manifest).encode(), "the names of the state"))
    whole: dict[str, Any] = {}
    if chain.rank == 0:
        whole = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
    for holder, theirs in enumerate(others, start=1):
        for name, text in theirs.items():
            form = Form.from_json(text)
            if form.tensors:
                whole[name] = _bring(own[name] if chain.rank == holder else None, form, name, chain)
            else:
                (whole[name],) = unpack(form, [])
    return whole if chain.rank == 0 else None


def _bring(own: Tensor | None, form: Form, name: str, chain: Chain) -> Tensor | None:
    """One tensor, which its holder gives as `own`, on rank 0; None elsewhere."""
    source = None if own is None else _memory(compact(own.detach()).cpu())
    whole = form.tensors[0].empty(torch.device("cpu" if chain.rank == 0 else "meta"))
    for start in range(0, whole.nbytes, _PIECE_BYTES):
        own_piece = None if source is None else source[start : start + _PIECE_BYTES].numpy().tobytes()
        piece = chain.bring(own_piece, f"the state of {name}")
        if chain.rank == 0:
            _memory(whole)[start : start + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    return unpack(form, [whole])[0] if chain.rank == 0 else None


def _memory(dense: Tensor) -> Tensor:
    """All bytes of a tensor, in the order of its memory."""
    return flat_bytes(dense).view(torch.uint8)
