"""The tensors of a rank under the whole model's names, and of all ranks on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.group.chain import Chain
from pipetrain.transport.forms import Form, TensorForm, compact, flat_bytes, pack, unpack

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


def state_dict(layers: Layers) -> dict[str, Any]:
    return {
        f"{number}.{name}": value
        for number, layer in sorted(layers.items())
        for name, value in layer.state_dict().items()
    }


def load_state_dict(layers: Layers, state: Mapping[str, Any]) -> None:
    """Load this rank's part of `state`, which may be the whole model's.

    Raises:
        ValueError: a tensor of this rank is missing in `state`, or has another shape.
    """
    for number, layer in sorted(layers.items()):
        own = layer.state_dict()
        missing = [name for name in own if f"{number}.{name}" not in state]
        if missing:
            raise ValueError(f"the state has no {number}.{missing[0]} (and {len(missing) - 1} more of layer {number})")
        part = {name: state[f"{number}.{name}"] for name in own}
        for name, value in own.items():
            if isinstance(value, Tensor) and part[name].shape != value.shape:
                raise ValueError(
                    f"{number}.{name} is {list(part[name].shape)} in the state, the model has {list(value.shape)}"
                )
        layer.load_state_dict(part)


def gather(own: Mapping[str, Any], chain: Chain) -> dict[str, Any] | None:
    """`own` of every rank, merged, on the CPU of rank 0; None on the others. Collective.

    Tensors come up the chain one by one, in pieces of 16 MiB. So rank 0 needs room for the whole model on the host, and any
    other rank for a copy of one of its own tensors (where it is on a GPU, or has gaps) and for a few pieces under way.

    Raises:
        TypeError: a value that is neither a tensor nor a number, string or None.
        PipelineError: another rank failed meanwhile.
    """
    # The names travel where a message between stages has the structure of its tree.
    manifest = Form("\n".join(own), tuple(map(_leaf_of, own.values())))
    _, *others = [Form.from_json(text) for text in chain.concatenate(manifest.to_json(), "the names of the state")]
    whole: dict[str, Any] = {}
    if chain.rank == 0:
        whole = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
    for holder, theirs in enumerate(others, start=1):
        for name, leaf in zip(theirs.spec.split("\n"), theirs.leaves):
            if isinstance(leaf, TensorForm):
                whole[name] = _bring(own[name] if chain.rank == holder else None, leaf, name, chain)
            else:
                (whole[name],) = unpack(Form("", (leaf,)), [])
    return whole if chain.rank == 0 else None


def _leaf_of(value: Any) -> Any:
    return pack([value], [False], "")[0].leaves[0]


def _bring(own: Tensor | None, form: TensorForm, name: str, chain: Chain) -> Tensor | None:
    """One tensor, which its holder gives as `own`, on rank 0; None elsewhere."""
    source = None if own is None else _memory(compact(own.detach()).cpu())
    whole = form.empty(torch.device("cpu" if chain.rank == 0 else "meta"))
    for start in range(0, whole.nbytes, _PIECE_BYTES):
        own_piece = None if source is None else source[start : start + _PIECE_BYTES].numpy().tobytes()
        piece = chain.bring(own_piece, f"the state of {name}")
        if chain.rank == 0:
            _memory(whole)[start : start + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    return unpack(Form("", (form,)), [whole])[0] if chain.rank == 0 else None


def _memory(dense: Tensor) -> Tensor:
    """All bytes of a tensor, in the order of its memory."""
    return flat_bytes(dense).view(torch.uint8)
