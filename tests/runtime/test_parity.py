"""Pipelined, recomputed, cut anywhere: the numbers of `reference_step`, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pairwise import pairwise
from parity_cases import (
    Case,
    assert_same_gradients,
    assert_same_tensors,
    channels_last,
    images,
    mean_square,
    plain,
    rows,
    run_cases,
    set_dropout,
    transposed,
)
from ranks import run_ranks
from rounding import rounding
from torch import nn

from pipetrain.config.records import ModelConfig
from pipetrain.models.transformer import transformer_layers
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.families import Shape
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Op
from pipetrain.schedule.policy import Mode, RecomputePolicy

BALANCES = {1: [(6,)], 3: [(2, 2, 2), (3, 1, 2)]}
MODELS: dict[str, tuple[Callable[[float], list[nn.Module]], Callable[..., Any]]] = {
    "plain": (plain, rows),
    "transposed": (transposed, rows),
    "channels-last": (channels_last, images),
}


def every_mode(num_stages: int) -> list[Case]:
    """Any two of model, mode and split; batches of 8 and 11 rows, without dropout and then with it."""
    cases = []
    for row in pairwise([*MODELS], [*Mode], BALANCES[num_stages]):
        model, mode, balance = row.values
        layers, batches = MODELS[model]  # type: ignore[index]
        if not row.marks:
            cases.append(
                Case(
                    f"{num_stages} stages, {model}, {mode}, balance {balance}",
                    lambda layers=layers: layers(0.0),
                    lambda batches=batches: batches(8, 11, 8, 11),
                    options={"recompute": mode, "balance": balance},
                    before_step=lambda step, model: set_dropout(model, 0.3 if step > 1 else 0.0),
                )
            )
    return cases


@pytest.mark.quick("1")
@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_mode_split_and_layout(num_stages: int) -> None:
    counts = run_ranks(num_stages, run_cases, every_mode, num_stages)
    assert counts == [12] * num_stages


def every_schedule(num_ranks: int) -> list[Case]:
    return [
        Case(name, lambda: transposed(0.3), lambda: rows(9, 12), options=options)
        for name, options in _schedules(num_ranks).items()
    ]


def _schedules(num_ranks: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for mode in Mode:
        found[f"1f1b {mode}"] = {"schedule": "1f1b", "recompute": mode}
        found[f"interleaved {mode}"] = {"schedule": "interleaved", "stages_per_rank": 2, "recompute": mode}
    found["two stages per rank in gpipe order"] = {"stages_per_rank": 2}
    found["interleaved, 5 microbatches"] = {**found["interleaved overlap"], "num_microbatches": 5}
    for changes in (
        {"keep": "auto"},
        {"sets": 2},
        {"sets": 3},
        {"sets": 2, "keep": "none"},
        {"last_stage": "always"},
        {"sets": 3, "last_stage": "always"},
    ):
        found[f"gpipe overlap {changes}"] = {"recompute": RecomputePolicy(**changes)}
        inline = RecomputePolicy(mode=Mode.INLINE, **changes)
        found[f"1f1b inline {changes}"] = {"schedule": "1f1b", "recompute": inline}
    for warmup in (1, 4):
        given = make_schedule("1f1b", num_stages=num_ranks, num_microbatches=4, warmup=warmup)
        found[f"1f1b, warmup {warmup}"] = {"schedule": given}
    just_in_time = make_schedule("gpipe", num_stages=num_ranks, num_microbatches=4, transport_ahead=0)
    found["receives just in time"] = {"schedule": just_in_time}
    for mode, sets in ((Mode.OVERLAP, 1), (Mode.OVERLAP, 2), (Mode.EARLY, 2), (Mode.INLINE, 1)):
        found[f"auto {mode} {sets}"] = {"schedule": "auto", "recompute": RecomputePolicy(mode=mode, sets=sets)}
    found["a generator"] = {"schedule": depth_first}
    found["a plan with its warm-up"] = {
        "schedule": "1f1b",
        "plan": make_plan(6, num_ranks=num_ranks, num_microbatches=4, warmup=4),
    }
    return found


def depth_first(shape: Shape) -> list[list[Op]]:
    """A family of one's own: each microbatch all the way there and back before the next."""
    pairs = [(kind, i) for i in range(shape.num_microbatches) for kind in (Kind.F, Kind.B)]
    return [[Op(rank, kind, i) for kind, i in pairs] for rank in range(shape.num_ranks)]


