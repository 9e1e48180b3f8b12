"""`model.compile` of a Hugging Face model: one code for all decoder layers, recomputed as without."""

from __future__ import annotations

import pytest
import torch
from rounding import rounding
from tiny import VOCABULARY, tiny
from torch import Tensor

from pipetrain import Pipeline
from pipetrain.models.spec import spec_of, with_compiled_layers


def trained(*, compiled: bool) -> tuple[list[float], list[str], dict[str, Tensor]]:
    """Losses of three steps over 3 stages on one rank in `overlap`, the ops of the last one, and the gradients."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny("llama")
    spec = spec_of(model)
    if compiled:
        spec = with_compiled_layers(spec, "aot_eager")
    with Pipeline(spec, num_stages=3, stages_per_rank=3, num_microbatches=4) as pipeline:
        losses = []
        for step in range(3):
            ids = torch.randint(0, model.config.vocab_size, (8, 17), generator=torch.Generator().manual_seed(step))
            losses.append(float(pipeline.step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())))
        ops = sorted(str(event.op) for event in pipeline.report.events)
        gradients = {
            name: weight.grad.clone() for name, weight in pipeline.named_parameters() if weight.grad is not None
        }
    return losses, ops, gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_decoder_layers_are_one_code_and_give_the_same() -> None:
    within = rounding(torch.float32, terms=VOCABULARY)  # the longest sum: compiled code may have another order
    losses, ops, gradients = trained(compiled=False)
    compiled_losses, compiled_ops, compiled_gradients = trained(compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled_losses == pytest.approx(losses, rel=within)
    assert compiled_ops == ops
    assert gradients.keys() == compiled_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=within, atol=within * float(gradient.std()))
