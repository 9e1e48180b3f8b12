"""Each file of `examples/` trains as a plain loop does, bit for bit, on any number of stages, after a kill too."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import PIPETRAIN, complete, torchrun
from ranks import run_outcomes, run_ranks
from torch import Tensor, nn

import pipetrain

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
LAYERS = ["resnet", "encoder_decoder", "experts"]
FINETUNE = "finetune"
STEPS, KILLED_AFTER, MICROBATCHES = 7, 5, 4
MAKE_OPTIMIZER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "resnet": lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9),
    "encoder_decoder": lambda own: torch.optim.AdamW(own, lr=3e-3),
    "experts": lambda own: torch.optim.AdamW(own, lr=3e-3),
    FINETUNE: lambda own: torch.optim.AdamW(own, lr=1e-3),
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(name: str, files: list[str]) -> list[float]:
    """Of a loop on one process that knows no pipeline."""
    torch.set_num_threads(1)
    module = example(name)
    model = module.AutoModelForCausalLM.from_pretrained(files[0], dtype=torch.float32).train() if files else None
    layers = [] if files else nn.ModuleList(module.make_layers())
    optimizer, losses = MAKE_OPTIMIZER[name]((model or layers).parameters()), []
    for step in range(STEPS):
        if model is not None:
            loss = finetune_step(model, finetune_batch(module, files, step))
        else:
            batch = module.make_batch(step)
            loss = pipetrain.reference_step(
                layers, nn.functional.cross_entropy, *batch, num_microbatches=MICROBATCHES, step=step
            )
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def finetune_batch(module: ModuleType, files: list[str], step: int) -> dict[str, Tensor]:
    tokenizer = module.AutoTokenizer.from_pretrained(files[0])
    rows = [module.json.loads(line)["messages"] for line in pathlib.Path(files[1]).read_text().splitlines()]
    return module.make_batch(tokenizer, tokenizer.apply_chat_template(rows, tokenize=False), step)


def finetune_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """transformers' model on eight microbatches, each weighed by the tokens that count in it."""
    total = torch.tensor(0.0)
    parts = [dict(zip(batch, rows)) for rows in zip(*(value.tensor_split(8) for value in batch.values()))]
    counted = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    for part, count in zip(parts, counted):
        logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits.float()
        targets = nn.functional.pad(part["labels"], (0, 1), value=-100)[:, 1:]
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = summed / count * (count / sum(counted))
        loss.backward()
        total += loss.detach()
    return total


def trains(name: str, arguments: list[str], killed_after: int | None = None) -> list[float]:
    """What `train` of the example returns; or all ranks are killed after so many steps, whatever is being saved then."""
    if killed_after is not None:
        step = pipetrain.Pipeline.step

        def last_step(self: pipetrain.Pipeline, *batch: Any) -> Tensor:
            if self.step_index == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *batch)

        pipetrain.Pipeline.step = last_step  # type: ignore[method-assign, assignment]
    return example(name).train(*arguments, num_steps=STEPS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model of transformers, and chats."""
    folder = tmp_path_factory.mktemp("model")
    made = [str(folder / "llama"), str(folder / "chats.jsonl")]
    sys.path.insert(0, str(EXAMPLES.parent / "docs"))
    try:
        import small_llama

        small_llama.main(*made, num_chats=40, num_layers=2, width=32)
    finally:
        sys.path.pop(0)
    return made


@pytest.mark.parametrize("name", LAYERS)
def test_two_stages_are_equal_to_the_plain_loop(name: str, tmp_path: pathlib.Path) -> None:
    (expected,) = run_ranks(1, plain_losses, name, [])
    assert run_ranks(2, trains, name, [str(tmp_path)]) == [expected, expected]
    assert expected[-1] < expected[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "after"), [("resnet", 3, 1), ("encoder_decoder", 1, 2), ("experts", 2, 3), (FINETUNE, 2, 3)]
)
def test_a_kill_and_other_numbers_of_stages_change_nothing(
    name: str, before: int, after: int, tmp_path: pathlib.Path, request: Any
) -> None:
    own = request.getfixturevalue("files") if name == FINETUNE else []
    (expected,) = run_ranks(1, plain_losses, name, own)
    killed = run_outcomes(before, trains, name, [*own, str(tmp_path)], KILLED_AFTER)
    codes = {outcome.exit_code for outcome in killed}
    assert -signal.SIGKILL in codes
    assert 0 not in codes  # one that sees another go first fails by itself
    rest = run_ranks(after, trains, name, [*own, str(tmp_path)])
    assert rest == [expected[-len(rest[0]) :]] * after
    assert len(rest[0]) in (STEPS - 4, STEPS)  # a kill may have come before the snapshot was whole


@pytest.mark.slow
def test_verify_finds_the_layers_equal() -> None:
    options = ["encoder_decoder:make_layers", "--quick", "--batch", "encoder_decoder:make_batch"]
    verified = complete(EXAMPLES, [*PIPETRAIN[:-1], "verify", *options])
    assert verified.returncode == 0, verified.stderr


@pytest.mark.slow
def test_the_command_in_its_first_lines_trains(tmp_path: pathlib.Path) -> None:
    """And types it again, which has nothing left to do."""
    command = [*torchrun(), "--nproc-per-node=2", "examples/experts.py", str(tmp_path / "saved")]
    first, again = (complete(EXAMPLES.parent, command) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    losses = [float(line.split()[-1]) for line in first.stdout.splitlines()]
    assert losses[-1] < losses[0] / 3
    assert again.stdout == ""


@pytest.mark.parametrize("name", [*LAYERS, FINETUNE])
def test_an_example_is_short(name: str) -> None:
    """And says how it is started."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert f"`torchrun --nproc-per-node=2 examples/{name}.py " in text
    # What extends pipetrain (own_*.py) is run by test_extensions.py.
    assert {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("own_")} == {*LAYERS, FINETUNE}
