"""A stage's share of a Hugging Face model: equal to the whole model's tensors, and nothing else of it is read or kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf.tiny import saved, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipetrain.models.hf import pruned
from pipetrain.models.hf.parts import Elsewhere
from pipetrain.models.hf.pruned import pruned_model
from pipetrain.models.hf.source import INDEX, HfSource, find_source

STAGES = (range(2), range(2, 5), range(5, 6))
# One family of each kind of tensors and names, and whether its head is tied: those that are left out have Llama's.
KINDS = {
    "llama": False,
    "mixtral": False,
    "gpt2": True,
    "gemma3_text": True,
    "gpt_neox": False,
    "phi3": True,
    "deepseek_v3": False,
    "qwen3_next": True,
    "opt": False,
    "falcon": True,
    "bloom": False,
    "llama4_text": True,
}
PRESENT = ("llama", "mixtral", "gpt2")
CASES = [
    pytest.param(family, tied, id=family, marks=() if family in PRESENT else pytest.mark.slow)
    for family, tied in KINDS.items()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> HfSource:
    return find_source(str(saved("llama", folder / "plain")))


@pytest.fixture
def own(llama: HfSource, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama.folder, tmp_path / "own"))


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_stages_are_the_whole_model_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    whole = tiny(family, tie_word_embeddings=tied)
    source = find_source(str(saved(family, tmp_path, tie_word_embeddings=tied)))
    buffers, found = dict(whole.named_buffers()), set()
    for layers in STAGES:
        model = pruned_model(source, layers.start, layers.stop, attention=whole.config._attn_implementation)
        assert type(model) is type(whole)
        gone = {module.number for module in model.modules() if isinstance(module, Elsewhere)}
        assert gone == set(range(6)) - set(layers)
        found |= model.state_dict().keys()
        for kept, of_whole in ((model.state_dict(), whole.state_dict()), (dict(model.named_buffers()), buffers)):
            assert [name for name, value in kept.items() if not torch.equal(value, of_whole[name])] == []
    assert found == whole.state_dict().keys()


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_drawn_weights_do_not_depend_on_the_split(family: str, tied: bool, tmp_path: Path) -> None:
    source = find_source(str(saved(family, tmp_path, tie_word_embeddings=tied)))
    expected = pruned_model(source, 0, 6, weights="random", seed=3).state_dict()
    before, found = torch.random.get_rng_state(), {}
    for layers in STAGES:
        model = pruned_model(source, layers.start, layers.stop, weights="random", seed=3)
        found.update(model.state_dict())
        assert [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])] == []
    assert found.keys() == expected.keys()
    assert torch.equal(torch.random.get_rng_state(), before)
    other = pruned_model(source, 0, 6, weights="random", seed=4).state_dict()
    changed = [name for name, value in expected.items() if not torch.equal(other[name], value)]
    assert len(changed) > 6  # norms and biases are no draws
    names = [name for name in expected if "layers.0." in name or "h.0." in name]
    twins = [name.replace("layers.0.", "layers.1.").replace("h.0.", "h.1.") for name in names]
    drawn = [(a, b) for a, b in zip(names, twins) if b in expected and expected[a].std() > 0]
    assert drawn
    assert not any(torch.equal(expected[a], expected[b]) for a, b in drawn)  # each layer has a seed of its own


class Counted:
    """`safe_open`, with a list of what is opened and read."""

    opened: list[str]
    read: list[str]

    def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
        if kwargs["framework"] == "pt":  # not who looks at names alone
            type(self).opened.append(path.name)
        self._file = safe_open(path, *args, **kwargs)

    def get_tensor(self, name: str) -> torch.Tensor:
        type(self).read.append(name)
        return self._file.get_tensor(name)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.opened, Counted.read = [], []
    monkeypatch.setattr("safetensors.safe_open", Counted)
    return Counted


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("mixtral", False), ("gpt2", True)])
def test_only_files_and_tensors_of_the_stage_are_read(
    family: str, tied: bool, tmp_path: Path, counted: type[Counted]
) -> None:
    path = saved(family, tmp_path, tie_word_embeddings=tied)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    layers = ("h.{}." if family == "gpt2" else "layers.{}.").format
    head = {name for name in weight_map if name in ("model.norm.weight", "lm_head.weight") or "ln_f" in name}
    tied_weights = {"transformer.wte.weight"}
    for stage, held in ((range(1, 3), {0, 1}), (range(3, 5), {2, 3}), (range(5, 6), set())):
        counted.opened, counted.read = [], []
        pruned_model(find_source(str(path)), stage.start, stage.stop)
        expected = {name for name in weight_map if any(layers(number) in name for number in held)}
        if 5 in stage:
            expected |= head | (tied_weights if tied else set())
        assert sorted(counted.read) == sorted(expected)
        assert set(counted.opened) == {weight_map[name] for name in counted.read}
        assert len(counted.opened) == len(set(counted.opened)) < len(set(weight_map.values()))


def test_the_dtype_is_that_of_the_files_or_the_one_asked_for(llama: HfSource, own: Path) -> None:
    for file in own.glob("*.safetensors"):
        save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"}))
    source = find_source(str(own))
    assert {value.dtype for value in pruned_model(source, 1, 3).state_dict().values()} == {torch.bfloat16}
    cast = pruned_model(source, 1, 3, dtype="float32").state_dict()
    assert {value.dtype for value in cast.values()} == {torch.float32}
    whole = pruned_model(llama, 1, 3).state_dict()
    assert all(torch.equal(value, whole[name].bfloat16().float()) for name, value in cast.items())


def test_what_is_elsewhere_has_no_memory_and_is_not_run(llama: HfSource) -> None:
    model = pruned_model(llama, 2, 3)
    absent = [module for module in model.modules() if isinstance(module, Elsewhere)]
    assert sorted({module.number for module in absent}) == [0, 1, 3, 4, 5]
    assert {name.split(".")[2] for name in model.state_dict()} == {"1"}
    with pytest.raises(AssertionError, match="layer 0 is run, which is on another stage"):
        absent[0]()


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    path = saved("llama", tmp_path, tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    for stage in ((0, 2), (5, 6)):
        with pytest.raises(ValueError, match=r"ties lm_head.weight to model.embed_tokens.weight, .* two that differ"):
            pruned_model(find_source(str(path)), *stage)


def without(path: Path, name: str) -> None:
    """Takes a tensor out of the files and out of the index."""
    index = json.loads((path / INDEX).read_text())
    file = path / index["weight_map"].pop(name)
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)
    (path / INDEX).write_text(json.dumps(index))


def test_a_tensor_that_is_missing_is_told(own: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    without(own, name)
    pruned_model(find_source(str(own)), 0, 3)
    with pytest.raises(ValueError, match=rf"the weights have no {name} \(and 0 more\), which LlamaForCausalLM needs"):
        pruned_model(find_source(str(own)), 3, 5)


def test_a_tensor_of_another_shape_is_told_in_a_line(own: Path) -> None:
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    told = r"model.path=.*: model.layers.0.mlp.\w+.weight is \[.*\] in the files"
    with pytest.raises(ValueError, match=told) as caught:
        pruned_model(find_source(str(own)), 1, 3)
    assert "\n" not in str(caught.value)


def test_layers_that_there_are_not_are_refused(llama: HfSource) -> None:
    with pytest.raises(ValueError, match="layers 3 to 6 were asked for, the model has 0 to 5"):
        pruned_model(llama, 3, 7)


_MEASURE = """
import sys, torch
from pipetrain.models.hf.pruned import pruned_model
from pipetrain.models.hf.source import find_source
def of(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
torch.set_num_threads(1)
source, dtype, quarter = find_source(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pruned_model(source, 1, 2)  # all that is imported is
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = of("VmRSS")
model = pruned_model(source, 1, 1 + quarter, dtype=dtype)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1)
sizes = [parameter.nbytes for parameter in model.parameters()]
print(of("VmRSS") - before, of("VmHWM") - before, sum(sizes), max(sizes))
"""


def large(family: str, path: Path, **keys: Any) -> tuple[Path, int]:
    """A model of 1 GB in float32 in files of 150 MB; and a quarter of its layers."""
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.for_model(family, vocab_size=8000, tie_word_embeddings=False, **keys)
    config.save_pretrained(path)
    model = pruned.empty_model(find_source(str(path)))
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(path)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, value in revert_weight_conversion(model, model.state_dict()).items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 150e6:
            shards.append({})
        shards[-1][name] = torch.empty(value.shape).uniform_(-1, 1)
    for number, shard in enumerate(shards):
        save_file(shard, path / f"model-{number}.safetensors")
    weight_map = {name: f"model-{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path, config.num_hidden_layers // 4


_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LARGE = {
    "llama": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 20, **_HEADS},
    "mixtral": {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 8, **_HEADS, **_EXPERTS},
}


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's figures of a process")
@pytest.mark.parametrize("family", LARGE)
def test_a_rank_holds_its_stage_and_no_more(family: str, tmp_path: Path) -> None:
    """A quarter of 1 GB, with each weight written in place: resident and peak grow by the stage, the largest tensor and 100 MB at most."""
    path, quarter = large(family, tmp_path / family, **LARGE[family])
    for dtype in ("auto", "bfloat16") if family == "llama" else ("auto",):
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(path), dtype, str(quarter)], capture_output=True, text=True, check=True
        )
        grown, peak, stage, largest = map(int, done.stdout.split()[-4:])
        assert stage > 100e6
        held = stage if dtype == "auto" else 3 * stage  # in float32, too
        assert max(grown, peak) <= held + (largest if dtype == "auto" else 3 * largest) + 100e6
