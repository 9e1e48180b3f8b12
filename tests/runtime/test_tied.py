"""A parameter that two stages share: two copies that stay equal, and the numbers of the model in one piece."""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import NEVER_SECONDS, run_outcomes, run_ranks
from replica_models import assert_replicas_equal, difference
from rounding import rounding
from torch import Tensor, nn

from pipetrain.comm.failure import PipelineError
from pipetrain.models.size import ModelSize
from pipetrain.models.spec import ModelSpec, one_by_one
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.losses import LossNotFinite
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.op import Kind, Lane, Op
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.snapshot.files import path_of
from pipetrain.snapshot.reader import Snapshot
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import Part, RunState, tensors_of

WORDS, WIDTH, MICROBATCHES, NUM_STEPS = 11, 8, 4, 5
FIRST, SECOND = "0.words.weight", "5.words.weight"
CPU = torch.device("cpu")


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.words(tokens))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.dropout(torch.tanh(self.linear(value)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.words(self.norm(value))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    made = [Embedding(), *(Block() for _ in range(4)), Head()]
    made[-1].words.weight = made[0].words.weight
    return made


def spec() -> ModelSpec:
    """The same of callables, which only say that two are one."""
    kinds = [Embedding, *[Block] * 4, Head]
    return ModelSpec(
        size=ModelSize(6), build_layers=one_by_one(kinds), tied=((FIRST, SECOND),), fingerprint={"num_layers": 6}
    )


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(WORDS, (8, 5), generator=generator) for _ in range(2))  # type: ignore[return-value]


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def pipeline_of(model: Any, plan: dict[str, Any] | None = None, **options: Any) -> Pipeline:
    ranks_of_one = num_ranks() // options.get("num_replicas", 1)
    made = make_plan(6, num_ranks=ranks_of_one, num_microbatches=MICROBATCHES, **(plan or {}))
    return Pipeline(model, cross_entropy, plan=made, timeout_seconds=NEVER_SECONDS, **options)


def within_after(num_steps: int, num_replicas: int = 1) -> float:
    """Each step adds up the gradients of two copies and of all microbatches in another order."""
    return rounding(torch.float32, terms=2 * MICROBATCHES * num_replicas * num_steps)


# Beside the model in one piece ----------------------------------------------------------------------------------------

V = {"stages_per_rank": 2, "placement": "v"}
ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpipe": ({}, {}),
    "gpipe, two stages per rank": ({"stages_per_rank": 2}, {"recompute": "early"}),
    "gpipe there and back": (V, {"recompute": "inline"}),
    "1f1b inline": ({}, {"schedule": "1f1b", "recompute": "inline"}),
    "1f1b in parts": ({}, {"schedule": "1f1b", "recompute": RecomputePolicy(segments="layers")}),
    "1f1b split": ({"split_backward": True}, {"schedule": "1f1b"}),
    "interleaved": ({"stages_per_rank": 2}, {"schedule": "interleaved", "recompute": "early"}),
    "zb-h1": ({}, {"schedule": "zb-h1", "recompute": "never"}),
    "zbv": (V, {"schedule": "zbv"}),
    "auto": ({}, {"schedule": "auto", "recompute": RecomputePolicy(sets=1)}),
}


ON_THREE = ("gpipe", "gpipe, two stages per rank", "interleaved", "zb-h1", "auto")


def every_order() -> None:
    """Each order on two ranks or on three; on two, too, a schedule that was made without the model."""
    of_nobody = make_schedule("1f1b", num_stages=num_ranks(), num_microbatches=MICROBATCHES)
    others = {} if num_ranks() == 3 else {"of nobody": ({}, {"schedule": of_nobody})}
    here = {name: order for name, order in ORDERS.items() if (name in ON_THREE) == (num_ranks() == 3)}
    for name, (plan, options) in {**here, **others}.items():
        try:
            several_steps_of(plan, options)
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise


