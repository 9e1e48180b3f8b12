"""The bundle of a model: any range of layers is that of the whole, and its numbers are those of the layers. A family of its own trains."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipetrain import Pipeline, make_plan, make_schedule
from pipetrain.config.records import DataConfig, ModelConfig, OptimConfig, RunConfig
from pipetrain.data.batch import Batch
from pipetrain.engine.engine import make_engine
from pipetrain.models.loss import next_token_loss
from pipetrain.models.size import MODEL_FAMILIES, ModelFamily, ModelSize, size_of
from pipetrain.models.spec import ModelSpec, make_spec, one_by_one, spec_of
from pipetrain.models.transformer import NOT_OF_THE_MODEL, transformer_layers
from pipetrain.models.weights import load_weights, save_weights
from pipetrain.stage.seeding import weight_seed

VOCABULARY = 29
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 24}
LLAMA = ModelConfig(name="llama", num_key_value_heads=2, **SMALL)
GPT2 = ModelConfig(name="gpt2", **SMALL)
both_styles = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])


def assert_same(layers: Sequence[nn.Module], expected: Sequence[nn.Module]) -> None:
    for layer, other in zip(layers, expected, strict=True):
        assert type(layer) is type(other)
        for value, wanted in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(value, wanted)


@both_styles
def test_a_range_of_layers_is_that_of_the_whole(config: ModelConfig) -> None:
    spec = make_spec(config, VOCABULARY)
    whole = []
    for number, make in enumerate(transformer_layers(config, VOCABULARY)):
        torch.manual_seed(weight_seed(7, number))
        whole.append(make())
    before = torch.get_rng_state()
    for first in range(4):
        for last in range(first + 1, 5):
            assert_same(spec.build(first, last, seed=7), whole[first:last])
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are others now"
    assert not torch.equal(whole[1].attention.query.weight, whole[2].attention.query.weight)


def test_layers_that_there_are_not() -> None:
    spec = make_spec(LLAMA, VOCABULARY)
    for first, last in ((-1, 2), (2, 2), (3, 5)):
        with pytest.raises(ValueError, match=rf"layers {first} to {last - 1} were asked for, the model has 0 to 3"):
            spec.build(first, last)


@both_styles
def test_names_begin_those_of_the_whole_model(config: ModelConfig) -> None:
    spec = make_spec(config, VOCABULARY)
    state = nn.Sequential(*spec.build(0, spec.num_layers)).state_dict()
    assert {name.split(".", 1)[0] for name in state} == set(map(str, range(spec.num_layers)))


@pytest.mark.parametrize("mlp", [None, 40])
@both_styles
def test_operations_and_parameters_are_those_of_each_layer(config: ModelConfig, mlp: int | None) -> None:
    """Operations as torch counts them, op by op, in 3 samples of 12 tokens (it knows no kernel of attention on CPU: the math one is asked for)."""
    config = dataclasses.replace(config, intermediate_size=mlp)
    size = size_of(config, vocabulary_size=VOCABULARY, sequence_length=12)
    assert (size.num_layers, size.kinds) == (4, ("embedding", "block", "block", "head"))
    value = torch.randint(VOCABULARY, (3, 12))
    for number, layer in enumerate(make_spec(config, VOCABULARY).build(0, 4)):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            value = layer(value)
        assert counter.get_total_flops() == size.flops_per_layer[number] * 36
        assert sum(weight.numel() for weight in layer.parameters()) == size.parameters_per_layer[number]


def test_without_a_vocabulary_the_layers_are_known_and_no_more() -> None:
    assert size_of(LLAMA) == ModelSize(4, ("embedding", "block", "block", "head"), width=LLAMA.hidden_size)
    assert size_of(dataclasses.replace(LLAMA, vocab_size=VOCABULARY)) == make_spec(LLAMA, VOCABULARY).size


def test_a_size_has_an_entry_per_layer() -> None:
    with pytest.raises(ValueError, match="kinds has 2 entries for 3 layers: give one per layer"):
        ModelSize(3, ("a", "b"))


CHANGED = {
    "name": "gpt2",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "vocab_size": 30,
    "max_position_embeddings": 25,
    "rope_theta": 500.0,
    "dropout": 0.1,
    "norm_epsilon": 1e-6,
}


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(ModelConfig) if field.name not in NOT_OF_THE_MODEL]
)
def test_the_fingerprint_changes_with_the_model(field: str) -> None:
    config = ModelConfig(**SMALL)
    before, after = (
        make_spec(each, VOCABULARY).fingerprint
        for each in (config, dataclasses.replace(config, **{field: CHANGED[field]}))
    )
    assert before[field] != after[field]
    assert json.loads(json.dumps(before)) == before


def test_the_fingerprint_is_of_the_model_and_not_of_how_it_is_written() -> None:
    config = ModelConfig(**SMALL)
    written_out = dataclasses.replace(config, num_key_value_heads=4, intermediate_size=88, vocab_size=VOCABULARY)
    assert make_spec(config, VOCABULARY).fingerprint == make_spec(written_out, VOCABULARY).fingerprint


def test_what_a_user_calls_a_model() -> None:
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)]
    for model in (nn.Sequential(*layers), layers, [lambda layer=layer: layer for layer in layers]):
        spec = spec_of(model)
        assert (spec.num_layers, spec.build(1, 3)) == (3, layers[1:])
    assert spec_of(spec) is spec


def test_a_parameter_of_two_layers_is_known_without_building() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    assert spec_of([first, nn.Tanh(), last]).tied == (("0.weight", "2.weight"),)


def test_names_in_files_are_those_of_the_spec(tmp_path: Path) -> None:
    def rename(old: str, new: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace(old, new): value for name, value in state.items()}

    path, spec = tmp_path, spec_of([nn.Linear(3, 2)])
    spec = dataclasses.replace(spec, to_file=partial(rename, "0.", "only."), from_file=partial(rename, "only.", "0."))
    saved, loaded = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    save_weights(path, saved.state_dict(), spec, SimpleNamespace(rank=0, size=1, largest=lambda value: value))
    with pytest.raises(ValueError, match="these weights are of another model"):
        load_weights(path, loaded, spec_of([nn.Linear(3, 2)]))
    load_weights(path, loaded, spec)
    assert_same([loaded], [saved])


# A family of its own: layers that take a tree, a size without torch, and a row ------------------------------------


class Tokens(nn.Module):
    """`{ids, positions}`, both `[batch, sequence]` -> `[batch, sequence, width]`."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary_size, width), nn.Embedding(8, width)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.tokens(inputs["ids"]) + self.positions(inputs["positions"])


