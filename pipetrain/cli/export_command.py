"""`pipetrain export`: writes the model of a run as a folder that `from_pretrained` of transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipetrain.cli.main import Arguments, Parser, add_run, say, writing
from pipetrain.config.load import read
from pipetrain.config.records import HUGGING_FACE, RunConfig
from pipetrain.config.terminal import printable
from pipetrain.launcher.outcome import Exit
from pipetrain.models.hf.hf_size import check_transformers
from pipetrain.monitor.folder import RunFolder, find_folder
from pipetrain.plan.plan import read_plan


def add_arguments(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument("--out", required=True, metavar="PATH", help="the folder or file to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=("hf", "safetensors"),
        default="hf",
        help="hf: a folder for from_pretrained; safetensors: one file of the weights of any model, PATH.safetensors (default: %(default)s)",
    )


def run(arguments: Arguments) -> int:
    folder = find_folder(arguments.run)
    config = read(folder.config)
    if arguments.format == "safetensors":
        return _write_weights(folder, config, Path(arguments.out))
    if config.model.name != HUGGING_FACE:
        raise ValueError(
            f"{arguments.run}: its model is model={config.model.name}, which transformers does not have; --format=safetensors writes its "
            "weights to one file"
        )
    check_transformers()
    from pipetrain.models.hf.export import check_out, export_model

    out = Path(arguments.out).absolute()
    check_out(out)  # before anything is read
    plan = read_plan(folder.plan)
    stages = [plan.layers_of(stage) for stage in range(plan.num_stages)]
    export_model(_tensors(folder), stages, folder.model, out, lora=config.model.lora, base=str(config.model.path))
    print(printable(str(out)))
    return Exit.DONE


def _write_weights(folder: RunFolder, config: RunConfig, out: Path) -> int:
    if out.exists():
        raise ValueError(f"--out={out}: there is something already; give another name")
    from safetensors.torch import save_file

    tensors = _tensors(folder, of_transformers=config.model.name == HUGGING_FACE)
    with writing(f"--out={out}"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)
    print(out)
    return Exit.DONE


def _tensors(folder: RunFolder, *, of_transformers: bool = True) -> Mapping[str, Any]:
    """The weights at the end of the run, or of its newest whole snapshot, under the names in its files of weights."""
    from pipetrain.models.weights import has_weights, read_weights

    if has_weights(folder.weights):
        return read_weights(folder.weights)
    from pipetrain.models.hf.export import in_files
    from pipetrain.snapshot.reader import Snapshot
    from pipetrain.snapshot.start import find
    from pipetrain.snapshot.state import Part

    snapshot = find(folder.path, say)
    say(f"the run has not ended; exporting {snapshot}")
    weights = Snapshot(snapshot, checked=True).tensors(Part.WEIGHTS)
    return in_files(weights, folder.model) if of_transformers else weights
