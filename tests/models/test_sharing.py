"""What layers have in common, by the modules themselves: whose memory, and whether a forward changed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipetrain.models.sharing import Overlap, SharedState, overlaps, tied_parameters


class Has(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def numbered(*layers: nn.Module) -> dict[int, nn.Module]:
    return dict(enumerate(layers))


def own_stage(layer: int) -> int:
    return layer


def test_one_parameter_in_two_layers() -> None:
    weight = nn.Parameter(torch.zeros(3))
    assert tied_parameters(numbered(Has(a=weight), Has(b=weight), Has(a=weight))) == (("0.a", "1.b"), ("0.a", "2.a"))


BASE = torch.zeros(12)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (BASE[:6], BASE[6:], []),
        (BASE[:7], BASE[6:], [Overlap("0.t", "1.t", False)]),
        (BASE, BASE[3:5], [Overlap("0.t", "1.t", False)]),
        (nn.Parameter(BASE[:7]), BASE[6:], [Overlap("0.t", "1.t", True)]),
        (BASE[:1].expand(5), BASE[1:], []),
        (BASE[:0], BASE, []),
        (BASE.to("meta"), BASE.to("meta"), []),
        (torch.eye(3).to_sparse(), BASE, []),
    ],
    ids=["beside", "one number", "within", "a parameter", "expanded", "empty", "meta", "sparse"],
)
def test_tensors_in_one_memory(first: Tensor, second: Tensor, expected: list[Overlap]) -> None:
    assert overlaps(numbered(Has(t=first), Has(t=second))) == expected


def test_a_third_layer_overlaps_with_the_first() -> None:
    found = overlaps(numbered(Has(t=BASE), Has(t=BASE[2:4]), Has(t=BASE[8:9])))
    assert found == [Overlap("0.t", "1.t", False), Overlap("0.t", "2.t", False)]


def test_layers_that_are_not_there_yet() -> None:
    lazy = nn.LazyLinear(3)
    assert overlaps(numbered(lazy, lazy)) == []


def raw(tensor: Tensor) -> None:
    tensor.data.add_(1)  # as batch_norm does: no new version


@pytest.mark.parametrize("change", [raw, lambda tensor: tensor.add_(1)], ids=["without a version", "with one"])
def test_a_buffer_of_two_stages_that_changes(change: Callable[[Tensor], object]) -> None:
    table = torch.zeros(3)
    shared = SharedState(numbered(Has(t=table), Has(t=table)), own_stage)
    message = r"^buffer 0.t of stage 0 is 1.t of stage 1 as well, and a forward changed it"
    with pytest.raises(ValueError, match=message), shared.unchanged(is_training=True):
        change(table)


def test_a_buffer_that_changes_later_or_in_another_mode() -> None:
    table = torch.zeros(3)
    shared = SharedState(numbered(Has(t=table), Has(t=table)), own_stage)
    with shared.unchanged(is_training=True):
        pass
    with pytest.raises(ValueError, match="changed it"), shared.unchanged(is_training=True):
        table.add_(1)
    with pytest.raises(ValueError, match="changed it"), shared.unchanged(is_training=False):
        raw(table)


def test_what_one_stage_has_for_itself_may_change() -> None:
    table = torch.zeros(3)
    shared = SharedState(numbered(Has(t=table), Has(t=table)), lambda layer: 0)
    with shared.unchanged(is_training=True):
        table.add_(1)


def test_attributes_of_a_module_in_two_stages() -> None:
    inner = Has()
    inner.last = torch.zeros(2)
    shared = SharedState(numbered(nn.Sequential(inner), nn.Sequential(nn.Tanh(), inner)), own_stage)
    with shared.unchanged(is_training=True):
        inner.eval()  # a mode is no state
    message = r"^Has 0.0 of stage 0 is 1.1 of stage 1 as well"
    with pytest.raises(ValueError, match=message), shared.unchanged(is_training=True):
        inner.last = torch.ones(2)
