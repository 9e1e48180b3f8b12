"""Text from a trained model, on one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pipetrain.config.records import DataConfig, ModelConfig
from pipetrain.data.dataset import make_tokenizer
from pipetrain.model.spec import make_spec
from pipetrain.snapshot.weights import load_weights


def generate(
    config: ModelConfig,
    data: DataConfig,
    weights: Path,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> str:
    """`prompt` and up to `num_tokens` tokens after it, drawn by the model of `config` with the `weights` of a run on `data`.

    Temperature 0 takes the likeliest token each time.

    Raises:
        ValueError: an empty prompt, numbers out of range, or weights that do not fit.
    """
    if not prompt:
        raise ValueError("--prompt is empty: the model goes on from a text of at least one character")
    if num_tokens < 1 or not 0.0 <= temperature < math.inf:
        raise ValueError(f"--tokens={num_tokens} --temperature={temperature}: at least 1 token, temperature 0 or more")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed={seed}: allowed is from 0 to {2**63 - 1}")
    tokenizer = make_tokenizer(data)
    if tokenizer is None:
        raise ValueError("data.tokenizer=null: the run was trained on token ids, and no tokenizer makes text of them")
    spec = make_spec(config, tokenizer.vocabulary_size)
    model = nn.Sequential(*spec.build(0, spec.num_layers))
    load_weights(weights, model, spec)
    start = tokenizer.encode(prompt.encode()).to(torch.int64)
    drawn = _draw(model.eval(), start, num_tokens, temperature, seed, data.sequence_length)
    return prompt + tokenizer.decode(drawn)


@torch.inference_mode()
def _draw(
    model: nn.Module, start: Tensor, num_tokens: int, temperature: float, seed: int, context: int
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = start
    for _ in range(num_tokens):
        logits = model(tokens[-context:].unsqueeze(0))[0, -1]
        if temperature == 0.0:
            token = logits.argmax().unsqueeze(0)
        else:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        tokens = torch.cat([tokens, token])
        yield int(token)
