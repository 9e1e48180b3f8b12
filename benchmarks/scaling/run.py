"""What each rank holds and sends by option, computed before anything runs and counted in a step: replicas, ZeRO, parts, the order of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetrain.comm.gloo import GlooEnd, GlooReducer
from pipetrain.config.load import load_config
from pipetrain.data.batch import Batch
from pipetrain.engine.engine import make_engine
from pipetrain.models.spec import make_spec
from pipetrain.plan.mesh import ACTIVATIONS, GRADIENTS, REDUCE, UPDATES, Mesh, MeshRank
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.op import Op
from pipetrain.trainer.prepare import predict, predict_mesh, prepare

from ..ranks import preload, run_ranks
from ..result import Options, Result, Table, Target

CLAIM = "what a rank holds and sends is known before a run, to the byte but for the marks beside the gradients"
VOCABULARY, LENGTH, SAMPLES = 256, 64, 32
MODEL = (
    "pipeline.schedule=1f1b",
    "pipeline.num_microbatches=4",
    "recompute.mode=inline",
    "model.num_hidden_layers=6",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    f"model.vocab_size={VOCABULARY}",
    f"data.sequence_length={LENGTH}",
    f"data.global_batch_size={SAMPLES}",
    "cluster.num_nodes=2",
)
CASES = {
    "1 x 2": ("parallel.num_replicas=1", "pipeline.num_stages=2"),
    "1 x 4": ("parallel.num_replicas=1", "pipeline.num_stages=4"),
    "2 x 2": ("parallel.num_replicas=2", "pipeline.num_stages=2"),
    "2 x 2, order=stage-replica": ("parallel.num_replicas=2", "pipeline.num_stages=2", "parallel.order=stage-replica"),
    "2 x 2, segments=4": ("parallel.num_replicas=2", "pipeline.num_stages=2", "recompute.segments=4"),
    "2 x 2, zero=1": ("parallel.num_replicas=2", "pipeline.num_stages=2", "parallel.zero_stage=1"),
    "4 x 1": ("parallel.num_replicas=4", "pipeline.num_stages=1"),
    "4 x 1, zero=1": ("parallel.num_replicas=4", "pipeline.num_stages=1", "parallel.zero_stage=1"),
}
HELD = ("weights", "their gradients", "optimizer")
SENT = (ACTIVATIONS, GRADIENTS, REDUCE, UPDATES)


@dataclass(frozen=True)
class Figures:
    """Of one rank: bytes that it holds, and of a step messages and bytes that it sends, by what they are."""

    held: dict[str, int]
    messages: dict[str, int]
    sent: dict[str, int]


def run(options: Options) -> Result:
    preload("pipetrain.engine.engine", "pipetrain.trainer.prepare", "pipetrain.config.load")
    result = Result("scaling", CLAIM, settings={"model": MODEL})
    rows = []
    for name, overrides in list(CASES.items())[2:3] if options.quick else CASES.items():
        mesh = mesh_of_case(overrides)
        counted = run_ranks(len(mesh.ranks), count_step, overrides, timeout_seconds=300.0)
        apart = [_apart(computed(rank), found) for rank, found in zip(mesh.ranks, counted)]
        rows += _lines(name, mesh, apart)
        what = f"{name}: most that anything counted differs from what was computed"
        result.targets.append(Target(what, max(apart), 0.01))
        result.data[name] = {"computed": mesh.as_json(), "counted": [vars(one) for one in counted]}
    heads = ("replicas x stages", "stage", *HELD, *SENT, "counted differs", "crosses nodes")
    title = (
        "as computed, kB: what the fullest rank of a stage holds, and of a step its messages and the bytes in them; by how much what was counted "
        "differs; and what crosses between two nodes, of all ranks"
    )
    result.tables.append(Table(title, heads, tuple(rows)))
    return result


def mesh_of_case(overrides: Sequence[str]) -> Mesh:
    """What `pipetrain show --mesh` says of it."""
    config = load_config([*MODEL, *overrides])
    mesh, unknown = predict_mesh(config, predict(config).schedule)
    assert not unknown, unknown
    return mesh


def count_step(overrides: Sequence[str]) -> Figures:
    """On one rank: the second step of a run of random tokens, its messages counted as they are handed to gloo."""
    counts = _Counts()
    config = load_config([*MODEL, *overrides])
    made = prepare(config, dist.get_world_size())
    engine = make_engine(
        config,
        make_spec(config.model, VOCABULARY),
        made.plan,
        made.schedule,
        device=torch.device("cpu"),
        on_event=lambda _: None,
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES // made.plan.num_replicas, LENGTH + 1))
    batch, held = Batch(tokens[:, :-1], tokens[:, 1:]), dict.fromkeys(HELD, 0)
    parameters = list(engine.model.parameters())

    def look(step: int, loss: float, norm: float | None) -> bool:  # noqa: ARG001
        held["their gradients"] = _bytes(one.grad for one in parameters if one.grad is not None)
        return True

    engine.step(1, batch, look)
    counts.clear()
    engine.step(2, batch, look)
    held["weights"] = _bytes(parameters)
    state = (value for of_one in engine.optimizer.state.values() for value in of_one.values())
    held["optimizer"] = _bytes(value for value in state if isinstance(value, Tensor) and value.dim() > 0)
    figures = Figures(held, dict(counts.messages), dict(counts.sent))
    dist.barrier()
    engine.close()
    return figures


class _Counts:
    """Messages of this process, counted where they are handed over, and the bytes in them."""

    def __init__(self) -> None:
        self.messages: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)
        send, reduce, broadcast = GlooEnd.send, GlooReducer.reduce, dist.broadcast

        def counted_send(self_: GlooEnd, op: Op, form: Any, tensors: list[Tensor], *args: Any, **options: Any) -> None:
            self._count(ACTIVATIONS if op.kind is Kind.SEND_F else GRADIENTS, tensors)
            send(self_, op, form, tensors, *args, **options)

        def counted_reduce(self_: GlooReducer, op: Op, tensors: list[Tensor], *args: Any, **options: Any) -> None:
            self._count(REDUCE, tensors)
            reduce(self_, op, tensors, *args, **options)

        def counted_broadcast(tensor: Tensor, src: int, *args: Any, **options: Any) -> Any:
            if src == dist.get_rank():
                self._count(UPDATES, [tensor])
            return broadcast(tensor, src, *args, **options)

        GlooEnd.send = counted_send  # type: ignore[method-assign]
        GlooReducer.reduce = counted_reduce  # type: ignore[method-assign]
        dist.broadcast = counted_broadcast

    def clear(self) -> None:
        self.messages.clear()
        self.sent.clear()

    def _count(self, what: str, tensors: Iterable[Tensor]) -> None:
        self.messages[what] += 1
        self.sent[what] += _bytes(tensors)


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def computed(rank: MeshRank) -> Figures:
    """The same of a rank of the mesh."""
    held = dict(zip(HELD, (rank.weight_bytes or 0, rank.gradient_bytes or 0, rank.optimizer_bytes or 0)))
    messages = {kind: sent.number or 0 for kind, sent in rank.sent.items()}
    return Figures(held, messages, {kind: sent.num_bytes or 0 for kind, sent in rank.sent.items()})


def _apart(wanted: Figures, found: Figures) -> float:
    """The most by which bytes differ, as a part of what was computed; a message more or less is all of it."""
    pairs = [(wanted.held[what], found.held[what]) for what in HELD]
    pairs += [(wanted.sent.get(kind, 0), found.sent.get(kind, 0)) for kind in SENT]
    numbers = [float(wanted.messages.get(kind, 0) != found.messages.get(kind, 0)) for kind in SENT]
    return max(*numbers, *(abs(there - expected) / max(expected, 1) for expected, there in pairs))


def _lines(name: str, mesh: Mesh, apart: Sequence[float]) -> list[tuple[str, ...]]:
    """A line for each stage: of its ranks the one that holds most."""
    lines = []
    for place in range(mesh.grid.stage):
        ranks = [rank for rank in mesh.ranks if rank.place == place]
        fullest = computed(max(ranks, key=lambda rank: rank.optimizer_bytes or 0))
        sent = [
            f"{fullest.messages[kind]}: {_kilo(fullest.sent[kind])}" if fullest.sent.get(kind) else "-" for kind in SENT
        ]
        crossing = _kilo(_crossing_bytes(mesh)) if place == 0 else ""
        differs = f"{max(apart[rank.rank] for rank in ranks):.2%}"
        lines.append(
            (
                name if place == 0 else "",
                str(place),
                *(_kilo(fullest.held[what]) for what in HELD),
                *sent,
                differs,
                crossing,
            )
        )
    return lines


def _crossing_bytes(mesh: Mesh) -> int:
    """Of a step, what goes from one node to another between stages, and what ranks of two nodes give to add up."""
    edges = sum(sent.num_bytes or 0 for edge in mesh.edges if edge.crosses_nodes for sent in edge.sent.values())
    return edges + sum(len(group.ranks) * (group.sent.num_bytes or 0) for group in mesh.groups if group.crosses_nodes)


def _kilo(count: int) -> str:
    return f"{count / 1e3:.1f}"