def several_steps_of(plan: dict[str, Any], options: dict[str, Any], num_replicas: int = 1) -> None:
    """Dropout on, clip active, evaluations in between: gradients and norms of each step, and both copies at the end."""
    reference = nn.Sequential(*layers())
    m = MICROBATCHES * num_replicas
    with pipeline_of(layers(), plan, num_replicas=num_replicas, **options) as pipeline:
        ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (pipeline, reference))
        for step in range(NUM_STEPS):
            close = within_after(step + 1, num_replicas)
            inputs, targets = pipeline.own_rows(batch(step))
            loss = pipeline.step(inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
            expected = reference_step(reference, cross_entropy, *batch(step), num_microbatches=m, step=step)
            assert difference(loss, expected) <= close
            wanted = dict(reference.named_parameters())
            for name, parameter in pipeline.named_parameters():
                found = difference(parameter.grad, wanted[name].grad)  # type: ignore[arg-type]
                assert found <= close, f"gradient of {name} in step {step}: {found:.1e}"
            norm = pipeline.clip_grad_norm_(0.1)
            assert difference(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1)) <= close
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_replicas_equal(pipeline)
            if step % 3 == 0:
                pipeline.evaluate(inputs, targets)
        state = pipeline.full_state_dict()
        if state is not None:
            assert torch.equal(state[FIRST], state[SECOND])
            for name, value in reference.state_dict().items():
                assert difference(state[name], value) <= within_after(NUM_STEPS, num_replicas), name
        reduced = [op for _, lane, op in pipeline.schedule.ops() if lane is Lane.REDUCE and op.peer is not None]
        place = pipeline.plan.stage_ranks
        assert [op.peer for op in reduced] == ([] if place[0] == place[-1] else [len(place) - 1, 0])
        events = {
            event.op for event in pipeline.report.events if event.lane is Lane.REDUCE and event.op.peer is not None
        }
        assert events == {op for op in reduced if place[op.stage] == pipeline.coordinates.stage}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_steps_in_every_order(num_ranks: int) -> None:
    run_ranks(num_ranks, every_order)


# One rank after the other: what is called between two steps -----------------------------------------------------------


def named_gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone() for name, parameter in pipeline.named_parameters() if parameter.grad is not None
    }


def several_steps(pipeline: Pipeline, *steps: int) -> dict[str, Tensor]:
    for step in steps:
        pipeline.step(*batch(step))
    return named_gradients(pipeline)


def what_is_called_in_between() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pipeline_of(layers()) as pipeline:
        several_steps(pipeline, 0)
        pipeline.zero_grad(set_to_none=False)
        kept = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        found["after zeros"] = several_steps(pipeline, 1)
        assert all(parameter.grad is kept[name] for name, parameter in pipeline.named_parameters())
        pipeline.zero_grad()
        pipeline.step_index = 1
        found["alone"] = several_steps(pipeline, 1)
        found["added"] = several_steps(pipeline, 2)
        found["norm"] = pipeline.clip_grad_norm_(math.inf)
        pipeline.zero_grad()
        with pytest.raises(LossNotFinite):
            _not_finite(pipeline)
        pipeline.zero_grad()
        pipeline.step_index = 1
        found["after a loss that was not finite"] = several_steps(pipeline, 1)
        pipeline.zero_grad()
        for layer in pipeline._parts.layers.values():
            layer.requires_grad_(isinstance(layer, Block))
        found["frozen"] = several_steps(pipeline, 4)
    return found


def _not_finite(pipeline: Pipeline) -> None:
    own = dict(pipeline.named_parameters())
    before = {name: own[name].data for name in own if name == "2.linear.weight"}
    for name in before:
        own[name].data = torch.full_like(own[name], torch.nan)
    try:
        pipeline.step(*batch(3))
    finally:
        for name, value in before.items():
            own[name].data = value


