"""What is run on virtual GPUs: a case is a model, a schedule and what is called; `look` says all that is wrong with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rounding import rounding
from torch import Tensor, nn

from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.runtime.reference import reference_step
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.snapshot.saver import Saver
from pipetrain.snapshot.state import Part, RunState
from pipetrain.stage import host_set
from virtual_gpu.hangs import find_hangs, find_hangs_of_all, folded
from virtual_gpu.races import find_races
from virtual_gpu.recorded import Recording
from virtual_gpu.virtual_ranks import VirtualRanks

WIDTH, STEPS = 4, 3
ROWS = 2  # of a microbatch
QUEUES = (8, 32)  # CUDA_DEVICE_MAX_CONNECTIONS as it is, and as we set it

Layers = Callable[[int], Sequence[nn.Module]]  # of so many stages, a layer each


def mean_square(output: Any, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def plain(num_stages: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def nothing(pipeline: Pipeline, batch: Any) -> None:
    """Nothing is called besides step."""


@dataclass(frozen=True)
class Case:
    """`ranks` are those of each of the `replicas`; `slow` is a rank that comes later than the others; `also` is called on each rank after a step."""

    schedule: str = "1f1b"
    mode: str = "overlap"
    sets: float | None = 1
    ranks: int = 2
    stages_per_rank: int = 1
    placement: str = "loop"
    microbatches: int = 4
    layers: Layers = plain
    loss: Callable[[Any, Tensor], Tensor] = mean_square
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    also: Callable[[Pipeline, Any], object] = nothing
    saves: bool = False
    slow: int | None = None
    last_stage: str = "auto"
    communicators: str = "edge"
    keep: str | None = None
    ahead: int = 2
    selective: str | None = None
    segments: int = 1
    replicas: int = 1
    layers_per_part: int = 1
    keep_layers: tuple[int, ...] = ()
    offload: str = "none"

    def __str__(self) -> str:
        words = [self.schedule, self.mode, f"sets{self.sets}", f"{self.ranks}x{self.stages_per_rank}", self.placement]
        for one in fields(self)[6:]:
            value = getattr(self, one.name)
            if value != one.default:
                words.append(getattr(value, "__name__", f"{one.name}{value}"))
        return "-".join(words)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        rows = ROWS * self.microbatches * self.replicas
        return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


@dataclass(frozen=True)
class Played:
    """What became of a case: what was recorded, and per rank the losses and the gradients of the last step."""

    recording: Recording
    losses: list[list[Tensor]]
    gradients: list[dict[str, Tensor | None]]


def play(case: Case) -> Played:
    """Some steps of a case, with an optimizer, on virtual GPUs. Sets go to host memory though their tensors are small."""
    ranks = VirtualRanks(case.ranks * case.replicas, slow=case.slow)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(host_set, "LEAST_BYTES", 1):
        recording, values = ranks.run(lambda: _train(case, Path(folder)))
    return Played(recording, [losses for losses, _ in values], [gradients for _, gradients in values])


def _train(case: Case, folder: Path) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """On one rank."""
    torch.manual_seed(0)
    num_stages = case.ranks * case.stages_per_rank
    num_layers = num_stages * case.segments * case.layers_per_part
    plan = make_plan(
        num_layers,
        num_ranks=case.ranks,
        stages_per_rank=case.stages_per_rank,
        num_microbatches=case.microbatches,
        placement=case.placement,
        communicators=case.communicators,
        transport_ahead=case.ahead,
        num_replicas=case.replicas,
    )
    policy = RecomputePolicy(
        case.mode,  # type: ignore[arg-type]
        case.sets,
        keep=case.keep,  # type: ignore[arg-type]
        last_stage=case.last_stage,  # type: ignore[arg-type]
        selective=case.selective,  # type: ignore[arg-type]
        segments=case.segments,
        keep_layers=case.keep_layers,  # type: ignore[arg-type]
        offload=case.offload,  # type: ignore[arg-type]
    )
    losses, gradients = [], {}
    with Pipeline(
        list(case.layers(num_layers)), case.loss, plan=plan, schedule=case.schedule, recompute=policy
    ) as pipeline:
        own = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(own, lr=0.1) if own else None
        saver = _saver(pipeline, folder) if case.saves else None
        for step in range(STEPS):
            inputs, targets = pipeline.own_rows(case.batch(step))
            pipeline.zero_grad()
            with case.autocast():
                losses.append(
                    pipeline.step(inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
                )
            gradients = {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in pipeline.named_parameters()
            }
            case.also(pipeline, (inputs, targets))
            if saver is not None:
                saver.before_update()
            if optimizer is not None:
                optimizer.step()
            if saver is not None:
                saver.save(_state(step + 1, case.ranks * case.replicas), {Part.WEIGHTS: pipeline.state_dict()})
        if saver is not None:
            saver.wait()
    return losses, gradients


def _saver(pipeline: Pipeline, folder: Path) -> Saver:
    return Saver(folder, rank=pipeline.rank, agree=pipeline._group.largest, keep_last=1, say=_fail)


def _state(step: int, num_ranks: int) -> RunState:
    return RunState(step, num_ranks, {}, {}, None, {})


def _fail(text: str) -> None:
    raise AssertionError(text)


# What is wrong -----------------------------------------------------------------------------------------------------


def look(case: Case) -> list[str]:
    """Everything that is wrong with a case, in sentences."""
    played = play(case)
    return [*faults(played.recording), *differences(case, played)]


def faults(recording: Recording) -> list[str]:
    """Races and hangs, each once."""
    found = [str(race) for race in find_races(recording)]
    found += [str(hang) for hang in find_hangs(recording)]
    for queues in QUEUES:
        found += [f"on {queues} hardware queues {hang}" for hang in find_hangs(recording, folded(queues))]
    found += [f"with a wait of all hosts before each op {hang}" for hang in find_hangs_of_all(recording)]
    return list(dict.fromkeys(found))


def differences(case: Case, played: Played) -> list[str]:
    """Where losses or gradients are not those of the plain loop: bit for bit, but where stages share parameters or there are replicas:
    each of them adds up its own gradients first; there the copies' are equal."""
    # Each step adds up the gradients of microbatches, replicas and two copies in another order.
    within = rounding(torch.float32, terms=STEPS * 2 * case.microbatches * case.replicas)
    same = partial(_close, within=within) if case.layers is tied or case.replicas > 1 else torch.equal
    torch.manual_seed(0)
    layers = list(case.layers(case.ranks * case.stages_per_rank * case.segments))
    parameters = nn.Sequential(*layers).parameters()  # one that is shared once
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)
    found = []
    for step in range(STEPS):
        inputs, targets = case.batch(step)
        optimizer.zero_grad()
        with case.autocast():
            m = case.microbatches * case.replicas
            loss = reference_step(layers, case.loss, inputs, targets, num_microbatches=m, step=step)
        for rank, losses in enumerate(played.losses):
            if not same(losses[step], loss):
                found.append(f"rank {rank}: the loss of step {step} is {losses[step]} and not {loss}")
        if step < STEPS - 1:
            optimizer.step()
    wanted = dict(nn.Sequential(*layers).named_parameters())
    for rank, gradients in enumerate(played.gradients):
        for name, gradient in gradients.items():
            expected, first = wanted[name].grad, played.gradients[rank % case.ranks][name]
            if (gradient is None) != (expected is None) or (
                gradient is not None and expected is not None and not same(gradient, expected)
            ):
                found.append(f"rank {rank}: the gradient of {name} differs")
            if gradient is not None and first is not None and not torch.equal(gradient, first):
                found.append(f"rank {rank}: the gradient of {name} is not that of replica 0")
    if (
        case.layers is tied
        and len({gradients[SHARED].sum().item() for gradients in played.gradients if SHARED in gradients}) != 1
    ):
        found.append(f"the copies of {SHARED} have other gradients")
    return found


