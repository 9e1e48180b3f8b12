"""load, export, load: every tensor bit for bit, in files that transformers loads; and what is not written over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf.test_load_pruned import CASES, STAGES
from hf.tiny import saved, tiny
from safetensors.torch import load_file
from tiny_tokenizer import save_tokenizer

from pipetrain.models.hf.export import export_model, keep_files
from pipetrain.models.hf.pruned import pruned_model
from pipetrain.models.hf.source import INDEX, HfSource, find_source


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def stages_of(source: HfSource, **how: Any) -> dict[str, torch.Tensor]:
    """What the stages hold, under transformers' names; of tied tensors the last stage has a copy."""
    own = {}
    for layers in STAGES:
        own.update(pruned_model(source, layers.start, layers.stop, **how).state_dict())
    return own


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_load_export_load(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = tiny(family, tie_word_embeddings=tied)
    source = find_source(str(save_tokenizer(saved(family, tmp_path, tie_word_embeddings=tied))))
    keep_files(source, tmp_path / "kept")
    export_model(stages_of(source), STAGES, tmp_path / "kept", tmp_path / "out")
    ours, theirs = tensors_in(tmp_path / "out"), tensors_in(source.folder)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert weight_map.keys() == ours.keys()
    assert len(set(weight_map.values())) == len(STAGES)
    attention = whole.config._attn_implementation
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=attention)
    assert type(loaded) is type(whole)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    tokenizer, own = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", source.folder))
    assert tokenizer("The quick fox.")["input_ids"] == own("The quick fox.")["input_ids"]
    assert tokenizer.chat_template == own.chat_template is not None
    generation, kept = (path / "generation_config.json" for path in (tmp_path / "out", source.folder))
    assert generation.read_bytes() == kept.read_bytes()


@pytest.fixture
def source(tmp_path: Path) -> HfSource:
    source = find_source(str(saved("llama", tmp_path)))
    keep_files(source, tmp_path / "kept")
    return source


def test_the_config_says_the_dtype_of_the_weights(source: HfSource, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_model(stages_of(source, dtype="bfloat16"), STAGES, tmp_path / "kept", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.bfloat16


def test_nothing_that_is_there_is_written_over(source: HfSource, tmp_path: Path) -> None:
    """Not the folder that the weights came from, which others may have mapped; not any other."""
    before = tensors_in(source.folder)
    (tmp_path / "file").touch()
    for out in (source.folder, tmp_path / "kept", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"--out=.*: there is something already"):
            export_model(stages_of(source), STAGES, tmp_path / "kept", out)
    assert all(torch.equal(value, before[name]) for name, value in tensors_in(source.folder).items())


def test_an_export_that_fails_leaves_nothing(source: HfSource, tmp_path: Path) -> None:
    own = stages_of(source)

    class Torn(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if "layers.2" in name:
                raise OSError("the disk is gone")
            return super().__getitem__(name)

    with pytest.raises(OSError, match="the disk is gone"):
        export_model(Torn(own), STAGES, tmp_path / "kept", tmp_path / "out")
    del own["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model.norm.weight is not among the tensors of the run \(and 0 more\)"):
        export_model(own, STAGES, tmp_path / "kept", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if "draft" in path.name] == []


def test_one_stage_is_one_file(source: HfSource, tmp_path: Path) -> None:
    export_model(pruned_model(source, 0, 6).state_dict(), [range(6)], tmp_path / "kept", tmp_path / "out")
    assert [path.name for path in sorted((tmp_path / "out").glob("model*"))] == ["model.safetensors"]
