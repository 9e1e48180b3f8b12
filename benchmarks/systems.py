"""The systems that are compared, each run as its documentation says: ours, torch.distributed.pipelining, DeepSpeed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.monitor.measured_costs import measure_costs
from pipetrain.plan.plan import make_plan
from pipetrain.runtime.pipeline import Pipeline
from pipetrain.schedule.costs import Costs
from pipetrain.schedule.csv_file import order_of_csv, write_csv
from pipetrain.schedule.families import AUTO
from pipetrain.schedule.make import make
from pipetrain.schedule.placement import stage_ranks_of
from pipetrain.schedule.policy import OFF, Keep, LastStage, Mode, Offload, RecomputePolicy
from pipetrain.schedule.schedule import Schedule
from pipetrain.schedule.schedule_spec import ScheduleSpec
from pipetrain.schedule.search.list_order import Effort
from pipetrain.schedule.search.search import best_schedule

from .emulated import EmulatedWorkload, sleep_in_copies

STAGES_PER_RANK = {"interleaved": 2, "zbv": 2}  # by placement loop and v; other families here have one


class Workload(Protocol):
    """What is trained: layers, how many of them each stage gets, a batch, what goes in and out of a stage, what a rank may need."""

    @property
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    def layers(self) -> list[Callable[[], nn.Module]]: ...
    def balance(self) -> list[int]: ...
    def batch(self) -> tuple[Tensor, Tensor]: ...
    def stage_input(self, stage: int) -> Tensor: ...
    def stage_output(self, stage: int) -> Tensor: ...
    def memory_bytes(self) -> int: ...
    def loss(self, output: Tensor, target: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Account:
    """Where the recomputation of a step went, in seconds per rank; `unexplained` is time that no cause accounts for. `costs`: what
    its ops took. `stage_bytes`: the peak of sets, inputs and what waits for W, without messages on their way."""

    recompute_hidden_seconds: tuple[float, ...]
    recompute_exposed_seconds: tuple[float, ...]
    unexplained_seconds: tuple[float, ...]
    step_seconds: float
    costs: Costs | None = None
    stage_bytes: tuple[int, ...] = ()


class Runner(Protocol):
    """One system, ready to run steps on this rank."""

    def step(self) -> None: ...
    def tensors(self) -> Iterable[Tensor]: ...  # parameters, gradients, buffers, the batch: no activations
    def own_peak_bytes(self) -> int | None: ...
    def account(self) -> Account | None: ...  # of the last step, on rank 0 of a system that knows; collective
    def close(self) -> None: ...


class System(Protocol):
    """What to run; `name` is its row in the tables."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def recomputes(self) -> bool: ...
    @property
    def is_peer(self) -> bool: ...
    def start(self, workload: Workload) -> Runner: ...


def _all_tensors(modules: Iterable[nn.Module], batch: Sequence[Tensor]) -> list[Tensor]:
    found = list(batch)
    for module in modules:
        found += [*module.parameters(), *module.buffers()]
    return found + [tensor.grad for tensor in found if tensor.grad is not None]


