"""`pipetrain generate`: text from a trained model, over as many ranks as it was trained on, or others."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipetrain.cli.main import Arguments, Command, Parser, add_run, say
from pipetrain.comm.address import is_rank
from pipetrain.config.load import read
from pipetrain.config.records import HUGGING_FACE, WEIGHTS_IN, RunConfig
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
        help=f"the text to go on from (default: {_PROMPT!r}); may be given again",
    )
    parser.add_argument(
        "--max-new-tokens", "--tokens", type=int, default=200, help="tokens to make at most (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest each time (default: 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest alone")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest with a share P of the chances"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (default: 0)")
    parser.add_argument("--system", metavar="TEXT", help="the system message, for a model that chats")
    parser.add_argument("--raw", action="store_true", help="go on from the text itself, without the chat template")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="with the weights of the snapshot after N steps (default: those at the end, else of the newest snapshot)",
    )
    parser.add_argument("--ranks", type=int, help="processes to run on; 1: this one alone (default: as in training)")


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

    # All ranks are to choose the same snapshot, while the run may save more.
    step = [] if weights == folder.weights else [f"--step={int(weights.name.removeprefix('step-'))}"]
    outcome = launch(
        "pipetrain.cli",
        ["generate", str(folder.path), *_words(arguments), *step],
        num_ranks=plan.num_ranks,
        threads_per_rank=config.threads_per_rank,
    )
    return tell(outcome)


def _config(folder: RunFolder) -> RunConfig:
    """The run's, but for where a Hugging Face model comes from: the run folder has what is needed of it besides weights.

    Those are not read there: they are the run's own.
    """
    config = read(folder.config)
    if config.model.name != HUGGING_FACE:
        return config
    dtype = config.model.dtype or WEIGHTS_IN[config.precision]
    model = replace(config.model, path=str(folder.model), revision=None, weights="random", dtype=dtype)
    return replace(config, model=model)


def _plan(folder: RunFolder, num_ranks: int | None) -> Plan:
    """That of a replica of the run; on another number of ranks one of its own.

    Raises:
        ValueError: there is none, or the model does not fill so many ranks.
    """
    plan = replace(read_plan(folder.plan), num_replicas=1)
    if num_ranks is None or whole_number("--ranks", num_ranks) == plan.num_ranks:
        return plan
    return make_plan(plan.num_layers, num_ranks=num_ranks, edges=plan.edges, communicators=plan.communicators)


def _asked(arguments: Arguments) -> Asked:
    """What can be said of it before a process starts, is.

    Raises:
        ValueError: an empty prompt; numbers out of range.
    """
    from pipetrain.runtime.sampling import Sampling
    from pipetrain.trainer.generate import Asked

    same = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed", "system", "raw")}
    asked = Asked(prompts=tuple(arguments.prompt or [_PROMPT]), num_tokens=arguments.max_new_tokens, **same)
    if not all(asked.prompts):
        raise ValueError("--prompt is empty: the model goes on from a text of at least one character")
    for option, texts in (("--prompt", asked.prompts), ("--system", (asked.system or "",))):
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            raise ValueError(f"{option} has bytes that are no UTF-8: set a UTF-8 locale, or write it in one")
    if asked.num_tokens < 1:
        raise ValueError(f"--max-new-tokens={asked.num_tokens}: at least 1 is needed")
    Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    return asked


def _weights(folder: RunFolder, step: int | None, *, is_rank: bool = False) -> Path:
    """Where the run left its weights: the folder of those at its end, or a whole snapshot. To a rank its launcher says which, and has
    checked it.

    Raises:
        ValueError: there are none; or nobody said which, and there are snapshots alone.
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
            f"{folder.path} has snapshots alone, to which more may come: choose one with --step=N on all ranks"
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
    """The options again, for the ranks."""
    words = []
    for name, value in vars(arguments).items():
        if name not in ("run", "ranks", "step") and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            words += [option] if value is True else [f"{option}={one}" for one in values]
    return words


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _be_a_rank(config: RunConfig, folder: RunFolder, arguments: Arguments) -> NoReturn:
    """One of the ranks of torchrun; ends the process."""
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
