"""The museum of bugs that were met: for each the symptom, the cause, and the test that would have caught it."""

from __future__ import annotations

import copy
import functools
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import NEVER_SECONDS, PATIENCE_SECONDS, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.config.load import load
from pipetrain.observe import folder
from pipetrain.observe.folder import choose_folder
from pipetrain.prepare import prepare
from pipetrain.runtime.cut import Whole
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.make import make_schedule
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.slots import RecomputeMismatch

ALWAYS = RecomputePolicy(last_stage="always")


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


class AddPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0]) + value[1]


def test_reference_takes_whole_inputs() -> None:
    """Symptom: `reference_step` refused inputs in which a tensor was wrapped in Whole: "1 rows, the tensors before 2".

    Cause: it counted the rows of each microbatch, where Whole has been unwrapped, and not those of the batch.
    """
    inputs, targets = batch()
    model = nn.Sequential(AddPositions())
    loss = reference_step(model, mean_square, (inputs, Whole(torch.ones(1, 4))), targets, num_microbatches=3)
    expected = mean_square(model((inputs, torch.ones(1, 4))), targets)
    assert torch.allclose(loss, expected)


def step_with_a_frozen_first_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    inputs, targets = batch()
    options = {"schedule": "interleaved", "stages_per_rank": 2, "timeout_seconds": NEVER_SECONDS}
    with Pipeline(model, mean_square, num_microbatches=3, **options) as pipeline:
        for step, frozen in enumerate((False, True, False)):
            for layers in (model, reference):
                layers[1].requires_grad_(not frozen)
            loss = pipeline.step(inputs, targets)
            assert torch.equal(
                loss, reference_step(reference, mean_square, inputs, targets, num_microbatches=3, step=step)
            )


def test_frozen_first_stage_with_several_stages_per_rank() -> None:
    """Symptom: with two stages per rank and stage 0 frozen, rank 1 waited in 1RECV_B0 until the time-out.

    Cause: which stage is the first that needs a gradient was handed down the chain of ranks, so rank 0, which holds
    stage 2, never heard that stage 1 on rank 1 does, and sent it no gradients.
    """
    run_ranks(2, step_with_a_frozen_first_stage)


def bad_batch_after_unfreezing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    inputs, targets = batch()
    with Pipeline(model, mean_square, num_microbatches=3, timeout_seconds=NEVER_SECONDS) as pipeline:
        pipeline.step(inputs, targets)
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match="num_microbatches=3"):
            pipeline.step(inputs[:2], targets[:2])
        pipeline.step(inputs, targets)
        assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_bad_batch_after_unfreezing() -> None:
    """Symptom: a layer was unfrozen, a batch was refused, and the next good step failed: it sent a gradient with no form.

    Cause: the refused call was taken for the one in which the ranks tell each other what needs a gradient now.
    """
    run_ranks(2, bad_batch_after_unfreezing)