def _balance(workload: Workload, stages_per_rank: int) -> list[int]:
    """Layers of each stage, in the order of stages, where ranks hold several."""
    assert all(layers % stages_per_rank == 0 for layers in workload.balance()), "its layers cannot be cut into as many"
    return [layers // stages_per_rank for layers in workload.balance() for _ in range(stages_per_rank)]


def _stage_layers(workload: Workload, stage: int, stages_per_rank: int = 1) -> list[nn.Module]:
    balance = _balance(workload, stages_per_rank)
    first = sum(balance[:stage])
    return [build() for build in workload.layers()[first : first + balance[stage]]]


# Ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """pipetrain: a family of schedules, a mode, and what the ablation changes."""

    family: str = "gpipe"
    mode: Mode = Mode.OVERLAP
    sets: float | None = 1
    last_stage: LastStage = LastStage.AUTO
    transport_ahead: int = 2
    warmup: tuple[int, ...] | None = None
    keep: Keep | None = None
    split_backward: bool = False
    search_seconds: float = 0.0  # of `auto`; 0: its rule alone
    order: str | None = None  # the order for `auto`, as a schedule's file
    label: str | None = None
    segments: int | str = 1
    stash: int | None = None
    selective: tuple[str, ...] = ()
    offload: Offload = Offload.NONE

    @property
    def name(self) -> str:
        return self.label or f"pipetrain {self.family} {self.mode}"

    @property
    def recomputes(self) -> bool:
        return self.mode is not Mode.NEVER

    @property
    def is_peer(self) -> bool:
        return False

    @property
    def policy(self) -> RecomputePolicy:
        # An emulated stage saves memory that nobody has written: there is nothing to prove.
        return RecomputePolicy(
            self.mode,
            sets=self.sets,
            keep=self.keep,
            stash=self.stash,
            last_stage=self.last_stage,
            segments=self.segments,
            selective=self.selective,  # type: ignore[arg-type]
            offload=self.offload,
            verify=OFF,
        )

    @property
    def stages_per_rank(self) -> int:
        return STAGES_PER_RANK.get(self.family, 1)

    @property
    def placement(self) -> str:
        return "v" if self.family == "zbv" else "loop"

    def schedule(self, workload: Workload, num_replicas: int = 1) -> Schedule:
        spec = self._spec(workload, num_replicas)
        if self.order is not None:
            spec = replace(spec, order=order_of_csv(self.order, self.name, spec.shape))
        return make(spec)

    def sought(self, workload: Workload, costs: Costs) -> Ours:
        """The same with the order of `auto` for `costs`, so that no rank searches."""
        if self.family != AUTO:
            return self
        found = best_schedule(self._spec(workload), costs, Effort(self.search_seconds))
        return replace(self, order=write_csv(found.schedule))

    def _spec(self, workload: Workload, num_replicas: int = 1) -> ScheduleSpec:
        return ScheduleSpec(
            family=self.family,
            stage_ranks=stage_ranks_of(
                self.placement,
                workload.num_stages * self.stages_per_rank,
                workload.num_stages,
            ),
            num_microbatches=workload.num_microbatches,
            policy=self._policy_of(workload),
            warmup=self.warmup,
            transport_ahead=self.transport_ahead,
            split_backward=self.split_backward,
            num_replicas=num_replicas,
            costs=workload.costs() if isinstance(workload, EmulatedWorkload) and self.offload is Offload.AUTO else None,
        )

    def _policy_of(self, workload: Workload) -> RecomputePolicy:
        """With the parts where their number is said by the layers; else the pipeline cuts them."""
        is_number = isinstance(self.segments, int)
        return self.policy if is_number else self.policy.of_layers(_balance(workload, self.stages_per_rank))

    def start(self, workload: Workload) -> OursRunner:
        return OursRunner(self, workload)


class OursRunner:
    """A `Pipeline` on this rank, of the ranks of `group` (default: all)."""

    def __init__(
        self, system: Ours, workload: Workload, *, num_replicas: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        layers, balance = workload.layers(), _balance(workload, system.stages_per_rank)
        if isinstance(workload, EmulatedWorkload) and workload.copy_seconds is not None:
            sleep_in_copies(workload.copy_seconds)
        plan = make_plan(
            len(layers),
            num_ranks=workload.num_stages,
            stages_per_rank=system.stages_per_rank,
            num_microbatches=workload.num_microbatches,
            balance=balance,
            placement=system.placement,
            num_replicas=num_replicas,
        )
        self.pipeline = Pipeline(
            layers,
            workload.loss,
            schedule=system.schedule(workload, num_replicas),
            recompute=system.policy,
            plan=plan,
            group=group,
            timeout_seconds=60.0,
        )
        self._batch = workload.batch()

    def step(self) -> None:
        self.pipeline.step(*self._batch)

    def tensors(self) -> Iterable[Tensor]:
        parameters = list(self.pipeline.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*self._batch, *parameters, *gradients]

    def own_peak_bytes(self) -> int | None:
        return self.pipeline.report.peak_activation_bytes

    def account(self) -> Account | None:
        report = self.pipeline.gather_report()
        if report is None:
            return None
        return Account(
            tuple(rank.recompute_hidden_seconds for rank in report.breakdown),
            tuple(rank.recompute_exposed_seconds for rank in report.breakdown),
            tuple(rank.unexplained_seconds for rank in report.breakdown),
            report.step_seconds,
            measure_costs(report.schedule.num_stages, [report.timelines]),
            report.per_rank("peak_stage_bytes"),
        )

    def close(self) -> None:
        self.pipeline.close()


# torch.distributed.pipelining -------------------------------------------------------------------------------------


_TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}


@dataclass(frozen=True)
class TorchPipelining:
    """`ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` or `ScheduleZBVZeroBubble`, with `torch.utils.checkpoint` around the whole stage or without."""

    family: str
    recomputes: bool

    @property
    def name(self) -> str:
        return f"torch {self.family} {'recompute' if self.recomputes else 'no recompute'}"

    @property
    def is_peer(self) -> bool:
        return True

    def start(self, workload: Workload) -> TorchRunner:
        return TorchRunner(self, workload)


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, given, use_reentrant=False)
        return output


