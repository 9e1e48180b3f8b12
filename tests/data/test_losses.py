"""What a pipeline learns from samples of documents: the loss of each document alone, over the tokens that count.

The oracle is transformers' own model on one process, given one document at a time: no padding, no neighbours, no positions, no mask.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf.loops import differing_gradients
from hf.tiny import tiny
from rounding import rounding
from tiny_tokenizer import MARKED, save_tokenizer

from pipetrain import Pipeline
from pipetrain.config.records import DataConfig
from pipetrain.data.batch import Batch
from pipetrain.data.dataset import make_data, make_tokenizer
from pipetrain.data.documents import Document
from pipetrain.data.samples import IGNORED

NUM_ROWS, LENGTH = 6, 64
# The loss is a mean over documents of up to 64 tokens, each alone or beside others. Its gradients come through sums over 48 numbers in each
# of four layers, too.
LOSS_ROUNDING, GRADIENT_ROUNDING = (rounding(torch.float32, terms=terms) for terms in (LENGTH, 4 * 48))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tokenizer, and chats of one to three turns."""
    folder = tmp_path_factory.mktemp("chats")
    save_tokenizer(folder / "tokenizer", MARKED)
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "I am fine, thank you."}]
    rows = [{"messages": [*turns * (n % 3), {**turns[0], "content": f"Hello {n}"}, turns[1]]} for n in range(24)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config_of(folder: pathlib.Path, **fields: Any) -> DataConfig:
    return DataConfig(
        name="jsonl",
        path=str(folder / "chat.jsonl"),
        tokenizer=str(folder / "tokenizer"),
        cache_dir=str(folder / "cache"),
        global_batch_size=NUM_ROWS,
        sequence_length=LENGTH,
        eval_fraction=0.0,
        **fields,
    )


def documents_of(folder: pathlib.Path, counted: str) -> list[tuple[list[int], list[bool]]]:
    """Each chat, tokenized by itself, with what counts."""
    tokenizer = make_tokenizer(config_of(folder, assistant_only_loss=counted == "answers"))
    assert tokenizer is not None
    lines = (folder / "chat.jsonl").read_text().splitlines()
    found = []
    for line in lines:
        encoded = tokenizer.encode_documents([Document(json.loads(line), (0, 1), 1, False)])
        assert encoded.counted is not None
        found.append((encoded.ids.tolist(), encoded.counted.tolist()))
    return found


def loss_alone(model: Any, documents: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Of all tokens that count and have one before them, the mean; with gradients."""
    losses = []
    for ids, counted in documents:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        wanted = torch.tensor(
            [token if counts else IGNORED for token, counts in zip(ids[1:], counted[1:], strict=True)]
        )
        losses.append(F.cross_entropy(logits, wanted, reduction="none")[wanted != IGNORED])
    mean = torch.cat(losses).mean()
    mean.backward()
    return mean.detach()


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("counted", ["answers", "all"])
def test_the_loss_of_each_document_alone(layout: str, counted: str, chats: pathlib.Path) -> None:
    """Of the documents that are in the first batch, over three stages; and their gradients."""
    data = make_data(config_of(chats, layout=layout, assistant_only_loss=counted == "answers"), 0)
    batch = data.train.batch(0)
    everything = documents_of(chats, counted)
    inside = [one for one in everything if is_in(one[0], batch)]
    assert data.train.samples_per_epoch > NUM_ROWS
    assert len(inside) == NUM_ROWS if layout == "padded" else len(inside) > 1.5 * NUM_ROWS
    theirs, ours = tiny("llama", vocab_size=360), tiny("llama", vocab_size=360)
    expected = loss_alone(theirs, inside)
    with Pipeline(ours, num_microbatches=3, stages_per_rank=3) as pipeline:
        loss = pipeline.step(batch.inputs, batch.targets)
    assert torch.allclose(loss, expected, rtol=LOSS_ROUNDING, atol=0)
    assert not differing_gradients(ours, theirs, within=GRADIENT_ROUNDING)


def is_in(ids: list[int], batch: Batch) -> bool:
    return any(
        row[at : at + len(ids)] == ids
        for row in batch.inputs["input_ids"].tolist()
        for at in range(LENGTH - len(ids) + 1)
    )


def test_a_microbatch_without_an_answer_changes_nothing(chats: pathlib.Path) -> None:
    """Two of six rows count nothing, and make a microbatch of their own: the loss is that of the other four."""
    data = make_data(config_of(chats, layout="padded"), 0)
    inputs, targets = data.train.batch(0)
    targets[2:4] = IGNORED
    rows = np.array([0, 1, 4, 5])
    with Pipeline(tiny("llama", vocab_size=360), num_microbatches=3, stages_per_rank=3) as pipeline:
        loss = pipeline.step(inputs, targets)
    with Pipeline(tiny("llama", vocab_size=360), num_microbatches=1) as pipeline:
        expected = pipeline.step({name: leaf[rows] for name, leaf in inputs.items()}, targets[rows])
    assert torch.allclose(loss, expected, rtol=LOSS_ROUNDING, atol=0)
