"""The transformer: shapes, causality, both styles, and weights that do not depend on who builds them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.config.records import ModelConfig
from pipetrain.models.loss import next_token_loss
from pipetrain.models.size import intermediate_size, transformer_size
from pipetrain.models.transformer import Attention, rotary_tables, rotate, transformer_layers

VOCABULARY = 31
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 24}
LLAMA = ModelConfig(name="llama", num_key_value_heads=2, **SMALL)
GPT2 = ModelConfig(name="gpt2", **SMALL)
both_styles = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])


def build(config: ModelConfig, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[layer() for layer in transformer_layers(config, VOCABULARY)])


def some_ids(batch: int = 3, sequence: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (batch, sequence), generator=torch.Generator().manual_seed(1))


@both_styles
def test_a_token_changes_no_logit_before_it(config: ModelConfig) -> None:
    model, ids = build(config), some_ids()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all(not torch.equal(before[:, place], after[:, place]) for place in range(7, 12))


@both_styles
def test_a_sequence_is_learnt_from_a_uniform_guess_on(config: ModelConfig) -> None:
    """The first loss is that of the guess, and every parameter gets a gradient."""
    model, ids = build(config), some_ids(batch=16)
    assert abs(next_token_loss(model(ids), ids).item() - math.log(VOCABULARY)) < 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = next_token_loss(model(ids[:3, :-1]), ids[:3, 1:])
        loss.backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
        optimizer.step()
    assert loss.item() < 0.5 * math.log(VOCABULARY)


@both_styles
def test_the_order_of_tokens_matters(config: ModelConfig) -> None:
    """Without positions, the last token would see the others as a bag."""
    model, ids = build(config), some_ids()
    swapped = ids[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(model(ids)[:, -1], model(swapped)[:, -1])


def test_residual_projections_start_smaller_with_depth() -> None:
    shallow = Attention(ModelConfig(num_hidden_layers=1, hidden_size=128)).output.weight.std()
    deep = Attention(ModelConfig(num_hidden_layers=16, hidden_size=128)).output.weight.std()
    assert 3.8 < (shallow / deep).item() < 4.2


def test_grouped_queries_equal_repeated_heads() -> None:
    torch.manual_seed(0)
    grouped = Attention(LLAMA)
    full = Attention(ModelConfig(name="llama", num_key_value_heads=4, **SMALL))
    full.load_state_dict(
        {
            name: weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
            if name[:3] in ("key", "val")
            else weight
            for name, weight in grouped.state_dict().items()
        }
    )
    hidden = torch.randn(2, 10, 32)
    torch.testing.assert_close(grouped(hidden), full(hidden))


@both_styles
def test_attention_is_softmax_of_scaled_products(config: ModelConfig) -> None:
    """Against the formula of Vaswani et al., 2017, section 3.2.1, written out, with queries and keys turned for llama."""
    torch.manual_seed(0)
    attention, hidden = Attention(config), torch.randn(2, 10, 32)
    query, key, value = (
        F.linear(hidden, layer.weight, layer.bias).unflatten(-1, (-1, 8)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    if config is LLAMA:
        tables = rotary_tables(torch.arange(10), 8, config.rope_theta)
        query, key = rotate(query, *tables), rotate(key, *tables)
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = query @ key.mT / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
    expected = attention.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(hidden), expected)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    tables = rotary_tables(torch.arange(20), 8, 10_000.0)
    products = rotate(query.expand(20, 8), *tables) @ rotate(key.expand(20, 8), *tables).T
    for distance in (0, 1, 5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(products[0, 0], products[0, 5])
    torch.testing.assert_close(products[0, 0], query @ key)


def test_rotary_turns_each_pair_by_its_angle() -> None:
    cosines, sines = rotary_tables(torch.arange(3), 4, 100.0)
    turned = rotate(torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(3, 4), cosines, sines)
    fast, slow = 2.0, 2.0 / 10.0  # position 2; pair 0 turns by 1 per position, pair 1 by 100 ** (-2 / 4)
    torch.testing.assert_close(
        turned[2], torch.tensor([math.cos(fast), -math.sin(slow), math.sin(fast), math.cos(slow)])
    )


@both_styles
def test_dropout_works_in_training_alone(config: ModelConfig) -> None:
    model = build(ModelConfig(name=config.name, dropout=0.5, **SMALL))
    assert not torch.equal(model(some_ids()), model(some_ids()))
    model.eval()
    assert torch.equal(model(some_ids()), model(some_ids()))


def test_bfloat16_autocast_keeps_the_loss_near_and_in_float32() -> None:
    model, ids = build(LLAMA), some_ids()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = next_token_loss(model(ids), ids)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - next_token_loss(model(ids), ids).item()) < 0.02


def test_the_embedding_names_a_sample_that_is_too_long() -> None:
    with pytest.raises(ValueError, match=r"has 25 tokens, more than model.max_position_embeddings=24"):
        build(LLAMA)(some_ids(sequence=25))


def test_mlp_sizes() -> None:
    assert intermediate_size(ModelConfig(name="gpt2", hidden_size=128)) == 512
    assert intermediate_size(ModelConfig(name="llama", hidden_size=96)) == 256
    assert intermediate_size(ModelConfig(name="llama", hidden_size=128)) == 344  # 341.3, rounded up to a multiple of 8


@both_styles
def test_flops_are_those_of_the_counter(config: ModelConfig) -> None:
    """Forward and backward of 3 samples, counted by torch op by op (it knows no kernel of attention on CPU: the math one is asked for)."""
    model, ids = build(config), some_ids()
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        next_token_loss(model(ids), ids).backward()
    assert counter.get_total_flops() == transformer_size(config, VOCABULARY, 12).flops_per_token * ids.numel()


def test_a_larger_vocabulary_than_the_tokenizers_is_built() -> None:
    layers = transformer_layers(ModelConfig(vocab_size=40, **SMALL), VOCABULARY)
    assert layers[0]().tokens.num_embeddings == layers[-1]().logits.out_features == 40
