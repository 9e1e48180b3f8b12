"""A trained Hugging Face model as a folder that `from_pretrained` loads: weights in the family's own names, config, tokenizer.

    run folder                                         DIR
      weights/ or the newest snapshot ── stage by stage ──► model-0000k-of-0000n.safetensors, and their index
      model/                          ── copied ──────────► config.json, tokenizer, chat template, generation config

One stage is in memory at a time, so a laptop exports what a cluster trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipetrain.config.records import LoraConfig
from pipetrain.config.write_files import draft_beside
from pipetrain.models.hf.lora import merged_weights, write_adapters
from pipetrain.models.hf.parts import Parts, model_parts
from pipetrain.models.hf.pruned import empty_model
from pipetrain.models.hf.source import CONFIG, HfSource, find_source
from pipetrain.models.weights import shard_name, write_index, write_shard


def export_model(
    tensors: Mapping[str, Tensor],
    stages: Sequence[range],
    files: Path,
    out: Path,
    *,
    lora: LoraConfig | None = None,
    base: str = "",
) -> None:
    """Writes `out`, a folder with `tensors`, which have transformers' names and are read one by one.

    Args:
        stages: our layers, some at a time; each becomes a file.
        files: config.json and what else belongs to the model, as `keep_files` left it in the run folder.
        lora: the trained adapters, which are merged into the weights, or written alone for users of the model `base`.
        out: appears only once it is complete.

    Raises ValueError: `out` is in use; a tensor of the model is missing.
    """
    source = find_source(str(files))
    model = empty_model(source)
    parts = model_parts(model)
    with _whole_or_not(out) as draft:
        for path in source.beside_weights:
            shutil.copyfile(path, draft / path.name)
        if lora is not None and lora.rank is not None:
            if not lora.merge:
                write_adapters(tensors, model, parts, lora, base, draft)
                return
            tensors = merged_weights(tensors, model, lora)
        dtypes = _write_stages(tensors, stages, model, parts, draft)
        config = {**source.config, "architectures": [type(model).__name__]}
        if len(dtypes) == 1:
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        (draft / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_stages(
    tensors: Mapping[str, Tensor], stages: Sequence[range], model: PreTrainedModel, parts: Parts, folder: Path
) -> set[torch.dtype]:
    """A file of weights per stage, and their index; returns the dtypes that they have."""
    tied = model.all_tied_weights_keys  # these are written once, so the source alone
    missing = sorted(model.state_dict().keys() - tensors.keys() - tied.keys())
    if missing:
        raise ValueError(
            f"{missing[0]} is not among the tensors of the run (and {len(missing) - 1} more): they are of another model"
        )
    shards = [shard_name(number, len(stages)) for number in range(len(stages))]
    dtypes = set()
    for layers, shard in zip(stages, shards):
        names = [name for name in tensors if name not in tied and (parts.layer_of(name) or 0) in layers]
        part = {name: tensors[name] for name in names}
        dtypes |= {tensor.dtype for tensor in part.values() if tensor.is_floating_point()}
        # names and shapes as the family's files have them: experts by themselves, where the model has them in one tensor
        write_shard(folder / shard, revert_weight_conversion(model, part))
    if len(shards) > 1:
        write_index(folder, shards)
    return dtypes


def in_files(own: Mapping[str, Tensor], files: Path) -> Mapping[str, Tensor]:
    """Tensors under transformers' names that are called `own` as in our layers, those of a snapshot."""
    return model_parts(empty_model(find_source(str(files)))).to_file(own)


def keep_files(source: HfSource, folder: Path) -> None:
    """What `export` and `generate` need of a model besides weights, copied into the run folder: the source may be gone by then."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (source.folder / CONFIG, *source.beside_weights):
        with draft_beside(folder / path.name) as draft:
            shutil.copyfile(path, draft)


def check_out(out: Path) -> None:
    """Raises ValueError: something is at `out` already."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(
            f"--out={out}: there is something already, and nothing that others may be reading is written over; name a folder that is new"
        )


@contextmanager
def _whole_or_not(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when all is written.

    Raises ValueError: something is there already (a model that is read, perhaps by the run that is exported), or it cannot be made.
    """
    check_out(out)
    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            draft = stack.enter_context(draft_beside(out))
            draft.mkdir()
        except OSError as error:
            raise ValueError(f"--out={out}: the folder cannot be made ({error.strerror})") from error
        yield draft
