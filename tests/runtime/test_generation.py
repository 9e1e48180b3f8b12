"""Text token by token over stages equals the whole model on the whole text, whatever the prompts and the ranks."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pytest
import torch
from ranks import NEVER_SECONDS, run_outcomes, run_ranks
from rounding import rounding
from torch import Tensor, nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import transformer_spec
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.generation import Sampling
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.past import Past

ONE = [[3, 1, 4, 1, 5]]
SEVERAL = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
VOCABULARY = 1000


@functools.cache
def model_of(name: str) -> nn.Sequential:
    """Four blocks whose next token depends on more than the last one: of small weights it would soon be always the same."""
    config = ModelConfig(
        name=name,
        num_hidden_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2 if name == "llama" else None,
        dropout=0.3,
    )
    spec = transformer_spec(config, VOCABULARY)
    layers = spec.build(0, spec.num_layers, seed=1)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.mul_(7.0 if parameter.dim() > 1 else 1.0)
    return nn.Sequential(*layers)


class Recorded:
    """Takes the likeliest tokens, and keeps the logits `[tokens][rows, vocabulary]`."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return logits.argmax(-1)


def whole_model(name: str, prompt: list[int], made: Tensor) -> Tensor:
    """The logits that each of the tokens `made` was chosen by, with all tokens in one forward on one process."""
    model = model_of(name).eval()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt + made.tolist()]))[0]
    return logits[len(prompt) - 1 : -1]


