"""Tokens of batches, and how many a run has learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from pipetrain.data.batch import Batch
from pipetrain.model.spec import ModelSpec


class Tokens(NamedTuple):
    """all: positions of the targets, with padding and all else that does not count. counted: those that the loss is a mean over."""

    all: int
    counted: int


def tokens_of(batch: Batch, spec: ModelSpec) -> Tokens:
    """The tokens of a batch; `spec` knows which count."""
    leaves = pytree.tree_leaves(batch.targets)
    return Tokens(sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), int(spec.count(batch.targets)))


class TokensSeen:
    """Tokens of all steps that changed the weights, those before a resume too. Its state belongs into a snapshot."""

    def __init__(self) -> None:
        self.total = Tokens(0, 0)

    def add(self, tokens: Tokens) -> None:
        """Another step."""
        self.total = Tokens(self.total.all + tokens.all, self.total.counted + tokens.counted)

    def state_dict(self) -> dict[str, int]:
        """What JSON can say."""
        return self.total._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Back to what `state_dict` gave; an empty mapping (a snapshot of an older version) begins at 0."""
        self.total = Tokens(int(state.get("all", 0)), int(state.get("counted", 0)))
