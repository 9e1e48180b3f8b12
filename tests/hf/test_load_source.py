"""Which model `model.path` names: a folder, a name in the cache, or a download that one process makes; and what is refused in a line."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipetrain.config.records import ModelConfig
from pipetrain.models.hf import source
from pipetrain.models.hf.pruned import causal_class, config_of, pruned_model
from pipetrain.models.hf.source import INDEX, WEIGHTS, bring_model, cached_folder, check_loadable, find_source

NAME, COMMIT = "someone/small-1.5", "0123456789abcdef0123456789abcdef01234567"
SMALL = ("config.json", INDEX, "tokenizer.json")  # of a model with shards
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


def write_model(folder: Path, *, shards: int = 0, config: dict[str, Any] = CONFIG) -> Path:
    """A folder with the names of a model's files; each shard has one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file({"0": torch.ones(2)}, folder / WEIGHTS)
        return folder
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    for number, file in enumerate(files):
        save_file({str(number): torch.ones(2)}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(number): file for number, file in enumerate(files)}}))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of this user: empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_cached(cache: Path, **files: Any) -> Path:
    home = cache / f"models--{NAME.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(COMMIT)
    return write_model(home / "snapshots" / COMMIT, **files)


def test_a_folder_is_what_it_says(tmp_path: Path) -> None:
    source = find_source(str(write_model(tmp_path / "model", shards=3)))
    assert (source.dtype, source.quantization) == ("bfloat16", None)
    assert {name: path.name for name, path in source.weight_map.items()} == {
        str(number): f"model-{number + 1:05d}-of-00003.safetensors" for number in range(3)
    }
    kept = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in (*kept, "notes.py"):
        (tmp_path / "model" / name).write_text("{}")
    assert [path.name for path in source.beside_weights] == kept


def test_one_file_is_known_by_its_header(tmp_path: Path) -> None:
    source = find_source(str(write_model(tmp_path, config={"model_type": "llama"})))
    assert {name: path.name for name, path in source.weight_map.items()} == {"0": WEIGHTS}
    assert source.dtype == "float32"


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    assert cached_folder(NAME) is None
    folder = write_cached(cache)
    for revision in (None, "main", COMMIT):
        source = find_source(NAME, revision)
        assert source.folder == folder
    assert cached_folder(NAME, "v2") is None
    assert cached_folder(NAME, "..") is None
    bring_model(ModelConfig(name="hf", path=NAME))  # it is here: nobody is asked


