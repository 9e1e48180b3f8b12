"""`pipetrain generate`: generates text with a trained model, on as many ranks as in training, or on another number."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipetrain.cli.main import Arguments, Command, Parser, add_run, say
from pipetrain.comm.address import is_rank
from pipetrain.config.load import read
from pipetrain.config.records import HUGGING_FACE, WEIGHTS_IN, RunConfig
from pipetrain.config.terminal import printable
from pipetrain.launcher.launch import launch
from pipetrain.launcher.outcome import Exit, Outcome, leave_process, run_as_rank, tell
from pipetrain.monitor.folder import RunFolder, find_folder
from pipetrain.plan.plan import Plan, make_plan, read_plan, whole_number

if TYPE_CHECKING:
    from pipetrain.trainer.generate import Asked

_PROMPT = "import "
_LAST_WORDS_SECONDS = 5


def _add_arguments(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"text that the model continues (default: {_PROMPT!r}); may be given several times",
    )
    parser.add_argument(
        "--max-new-tokens", "--tokens", type=int, default=200, help="most tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw only from the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw only from the likeliest tokens that together have probability P"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    parser.add_argument("--system", metavar="TEXT", help="the system message, for a chat model")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="use the snapshot after N steps (default: the weights at the end of the run, or the newest snapshot)",
    )
    parser.add_argument("--ranks", type=int, help="number of processes; 1: this one only (default: as in training)")


def _generate(arguments: Arguments) -> int:
    folder = find_folder(arguments.run)
    config = _config(folder)
    if is_rank():
        _be_a_rank(config, folder, arguments)
    asked = _asked(arguments)
    weights = _weights(folder, arguments.step)
    plan = _plan(folder, arguments.ranks)
    if plan.num_ranks == 1:
        from pipetrain.trainer.generate import generate

        generate(config, plan, weights, asked, _write)
        return Exit.DONE

    # All ranks must choose the same snapshot, although the run may save more meanwhile.
    step = [] if weights == folder.weights else [f"--step={int(weights.name.removeprefix('step-'))}"]
    outcome = launch(
        "pipetrain.cli",
        ["generate", str(folder.path), *_words(arguments), *step],
        num_ranks=plan.num_ranks,
        threads_per_rank=config.threads_per_rank,
    )
    return tell(outcome)


def _config(folder: RunFolder) -> RunConfig:
    """The run's configuration. The files of a Hugging Face model come from the run folder, its weights from the training."""
    config = read(folder.config)
    if config.model.name != HUGGING_FACE:
        return config
    dtype = config.model.dtype or WEIGHTS_IN[config.precision]
    model = replace(config.model, path=str(folder.model), revision=None, weights="random", dtype=dtype)
    return replace(config, model=model)


def _plan(folder: RunFolder, num_ranks: int | None) -> Plan:
    """The plan of one replica of the run; for another number of ranks a new plan.

    Raises:
        ValueError: the run has no plan, or the model has too few layers for so many ranks.
    """
    plan = replace(read_plan(folder.plan), num_replicas=1)
    if num_ranks is None or whole_number("--ranks", num_ranks) == plan.num_ranks:
        return plan
    return make_plan(plan.num_layers, num_ranks=num_ranks, edges=plan.edges, communicators=plan.communicators)


def _asked(arguments: Arguments) -> Asked:
    """What the user asks for, checked before a process starts.

    Raises:
        ValueError: an empty prompt; numbers out of range.
    """
    from pipetrain.runtime.generation import Sampling
    from pipetrain.trainer.generate import Asked

    same = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed", "system", "raw")}
    asked = Asked(prompts=tuple(arguments.prompt or [_PROMPT]), num_tokens=arguments.max_new_tokens, **same)
    if not all(asked.prompts):
        raise ValueError("--prompt is empty: the model needs at least one character to continue")
    for option, texts in (("--prompt", asked.prompts), ("--system", (asked.system or "",))):
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            raise ValueError(f"{option} has bytes that are not UTF-8: set a UTF-8 locale")
    if asked.num_tokens < 1:
        raise ValueError(f"--max-new-tokens={asked.num_tokens}: at least 1 is needed")
    Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    return asked


def _weights(folder: RunFolder, step: int | None, *, is_rank: bool = False) -> Path:
    """The folder of the weights at the end of the run, or a whole snapshot. A rank gets the choice from its launcher, which has
    checked it.

    Raises:
        ValueError: there are no weights; or a rank did not get a choice, and there are only snapshots.
    """
    from pipetrain.models.weights import check_weights, has_weights
    from pipetrain.snapshot.files import path_of, steps_in
    from pipetrain.snapshot.start import SNAPSHOTS, find

    steps = steps_in(folder.path / SNAPSHOTS)
    if step is None and (has_weights(folder.weights) or not steps):
        check_weights(folder.weights)
        return folder.weights
    if is_rank and step is None:
        raise ValueError(
            f"{folder.path} has only snapshots, and more may follow: choose one with --step=N on all ranks"
        )
    if step is None:
        snapshot = find(folder.path, say)
        say(f"the run has not ended; generating from {snapshot}")
        return snapshot
    if is_rank:
        return path_of(folder.path / SNAPSHOTS, step)
    if step not in steps:
        there = ", ".join(map(str, steps[::-1])) or "none"
        raise ValueError(f"--step={step}: {folder.path} has no such snapshot; there are {there}")
    return find(path_of(folder.path / SNAPSHOTS, step), say)


def _words(arguments: Arguments) -> list[str]:
    """The options, as arguments for the ranks."""
    words = []
    for name, value in vars(arguments).items():
        if name not in ("run", "ranks", "step") and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            words += [option] if value is True else [f"{option}={one}" for one in values]
    return words


def _write(text: str) -> None:
    # a model may have learnt codes of a terminal; a file gets them as they are
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _be_a_rank(config: RunConfig, folder: RunFolder, arguments: Arguments) -> NoReturn:
    """Runs one rank of torchrun, then ends the process: after a failure threads may wait for ranks that are gone."""
    import torch

    from pipetrain.comm.failure import PipelineError
    from pipetrain.comm.own_device import set_variables_of_gpus
    from pipetrain.launcher.outcome import ending_with_the_launcher
    from pipetrain.trainer.generate import generate

    def work(rank: int) -> Outcome:
        asked, plan = _asked(arguments), _plan(folder, int(os.environ["WORLD_SIZE"]))
        weights = _weights(folder, arguments.step, is_rank=True)
        set_variables_of_gpus()
        torch.set_num_threads(config.threads_per_rank)
        # Where a rank is gone torchrun asks the others to end, and may be faster than they are in seeing who it was.
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_LAST_WORDS_SECONDS))
        with ending_with_the_launcher():
            generate(config, plan, weights, asked, _write)
        return Outcome(rank, Exit.DONE)

    leave_process(run_as_rank(work, PipelineError))


COMMAND = Command(_add_arguments, _generate)
