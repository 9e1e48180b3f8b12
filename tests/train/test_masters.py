"""bfloat16 weights with float32 masters: what moves, what is saved, what goes on."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from updates import stage_in, train_stage

from pipetrain.config.records import OptimConfig
from pipetrain.models.loss import next_token_loss
from pipetrain.optim.optimizer import MasterWeights, make_optimizer
from pipetrain.snapshot.state import Part, restore_optimizer, tensors_of

RATE = 1e-5  # that of fine-tuning
CONFIG = OptimConfig(learning_rate=RATE)
CPU = torch.device("cpu")
model_in, train = functools.partial(stage_in, num_hidden_layers=1), functools.partial(train_stage, rate=None)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def movement(dtype: torch.dtype, masters: str = "auto") -> tuple[Tensor, Tensor]:
    """By how much each weight has moved after 50 steps: it, and its master."""
    model = model_in(torch.bfloat16).to(dtype)  # the same start
    start = flat(list(model.parameters()))
    optimizer = make_optimizer(OptimConfig(learning_rate=RATE, masters=masters), model.parameters())
    train(model, optimizer, range(50))
    trained = [optimizer.state[weight].get("master", weight) for weight in model.parameters()]
    return flat(list(model.parameters())) - start, flat(trained) - start


def test_with_masters_weights_move_as_far_as_in_float32_and_without_they_hardly_move() -> None:
    whole, _ = movement(torch.float32)
    rounded, exact = movement(torch.bfloat16)
    assert float(exact.norm()) == pytest.approx(float(whole.norm()), rel=0.01)
    assert float(rounded.norm()) == pytest.approx(float(whole.norm()), rel=0.05)  # the weights themselves are rounded
    assert float((exact - whole).norm() / whole.norm()) < 0.05  # and each moves where it should
    stuck, _ = movement(torch.bfloat16, masters="off")
    assert (whole == 0).double().mean() < 0.01
    assert (stuck == 0).double().mean() > 0.7


def test_gradients_are_added_up_in_float32() -> None:
    model = model_in(torch.bfloat16)
    optimizer = make_optimizer(CONFIG, model.parameters())
    weight = model[1].mlp.up.weight

    def add_gradients_of(row: int) -> Tensor:
        ids = torch.randint(0, 64, (1, 17), generator=torch.Generator().manual_seed(row))
        next_token_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
        return weight.grad

    parts = []
    for row in range(8):
        weight.grad = None
        parts.append(add_gradients_of(row))
    assert all(part.dtype is torch.float32 for part in parts)
    optimizer.zero_grad()
    for row in range(8):
        add_gradients_of(row)
    assert torch.equal(weight.grad, sum(parts[1:], parts[0]))
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float()), "more bits than bfloat16 has"


def test_what_was_saved_goes_on_bit_for_bit() -> None:
    """The weights alone would not do: what the masters hold beyond them is lost."""
    model = model_in(torch.bfloat16)
    optimizer = make_optimizer(CONFIG, model.parameters())
    train(model, optimizer, range(3))
    saved = {
        part: {name: tensor.clone() for name, tensor in tensors.items()}
        for part, tensors in tensors_of(model, optimizer, CPU).items()
    }
    assert saved[Part.OPTIMIZER]["1.mlp.up.weight/master"].dtype is torch.float32
    assert saved[Part.OPTIMIZER]["1.mlp.up.weight/exp_avg"].dtype is torch.float32
    assert saved[Part.WEIGHTS]["1.mlp.up.weight"].dtype is torch.bfloat16
    other = model_in(torch.bfloat16)
    another = make_optimizer(CONFIG, other.parameters())
    train(other, another, range(7, 8))  # it has masters of its own by then
    other.load_state_dict(saved[Part.WEIGHTS])
    restore_optimizer(other, another, saved[Part.OPTIMIZER])
    for each in ((model, optimizer), (other, another)):
        train(*each, range(3, 6))
    ours, theirs = (tensors_of(*each, CPU) for each in ((model, optimizer), (other, another)))
    for part in (Part.WEIGHTS, Part.OPTIMIZER):
        assert ours[part].keys() == theirs[part].keys()
        assert [name for name in ours[part] if not torch.equal(ours[part][name], theirs[part][name])] == []


def test_masters_begin_as_the_weights_are_at_the_first_step() -> None:
    """`init_from` fills the model after its optimizer is made."""
    model = model_in(torch.bfloat16)
    optimizer = make_optimizer(CONFIG, model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    train(model, optimizer, range(1))
    for weight in model.parameters():
        assert (optimizer.state[weight]["master"] - 0.5).abs().max() <= 1.2 * RATE


def test_without_state_of_its_own_a_weight_is_its_masters_start() -> None:
    """A snapshot of a run whose every step was refused: there is no state, and the masters of before are of no use."""
    model = model_in(torch.bfloat16)
    optimizer = make_optimizer(CONFIG, model.parameters())
    start = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2))
    model.load_state_dict(start)
    restore_optimizer(model, optimizer, {})
    assert optimizer.state == {}
    fresh = model_in(torch.bfloat16)
    train(fresh, make_optimizer(CONFIG, fresh.parameters()), range(2))
    train(model, optimizer, range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), fresh.parameters()))


def test_weights_of_more_bits_are_their_own_masters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 1))
    optimizer = make_optimizer(OptimConfig(learning_rate=0.1), model.parameters())
    assert isinstance(optimizer, MasterWeights)
    model[1](model[0](torch.randn(2, 4).bfloat16()).float()).sum().backward()
    before = model[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    assert ["master" in optimizer.state[weight] for weight in model.parameters()] == [True, True, False, False]
    assert not isinstance(make_optimizer(CONFIG, nn.Linear(2, 2).parameters()), MasterWeights)


def test_a_rate_that_is_set_is_that_of_the_masters() -> None:
    model = model_in(torch.bfloat16)
    optimizer = make_optimizer(CONFIG, model.parameters())
    start = flat(list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2))
    assert torch.equal(flat(list(model.parameters())), start)


def test_masters_that_are_not_wanted_any_more_are_dropped() -> None:
    model = model_in(torch.bfloat16)
    optimizer = make_optimizer(CONFIG, model.parameters())
    train(model, optimizer, range(2))
    saved = tensors_of(model, optimizer, CPU)[Part.OPTIMIZER]
    plain = make_optimizer(OptimConfig(learning_rate=RATE, masters="off"), model.parameters())
    restore_optimizer(model, plain, saved)
    assert {key for state in plain.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
