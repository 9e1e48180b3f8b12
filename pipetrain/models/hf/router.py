"""The loss that balances the experts of a mixture, over stages: its sums travel with the hidden state.

    loss = coefficient x E x sum over experts e of (T_e / rows) (P_e / rows)

T_e are the tokens sent to expert e and P_e the sum of their router probabilities, over all tokens and layers: Fedus et al., "Switch
Transformers", 2021, equations (4) to (6), as transformers adds them up. So three small tensors are all that a later stage needs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import output_capturing

_KEY = "router_logits"  # under which transformers records what routers say


Sums = tuple[Tensor, Tensor, Tensor]
"""Over the layers so far: tokens `[E]` and probabilities `[E]` of each expert, rows `[1]` (token times layer), float32."""


@dataclass(frozen=True)
class Router:
    """How a model weighs the use of its experts: the coefficient, and how many experts each token is sent to."""

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