def test_checkpoint_inside_a_layer_is_not_taken_for_a_leak() -> None:
    """Symptom: a layer with `torch.utils.checkpoint` inside warned that it "holds 5056 bytes outside of its saved tensors".

    Cause: those are the generator states that checkpoint keeps; the limit for what is worth a warning was 4096 bytes.
    """

    class Checkpointed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return output

    with Pipeline([Checkpointed(4, 4)], mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(*batch())


def test_recompute_that_saves_less_names_its_own_layer() -> None:
    """Symptom: a layer saved a tensor less in R than in F, and the error named the layer after it.

    Cause: what the next layer saved was compared with what had not come; the count at the end of a layer was not.
    """

    class SavesOnce(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            SavesOnce.calls += 1
            return x.exp() if SavesOnce.calls > 3 else x.exp().sin()

    layers = [nn.Linear(4, 4), SavesOnce(), nn.Linear(4, 4)]
    message = r"layer 1 \(SavesOnce\): the recompute ended without saving"
    pipeline = Pipeline(layers, mean_square, num_microbatches=3, recompute=ALWAYS)
    with pytest.raises(RecomputeMismatch, match=message):
        pipeline.step(*batch())


def step_with_a_schedule_for_a_frozen_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3, first_backward=1)
    with Pipeline(model, mean_square, num_microbatches=3, schedule=schedule, timeout_seconds=NEVER_SECONDS) as pipeline:
        assert pipeline.schedule == schedule
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


def test_a_schedule_made_for_a_frozen_first_stage() -> None:
    """Symptom: a schedule made with first_backward=1 was refused, with the advice to make one with first_backward=0.

    Cause: the schedules were first checked as if every stage needed gradients.
    """
    run_ranks(2, step_with_a_schedule_for_a_frozen_stage)


# Layers that are no clean stack: each trains as the plain loop does, or is named. -------------------------------------

# Gradients inside a forward, and control flow of a layer's own. --- (12: 1, 2, 4, 13)

# State that a forward changes. --- (12: 3, 5, 8, 14, 15, 16)

# What needs a gradient, and whose. --- (12: 9, 10)


def refused_in_step(message: str, layers: Sequence[nn.Module], loss: Any = mean_square, **options: Any) -> None:
    """A step of it is refused with such a message, whether sets are recomputed or kept."""
    for mode in (ALWAYS, "never"):
        with (
            pytest.raises(ValueError, match=message),
            Pipeline(layers, loss, num_microbatches=3, recompute=mode, **{**TWO_STAGES, **options}) as pipeline,
        ):
            pipeline.step(*batch())


TWO_STAGES: dict[str, Any] = {"num_stages": 2, "stages_per_rank": 2, "schedule": "interleaved"}


def test_a_step_where_no_gradients_are_made() -> None:
    """Symptom: `step` under `no_grad` or `inference_mode` ended in an internal KeyError or in autograd's words, in the midst of its ops.

    Cause: nobody asked whether gradients are made here. Now it is refused before any op, and the pipeline goes on.
    """
    for no_gradients in (torch.no_grad, torch.inference_mode):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        reference = copy.deepcopy(model)
        with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
            with (
                no_gradients(),
                pytest.raises(ValueError, match=rf"step was called under torch.{no_gradients.__name__}\(\)"),
            ):
                pipeline.step(*batch())
            assert torch.equal(
                pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
            )


def test_inputs_that_require_a_gradient() -> None:
    """Symptom: inputs with `requires_grad` got no `.grad`, and whatever had computed them none either; no word.

    Cause: what enters stage 0 is detached, as it must be where it comes from another rank.
    """
    inputs, targets = batch()
    for mode in (ALWAYS, "never"):
        with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=mode) as pipeline:
            for wrong in (inputs.clone().requires_grad_(), nn.Linear(4, 4)(inputs)):
                with pytest.raises(
                    ValueError,
                    match="inputs requires a gradient: a step gives gradients to the layers' parameters only",
                ):
                    pipeline.step(wrong, targets)
        pipeline = Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, recompute=mode)
        with pytest.raises(ValueError, match="targets requires a gradient"):
            pipeline.step(inputs, targets.clone().requires_grad_())


