"""Runs one rank's part of a call: ranks agree, the batch is cut, the ops run. A rank that fails drops what it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from pipetrain.comm.device import bring
from pipetrain.comm.failure import PipelineError, Watchdog
from pipetrain.comm.transport import Transport, make_edges
from pipetrain.plan.host_memory import checked_limit
from pipetrain.plan.plan import Plan
from pipetrain.runtime.agreement import Call, Calls
from pipetrain.runtime.arguments import SUM
from pipetrain.runtime.assembly import Assembly, Stages
from pipetrain.runtime.call_programs import Programs, Proving
from pipetrain.runtime.cut import (
    CountFn,
    checked_rows,
    count_targets,
    is_number,
    rows_fault,
    shares_of_rows,
    slices,
    whole_tensors,
)
from pipetrain.runtime.executor import Executor, Step
from pipetrain.runtime.generation import Choose, Generation, OnToken, Request
from pipetrain.runtime.host_copies import HostCopies
from pipetrain.runtime.losses import LossCheck, LossNotFinite
from pipetrain.runtime.skips import Skips
from pipetrain.schedule.alive import peak_on_host
from pipetrain.schedule.policy import RecomputePolicy
from pipetrain.stage.layer_state import BUFFERS, PARAMETERS, modules_below, tensors_below
from pipetrain.stage.past import set_trainable
from pipetrain.stage.seeding import generators_restored


class CallRunner:
    """Runs calls on the stages of one rank, together with the other ranks of `parts.group`. The constructor raises PipelineError: a
    rank that holds a neighbouring stage cannot be reached."""

    def __init__(
        self,
        parts: Assembly,
        plan: Plan,
        programs: Programs,
        stages: Stages,
        policy: RecomputePolicy,
        count_fn: CountFn | None,
        loss_reduction: str,
        checks_loss: bool,
    ) -> None:
        self._parts, self._device, self.is_closed = parts, parts.lanes.device, False
        self._group = group = parts.group
        self._count_fn, self._loss_reduction = count_fn, loss_reduction
        self._skips = Skips(parts.known_layers, parts.loss_fn, plan, parts.place)
        self._loss_check = None
        self._is_last, self._has_shared = plan.num_stages - 1 in stages, len(parts.shared) > 0
        if checks_loss and parts.loss_fn is not None and self._is_last:
            warns = group.coordinates.replica == 0
            last_layer = plan.num_layers - 1
            self._loss_check = LossCheck(parts.loss_fn, count_fn, loss_reduction, last_layer, parts.fetch, warns)
        self.trained = programs.whole().schedule  # the schedule of the last call with a graph
        before = self._device.memory().other_bytes
        self.transport = _connect(parts, plan, programs)
        after = self._device.memory().other_bytes
        # None: the device does not report its memory. The figure is wrong if another process takes or frees memory meanwhile.
        self.communicator_bytes = None if before is None or after is None else max(0, after - before)
        self.executor = Executor(group.rank, {}, self.transport, parts.lanes, group.monitor, group.board)
        self.adopt(plan, programs, stages, policy)
        group.monitor.on_failure = self._break_off
        # On a GPU the computing thread may be stuck in a launch, where it cannot notice that another rank failed.
        self._watchdog = Watchdog(group.monitor) if self._device.runs_ahead else None

    def adopt(self, plan: Plan, programs: Programs, stages: Stages, policy: RecomputePolicy) -> None:
        """Set the programs and stages of later calls; connections stay. Every rank must call it between the same two calls."""
        group, copies = self._group, self._parts.copies.apart if self._parts.ties else None
        self._plan, self._programs, self._stages = plan, programs, stages
        self._proving = Proving(stages, policy.verify)
        self._calls = Calls(group, plan, stages, copies)
        self._shared_gradients = self._parts.shared_gradients(stages, programs)
        self.executor.change(stages, self._shared_gradients)
        if self.executor.copies is not None:
            self.executor.copies.close()
            self.executor.copies = None
        if (schedule := programs.whole().schedule).offloaded:
            most = {stage: peak_on_host(schedule, stage)[0] for stage in stages}
            self.executor.copies = HostCopies(
                self._parts.lanes,
                group.monitor,
                self._parts.meter,
                group.device,
                checked_limit(policy.host_bytes),
                most,
                lambda op, land: self.transport.ended.append((op, land)),
            )

    def run(
        self, kind: str, step: Step, inputs: Any, targets: Any, *, is_training: bool, mistake: str | None = None
    ) -> Call:
        """Run all ops of this rank; returns when the rank's messages have left. `step.outputs` is filled then. Collective.

        Raises ValueError before any op runs. On every rank: inputs that cannot be cut, targets that cannot be counted, or a `mistake` of
        the first stage's rank. On this rank only: its own `mistake`. On the last stage's rank only: no loss_fn, targets that do not fit
        the inputs, or no parameter to train. PipelineError: another rank failed. Also raises what an op of this rank raises.
        """
        self.check_usable()
        if step.with_graph:
            mistake = mistake_in_step(step.scale) or mistake
        count = None
        if self._count_fn is not None and step.with_loss:
            # Counts the targets on the host: a count on the device would wait for all queued work.
            m, whole = self._plan.num_microbatches, step.with_graph
            count = partial(count_targets, targets, m, self._count_fn, all_of_them=whole)
        call = self._calls.agree(
            kind, step.index, inputs, is_training=is_training, count=count, mistake=mistake, left=self._skips.reported
        )
        monitor, lacks_targets = self._group.monitor, targets is None and step.with_loss and self._is_last
        with self.failing_together(
            f"{kind} was given no targets on {monitor.name}, which holds the last stage" if lacks_targets else ""
        ):
            if mistake is not None:  # of this rank: `agree` has raised that of the first stage's rank
                raise ValueError(f"{mistake} (on {monitor.name})")
            self._cut(call, step, inputs, targets)
            with self._parts.shared.unchanged(is_training=is_training) if self._has_shared else nullcontext():
                self._execute(call, step)
        return call

    def check_usable(self) -> None:
        """Raise PipelineError if the pipeline is closed, or failed before, here or on another rank."""
        if self.is_closed:
            raise PipelineError("the pipeline is closed")
        if self._group.monitor.failure is not None:
            raise PipelineError(f"the pipeline failed before and cannot go on: {self._group.monitor.failure}")

    @contextmanager
    def failing_together(self, note: str = "") -> Iterator[None]:
        """Run a block of ops. If it fails, drop what is held, add `note` to the error, and tell the other ranks. Raises PipelineError:
        another rank failed meanwhile."""
        try:
            yield
            if self._group.monitor.failure is not None:  # noted by another thread after all ops were launched
                raise PipelineError(f"{self._group.monitor.failure} (rank {self._group.rank} ends)")
        except BaseException as error:
            self.executor.drop()
            if note:
                error.add_note(note)
            broken_off: str | None = self._group.monitor.failure
            self._group.fail(error)
            if broken_off is not None and not isinstance(error, PipelineError):
                # Another rank failed, so the connections were broken while ops were launched: that caused this error.
                raise PipelineError(f"{broken_off} (rank {self._group.rank} ends)") from error
            raise
        finally:
            self._group.monitor.doing = None

    def generate(self, request: Request, choose: Choose | None, on_token: OnToken | None) -> list[Tensor]:
        """Return the new tokens of each prompt of a `request` on which all ranks have agreed. Collective."""
        self._exclude_weights()
        program = self._programs.inference(1)
        with self.failing_together():
            try:
                return Generation(
                    request, self._plan, program, self.executor, self.transport, self._parts, choose, on_token
                ).run()
            finally:
                set_trainable(self._parts.layers.values())

    def _cut(self, call: Call, step: Step, inputs: Any, targets: Any) -> None:
        m, step.idle = call.num_microbatches, call.idle
        here = partial(bring, where=self._group.device, device=self._device)
        step.first_microbatch = self._group.coordinates.replica * self._plan.num_microbatches
        if 0 in self._stages:
            step.microbatches = slices(inputs, m, here)
            step.whole_inputs = whole_tensors(inputs, "inputs")
        if not self._is_last:
            return
        if step.with_loss:
            if self._parts.loss_fn is None:
                raise ValueError("this Pipeline has no loss_fn, which step and evaluate need")
            rows = checked_rows(targets, "targets", with_graph=step.with_graph, rows_of_inputs=call.rows)
            if fault := rows_fault(rows, call.rows):
                raise ValueError(fault)
            step.targets = slices(targets, m, here)
            step.shares = shares_of_rows(call.rows, m) if call.weights is None else call.weights
            is_sum = self._loss_reduction == SUM
            step.weights = [float(share > 0) for share in step.shares] if is_sum else step.shares
            step.whole_targets = whole_tensors(targets, "targets")
        if step.with_graph and call.first_backward > max(self._stages):
            raise ValueError("nothing in the model needs a gradient: no parameter has requires_grad=True")

    def _execute(self, call: Call, step: Step) -> None:
        self._exclude_weights()
        if step.with_graph:
            self._parts.meter.start_step()
            program = self._programs.training(call.first_backward)
            step.proved, witnessed = self._proving.choose(call.signature, step.index, program, call.idle)
            # Not on a GPU: R may run other kernels than F, and the host would have to wait for the checksums.
            step.witnessed = frozenset() if self._device.runs_ahead else witnessed
            self.trained = program.schedule
        else:
            program = self._programs.inference(call.num_microbatches)
        if self.transport.has_peers:
            self.transport.start_step(call.forms, described=call.described)
        with ExitStack() as around:
            around.enter_context(generators_restored(self._group.device))
            if step.with_graph:
                if self._loss_check is not None and not self._loss_check.is_done:
                    around.enter_context(self._loss_check.over(step))
                if not self._skips.is_done:
                    around.enter_context(self._skips.over(step, call.left))
            self.executor.run(program, step)
        if program.reduces:
            self._shared_gradients.finish(self._parts.fetch)

    def _exclude_weights(self) -> None:
        modules = modules_below(self._parts.layers.values())
        self._parts.meter.exclude([*tensors_below(modules, PARAMETERS), *tensors_below(modules, BUFFERS)])

    def loss_of(self, step: Step) -> Tensor:
        """Return the sum of the losses of all microbatches of all replicas, in order, 0-dim on every rank's host. Collective. Raises
        LossNotFinite: the loss of a microbatch is not finite."""
        group, root, told = self._group, self._plan.stage_ranks[-1], b""
        what = f"the loss of step {step.index + 1}"
        if group.chain.rank == root:
            own = json.dumps(self._own_losses(step)).encode()
            told = json.dumps(_sum_of(map(json.loads, group.replicas.concatenate(own, what)))).encode()
        total, dtype, bad = json.loads(group.chain.broadcast(told, root, what))
        if bad is not None:
            raise LossNotFinite(step.index, bad, total)
        return torch.tensor(total, dtype=getattr(torch, dtype))

    def _own_losses(self, step: Step) -> tuple[str | None, list[tuple[int, float]]]:
        """Return the dtype of this replica's losses, and the number and value of each. One float64 tensor, which holds any dtype exactly,
        brings all of them to the host at once."""
        if not step.outputs:  # all microbatches of this replica are idle
            return None, []
        numbers, losses, ordered = list[int](), list[Tensor](), sorted(step.outputs.items())
        first = ordered[0][1]
        for number, loss in ordered:
            numbers.append(step.first_microbatch + number)
            losses.append(loss.to(first.device).double())
        values = self._parts.fetch(torch.stack(losses), "the loss of the step").tolist()
        return str(first.dtype).removeprefix("torch."), list(zip(numbers, values))

    def close(self) -> None:
        """End the threads and connections between stages."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self.executor.copies is not None:
            self.executor.copies.close()
        self.transport.close()

    def _break_off(self) -> None:
        """End all waits on connections of this rank, on every thread and device."""
        self.transport.abort()
        self._group.everyone.abort()


