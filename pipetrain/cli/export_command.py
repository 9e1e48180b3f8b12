"""`pipetrain export`: the model of a run as a folder that `from_pretrained` of transformers loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipetrain.cli.command import Arguments, Command, Parser
from pipetrain.launcher.outcome import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from pipetrain.observe.folder import RunFolder


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make; it must be new")


def _export(arguments: Arguments) -> int:
    from pipetrain.config.load import read
    from pipetrain.config.records import HUGGING_FACE
    from pipetrain.observe.folder import find_folder
    from pipetrain.plan.plan import read_plan

    folder = find_folder(arguments.run)
    config = read(folder.config)
    if config.model.name != HUGGING_FACE:
        raise ValueError(
            f"{arguments.run}: its model is model={config.model.name}, which transformers does not have; its weights are in {folder.weights}"
        )
    from pipetrain.model.hf.hf_size import check_transformers
    from pipetrain.snapshot.export import check_out, export_model

    check_transformers()
    out = Path(arguments.out).absolute()
    check_out(out)
    plan = read_plan(folder.plan)
    stages = [plan.layers_of(stage) for stage in range(plan.num_stages)]
    export_model(_tensors(folder), stages, folder.model, out, lora=config.model.lora, base=str(config.model.path))
    print(out)
    return Exit.DONE


def _tensors(folder: RunFolder) -> Mapping[str, Tensor]:
    """Those at the end of the run, else of its newest whole snapshot, under transformers' names."""
    from pipetrain.snapshot.weights import has_weights, read_weights

    if has_weights(folder.weights):
        return read_weights(folder.weights)
    from pipetrain.snapshot.export import in_files
    from pipetrain.snapshot.reader import Snapshot
    from pipetrain.snapshot.start import find
    from pipetrain.snapshot.state import Part

    snapshot = find(folder.path, _say)
    _say(f"the run has not ended; exporting {snapshot}")
    return in_files(Snapshot(snapshot, checked=True).tensors(Part.WEIGHTS), folder.model)


def _say(text: str) -> None:
    print(f"pipetrain: {text}", file=sys.stderr, flush=True)


EXPORT = Command("a trained Hugging Face model as a folder of transformers", _add_arguments, _export)