def test_a_loss_with_parameters_of_its_own() -> None:
    """Symptom: the parameters of a `loss_fn` had gradients and were in no `parameters()`, clip or `state_dict`; no word.

    Cause: a pipeline knows its layers, and nobody looked at what the loss is made of.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.weight * (output - target) ** 2).mean()

        def method(self, output: Tensor, target: Tensor) -> Tensor:
            return self(output, target)

    def of(loss: Weighted, output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target)

    own = Weighted()
    for loss in (own, own.method, functools.partial(of, own)):
        with pytest.raises(
            ValueError,
            match=r"loss_fn has parameters of its own to train \(weight\).*make what has them the last layer",
        ):
            Pipeline([nn.Linear(4, 4)], loss, num_microbatches=3)
    refused_in_step("^loss_fn uses a tensor .*weight", [nn.Linear(4, 4), nn.Linear(4, 4)], lambda *both: own(*both))
    own.requires_grad_(False)
    with Pipeline([nn.Linear(4, 4)], own, num_microbatches=3) as pipeline:
        pipeline.step(*batch())


def test_a_weight_tied_by_a_hidden_reference() -> None:
    """Symptom: a layer that used a layer of another stage (in a list, so that nothing registered it) trained with wrong gradients.

    Cause: its rank has its own copy of that layer, whose gradient nobody added; only registered parameters were compared.
    """

    class Tied(nn.Module):
        def __init__(self, first: nn.Linear) -> None:
            super().__init__()
            self.linear, self.first = nn.Linear(4, 4), [first]

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.first[0].weight

    first = nn.Linear(4, 4)
    refused_in_step(r"^layer 1 \(Tied\) uses 0.weight, which is of another stage", [first, Tied(first)])


def test_a_regulariser_over_all_layers() -> None:
    """Symptom: a `loss_fn` with a term over all layers: the stages before the last trained without it, and no word.

    Cause: on the last rank these layers are copies, whose gradients went nowhere.
    """
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + sum(p.square().sum() for layer in layers for p in layer.parameters())

    refused_in_step(r"^loss_fn uses 0\.(weight|bias), which is of another stage", layers, loss)


def test_a_constant_that_requires_a_gradient() -> None:
    """Symptom: a tensor with `requires_grad` in a closure or an attribute of a layer: in no `parameters()`, clip or `state_dict`.

    Cause: F's graph was never compared with the parameters of the stage.
    """
    scale = torch.ones(4, requires_grad=True)

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    refused_in_step(
        r"^layer 1 \(Scaled\) uses a tensor \[4\] that requires a gradient.*\(scale of Scaled\)",
        [nn.Linear(4, 4), Scaled(4, 4)],
    )


def test_statistics_shared_over_stages() -> None:
    """Symptom: one BatchNorm without parameters in two stages: each rank kept statistics of its own, which diverged; no word.

    Cause: only parameters were looked for in two stages.
    """
    norm = nn.BatchNorm1d(4, affine=False)
    layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)]
    refused_in_step(r"^buffer 1.(\w+) of stage 0 is 3.\1 of stage 1 as well, and a forward changed it", layers)


def test_a_buffer_that_stays_may_be_shared_over_stages() -> None:
    """A table that all layers look into, or a shared ReLU, is right on every stage: not everything shared is refused."""

    class Positions(nn.Linear):
        def __init__(self, table: Tensor) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table

    table, relu = torch.linspace(0, 1, 4), nn.ReLU()
    model = nn.Sequential(Positions(table), relu, Positions(table), relu, Positions(table))
    reference = copy.deepcopy(model)
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS, **TWO_STAGES) as pipeline:
        assert torch.equal(
            pipeline.step(*batch()), reference_step(reference, mean_square, *batch(), num_microbatches=3)
        )


def test_a_counter_shared_over_stages() -> None:
    """Symptom: a module without parameters that counts its calls, in two stages: each rank counted its own.

    Cause: only parameters were looked for in two stages.
    """

    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    counter = Counter()
    with (
        pytest.raises(ValueError, match="Counter 1 of stage 0 is 3 of stage 1 as well, and a forward changed it"),
        Pipeline(
            [nn.Linear(4, 4), counter, nn.Linear(4, 4), counter],
            mean_square,
            num_microbatches=3,
            recompute="never",
            **TWO_STAGES,
        ) as pipeline,
    ):
        pipeline.step(*batch())


def test_parameters_that_look_into_one_memory() -> None:
    """Symptom: `b.weight.data = a.weight.data` over two stages trained as two weights; no word.

    Cause: parameters were compared as objects. Flat parameters, which lie side by side in one storage, are no mistake.
    """
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"0.weight of stage 0 and 1.weight of stage 1 lie in one memory"):
        Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES)
    second.weight.data = first.weight.data.clone()
    flat = nn.utils.parameters_to_vector([*first.parameters(), *second.parameters()]).detach()
    nn.utils.vector_to_parameters(flat, [*first.parameters(), *second.parameters()])
    Pipeline([first, second], mean_square, num_microbatches=3, **TWO_STAGES).close()


def test_callables_that_return_one_layer() -> None:
    """Symptom: two callables that returned one and the same layer, for two stages, trained one weight as two.

    Cause: sharing was looked for in what was given, not in what was built.
    """
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"parameter 0.weight of stage 0 is 1.weight of stage 1 as well"):
        Pipeline([lambda: layer, lambda: layer], mean_square, num_microbatches=3, **TWO_STAGES)


# Microbatches that do not count. --- (12: 6)


class NormedRoot(nn.Module):
    """Running means that see every microbatch that runs, and a derivative that is endless at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).abs().sqrt())


