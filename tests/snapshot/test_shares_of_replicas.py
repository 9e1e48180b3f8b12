"""What each of several replicas writes into a snapshot: together what one would write alone, and nothing twice."""

import pathlib

import pytest
import torch
from saved import CPU, trained
from torch import nn

from pipetrain.models.spec import spec_of
from pipetrain.models.weights import SINGLE, Shard, read_weights, save_weights
from pipetrain.snapshot.state import Part, tensors_of


class HalfOfIt:
    """An optimizer that holds the state of some parameters only."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: list[nn.Parameter]) -> None:
        self.state = {parameter: optimizer.state[parameter] for parameter in held}
        self.param_groups = optimizer.param_groups
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def holds(self, parameter: nn.Parameter) -> bool:
        return parameter in self.state


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_shares_make_the_whole_and_have_nothing_twice(num_replicas: int) -> None:
    model, optimizer = trained()
    whole = tensors_of(model, optimizer, CPU)
    shares = [tensors_of(model, optimizer, CPU, replica=one, num_replicas=num_replicas) for one in range(num_replicas)]
    for part in (Part.WEIGHTS, Part.OPTIMIZER):
        names = [name for share in shares for name in share[part]]
        assert sorted(names) == sorted(whole[part])
        for share in shares:
            assert all(torch.equal(value, whole[part][name]) for name, value in share[part].items())


def test_shares_are_of_about_the_same_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    shares = [tensors_of(model, optimizer, CPU, replica=one, num_replicas=4) for one in range(4)]
    for part in (Part.WEIGHTS, Part.OPTIMIZER):
        sizes = [sum(tensor.nbytes for tensor in share[part].values()) for share in shares]
        largest = max(tensor.nbytes for share in shares for tensor in share[part].values())
        assert max(sizes) - min(sizes) <= largest


def test_buffers_are_those_of_the_first_replica() -> None:
    """They are no function of the gradients: each replica's may be others, and a mix would be nobody's."""
    model, optimizer = trained()
    buffers = {name for name, _ in model.named_buffers()}
    first, second = (tensors_of(model, optimizer, CPU, replica=one, num_replicas=2)[Part.WEIGHTS] for one in range(2))
    assert buffers <= first.keys()
    assert not buffers & second.keys()


def test_state_that_is_shared_out_is_written_by_whoever_holds_it() -> None:
    model, optimizer = trained()
    held = list(model.parameters())[2:]
    names = {name for name, parameter in model.named_parameters() if any(parameter is one for one in held)}
    share = tensors_of(model, HalfOfIt(optimizer, held), CPU, replica=1, num_replicas=2)[Part.OPTIMIZER]
    assert share.keys() == {f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}


class Two:
    """Two ranks that hold the same model, and agree."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def largest(self, value: int) -> int:
        return value


def test_the_weights_at_the_end_are_written_once(tmp_path: pathlib.Path) -> None:
    spec = spec_of([lambda: nn.Linear(2, 2)])
    layers = nn.Sequential(nn.Linear(2, 2))
    save_weights(tmp_path, layers.state_dict(), spec, Two(0), Shard(0, 1))
    before = (tmp_path / SINGLE).stat()
    save_weights(tmp_path, nn.Sequential(nn.Linear(2, 2)).state_dict(), spec, Two(1), Shard(None, 1))
    assert (tmp_path / SINGLE).stat() == before
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert all(torch.equal(read_weights(tmp_path)[name], value) for name, value in layers.state_dict().items())