class Mixer(nn.Module):
    """`[batch, sequence, width]` to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(F.gelu(self.linear(hidden)))


def check_mlp(config: ModelConfig) -> None:
    if config.hidden_size % 2:
        raise ValueError(f"model.hidden_size={config.hidden_size} is odd")


def mlp_size_of(config: ModelConfig, vocabulary_size: int | None, sequence_length: int) -> ModelSize:
    return ModelSize(config.num_hidden_layers + 2, ("tokens", *["mixer"] * config.num_hidden_layers, "logits"))


def mlp_spec(config: ModelConfig, vocabulary_size: int) -> ModelSpec:
    width = config.hidden_size
    layers = [
        partial(Tokens, vocabulary_size, width),
        *[partial(Mixer, width)] * config.num_hidden_layers,
        partial(nn.Linear, width, vocabulary_size),
    ]
    return ModelSpec(size=size_of(config), build_layers=one_by_one(layers), loss_fn=next_token_loss)


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    row = ModelFamily(check=f"{__name__}:check_mlp", size=f"{__name__}:mlp_size_of", spec=f"{__name__}:mlp_spec")
    monkeypatch.setitem(MODEL_FAMILIES, "mlp", row)
    return RunConfig(
        steps=12,
        model=ModelConfig(name="mlp", num_hidden_layers=3, hidden_size=16),
        data=DataConfig(global_batch_size=8, sequence_length=8),
        optim=OptimConfig(learning_rate=0.02, warmup_steps=1),
    )


def some_batch() -> Batch:
    ids = torch.arange(8)[:, None] + torch.arange(8)
    return Batch({"ids": ids % VOCABULARY, "positions": torch.arange(8).expand(8, 8)}, (ids + 1) % VOCABULARY)


def test_a_family_of_its_own_trains_in_an_engine(mlp: RunConfig) -> None:
    spec = make_spec(mlp.model, VOCABULARY)
    plan = make_plan(spec.num_layers, num_microbatches=2)
    schedule = make_schedule("1f1b", num_stages=1, num_microbatches=2)
    engine = make_engine(mlp, spec, plan, schedule, device=torch.device("cpu"), on_event=lambda event: None)
    batch = some_batch()
    losses = [engine.step(step, batch, lambda step, loss, norm: True).loss for step in range(1, 13)]
    assert losses[-1] < losses[0] / 2
    heldout = engine.evaluate([batch, Batch({key: leaf[:3] for key, leaf in batch.inputs.items()}, batch.targets[:3])])
    assert heldout is not None
    assert heldout < losses[0] / 2
    engine.close()


def test_a_family_of_its_own_has_errors_of_its_own(mlp: RunConfig) -> None:
    with pytest.raises(ValueError, match=r"model.hidden_size=15 is odd"):
        size_of(dataclasses.replace(mlp.model, hidden_size=15))
    with pytest.raises(ValueError, match=r"allowed are llama, gpt2, hf, python, mlp; did you mean 'mlp'"):
        size_of(dataclasses.replace(mlp.model, name="mpl"))


def test_a_pipeline_takes_loss_and_count_of_the_spec() -> None:
    """3 of 4 tokens count in the first sample, 1 in the second: by rows, both would weigh the same."""
    spec = make_spec(LLAMA, VOCABULARY)
    ids, targets = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 2, 3, -100], [4, -100, -100, -100]])
    with Pipeline(spec, num_microbatches=2) as pipeline:
        ours = pipeline.evaluate(ids, targets)
        logits = pipeline(ids)
    torch.testing.assert_close(ours, next_token_loss(logits, targets))
    by_rows = Pipeline(spec, next_token_loss, num_microbatches=2)
    assert abs(by_rows.evaluate(ids, targets) - ours) > 1e-4, "with a loss of one's own, rows count"
    by_rows.close()


def test_an_engine_refuses_a_model_without_a_loss(mlp: RunConfig) -> None:
    with pytest.raises(ValueError, match="its ModelSpec needs a loss_fn"):
        make_engine(
            mlp,
            dataclasses.replace(make_spec(mlp.model, VOCABULARY), loss_fn=None),
            make_plan(5, num_microbatches=2),
            make_schedule("1f1b", num_stages=1, num_microbatches=2),
            device=torch.device("cpu"),
            on_event=lambda event: None,
        )


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.Bilinear(2, 2, 2), r"layer 1 \(Bilinear\) takes input1 and input2, and a layer gets one argument"),
        (nn.MultiheadAttention(4, 2), r"takes query and key and value"),
        (nn.TransformerDecoderLayer(4, 2), r"takes tgt and memory"),
    ],
)
def test_a_layer_that_takes_two_arguments_is_named(layer: nn.Module, told: str) -> None:
    for model in ([nn.Linear(2, 2), layer], [lambda: nn.Linear(2, 2), lambda: layer]):
        with pytest.raises(ValueError, match=told):
            spec_of(model).build(0, 2)


@pytest.mark.parametrize(
    "layer", [nn.TransformerEncoderLayer(4, 2), nn.LSTM(2, 2), nn.EmbeddingBag(3, 2), nn.Identity()]
)
def test_what_has_a_default_is_no_second_argument(layer: nn.Module) -> None:
    assert spec_of([layer]).build(0, 1) == [layer]
