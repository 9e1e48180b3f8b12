"""Text of Hugging Face models over stages, next to transformers' own `generate`: the tokens, and the logits of every step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rounding import rounding
from tiny import tiny
from torch import Tensor

from pipetrain.models.hf.hf_spec import layers_of
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.stage.past import Past, run_cached

ONE = [[3, 4, 5, 6, 7]]
SEVERAL = [[3, 4, 5, 6, 7], [7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 4, 5, 6, 7]]
SEVERAL_SMALL = [[token % 58 + 3 for token in row] for row in SEVERAL]
NUM_TOKENS = 80
CPU = torch.device("cpu")
TESTED = ("llama", "gpt2", "gemma3_text", "mixtral")
# Others with caches or positions of their own kind.
OTHERS = (
    "mistral", "gemma2", "cohere2", "gpt_neox", "deepseek_v3", "qwen3_next", "opt", "falcon", "bloom", "llama4_text"
)  # fmt: skip


def lively(family: str) -> Any:
    """A model whose next token depends on more than the last one, and that never ends."""
    length = {"n_positions": 256} if family == "gpt2" else {"max_position_embeddings": 256}
    model = tiny(family, vocab_size=509, **length).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(word in name for word in ("lm_head", "embed", "wte")):
                parameter.mul_(9.0 if "wpe" in name else 3.0)
    return model


def by_transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[Tensor, list[Tensor]]:
    """Its greedy tokens `[prompts, tokens]`, and the logits `[prompts, vocabulary]` of each."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    return output.sequences[:, length:], list(output.logits)


def by_stages(
    layers: Any, prompts: list[list[int]], num_tokens: int, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    logits: list[Tensor] = []

    def likeliest(step: Tensor) -> Tensor:
        logits.append(step.clone())
        return step.argmax(-1)

    with Pipeline(layers, **options) as pipeline:
        return pipeline.generate(prompts, max_new_tokens=num_tokens, choose=likeliest), logits


def assert_close(logits: Tensor, wanted: Tensor) -> None:
    """But for the order of sums: over the 48 numbers between the halves of an MLP, in each of four layers, or over a text of about 100 tokens."""
    within = rounding(torch.float32, terms=4 * 48) * float(wanted.std())
    torch.testing.assert_close(logits, wanted, atol=within, rtol=0)


def check_same(ours: tuple[list[Tensor], list[Tensor]], theirs: tuple[Tensor, list[Tensor]], *, distinct: int) -> None:
    assert_close(torch.stack(ours[1]), torch.stack(theirs[1]))
    for own, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(own, other)
        assert own.unique().numel() >= distinct, "a model that repeats itself shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "prompts"), [("llama", ONE), ("mixtral", SEVERAL)])
def test_three_stages_on_one_rank(family: str, prompts: list[list[int]]) -> None:
    model = lively(family)
    theirs = by_transformers(model, prompts, NUM_TOKENS)
    ours = by_stages(layers_of(model, 0, 6), prompts, NUM_TOKENS, stages_per_rank=3)
    check_same(ours, theirs, distinct=NUM_TOKENS // 4)


@pytest.mark.parametrize("family", TESTED)
def test_a_later_stage_has_no_layer_0(family: str) -> None:
    """Two stages as two ranks have them, each with what its own layers keep: how many tokens came before nobody reads off layer 0."""
    model = lively(family)
    layers = layers_of(model, 0, 6)
    longest = max(map(len, SEVERAL))
    padding = [longest - len(row) for row in SEVERAL]
    tokens = torch.tensor([[0] * pads + row for pads, row in zip(padding, SEVERAL)])
    stages = [(layers[:3], Past(padding, CPU)), (layers[3:], Past(padding, CPU))]
    theirs, logits = by_transformers(model, SEVERAL, 20)
    for number in range(20):
        value: Any = tokens
        for own_layers, past in stages:
            past.begin(tokens.shape[1])
            with torch.no_grad():
                for layer in own_layers:
                    value = run_cached(layer, value, past)
            past.end()
        assert_close(value[:, -1], logits[number])
        tokens = theirs[:, number : number + 1]


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str) -> None:
    model = tiny(family).eval()
    model.generation_config.eos_token_id = None
    theirs = by_transformers(model, SEVERAL_SMALL, 20)
    check_same(by_stages(layers_of(model, 0, 6), SEVERAL_SMALL, 20, stages_per_rank=2), theirs, distinct=1)


def _on_ranks(families: list[str]) -> list[tuple[list[Tensor], list[Tensor]]]:
    made = []
    for family in families:
        model = lively(family)
        layers = [functools.partial(_layer, model, number) for number in range(6)]
        made.append(by_stages(layers, SEVERAL, NUM_TOKENS))
    return made


def _layer(model: Any, number: int) -> Any:
    return layers_of(model, number, number + 1)[0]


@pytest.mark.slow
def test_ranks_with_layers_of_their_own() -> None:
    """A later rank has no layer 0, of which transformers' cache reads how many tokens came before."""
    families = ["gpt2", "gemma3_text"]
    outcomes = run_ranks(3, _on_ranks, families)
    for number, family in enumerate(families):
        theirs = by_transformers(lively(family), SEVERAL, NUM_TOKENS)
        made = [outcome[number] for outcome in outcomes]
        check_same((made[0][0], made[-1][1]), theirs, distinct=NUM_TOKENS // 4)
        assert all(torch.equal(own, other) for tokens, _ in made for own, other in zip(tokens, made[0][0]))