@pytest.mark.slow
def test_every_schedule_and_policy() -> None:
    run_ranks(3, run_cases, every_schedule, 3)


def ten_steps(mode: str, schedule: str) -> list[float]:
    """Ten steps of AdamW with clipping next to the same on one process."""
    torch.manual_seed(1)
    model = nn.Sequential(*plain(0.2))
    reference = copy.deepcopy(model)
    losses = []
    with Pipeline(model, mean_square, num_microbatches=4, recompute=mode, schedule=schedule) as pipeline:
        ours = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        for step, (inputs, targets) in enumerate(rows(*[8, 11] * 5)):
            loss = pipeline.step(inputs, targets)
            assert torch.equal(
                loss, reference_step(reference, mean_square, inputs, targets, num_microbatches=4, step=step)
            )
            limit = 0.1 if step % 2 else 1e6  # one that clips, one that does not
            norm = pipeline.clip_grad_norm_(limit)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), limit)), f"norm of step {step}"
            assert_same_gradients(pipeline, reference)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert_same_tensors(pipeline.state_dict(), reference.state_dict())
    return losses


@pytest.mark.parametrize(("num_ranks", "mode", "schedule"), [(3, "overlap", "gpipe"), (2, "inline", "1f1b")])
def test_ten_steps_with_clipping(num_ranks: int, mode: str, schedule: str) -> None:
    first, *others = run_ranks(num_ranks, ten_steps, mode, schedule)
    assert first[-1] < first[0]
    assert all(losses == first for losses in others)


def built_weights(balance: Sequence[int]) -> Any:
    makers = [lambda: nn.Linear(4, 4), nn.Tanh, lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 2)]
    before = torch.get_rng_state()
    with Pipeline(makers, mean_square, num_microbatches=1, balance=balance, seed=7) as pipeline:
        assert torch.equal(torch.get_rng_state(), before), "building the layers took the user's random numbers"
        return pipeline.full_state_dict()


def test_initial_weights_do_not_depend_on_the_split() -> None:
    whole = built_weights([4])
    assert not torch.equal(whole["0.weight"].flatten()[:2], whole["2.weight"].flatten()[:2])
    split = run_ranks(3, built_weights, [1, 2, 1])[0]
    assert list(split) == list(whole)
    assert_same_tensors(split, whole)


WHOLE_ROUNDING = rounding(torch.float32, terms=16 * 8)  # 16 rows of 8 are summed in one piece, and in four


def whole_batch_difference() -> dict[str, float]:
    """How far the gradients are from those of the full batch in one piece: norm of the difference over norm."""
    torch.manual_seed(2)
    model = nn.Sequential(*plain(0.0))
    reference = copy.deepcopy(model)
    ((inputs, targets),) = rows(16)
    loss = mean_square(reference(inputs), targets)
    loss.backward()
    with Pipeline(model, mean_square, num_microbatches=4) as pipeline:
        assert abs(pipeline.step(inputs, targets) - loss) <= WHOLE_ROUNDING * abs(loss)
        expected = dict(reference.named_parameters())
        return {
            name: float((parameter.grad - expected[name].grad).norm() / expected[name].grad.norm())
            for name, parameter in pipeline.named_parameters()
        }


def test_equal_microbatches_give_the_gradient_of_the_whole_batch() -> None:
    found = whole_batch_difference()
    assert len(found) == 8
    assert all(value <= WHOLE_ROUNDING for value in found.values()), found


def transformers() -> list[Case]:
    def of_style(style: str, mode: Mode) -> Case:
        keys = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 8}
        config = ModelConfig(style, num_key_value_heads=2 if style == "llama" else None, dropout=0.1, **keys)  # type: ignore[arg-type]
        return Case(
            f"{style} {mode}",
            lambda: [make() for make in transformer_layers(config, 31)],
            lambda: [_tokens(5, 8), _tokens(4, 6), _tokens(5, 8)],
            loss=_cross_entropy,
            options={"recompute": mode},
        )

    return [of_style(style, mode) for style in ("llama", "gpt2") for mode in Mode]


def _tokens(batch: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(31, (batch, sequence + 1), generator=torch.Generator().manual_seed(batch))
    return ids[:, :-1], ids[:, 1:]


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_transformers_with_dropout() -> None:
    run_ranks(3, run_cases, transformers)
