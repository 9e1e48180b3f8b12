"""What tensors are called: in our layers, and in the whole model of transformers, which is what files have.

0.owner.embed_tokens.weight          model.embed_tokens.weight
1.layer.mlp.up_proj.weight           model.layers.0.mlp.up_proj.weight
5.model.model.norm.weight            model.norm.weight
5.model.lm_head.weight               lm_head.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pipetrain.model.hf.parts import Parts


@dataclass(frozen=True)
class HfNames:
    """The names of a model with these parts, both ways."""

    parts: Parts

    def in_file(self, name: str) -> str:
        """What transformers calls the tensor that we call `name`."""
        number, _, rest = name.partition(".")
        if int(number) == 0:
            return self._owned(rest.removeprefix("owner."))
        if int(number) < self.parts.num_layers - 1:
            return f"{self.parts.layers}.{int(number) - 1}.{rest.removeprefix('layer.')}"
        return rest.removeprefix("model.")

    def in_layers(self, name: str) -> str:
        """What we call the tensor that transformers calls `name`. One that it has no layer for is called as it is."""
        number = self.parts.layer_of(name)
        if number is None:
            return name
        if number == 0:
            return f"0.owner.{name.removeprefix(self._owned(''))}"
        if number < self.parts.num_layers - 1:
            return f"{number}.layer.{name.removeprefix(f'{self.parts.layers}.{number - 1}.')}"
        return f"{number}.model.{name}"

    def to_file(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return _Renamed(tensors, self.in_file)

    def from_file(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return _Renamed(tensors, self.in_layers)

    def _owned(self, name: str) -> str:
        return f"{self.parts.owner}.{name}" if self.parts.owner else name


class _Renamed(Mapping[str, Tensor]):
    """A mapping under other names; a tensor is read when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> None:
        self._tensors = tensors
        self._name_of = {rename(name): name for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._name_of[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._name_of)

    def __len__(self) -> int:
        return len(self._name_of)