def assert_close(logits: Tensor, wanted: Tensor, *, length: int) -> None:
    """But for the order of sums: over 32 numbers in each of four blocks, or over a text of so many tokens in attention."""
    within = rounding(torch.float32, terms=max(4 * 32, length)) * float(wanted.detach().std())
    torch.testing.assert_close(logits, wanted, atol=within, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("prompts", [ONE, SEVERAL], ids=["one prompt", "several, padded"])
def test_each_step_is_that_of_the_whole_model(name: str, prompts: list[list[int]]) -> None:
    recorded = Recorded()
    with Pipeline(model_of(name), stages_per_rank=3) as pipeline:
        made = pipeline.generate(prompts, max_new_tokens=200, choose=recorded)
    for row, (prompt, tokens) in enumerate(zip(prompts, made, strict=True)):
        logits = torch.stack([step[row] for step in recorded.logits])
        assert_close(logits, whole_model(name, prompt, tokens), length=len(prompt) + 200)
        assert len(tokens) == 200
        assert tokens.unique().numel() >= 50, "a model that repeats itself shows nothing"


def _length_until(ends: list[int], tokens: Tensor, most: int) -> int:
    """How many tokens there are up to the first that is an end."""
    return next((place + 1 for place, token in enumerate(tokens[:most].tolist()) if token in ends), most)


def greedy(name: str, num_tokens: int) -> list[Tensor]:
    with Pipeline(model_of(name), stages_per_rank=2) as pipeline:
        return pipeline.generate(SEVERAL, max_new_tokens=num_tokens)


def test_stages_in_parts_make_the_same_text() -> None:
    """Each part keeps its own of the tokens before; what is recomputed has no part in it."""
    with Pipeline(model_of("llama"), stages_per_rank=2, recompute=RecomputePolicy(segments=3)) as pipeline:
        made = pipeline.generate(SEVERAL, max_new_tokens=30)
    assert all(map(torch.equal, made, greedy("llama", 30)))


def _on_a_rank(name: str, placement: str) -> tuple[list[Tensor], list[tuple[int, int]], list[Tensor]]:
    told: list[tuple[int, int]] = []
    recorded = Recorded()
    num_ranks = torch.distributed.get_world_size()
    plan = make_plan(6, num_ranks=num_ranks, stages_per_rank=2 if placement == "v" else 1, placement=placement)
    with Pipeline(model_of(name), plan=plan) as pipeline:
        made = pipeline.generate(
            SEVERAL if pipeline.is_first else None,
            max_new_tokens=30,
            on_token=lambda *token: told.append(token),
            choose=recorded,
        )
        ends = [int(made[0][2]), int(made[1][9])]  # where one of them comes, a text ends
        again = pipeline.generate(SEVERAL if pipeline.is_first else None, max_new_tokens=20, eos=ends)
        assert len(again[0]) < 20
        assert list(map(len, again)) == [_length_until(ends, tokens, 20) for tokens in made]
        assert all(torch.equal(short, long[: len(short)]) for short, long in zip(again, made))
        return made, told, recorded.logits if pipeline.is_last else []


@pytest.mark.parametrize(
    ("num_ranks", "name", "placement"), [(3, "llama", "loop"), (3, "gpt2", "loop"), (2, "llama", "v")]
)
def test_ranks_make_the_same_text(num_ranks: int, name: str, placement: str) -> None:
    """Each rank knows all tokens, in one order; the logits are those of the whole model."""
    outcomes = run_ranks(num_ranks, _on_a_rank, name, placement)
    logits = next(logits for _, _, logits in outcomes if logits)
    for made, told, _ in outcomes:
        assert all(map(torch.equal, made, greedy(name, 30)))
        assert told == outcomes[0][1]
        for number, tokens in enumerate(made):
            assert [token for sample, token in told if sample == number] == tokens.tolist()
    for row, (prompt, tokens) in enumerate(zip(SEVERAL, outcomes[0][0], strict=True)):
        own = torch.stack([step[row] for step in logits])
        assert_close(own, whole_model(name, prompt, tokens), length=len(prompt) + 30)


def _killed(at_rank: int) -> None:
    with Pipeline(model_of("llama"), timeout_seconds=NEVER_SECONDS) as pipeline:

        def on_token(_: int, token: int) -> None:
            seen.append(token)
            if len(seen) == 7 and pipeline.rank == at_rank:
                os.kill(os.getpid(), signal.SIGKILL)

        seen: list[int] = []
        pipeline.generate(SEVERAL, max_new_tokens=1000, on_token=on_token)


def test_a_rank_that_is_killed_is_named() -> None:
    for outcome in run_outcomes(3, _killed, 1):
        if outcome.rank == 1:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert "rank 1 is gone" in (outcome.error or ""), outcome


def _ended_on_one_rank(at_rank: int) -> None:
    with Pipeline(model_of("llama"), timeout_seconds=NEVER_SECONDS) as pipeline:
        seen: list[int] = []

        def on_token(_: int, token: int) -> bool:
            seen.append(token)
            return len(seen) == 7 and pipeline.rank == at_rank

        pipeline.generate(SEVERAL, max_new_tokens=10, on_token=on_token)


@pytest.mark.parametrize("at_rank", [0, 1])
def test_a_text_that_ends_on_one_rank_alone_is_an_error(at_rank: int) -> None:
    """Else the ranks would go on with different texts, or wait for tokens that never come."""
    first, last = run_outcomes(2, _ended_on_one_rank, at_rank)
    assert "on_token ended other texts on rank 1 at token 2" in (first.error or "")
    assert "rank 0" in (last.error or "")


def test_what_is_longer_than_the_context_goes_on_from_its_latter_half() -> None:
    recorded = Recorded()
    with Pipeline(model_of("gpt2"), stages_per_rank=2) as pipeline:
        (made,) = pipeline.generate(ONE, max_new_tokens=20, context=8, choose=recorded)
    text, length, checked = ONE[0] + made.tolist(), 5, 0
    for number in range(20):
        if length > 8:
            length = 4  # of the 8 that were looked at
        given = text[: 5 + number][-length:]
        assert_close(recorded.logits[number][0], model_of("gpt2").eval()(torch.tensor([given]))[0, -1], length=8)
        length, checked = length + 1, checked + 1
    assert checked == 20


def test_a_prompt_that_is_longer_than_the_context_is_cut_in_front() -> None:
    with Pipeline(model_of("gpt2")) as pipeline:
        (long,) = pipeline.generate([list(range(50))], max_new_tokens=1, context=8)
        (short,) = pipeline.generate([list(range(42, 50))], max_new_tokens=1)
    assert torch.equal(long, short)


def test_training_does_not_notice() -> None:
    """Layers are as they were, dropout draws what it would have drawn."""

    def losses(*, generating: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = transformer_spec(ModelConfig(num_hidden_layers=2, hidden_size=16, dropout=0.4), 50).build(0, 4)
        drawn = []
        with Pipeline(layers, _loss, num_microbatches=2, stages_per_rank=2) as pipeline:
            for _ in range(2):
                batch = torch.arange(24).reshape(4, 6)
                drawn.append(pipeline.step(batch, batch))
                if generating:
                    pipeline.generate([[1, 2, 3], [4]], max_new_tokens=3, temperature=1.0)
                    assert all(layer.training for layer in layers)
        return [*drawn, torch.rand(1)]

    assert all(map(torch.equal, losses(generating=True), losses(generating=False)))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Tables(nn.Module):
    """Keeps what it has made of positions, in each way in which layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("buffer", torch.zeros(1), persistent=False)
        self.alone: Tensor | None = None
        self.pair: tuple[Tensor, ...] = ()
        self.by_length: dict[int, list[Tensor]] = {}

    def forward(self, value: Tensor) -> Tensor:
        if self.alone is None:
            self.alone = torch.full((1,), 2.0)
            self.buffer = torch.full((1,), 3.0)
            self.pair = (self.alone + 1, self.alone)
            self.by_length[1] = [self.alone * 1]
        return value * self.weight * self.alone * self.buffer * self.pair[0] * self.pair[1] * self.by_length[1][0]

    def forward_cached(self, value: Tensor, _past: Past) -> Tensor:
        return self(value)


def test_what_layers_keep_while_generating_can_be_trained_with() -> None:
    """Tokens are made in inference mode, of whose tensors no backward takes any: nor does anybody who calls get one."""
    gradients, batch = [], torch.arange(12).reshape(4, 3) % 8
    given: list[Tensor] = []

    def likeliest(logits: Tensor) -> Tensor:
        given.append(logits)
        return logits.argmax(-1)

    for generating in (False, True):
        torch.manual_seed(0)
        layers = [nn.Embedding(8, 8), Tables(), Tables(), nn.Linear(8, 8)]
        with Pipeline(layers, _loss, num_microbatches=2, stages_per_rank=2) as pipeline:
            if generating:
                given += pipeline.generate([[1, 2]], max_new_tokens=2, choose=likeliest)
            pipeline.step(batch, batch)
            gradients.append([parameter.grad for parameter in pipeline.parameters()])
    assert all(map(torch.equal, *gradients))
    assert len(given) == 3
    assert not any(tensor.is_inference() for tensor in given)


class Told(nn.Linear):
    """Says what is asked of it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.told: list[tuple[str, int]] = []

    def prepare_cached(self, past: Past) -> None:
        self.told.append(("prepare", past.length))

    def forward_cached(self, value: Tensor, past: Past) -> Tensor:
        self.told.append(("forward", past.length))
        return self(value)


def _prepared() -> list[list[tuple[str, int]]]:
    layers = [nn.Embedding(8, 8), Told(), Told(), Told()]
    with Pipeline(layers) as pipeline:
        pipeline.generate([[1, 2]], max_new_tokens=2)
    return [layer.told for layer in layers[1:] if isinstance(layer, Told)]


def test_a_stage_that_waits_prepares_what_it_can() -> None:
    first, second = run_ranks(2, _prepared)
    assert first == [[("forward", 0), ("forward", 2)], [], []]
    assert second[0] == []
    assert second[1] == second[2] == [("prepare", 0), ("forward", 0), ("prepare", 2), ("forward", 2)]


def test_drawn_tokens_depend_on_the_seed_alone() -> None:
    with Pipeline(model_of("llama"), stages_per_rank=2) as pipeline:
        draw = functools.partial(pipeline.generate, max_new_tokens=25, temperature=1.0, top_k=40, top_p=0.9)
        together = draw(SEVERAL, seed=3)
        assert all(map(torch.equal, together, draw(SEVERAL, seed=3)))
        assert torch.equal(together[0], draw(SEVERAL[:1], seed=3)[0])
        assert not torch.equal(together[0], draw(SEVERAL[:1], seed=4)[0])


def test_what_a_tokenizer_gives_is_a_prompt_too() -> None:
    ids = torch.tensor([[0, 0, 9, 2], [3, 1, 4, 1]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with Pipeline(model_of("llama")) as pipeline:
        padded = pipeline.generate({"input_ids": ids, "attention_mask": mask}, max_new_tokens=6)
        assert all(map(torch.equal, padded, pipeline.generate([[9, 2], [3, 1, 4, 1]], max_new_tokens=6)))
        assert torch.equal(padded[1], pipeline.generate(ids[1], max_new_tokens=6)[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompts": None}, "no prompts"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty"),
        ({"prompts": "text"}, "prompts is a str"),
        ({"prompts": [[1, -1]]}, r"prompts\[0\] has -1"),
        ({"prompts": [torch.tensor([0.5])]}, r"prompts\[0\] is a tensor \[1\] of torch.float32"),
        ({"prompts": {"ids": 1}}, "a dict needs input_ids"),
        ({"prompts": {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 3)}}, "the same shape"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: at least 1"),
        ({"context": 1}, "context=1: at least 2"),
        ({"eos": [-1]}, "eos has -1"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 5}, "temperature=0 takes the likeliest"),
        ({"temperature": 1.0, "seed": 0.5}, "seed=0.5"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options: dict[str, Any], said: str) -> None:
    options = {"prompts": [[1]], "max_new_tokens": 2, **options}
    with Pipeline([nn.Embedding(8, 8), nn.Linear(8, 8)]) as pipeline, pytest.raises(ValueError, match=said):
        pipeline.generate(**options)


def _mistaken() -> str:
    first = torch.distributed.get_rank() == 0
    layers: list[nn.Module] = [nn.Embedding(8, 8), nn.LSTM(8, 8)]
    with Pipeline(layers) as pipeline, pytest.raises(ValueError, match="layer 1") as found:
        pipeline.generate([[1]] if first else None, max_new_tokens=1)
    return str(found.value)


def test_layers_that_keep_nothing_are_named_on_every_rank() -> None:
    first, second = run_ranks(2, _mistaken)
    assert first == second
    assert "layer 1 (LSTM) cannot continue from earlier tokens: give it forward_cached" in first


def test_the_chances_of_tokens() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()  # the softmax of which is this again
    assert Sampling(1.0).chances(logits).tolist() == [pytest.approx([0.1, 0.4, 0.2, 0.3])]
    assert Sampling(1.0, top_k=2).chances(logits).tolist() == [pytest.approx([0, 4 / 7, 0, 3 / 7])]
    assert Sampling(1.0, top_k=9).chances(logits).tolist() == [pytest.approx([0.1, 0.4, 0.2, 0.3])]
    assert Sampling(1.0, top_p=0.65).chances(logits).tolist() == [pytest.approx([0, 4 / 7, 0, 3 / 7])]
    assert Sampling(1.0, top_p=0.75).chances(logits).tolist() == [pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])]
    assert Sampling(1.0, top_p=0.01).chances(logits).tolist() == [[0, 1, 0, 0]]
    squares = [0.01, 0.16, 0.04, 0.09]
    assert Sampling(0.5).chances(logits).tolist() == [pytest.approx([square / 0.3 for square in squares])]


def test_tokens_are_drawn_by_their_chances() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4000, 4)
    drawn = Sampling(1.0, seed=7).draw(logits, 0)
    counts = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(
        counts, torch.tensor([0.1, 0.4, 0.2, 0.3]), atol=0.04, rtol=0
    )  # five standard deviations
