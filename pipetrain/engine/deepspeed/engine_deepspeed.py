"""DeepSpeed's `PipelineEngine` behind the engine protocol: the same model, data, figures and snapshots as the native engine.

train_batch:  F and B of all microbatches, 1F1B
              ReduceGrads     [1] before it all ranks learn the loss of the step; where that is not finite, nothing is reduced
                              [2] after it we clip by the norm over all stages, and ask whether the step is accepted
              OptimizerStep   [3] AdamW, plain (ZeRO 0) or on flat tensors over the replicas (ZeRO 1); not where it is refused
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.comm.coordinates import Coordinates, Grid
from pipetrain.comm.courier import closing_ports
from pipetrain.comm.device import device_of
from pipetrain.comm.failure import PipelineError
from pipetrain.comm.torch_distributed import all_gather_bytes
from pipetrain.config.records import RunConfig
from pipetrain.data.batch import Batch
from pipetrain.engine.deepspeed.environment import import_deepspeed, join_world, quiet_stdout
from pipetrain.engine.engine import Accepts, Precision
from pipetrain.models.loss import IGNORED
from pipetrain.models.spec import ModelSpec
from pipetrain.models.trained import Optimizer
from pipetrain.monitor.step_report import StepFigures, StepResult
from pipetrain.optim.optimizer import learning_rate, make_optimizer, what_broke
from pipetrain.plan.plan import Plan
from pipetrain.schedule.schedule import Schedule
from pipetrain.stage.seeding import generators_restored

_T = TypeVar("_T")
_Microbatch = tuple[Tensor, tuple[Tensor, Tensor]]  # inputs, and targets with their weight
# What computes and talks to no other rank: an error there is no lost connection.
_COMPUTES = ("_exec_load_micro_batch", "_exec_forward_pass", "_exec_backward_pass")
_NEIGHBOUR = {
    "_exec_send_activations": 1,
    "_exec_recv_activations": -1,
    "_exec_send_grads": -1,
    "_exec_recv_grads": 1,
}


class DeepSpeedEngine:
    """Trains the model of `spec` with a stage of a replica on each rank of torch.distributed; a batch is a tensor of inputs and one of
    targets. Of the schedule it takes the policy, not the order."""

    def __init__(
        self,
        config: RunConfig,
        spec: ModelSpec,
        plan: Plan,
        schedule: Schedule,
        *,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._config = config
        self._spec = spec
        self._plan = plan
        self._device = device
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._grid = grid = Grid(plan.num_replicas, plan.num_ranks, order=plan.order)
        self._at = grid.coordinates_of(self._rank)
        self._rows = config.data.global_batch_size // (plan.num_microbatches * grid.replica)
        zero = config.parallel.zero_stage
        self._result = StepResult(0.0, 0.0, None)
        self._started = self._step_seconds = 0.0
        self._step = 0
        timeout = timedelta(seconds=config.timeout_seconds)
        deepspeed = import_deepspeed(device)
        with closing_ports():
            self._group = dist.new_group(backend="gloo", timeout=timeout)  # for figures, on the host
        with quiet_stdout(), generators_restored(device):
            join_world(deepspeed, timeout)
            from pipetrain.engine.deepspeed.stages import ShardedAdamW, StagedModule

            self.model = StagedModule(spec, plan, schedule.policy, grid, config.seed, device)
            optimizer = make_optimizer(config.optim, self.model.parameters())
            with self._naming_a_loss():
                self._engine, *_ = deepspeed.initialize(
                    model=self.model,
                    optimizer=optimizer,
                    config=_settings(self._rows, plan.num_microbatches, zero, precision),
                )
        self._sharded = ShardedAdamW(self._engine.optimizer) if zero else None
        self.optimizer: Optimizer = self._sharded or optimizer
        if zero:  # else ZeRO's own copy would overwrite what was loaded
            self.model.on_load = self._engine.optimizer.refresh_fp32_params
        self._engine._INSTRUCTION_MAP = self._instructions()

    def start_at(self, step: int) -> None:
        """Nothing to do: `step` takes its number as an argument."""

    def change(self, plan: Plan, schedule: Schedule) -> NoReturn:  # noqa: ARG002
        raise ValueError("engine=deepspeed trains the whole run by one plan; use phases=[], or engine=native")

    def step(self, step: int, batch: Batch, accepts: Accepts) -> StepResult:
        rate = learning_rate(self._config.optim, step, self._config.num_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._step, self.model.step, self._accepts = step, step - 1, accepts
        self.model.micro_offset = 0  # microbatches are counted from here
        self._started = time.perf_counter()
        with self._naming_a_loss():
            self._engine.train_batch(iter(self._cut(batch)))
        return replace(self._result, learning_rate=rate)

    def diagnose(self, batch: Batch) -> None:
        """DeepSpeed has no way to watch a step."""

    def check_replicas(self) -> None:
        """Whether all replicas have the same weights. Collective.

        Raises PipelineError: they do not; it names the ranks that differ from replica 0's.
        """
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        digests = self._of_all(digest.hexdigest())
        differ = [
            f"rank {rank} (replica {self._grid.coordinates_of(rank).replica})"
            for rank, digest in enumerate(digests)
            if digest != digests[self._grid.ranks_of_stage(rank)[0]]
        ]
        if differ:
            raise PipelineError(
                f"after step {self._step} the weights of {' and '.join(differ)} are not those of the same stage in replica 0: something "
                "other than the optimizer changed them, or a machine computes wrongly; resume=auto resumes from the last snapshot"
            )

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        total = num_counted = 0.0
        for batch in batches:
            microbatches = self._cut(batch)
            with self._naming_a_loss():
                loss = self._engine.eval_batch(iter(microbatches), num_micro_batches=len(microbatches))
            count = self._spec.count(batch.targets)
            total += float(loss) * count
            num_counted += count
        return total / num_counted if num_counted else None

    def gather_report(self) -> StepFigures | None:
        """Time of rank 0, whose F0 is the first op of a 1F1B step and whose last B is the last."""
        peaks = self._of_all(device_of(self._device).memory().peak_bytes)
        return StepFigures(self._step_seconds, tuple(peaks)) if self._rank == 0 else None

    def weights(self) -> Mapping[str, Tensor]:
        state: Mapping[str, Tensor] = self.model.state_dict()
        return state

    def close(self) -> None:
        self._engine.destroy()

    def _instructions(self) -> dict[Any, Callable[..., None]]:
        """DeepSpeed's table from instruction to method, with `_reduce` around the reduction, which says whether there is a step."""
        from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceGrads

        table: dict[Any, Callable[..., None]] = dict(self._engine._INSTRUCTION_MAP)
        reduce, update = table[ReduceGrads], table[OptimizerStep]

        def _exec_reduce_grads(engine: Any, **options: Any) -> None:
            self._reduce(lambda: reduce(engine, **options))

        def _exec_optimizer_step(engine: Any, **options: Any) -> None:
            if self._result.is_accepted:
                update(engine, **options)
            else:
                engine.module.zero_grad(set_to_none=True)

        return {**table, ReduceGrads: _exec_reduce_grads, OptimizerStep: _exec_optimizer_step}

    def _reduce(self, reduce: Callable[[], None]) -> None:
        """All B of this rank are done: its gradients are summed up over the replicas, and clipped; `_result` says whether they may be used.

        DeepSpeed's own clipping stays off: without ZeRO its norm is that of the first stage alone.
        """
        ended = time.perf_counter()
        total = self._engine.total_loss
        losses = self._of_all(0.0 if total is None else float(total) / self._plan.num_microbatches)
        last = self._plan.num_stages - 1
        loss = sum(losses[self._rank_of(last, replica)] for replica in range(self._grid.replica)) / self._grid.replica
        norm = None
        reduced = time.perf_counter()
        if math.isfinite(loss):
            reduce()
            self._step_seconds = ended - self._started + (time.perf_counter() - reduced) * (self._grid.replica > 1)
            norm = self._clip(self._config.optim.max_grad_norm or math.inf)
        self._result = StepResult(loss, 0.0, norm, self._accepts(self._step, loss, norm))
        if not self._result.is_accepted and self._sharded is not None:
            self._sharded.drop_gradients()

    def _clip(self, limit: float) -> float:
        """The norm over all stages, in which each weight counts once; the same on every rank."""
        parameters = list(self.model.parameters())
        if self._sharded is not None:
            return clip(self._sharded.gradients(), parameters, self._at.stage, limit, self._of_all)
        # The first replica's norms, for all: no replica may decide otherwise about a step than another.
        given = ((parameter.grad, parameter) for parameter in parameters if parameter.grad is not None)
        return clip(given, parameters, self._at.stage, limit, self._of_all, are_counted=self._at.replica == 0)

    def _rank_of(self, stage: int, replica: int) -> int:
        return self._grid.rank_of(Coordinates(replica, stage, 0))

    def _of_all(self, value: _T) -> list[_T]:
        """What each rank gives of what JSON knows, on every rank. Collective."""
        with self._naming_a_loss():
            return [json.loads(part) for part in all_gather_bytes(json.dumps(value).encode(), self._group)]

    def _cut(self, batch: Batch) -> list[_Microbatch]:
        """Microbatches of one size, as DeepSpeed's buffers need: the last one of an evaluation is padded with rows that do not count.

        Raises ValueError: inputs or targets are not one tensor.
        """
        if self._spec.take_batch is not None:
            batch = Batch(*self._spec.take_batch(*batch))
        inputs, targets = batch
        for name, tree in batch._asdict().items():
            if not isinstance(tree, Tensor):
                raise ValueError(
                    f"engine=deepspeed: the {name} of a batch are a {type(tree).__name__}, and its pipeline takes one tensor; "
                    "use engine=native"
                )
        missing = -len(inputs) % self._rows
        if missing:
            inputs = torch.cat([inputs, inputs[:1].expand(missing, -1)])
            targets = torch.cat([targets, torch.full_like(targets[:1], IGNORED).expand(missing, -1)])
        pieces = list(zip(torch.split(inputs, self._rows), torch.split(targets, self._rows)))
        count, replicas = self._spec.count, self._grid.replica
        total = count(targets)  # of what counts in all replicas
        if replicas > 1:
            counts = self._of_all(total)
            total = sum(counts[self._rank_of(0, replica)] for replica in range(replicas))
        share = len(pieces) * replicas / max(total, 1)
        return [(piece, (labels, torch.tensor(count(labels) * share))) for piece, labels in pieces]

    @contextlib.contextmanager
    def _naming_a_loss(self) -> Iterator[None]:
        """What a broken connection or a time-out means, and where it was."""
        try:
            yield
        except RuntimeError as error:
            current = getattr(getattr(self, "_engine", None), "_exec_instr", None)
            instruction = current.__func__.__name__ if current is not None else ""
            if instruction in _COMPUTES or isinstance(error, PipelineError):
                raise
            if instruction in _NEIGHBOUR:
                peer = f"rank {self._rank_of(self._at.stage + _NEIGHBOUR[instruction], self._at.replica)}"
            else:
                peer = f"rank {1 - self._rank}" if self._num_ranks == 2 else "another rank"
            where = f"{instruction.removeprefix('_exec_') or 'its start'} of step {self._step}"
            raise PipelineError(what_broke(str(error), self._rank, peer, where, f"{peer} in {where}")) from error