def _boundary(tensor: Tensor, *, wants_gradient: bool) -> Tensor:
    return tensor.requires_grad_(wants_gradient)


class TorchRunner:
    """One schedule of torch on this rank, of those of `group` (default: all)."""

    def __init__(self, system: TorchPipelining, workload: Workload, *, group: dist.ProcessGroup | None = None) -> None:
        pipelining = importlib.import_module("torch.distributed.pipelining")
        per_rank = STAGES_PER_RANK.get(system.family, 1)
        last = workload.num_stages * per_rank - 1
        rank = dist.get_rank(group)
        again = last - rank if system.family == "zbv" else rank + workload.num_stages
        numbers = [rank, again][:per_rank]
        self._has_first, self._has_last = 0 in numbers, last in numbers
        self._modules: list[nn.Module] = []
        stages = []
        for number in numbers:
            module: nn.Module = nn.Sequential(*_stage_layers(workload, number, per_rank))
            if system.recomputes:
                module = _Checkpointed(module)
            self._modules.append(module)
            place = number // per_rank  # where boundary tensors differ from stage to stage, no rank has two
            stages.append(
                pipelining.PipelineStage(
                    module,
                    number,
                    last + 1,
                    torch.device("cpu"),
                    input_args=(_boundary(workload.stage_input(place), wants_gradient=number > 0),),
                    output_args=(_boundary(workload.stage_output(place), wants_gradient=True),),
                    group=group,
                )
            )
        kind = getattr(pipelining, _TORCH_SCHEDULES[system.family])
        given = stages if per_rank > 1 else stages[0]
        self._schedule = kind(given, n_microbatches=workload.num_microbatches, loss_fn=workload.loss)
        self._batch = workload.batch()

    def step(self) -> None:
        inputs, targets = self._batch
        given = (inputs,) if self._has_first else ()
        if self._has_last:
            self._schedule.step(*given, target=targets, losses=[])
        else:
            self._schedule.step(*given)

    def tensors(self) -> Iterable[Tensor]:
        return _all_tensors(self._modules, self._batch)

    def gradients(self) -> list[Tensor]:
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def own_peak_bytes(self) -> int | None:
        return None

    def account(self) -> Account | None:
        return None

    def close(self) -> None:
        """Its processes end with it."""


# DeepSpeed --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeepSpeedPipe:
    """`PipelineEngine`, which runs 1F1B, with activation checkpointing every layer's interval = the stage, or without."""

    recomputes: bool
    family: str = "1f1b"

    @property
    def name(self) -> str:
        return f"DeepSpeed {self.family} {'recompute' if self.recomputes else 'no recompute'}"

    @property
    def is_peer(self) -> bool:
        return True

    def start(self, workload: Workload) -> Runner:
        return _DeepSpeedRunner(self, workload)


class _DeepSpeedRunner:
    def __init__(self, system: DeepSpeedPipe, workload: Workload) -> None:
        deepspeed = importlib.import_module("deepspeed")
        # Its shared-memory extension is compiled at the first init and serves collectives that a pipeline does not use.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        pipe = importlib.import_module("deepspeed.pipe")
        checkpointing = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        module = pipe.PipelineModule(
            [build() for build in workload.layers()],
            num_stages=workload.num_stages,
            loss_fn=workload.loss,
            partition_method="uniform",
            activation_checkpoint_interval=max(workload.balance()) if system.recomputes else 0,
            # The reentrant default recomputes nothing on the first stage, whose input needs no gradient.
            activation_checkpoint_func=checkpointing.non_reentrant_checkpoint,
        )
        inputs, targets = workload.batch()
        rows = len(inputs) // workload.num_microbatches
        self._microbatches = list(zip(inputs.split(rows), targets.split(rows)))
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": workload.num_microbatches,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            },
        )
        self._module = module
        self._batch = (inputs, targets)

    def step(self) -> None:
        self._engine.train_batch(data_iter=iter(self._microbatches))

    def tensors(self) -> Iterable[Tensor]:
        return _all_tensors([self._module], self._batch)

    def own_peak_bytes(self) -> int | None:
        return None

    def account(self) -> Account | None:
        return None

    def close(self) -> None:
        """Its processes end with it."""