def mistake_in_step(scale: Any) -> str | None:
    """Return why a step may not run now: `scale` is invalid, or gradients are switched off. None: it may."""
    if not is_number(scale) or not math.isfinite(scale) or scale == 0:
        return f"step was given scale={scale!r}: a finite number other than 0 is needed, as it multiplies the gradients"
    if torch.is_grad_enabled():
        return None
    around = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
    return f"step was called under {around}(), where no gradients are made: call it outside, or call evaluate(...) for the loss alone"


def _sum_of(replicas: Iterable[tuple[str | None, list[tuple[int, float]]]]) -> tuple[float, str, int | None]:
    """Return, from the `_own_losses` of all replicas, the sum in the losses' own dtype, that dtype, and the first microbatch whose loss is
    not finite."""
    dtype, values, bad = "", list[float](), None
    for of_replica, losses in replicas:
        dtype = dtype or of_replica or ""
        for number, loss in losses:
            values.append(loss)
            if bad is None and not math.isfinite(loss):
                bad = number
    total, *others = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype)).unbind()
    for other in others:
        total = total + other
    return float(total), dtype, bad


def _connect(parts: Assembly, plan: Plan, programs: Programs) -> Transport:
    """Connect to the ranks of neighbouring stages, and of the same stages in other replicas; return this rank's transport."""
    group, lanes = parts.group, parts.lanes
    replica = group.coordinates.replica
    replicas = [
        [group.grid.ranks_of_replica(first)[place] for place in plan.stage_ranks]
        for first in group.grid.ranks_of_stage(0)
    ]
    edges = None
    if group.store is not None:
        several = len(replicas) > 1
        edges = make_edges(
            PrefixStore(f"replica/{replica}", group.store) if several else group.store,
            lanes,
            group.monitor,
            group.device,
            replicas[replica],
            edges=plan.edges,
            communicators=plan.communicators,
            of_all=group.store,
        )
    tied, named = programs.whole().schedule.tied, group.monitor.named
    return Transport(replicas[replica], group.rank, edges, parts.meter, group.device, lanes, tied, replicas, named)