@torch.no_grad()
def clip(
    gradients: Iterable[tuple[Tensor, Tensor]],
    parameters: Iterable[Tensor],
    stage: int,
    limit: float,
    of_all: Callable[[Any], list[Any]],
    *,
    are_counted: bool = True,
) -> float:
    """Scale the reduced gradients so that their norm over all stages is at most `limit`; return the norm before.

    `gradients` are what this rank has of them, each with its parameter; they are not counted on a rank if another rank has the same.
    `parameters` are those of the stage, in the model's order. `of_all` returns what each rank gives it, on every rank.
    """
    here = list(gradients)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    own = [(numbers[id(one)], float(torch.linalg.vector_norm(piece))) for piece, one in here if are_counted]
    pieces: dict[tuple[int, int], list[float]] = {}
    for of_stage, norms in of_all((stage, own)):
        for number, norm in norms:
            pieces.setdefault((of_stage, number), []).append(norm)
    # One piece is the gradient: then the norm is that of a model in one piece, bit for bit.
    norms = [norms[0] if len(norms) == 1 else math.hypot(*norms) for _, norms in sorted(pieces.items())]
    total = torch.linalg.vector_norm(torch.tensor(norms))
    if math.isfinite(limit):
        factor = torch.clamp(limit / (total + 1e-6), max=1.0)
        for piece, _ in here:
            piece.mul_(factor)
    return float(total)


def _settings(rows: int, num_microbatches: int, zero: int, precision: Precision) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 0.0,  # its default is 1.0
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": zero,
            "overlap_comm": False,
            # With ZeRO its own norm hangs where stages differ in their number of parameter groups. Ours is taken.
            "compute_grad_norm": zero == 0,
            "contiguous_gradients": False,  # with a pipeline it would take a buffer of 2 GB for nothing
        },
        # Weights stay float32: its `bf16` mode without ZeRO saves what it cannot load.
        "torch_autocast": {"enabled": precision.autocast, "dtype": "bfloat16"},
    }
