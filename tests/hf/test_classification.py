"""A sequence classification of transformers over stages is transformers' own, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf.loops import differing_gradients
from hf.tiny import padding_mask, tiny_config, token_ids
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

import pipetrain
from pipetrain import Pipeline
from pipetrain.config.load import load_config
from pipetrain.launcher.outcome import Exit
from pipetrain.train import train

ROWS, LENGTH, PADDING = 6, 12, 0
TARGETS = {
    "classes": (3, torch.tensor([0, 2, 1, 1, 0, 2])),
    "a number": (1, torch.linspace(-1, 1, ROWS)),  # a reward
    "several labels": (3, (torch.arange(3 * ROWS).reshape(ROWS, 3) % 2).float()),
}


def classifier(family: str, num_labels: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = tiny_config(family, pad_token_id=PADDING, num_labels=num_labels)
        return AutoModelForSequenceClassification.from_config(config).train()


def batch(*, padded: bool) -> dict[str, Tensor]:
    ids, mask = token_ids(ROWS, LENGTH), padding_mask(ROWS, LENGTH)
    return {"input_ids": ids.masked_fill(mask == 0, PADDING), "attention_mask": mask} if padded else {"input_ids": ids}


def losses_of(model: Any, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Transformers' own loss, of three microbatches."""
    total = torch.zeros(())
    rows = zip(*(value.tensor_split(3) for value in (*inputs.values(), targets)))
    for *values, wanted in rows:
        loss = model(**dict(zip(inputs, values)), labels=wanted, use_cache=False).loss * (len(wanted) / ROWS)
        loss.backward()
        total += loss.detach()
    return total


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in TARGETS), pytest.param("gpt2", "classes", marks=pytest.mark.slow)],
)
def test_stages_are_the_model(family: str, kind: str) -> None:
    num_labels, targets = TARGETS[kind]
    theirs = classifier(family, num_labels)
    ours = copy.deepcopy(theirs)
    with Pipeline(ours, num_microbatches=3, stages_per_rank=3) as pipeline:
        for padded in (False, True):
            inputs = batch(padded=padded)
            loss = pipeline.step({**inputs, "labels": targets})
            assert torch.equal(loss, losses_of(theirs, inputs, targets))
            assert not differing_gradients(ours, theirs)


def test_padding_needs_a_mask() -> None:
    """Only the first stage has the tokens, and the last one takes the score of the last of them."""
    inputs = batch(padded=True)
    with (
        Pipeline(classifier("llama", 3), num_microbatches=3) as pipeline,
        pytest.raises(
            ValueError, match="have the padding token 0 and no attention_mask, which says where each sample ends"
        ),
    ):
        pipeline.step({"input_ids": inputs["input_ids"]}, TARGETS["classes"][1])


OWN = """
from hf.test_classification import PADDING, TARGETS, batch, classifier
from torch.utils.data import Dataset


def make_model(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


class Samples(Dataset):
    def __init__(self):
        self.inputs, self.targets = batch(padded=True), TARGETS["a number"][1]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {name: value[index] for name, value in self.inputs.items()}, self.targets[index]
"""


@pytest.mark.slow
def test_the_trainer_takes_it_from_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error of model=hf says."""
    (tmp_path / "rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the process that counts the layers
    theirs = classifier("llama", 1)
    theirs.save_pretrained("model")
    typed = ["model=python", "model.target=rewards:make_model", "model.args.folder=model", "data=python"]
    keys = ["pipeline.num_stages=2", "pipeline.stages_per_rank=2", "pipeline.num_microbatches=3", "run_dir=run"]
    config = load_config([*typed, "data.target=rewards:Samples", f"data.global_batch_size={ROWS}", "steps=1", *keys])
    assert train(config).code is Exit.DONE
    inputs, targets = next(pipetrain.batches(sys.modules["rewards"].Samples(), ROWS, seed=config.seed))
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == losses_of(theirs, inputs, targets).item()
