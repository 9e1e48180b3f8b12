"""A small GPT as a workload: random tokens, real layers, real arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.loss import next_token_loss
from pipetrain.models.transformer import transformer_layers

VOCABULARY = 256


@dataclass(frozen=True)
class TransformerWorkload:
    """Equal numbers of layers per stage; a microbatch is `rows` sequences."""

    num_stages: int
    num_microbatches: int = 8
    rows: int = 2
    sequence_length: int = 256
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def tokens_per_step(self) -> int:
        return self.num_microbatches * self.rows * self.sequence_length

    def layers(self) -> list[Callable[[], nn.Module]]:
        return transformer_layers(self.model, VOCABULARY)

    def balance(self) -> list[int]:
        each, rest = divmod(len(self.layers()), self.num_stages)
        assert rest == 0, f"{len(self.layers())} layers on {self.num_stages} stages: DeepSpeed would cut elsewhere"
        return [each] * self.num_stages

    def batch(self) -> tuple[Tensor, Tensor]:
        """Token ids and the next ones, each [batch, sequence]."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_microbatches * self.rows, self.sequence_length + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def stage_input(self, stage: int) -> Tensor:
        if stage == 0:
            return torch.zeros(self.rows, self.sequence_length, dtype=torch.int64)
        return torch.zeros(self.rows, self.sequence_length, self.model.hidden_size)

    def stage_output(self, stage: int) -> Tensor:
        if stage < self.num_stages - 1:
            return self.stage_input(stage + 1)
        return torch.zeros(self.rows, self.sequence_length, VOCABULARY)

    def memory_bytes(self) -> int:
        """Nothing beforehand: a forward takes seconds, and its layers use all of what they allocate."""
        return 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(output, target)