def _close(one: Tensor, other: Tensor, *, within: float) -> bool:
    return torch.allclose(one, other, rtol=within, atol=within * float(other.abs().max()))


# What is called besides step -----------------------------------------------------------------------------------------


def clips(pipeline: Pipeline, batch: Any) -> None:
    pipeline.clip_grad_norm_(1e9)


def evaluates(pipeline: Pipeline, batch: Any) -> None:
    inputs, targets = batch
    pipeline.evaluate(inputs if pipeline.is_first else None, targets if pipeline.is_last else None)


def evaluates_on_two_streams(pipeline: Pipeline, batch: Any) -> None:
    on_two_streams(pipeline, lambda: evaluates(pipeline, batch), lambda: evaluates(pipeline, batch))


def on_two_streams(pipeline: Pipeline, *calls: Callable[[], object]) -> None:
    """Each call from a stream of its own, none of which waits for another."""
    device = pipeline._lanes.device
    before = device.current()
    streams = [device.stream() for _ in calls]
    for stream in streams:
        device.name(stream, "caller's other")  # type: ignore[attr-defined]
        device.follow(stream, before)
    for stream, call in zip(streams, calls):
        with device.on(stream):
            call()
    for stream in streams:
        device.follow(before, stream)


def accumulates(pipeline: Pipeline, batch: Any) -> None:
    """A second step adds to the gradients of the first, and a third to nothing but zeros."""
    inputs, targets = batch
    given = inputs if pipeline.is_first else None, targets if pipeline.is_last else None
    pipeline.step(*given)
    pipeline.zero_grad(set_to_none=False)
    pipeline.step(*given)


