"""Replicas sum their gradients in buckets; a sum has the strides and layout of its parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipetrain.runtime.gradients import SharedGradients
from pipetrain.schedule.kinds import Kind
from pipetrain.schedule.op import Op

REDUCES = (Op(1, Kind.REDUCE_GRAD, None, 1), Op(1, Kind.REDUCE_GRAD, None, 0), Op(3, Kind.REDUCE_GRAD, None, 0))


@dataclass
class Replicas:
    """What each replica's rank has of the same parts; sums are taken as a transport would."""

    parts: list[dict[tuple[int, int | None], list[nn.Parameter]]]

    def __post_init__(self) -> None:
        self.shared = [SharedGradients({}, parts) for parts in self.parts]

    def step(self, *gradients: Callable[[dict[tuple[int, int | None], list[nn.Parameter]]], None]) -> list[int]:
        """Each replica's parameters get their gradients, then all are summed. Returns how many tensors there were to sum."""
        counts = []
        for one, own, give in zip(self.shared, self.parts, gradients, strict=True):
            one.start_step(REDUCES)
            give(own)
        for op in REDUCES:
            given = [one.given(op) for one in self.shared]
            counts.append(len(given[0]))
            for tensors in zip(*given, strict=True):
                total = sum(tensors[1:], start=tensors[0].clone())
                for tensor in tensors:
                    assert tensor.is_contiguous()
                    tensor.copy_(total)
            for one in self.shared:
                one.settle(op)
        for one in self.shared:
            one.end_step()
            one.finish(lambda tensor, what: tensor)
        return counts


def parameters_of_parts() -> dict[tuple[int, int | None], list[nn.Parameter]]:
    torch.manual_seed(0)
    plain, shared, late = (nn.Parameter(torch.randn(3, 4)) for _ in range(3))
    columns = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    half = nn.Parameter(torch.randn(5).bfloat16())
    large = nn.Parameter(torch.randn(600, 512))
    frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    return {(1, 1): [plain, shared, half, frozen], (1, 0): [shared, large, columns], (3, 0): [shared, late]}


def names_of(parts: dict[tuple[int, int | None], list[nn.Parameter]]) -> dict[str, nn.Parameter]:
    plain, shared, half, frozen = parts[1, 1]
    _, large, columns = parts[1, 0]
    return {
        "plain": plain,
        "shared": shared,
        "half": half,
        "frozen": frozen,
        "large": large,
        "columns": columns,
        "late": parts[3, 0][1],
    }


def give(seed: int, *without: str) -> Callable[[dict[tuple[int, int | None], list[nn.Parameter]]], None]:
    def given(parts: dict[tuple[int, int | None], list[nn.Parameter]]) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in names_of(parts).items():
            values = torch.randint(-4, 5, parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.requires_grad and name not in without:
                assert parameter.grad is None, f"{name}: what steps before gave was not put aside"
                parameter.grad = values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values

    return given


def test_buckets_of_parameters() -> None:
    """Small gradients travel together by dtype, a large one alone; what two parts share goes with the last that is ready."""
    replicas = Replicas([parameters_of_parts() for _ in range(3)])
    both = [names_of(parts) for parts in replicas.parts]
    expected: dict[str, Tensor] = {}
    for step in range(2):
        gives = [give(10 * step + number) for number in range(3)]
        for one in gives:
            alone = parameters_of_parts()
            one(alone)
            for name, parameter in names_of(alone).items():
                if parameter.grad is not None:
                    expected[name] = expected.get(name, 0) + parameter.grad
        assert replicas.step(*gives) == [2, 2, 1]
        for own in both:
            assert own["frozen"].grad is None
            for name, wanted in expected.items():
                assert torch.equal(own[name].grad, wanted), name  # type: ignore[arg-type]
                assert own[name].grad.stride() == own[name].stride(), name  # type: ignore[union-attr]
    of_each = [sorted(len(bucket) for bucket in one._buckets[REDUCES].values()) for one in replicas.shared]
    assert of_each == [[2, 2, 3]] * 3


def test_gradients_that_some_replicas_do_not_have() -> None:
    replicas = Replicas([parameters_of_parts() for _ in range(2)])
    replicas.step(give(0, "plain", "late", "large"), give(1, "plain", "half", "large"))
    alone = [parameters_of_parts() for _ in range(2)]
    give(0)(alone[0])
    give(1)(alone[1])
    for parts in replicas.parts:
        own, (first, second) = names_of(parts), map(names_of, alone)
        assert own["plain"].grad is None
        assert own["large"].grad is None
        assert torch.equal(own["half"].grad, first["half"].grad)  # type: ignore[arg-type]
        assert torch.equal(own["late"].grad, second["late"].grad)  # type: ignore[arg-type]
    before = [names_of(parts)["late"].grad.clone() for parts in replicas.parts]  # type: ignore[union-attr]
    replicas.step(give(2, "late"), give(3, "late"))
    assert all(torch.equal(names_of(parts)["late"].grad, one) for parts, one in zip(replicas.parts, before))  # type: ignore[arg-type]


def test_sparse_gradients_stay_sparse() -> None:
    tables = [nn.Embedding(9, 2, sparse=True) for _ in range(2)]
    for table in tables[1:]:
        table.load_state_dict(tables[0].state_dict())
    parts = [{(1, 1): [], (1, 0): [table.weight], (3, 0): []} for table in tables]
    replicas = Replicas(parts)  # type: ignore[arg-type]
    rows = [torch.tensor([1, 1, 4]), torch.tensor([4, 7])]
    for times in (1, 2):
        replicas.step(
            *(lambda own, one=one, table=table: table(one).sum().backward() for one, table in zip(rows, tables))
        )  # type: ignore[misc]
        expected = torch.zeros(9, 2)
        for row in (1, 1, 4, 4, 7):
            expected[row] += times
        for table in tables:
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse
            assert torch.equal(table.weight.grad.to_dense(), expected)
    optimizer = torch.optim.SparseAdam(tables[0].parameters())
    before = copy.deepcopy(tables[0].weight.data)
    optimizer.step()
    changed = (tables[0].weight != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [1, 4, 7]


def test_a_step_that_fails_puts_gradients_back() -> None:
    parts = parameters_of_parts()
    give(0)(parts)
    before = {name: parameter.grad for name, parameter in names_of(parts).items()}
    shared = SharedGradients({}, parts)
    shared.start_step(REDUCES)
    give(1)(parts)
    shared.given(REDUCES[0])
    shared.drop()
    assert all(parameter.grad is before[name] for name, parameter in names_of(parts).items())