BROKEN = {
    "nothing": (lambda path: shutil.rmtree(path), "there is no such folder"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "config that is no JSON": (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
    "no weights": (lambda path: [file.unlink() for file in path.glob("model*")], "model.weights=random starts without"),
    "pickles": (
        lambda path: [*(file.unlink() for file in path.glob("model*")), (path / "pytorch_model.bin").touch()],
        "pickles .* only safetensors are",
    ),
    "a missing shard": (
        lambda path: (path / "model-00002-of-00003.safetensors").unlink(),
        r"model-00002-of-00003.safetensors is missing in .* \(and 0 more that model.safetensors.index.json names\)",
    ),
    "a shard elsewhere": (
        lambda path: (path / INDEX).write_text('{"weight_map": {"0": "../x.safetensors"}}'),
        "names '../x.safetensors', which is not in its folder",
    ),
    "an index of nothing": (lambda path: (path / INDEX).write_text("{}"), "has no weight_map"),
    "a cut file": (
        lambda path: [(path / INDEX).unlink(), (path / WEIGHTS).write_bytes(b"abc")],
        "is no safetensors file",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_what_is_broken_is_told_in_a_line(tmp_path: Path, damage: str) -> None:
    path, (change, message) = write_model(tmp_path / "model", shards=3), BROKEN[damage]
    change(path)
    with pytest.raises(ValueError, match=message) as caught:
        check_loadable(find_source(str(path)))
    assert "\n" not in str(caught.value)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    path = write_model(tmp_path, config={**CONFIG, **quantised})
    with pytest.raises(ValueError, match=r"its weights are quantised \(fp8\)"):
        check_loadable(find_source(str(path)))
    nested = write_model(tmp_path, config={"model_type": "x", "text_config": quantised})
    assert find_source(str(nested)).quantization == "fp8"


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.revision=v1: .* is a folder"):
        find_source(str(write_model(tmp_path)), "v1")


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    path = write_model(tmp_path, config=config)
    (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(ValueError, match="code that comes with a model is not run") as caught:
        pruned_model(find_source(str(path)), 0, 1)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = find_source(str(write_model(tmp_path, config={"model_type": "vit"})))
    with pytest.raises(ValueError, match="model_type 'vit' has no causal language model"):
        causal_class(config_of(source))


# Downloads ---------------------------------------------------------------------------------------------------------


def test_without_a_network_a_name_is_refused_in_a_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ValueError, match=f"model.path={NAME}: .* cannot be downloaded") as caught:
        bring_model(ModelConfig(name="hf", path=NAME))
    assert "\n" not in str(caught.value)
    assert "network" in str(caught.value)


class Hub:
    """Stands for the hub: `snapshot_download` brings the files that were asked for and are not there, as the real one does."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.brought: list[str] = []
        self.fails_at: str | None = None  # a file at which the network fails, once

    def snapshot_download(self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        assert name == NAME
        home = self.cache / f"models--{NAME.replace('/', '--')}"
        target, blobs = home / "snapshots" / COMMIT, home / "blobs"
        for folder in (target, blobs, home / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        part = home / "refs" / f"main.{threading.get_ident()}.tmp"
        part.write_text(COMMIT)
        part.rename(home / "refs" / "main")  # as the real one: nobody reads a name without its commit
        for path in sorted(self.folder.iterdir()):
            wanted = any(path.match(pattern) for pattern in allow_patterns)
            if any(path.name == pattern for pattern in ignore_patterns) or not wanted or (target / path.name).exists():
                continue
            if path.name == self.fails_at:
                self.fails_at = None
                raise ConnectionError("the network is down")
            self.brought.append(path.name)
            part = shutil.copyfile(path, blobs / f"{path.name}.incomplete")
            part.rename(target / path.name)  # as the real one: nobody reads half a file
        return str(target)


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    folder = write_model(tmp_path / "at the hub", shards=2)
    (folder / "pytorch_model.bin").touch()
    (folder / "tokenizer.json").write_text("{}")
    hub = Hub(folder, cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_model_is_downloaded_once_whoever_asks(hub: Hub) -> None:
    asking = [threading.Thread(target=bring_model, args=(ModelConfig(name="hf", path=NAME),)) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(hub.brought) == sorted([*SMALL, *shards])
    check_loadable(find_source(NAME))


@pytest.mark.parametrize(
    ("fails_at", "weights"),
    [
        *((name, weights) for name in SMALL for weights in ("pretrained", "random")),
        ("model-00002-of-00002.safetensors", "pretrained"),
    ],
)
def test_a_download_that_broke_off_is_completed(hub: Hub, fails_at: str, weights: str) -> None:
    config, hub.fails_at = ModelConfig(name="hf", path=NAME, weights=weights), fails_at
    with pytest.raises(ValueError, match=r"cannot be downloaded \(ConnectionError: the network is down\)"):
        bring_model(config)
    bring_model(config)
    source = find_source(NAME)
    assert all((source.folder / name).is_file() for name in SMALL)
    if weights == "pretrained":
        check_loadable(source)


def test_weights_that_are_drawn_are_not_downloaded(hub: Hub) -> None:
    bring_model(ModelConfig(name="hf", path=NAME, weights="random"))
    assert sorted(hub.brought) == list(SMALL)
    bring_model(ModelConfig(name="hf", path=NAME))  # now they are wanted, and nothing else
    assert len(hub.brought) == 5


def test_a_download_of_another_process_that_stands_still_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    home = hub.cache / f"models--{NAME.replace('/', '--')}"
    home.mkdir(parents=True)
    monkeypatch.setattr(source, "_POLL_SECONDS", 0.01)
    with (home / ".pipetrain.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            ValueError, match=r"another process downloads it to .* for timeout_seconds=0.05 nothing more"
        ):
            bring_model(ModelConfig(name="hf", path=NAME), timeout_seconds=0.05)
    bring_model(ModelConfig(name="hf", path=NAME))
    assert hub.brought


def test_a_folder_is_never_asked_for(tmp_path: Path, hub: Hub) -> None:
    for path in (None, str(write_model(tmp_path / "model")), "./not/there"):
        bring_model(ModelConfig(name="hf", path=path))
    assert hub.brought == []