def together(found: Sequence[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """The gradients of all ranks by name; the copies' are equal."""
    whole: dict[str, Tensor] = {}
    for rank in found:
        for name, gradient in rank[key].items():
            assert torch.equal(whole.setdefault(name, gradient), gradient), f"{name}, {key}"
    return whole


def test_gradients_of_several_steps() -> None:
    """Added to what is there, which is not added up again; and the norm counts the pair once, as the model in one piece does."""
    found = run_ranks(2, what_is_called_in_between)
    alone, added = together(found, "alone"), together(found, "added")
    for key in ("after zeros", "after a loss that was not finite"):
        again = together(found, key)
        assert all(torch.equal(again[name], alone[name]) for name in alone), key
    reference = nn.Sequential(*layers())
    for step in (1, 2):
        reference_step(reference, cross_entropy, *batch(step), num_microbatches=MICROBATCHES, step=step)
    for name, parameter in reference.named_parameters():
        assert difference(added[name], parameter.grad) <= within_after(2)  # type: ignore[arg-type]
        parameter.grad = added[name]
    assert torch.equal(found[0]["norm"], nn.utils.clip_grad_norm_(reference.parameters(), math.inf))
    assert torch.equal(found[1]["norm"], found[0]["norm"])
    assert set(together(found, "frozen")) == {f"{n}.linear.{kind}" for n in range(1, 5) for kind in ("weight", "bias")}


# Copies from the start -------------------------------------------------------------------------------------------------


def callables() -> dict[str, Any]:
    with pipeline_of(spec(), seed=3) as pipeline:
        return pipeline.state_dict()


def test_callables_start_with_the_weights_of_the_lower_stage() -> None:
    whole = callables()
    first, last = run_ranks(2, callables)
    assert torch.equal(whole[FIRST], whole[SECOND])
    for name, value in {**first, **last}.items():
        assert torch.equal(value, whole[name]), name


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except (ValueError, PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def three_of_one() -> list[nn.Module]:
    made = layers()
    made[2].linear.weight = made[4].linear.weight
    made[3].linear.weight = made[4].linear.weight
    return made


def other_shape() -> ModelSpec:
    kinds = [Embedding, *[Block] * 4, lambda: nn.Linear(WIDTH, 7)]
    return ModelSpec(size=ModelSize(6), build_layers=one_by_one(kinds), tied=((FIRST, "5.weight"),))


def unnamed() -> ModelSpec:
    return ModelSpec(size=ModelSize(6), build_layers=one_by_one(layers()), tied=((FIRST, "5.word.weight"),))


def of_one_rank() -> list[nn.Module]:
    """The model of rank 0, and on the other one without a tie."""
    made = layers()
    if dist.get_rank() == 1:
        made[-1].words = nn.Linear(WIDTH, WORDS, bias=False)
    return made


def one_frozen() -> None:
    with pipeline_of(layers()) as pipeline:
        if pipeline.rank == 1:
            pipeline._parts.layers[5].words.weight.requires_grad_(False)
        pipeline.step(*batch(0))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "three stages": (
        lambda: pipeline_of(three_of_one(), {"balance": [3, 1, 1, 1], "stages_per_rank": 2}),
        "ValueError: 2.linear.weight of stage 0, 3.linear.weight of stage 1, 4.linear.weight of stage 2 are one parameter: two",
    ),
    "another shape": (
        lambda: pipeline_of(other_shape()),
        "ValueError: 0.words.weight and 5.weight are tied as one parameter, but differ: [11, 8] of float32, trained and [7, 8] of float32",
    ),
    "no such name": (
        lambda: pipeline_of(unnamed()),
        "ValueError: layer 5 (Head) has no parameter word.weight, which is said",
    ),
    "one rank ties": (lambda: pipeline_of(of_one_rank()), "ValueError: rank 1 was given another model than rank 0"),
    "one copy frozen": (one_frozen, "ValueError: 0.words.weight is one parameter in two stages, frozen in one of them"),
}


def make_each() -> list[str]:
    return [refused(make) for make, _ in MISTAKES.values()]


def test_what_cannot_be_shared_is_refused_on_every_rank() -> None:
    for found in zip(MISTAKES.items(), *run_ranks(2, make_each)):
        (name, (_, message)), *texts = found
        assert all(text.startswith(message) for text in texts), f"{name}: {texts}"


# State -----------------------------------------------------------------------------------------------------------------


def load(states: Sequence[dict[str, Tensor]]) -> list[Any]:
    found: list[Any] = []
    with pipeline_of(layers()) as pipeline:
        for state in states:
            error = refused(lambda state=state: pipeline.load_state_dict(state))  # type: ignore[misc]
            whole = pipeline.full_state_dict()
            found.append(error if whole is None or error != "nothing" else (whole[FIRST], whole[SECOND]))
    return found


def test_a_state_with_one_name_or_with_both() -> None:
    state = nn.Sequential(*layers()).state_dict()
    other = torch.randn(WORDS, WIDTH)
    without = {FIRST: SECOND, SECOND: FIRST}
    states = [{**{n: v for n, v in state.items() if n != gone}, name: other} for gone, name in without.items()]
    first, second, both = run_ranks(2, load, [*states, {**state, FIRST: other}])[0]
    for one, two in (first, second):
        assert torch.equal(one, other)
        assert torch.equal(two, other)
    assert both.startswith(
        "ValueError: 0.words.weight and 5.words.weight are one parameter, but have different values in the state"
    )


def trains(folder: str, start: int, end: int) -> dict[str, Tensor]:
    """Steps from the snapshot after `start`; what was loaded, and what came out, of weights and AdamW's moments."""
    plan = {} if num_ranks() < 3 else {"balance": [1, 4, 1]}
    with pipeline_of(layers(), plan) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        pipeline.step_index = start
        if start:
            Snapshot(path_of(pathlib.Path(folder), start)).restore(pipeline, optimizer, pipeline.rank, CPU)
        for step in range(start, end):
            pipeline.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
        saver = Saver(
            pathlib.Path(folder), rank=pipeline.rank, agree=pipeline._group.largest, say=lambda text: None, keep_last=9
        )
        if end > start:
            saver.save(RunState(end, num_ranks(), {}, {}), tensors_of(pipeline, optimizer, CPU))
            saver.wait()
        parts = tensors_of(pipeline, optimizer, CPU)
    return {name: value.clone() for part in (Part.WEIGHTS, Part.OPTIMIZER) for name, value in parts[part].items()}


def whole_and_saved(whole: str, parts: str) -> tuple[dict[str, Tensor], ...]:
    """Four steps in one go; and two, which are saved."""
    return trains(whole, 0, 4), trains(parts, 0, 2)


def test_a_resume_on_other_stages(tmp_path: pathlib.Path) -> None:
    """What is saved by two ranks is loaded by one and by three, bit for bit, moments of both copies too; two go on as they would have."""
    on_two = run_ranks(2, whole_and_saved, str(tmp_path / "whole"), str(tmp_path / "parts"))
    merged = {name: value for _, saved in on_two for name, value in saved.items()}
    for ranks in (1, 3):
        loaded = run_ranks(ranks, trains, str(tmp_path / "parts"), 2, 2)
        assert ranks > 1 or set(loaded[0]) == set(merged)
        for part in loaded:
            assert part
            for name, value in part.items():
                assert torch.equal(value, merged[name]), f"{name} on {ranks} ranks"
    for part, (expected, _) in zip(run_ranks(2, trains, str(tmp_path / "parts"), 2, 4), on_two):
        assert part.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in part.items())


# Faults -------------------------------------------------------------------------------------------------------------------


def is_left_alone(how: str) -> str:
    with pipeline_of(layers()) as pipeline:
        pipeline.step(*batch(0))

        def before(op: Op, step: int) -> None:
            if pipeline.rank == 1 and op.kind is Kind.REDUCE_GRAD:
                if how == "dies":
                    os._exit(3)
                pipeline.disconnect(op)

        pipeline.before_ops(before)
        pipeline.step(*batch(1))
    return "nothing"


@pytest.mark.parametrize("how", ["dies", "disconnects"])
def test_a_rank_that_is_gone_is_named(how: str) -> None:
    first, _ = run_outcomes(2, is_left_alone, how)
    assert first.error is not None
    assert re.search(r"PipelineError: .*rank 1", first.error), first.error