def does_not_count(loss_of_nothing: float, recompute: str | RecomputePolicy) -> None:
    """A batch whose second microbatch is padding: zeros as inputs, and nothing in its targets counts."""
    torch.manual_seed(0)
    model = nn.Sequential(NormedRoot(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    reference = copy.deepcopy(model)
    inputs, targets = batch()
    inputs[2:4], targets[2:4] = 0.0, -99.0

    def count(target: Tensor) -> int:
        return int((target != -99.0).sum())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) if count(target) else output.sum() * loss_of_nothing

    options = {"num_microbatches": 3, "count_fn": count}
    with Pipeline(model, loss_fn, stages_per_rank=2, balance=[1, 2], recompute=recompute, **options) as pipeline:
        loss = pipeline.step(inputs, targets)
    assert torch.equal(loss, reference_step(reference, loss_fn, inputs, targets, **options))
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), reference.buffers()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recompute", ["never", ALWAYS], ids=str)
@pytest.mark.parametrize("loss_of_nothing", [0.0, float("inf")])
def test_a_microbatch_that_counts_nothing(loss_of_nothing: float, recompute: str | RecomputePolicy) -> None:
    """Symptom: the loss was finite and gradients were NaN; running means had moved four times in three counted microbatches.

    Cause: a microbatch with n_i = 0 ran F on every stage, and zeros went back through its graph, where they met 0 * inf.
    The plain loop leaves it out.
    """
    does_not_count(loss_of_nothing, recompute)


@pytest.mark.parametrize("given", [float("nan"), None, -1])
def test_a_count_that_is_no_number(given: float | None) -> None:
    """Symptom: with count_fn giving nan the loss was nan without a reason; None gave "unsupported operand type(s) for +".

    Cause: what it gave was added up as it came.
    """
    pipeline = Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3, count_fn=lambda target: given)
    with pytest.raises(ValueError, match=f"count_fn gave {given} for the target of microbatch 0: it must return"):
        pipeline.step(*batch())


# What crosses a cut. --- (12: 7, 11, 12, 17)

# Arguments. --- (12: 18, 19, 20)


def test_two_runs_that_start_in_one_new_folder(tmp_path: pathlib.Path) -> None:
    """Symptom: two runs started in the same new `run_dir` at the same moment both ran, and wrote over each other.

    Cause: a folder was taken once `config.yaml` lay in it, which is written long after it was looked for.
    """
    (tmp_path / "text.txt").write_text("a stage waits for a stage that runs " * 500)
    options = ["experiment=smoke", "data=text", "data.path=text.txt", "pipeline.num_stages=1", "steps=2", "run_dir=new"]
    root = str(pathlib.Path(__file__).resolve().parents[1])
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pipetrain.train", *options],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = sorted((run.communicate(timeout=PATIENCE_SECONDS)[1], run.returncode) for run in runs)
    assert sorted(code for _, code in ends) == [0, 2], ends
    (told,) = (error for error, code in ends if code == 2)
    # Where one has ended before the other begins, that finds its configuration.
    assert "another run is in this folder" in told or "there is a run in this folder" in told


