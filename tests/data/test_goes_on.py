"""A run that is stopped goes on with the very batches, whatever it reads, also when its model is cut into other stages."""

import gc
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_tokenizer import MARKED, save_tokenizer

from pipetrain.config.load import load_config
from pipetrain.launcher.outcome import Exit
from pipetrain.models.weights import read_weights
from pipetrain.train import train

SMOKE = [
    "experiment=smoke",
    "observe.progress=false",
    "data.global_batch_size=4",
    "data.sequence_length=48",
    "data.eval_bytes=192",
    "snapshot.every_steps=2",
    "snapshot.keep_last=9",
    "steps=4",
]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What is typed for each source."""
    folder = tmp_path_factory.mktemp("read")
    tokenizer = f"data.tokenizer={save_tokenizer(folder / 'tokenizer', MARKED)}"
    lines = [json.dumps({"text": f"Hello there {number}. How are you today?"}) for number in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "I am fine"}]
    chats = [
        json.dumps({"messages": [*chat, {"role": "user", "content": str(number)}, chat[1]]}) for number in range(30)
    ]
    (folder / "chat.jsonl").write_text("\n".join(chats))
    (np.arange(5000, dtype=np.uint16) % 300).tofile(folder / "ids.bin")
    cache = f"data.cache_dir={folder / 'cache'}"
    return {
        "ids": ["data=memmap", f"data.path={folder / 'ids.bin'}"],
        "texts": ["data=jsonl", f"data.path={folder / 'text.jsonl'}", cache],
        "chats": ["data=jsonl", f"data.path={folder / 'chat.jsonl'}", "data.layout=padded", tokenizer, cache],
    }


def run(folder: pathlib.Path, *options: str) -> list[Any]:
    """The losses of a run on this one rank."""
    assert train(load_config([*SMOKE, f"run_dir={folder}", *options])).code is Exit.DONE
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("source", ["ids", "texts", "chats"])
def test_with_another_number_of_stages(source: str, read: dict[str, list[str]], tmp_path: pathlib.Path) -> None:
    losses = run(tmp_path / "whole", *read[source], "pipeline.stages_per_rank=2")
    snapshot = tmp_path / "whole" / "snapshots" / "step-00000002"
    later = run(tmp_path / "later", *read[source], "pipeline.stages_per_rank=3", f"resume={snapshot}")
    assert len(losses) == 4
    assert later == losses[2:]
    whole, again = (read_weights(tmp_path / name / "weights") for name in ("whole", "later"))
    assert sorted(whole) == sorted(again)
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []


def test_a_corpus_that_changed_is_refused(read: dict[str, list[str]], tmp_path: pathlib.Path) -> None:
    run(tmp_path / "whole", *read["texts"])
    snapshot = tmp_path / "whole" / "snapshots" / "step-00000002"
    path = tmp_path / "text.jsonl"
    path.write_text(pathlib.Path(read["texts"][1].removeprefix("data.path=")).read_text().replace("Hello", "Hullo"))
    try:
        with pytest.raises(ValueError, match=r"the text is not that of .*step-00000002"):
            run(tmp_path / "later", *read["texts"], f"data.path={path}", f"resume={snapshot}")
    finally:
        if dist.is_initialized():  # a process that fails ends, and leaves it to the others to see that
            dist.destroy_process_group()


def test_what_the_first_step_made_is_collected_once(
    read: dict[str, list[str]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append((tmp_path / "whole/metrics.jsonl").read_text()))
    run(tmp_path / "whole", *read["ids"])
    assert [len(lines.splitlines()) for lines in frozen] == [1]