def changes(pipeline: Pipeline, batch: Any) -> None:
    """The next step is run by another schedule and another policy."""
    others = (("gpipe", "early", 2), ("1f1b", "inline", 1), ("gpipe", "never", None), ("1f1b", "overlap", 2))
    schedule, mode, sets = others[pipeline.step_index % len(others)]
    pipeline.change(schedule=schedule, recompute=RecomputePolicy(mode, sets))  # type: ignore[arg-type]


def infers(pipeline: Pipeline, batch: Any) -> None:
    pipeline(batch[0] if pipeline.is_first else None)


# Models ------------------------------------------------------------------------------------------------------------


class Bridge(nn.Module):
    """Gives what `give` makes of its output, and takes what another one gave."""

    def __init__(self, give: Callable[[Tensor], Any], width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self._give = give

    def forward(self, value: Any) -> Any:
        return self._give(torch.tanh(self.linear(_tensor_of(value))))


def _tensor_of(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return torch.view_as_real(value.resolve_conj()).sum(-1) if value.is_complex() else value
    return sum(
        _tensor_of(one) for one in (value.values() if isinstance(value, dict) else value) if isinstance(one, Tensor)
    )


def bridges(give: Callable[[Tensor], Any]) -> Layers:
    """All stages but the last give what `give` makes; of twice as much where that is half of it."""
    width = 2 * WIDTH if give in (gaps, chunks) else WIDTH

    def layers(num_stages: int) -> list[nn.Module]:
        return [*(Bridge(give, width) for _ in range(num_stages - 1)), Bridge(lambda output: output, WIDTH)]

    layers.__name__ = give.__name__
    return layers


def gaps(output: Tensor) -> Tensor:
    return output[:, ::2]


def chunks(output: Tensor) -> Tensor:
    return output.chunk(2, dim=1)[1]


def last_of_sequence(output: Tensor) -> Tensor:
    return output.unsqueeze(1).expand(-1, 3, -1).contiguous()[:, -1]


def expanded(output: Tensor) -> Tensor:
    return output.mean(dim=1, keepdim=True).expand(-1, WIDTH)


def transposed(output: Tensor) -> Tensor:
    return output.t().contiguous().t()


def conjugate(output: Tensor) -> Tensor:
    return torch.complex(output, output * 2).conj()


def pairs(output: Tensor) -> tuple[Tensor, Tensor]:
    return output * 2, output.detach()


def trees(output: Tensor) -> dict[str, Any]:
    return {"one": output, "again": output, "count": 3, "half": output[:, ::2].repeat(1, 2)}


class Unread(nn.Module):
    """Gives two tensors, of which the next one reads one alone: no gradient of the other comes back. The last one gives one."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._is_last = is_last

    def forward(self, value: Any) -> Any:
        output = torch.tanh(self.linear(value if isinstance(value, Tensor) else value[0]))
        return output if self._is_last else (output, output * 2)


def missing_gradients(num_stages: int) -> list[nn.Module]:
    return [Unread(is_last=number == num_stages - 1) for number in range(num_stages)]


def batch_norm(num_stages: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(num_stages)]


def dropout(num_stages: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()) for _ in range(num_stages)]


def frozen(num_stages: int) -> list[nn.Module]:
    """Every other stage's weights get no gradient; those before them do."""
    layers = plain(num_stages)
    for layer in layers[1::2]:
        layer.requires_grad_(False)
    return layers


SHARED = "0.0.weight"


def tied(num_stages: int) -> list[nn.Module]:
    """The first and the last stage share a weight."""
    layers = plain(num_stages)
    layers[-1][0].weight = layers[0][0].weight  # type: ignore[index]
    return layers


def frozen_below(num_stages: int) -> list[nn.Module]:
    layers = plain(num_stages)
    layers[0].requires_grad_(False)
    return layers


def in_place(num_stages: int) -> list[nn.Module]:
    """Each stage changes its input."""
    return [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(num_stages)]


def handed_through(num_stages: int) -> list[nn.Module]:
    """The middle stages give their very input."""
    return [nn.Linear(WIDTH, WIDTH), *(nn.Identity() for _ in range(num_stages - 2)), nn.Linear(WIDTH, WIDTH)]


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)