def test_two_runs_without_a_folder_that_start_in_one_second(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two runs without `run_dir` that started in the same second could share a folder.

    Cause: a free name was chosen first, and its folder made later.
    """
    monkeypatch.chdir(tmp_path)
    taken = choose_folder(None, "run").path
    names = iter([taken, taken, taken.with_name("next")])
    monkeypatch.setattr(folder, "choose_folder", lambda *_: folder.RunFolder(next(names)))
    assert folder.reserve_folder(None, "run").path == taken
    assert folder.reserve_folder(None, "run").path == taken.with_name("next")


@pytest.mark.parametrize("field", ["forward", "backward", "recompute", "hop", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, [1.0, math.nan]])
def test_costs_are_finite(field: str, seconds: float | list[float]) -> None:
    """Symptom: `pipetrain show cost.forward_seconds=nan` never ended.

    Cause: no time is later than nan, so the simulated step had no next moment.
    """
    with pytest.raises(ValueError, match=f"cost.{field}_seconds=.*(nan|inf|-1)"):
        Costs.spread(2 + (field == "hop"), **{field: seconds})
    with pytest.raises(ValueError, match=r"recompute=\[nan\]: costs are finite numbers, 0 or more"):
        Costs((1.0,), (1.0,), (math.nan,), (), ())


def test_a_schedule_that_is_too_large_is_refused() -> None:
    """Symptom: `pipetrain show pipeline.num_stages=99999999` never ended, nor did a schedule of so many microbatches.

    Cause: there was no limit, and every op of it was to be made.
    """
    with pytest.raises(ValueError, match=r"99999999 stages .* are too many: allowed are 4096"):
        make_schedule(num_stages=99999999, num_microbatches=1)
    with pytest.raises(ValueError, match=r"num_microbatches=99999999 with 4 stages.*=32768"):
        make_schedule(num_stages=4, num_microbatches=99999999)


def test_what_does_not_run_yet_is_refused_before_a_process_starts() -> None:
    """Symptom: a run whose schedule has I and W was refused by its ranks, after its run folder was made.

    Cause: only the executor knew which kinds of ops it runs.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0F0,0I0,0W0\n")
        file.flush()
        options = ["experiment=smoke", f"pipeline.schedule={file.name}", "pipeline.num_microbatches=1"]
        with pytest.raises(ValueError, match="0I0: the runtime does not run I yet, only F, R, B, SEND_F"):
            prepare(load([*options, "pipeline.num_stages=1", "recompute=never"]))


def test_arguments_that_are_no_numbers() -> None:
    """Symptom: `num_microbatches=2.5` or `timeout_seconds=-1` ended in raw errors later, `balance=[1.5, 1.5]` was cut to `[1, 1]`.

    Cause: only their range was looked at, or nothing.
    """
    wrong: dict[str, Any] = {
        "num_microbatches": 2.5,
        "num_stages": 1.0,
        "stages_per_rank": True,
        "balance": [1.5, 0.5],
        "timeout_seconds": -1,
        "seed": 1 << 64,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ")):
            Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mean_square, **{name: value})
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        for scale in (0, float("nan"), float("inf"), "2", torch.tensor(2.0)):
            with pytest.raises(ValueError, match=r"step was given scale="):
                pipeline.step(*batch(), scale=scale)


def test_batches_that_are_no_tensors() -> None:
    """Symptom: a numpy array went whole to every microbatch, or failed in the midst of a layer; a list of numbers likewise.

    Cause: what is no tensor counts as a plain value, which each microbatch gets.
    """
    inputs, targets = batch()
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        with pytest.raises(ValueError, match=r"^inputs is a numpy.ndarray, which is not cut: .*torch.from_numpy"):
            pipeline.step(inputs.numpy(), targets)
        with pytest.raises(ValueError, match=r"^targets is a list of 6 plain values, as many as the batch has rows"):
            pipeline.step(inputs, list(range(6)))


def test_clipping_to_a_norm_that_is_none() -> None:
    """Symptom: `clip_grad_norm_(-1)` turned every gradient round; nan made them nan; no word.

    Cause: whatever was given was divided by the norm.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        pipeline.step(*batch())
        before = [parameter.grad.clone() for parameter in pipeline.parameters()]
        for norm in (-1, float("nan"), "1"):
            with pytest.raises(ValueError, match=r"clip_grad_norm_ was given max_norm=.*: a number, 0 or more"):
                pipeline.clip_grad_norm_(norm)
        for parameter, gradient in zip(pipeline.parameters(), before):
            assert torch.equal(parameter.grad, gradient)


def test_clipping_sparse_gradients() -> None:
    """Symptom: `clip_grad_norm_` raised NotImplementedError after a step with `nn.Embedding(sparse=True)`.

    Cause: torch has no norm of a sparse tensor. That of its entries would be wrong: rows that meet are added first.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4))
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    tokens, targets = torch.tensor([0, 1, 0, 0, 1, 2]), batch()[1]
    with Pipeline(model, mean_square, num_microbatches=3, recompute=ALWAYS) as pipeline:
        pipeline.step(tokens, targets)
        reference_step(dense, mean_square, tokens, targets, num_microbatches=3)
        norm, expected = pipeline.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        assert torch.allclose(norm, expected)
        for own, wanted in zip(model.parameters(), dense.parameters()):
            assert torch.allclose(own.grad.to_dense(), wanted.grad)


def test_a_state_of_another_model() -> None:
    """Symptom: a misspelt name in the state was ignored, and the layer kept its old buffer or extra tensors vanished; no word.

    Cause: each layer picked what it knows.
    """
    with Pipeline([nn.Linear(4, 4)], mean_square, num_microbatches=3) as pipeline:
        state = pipeline.state_dict()
        for name in ("0.wieght", "1.weight", "weight"):
            with pytest.raises(ValueError, match=f"the state has '?{name}.*which the model does not"):
                pipeline.load_state_dict({**state, name: state["0.weight"]})
        with pytest.raises(ValueError, match=r"0.weight is a list in the state"):
            pipeline.load_state_dict({**state, "0.weight": [1.0]})
