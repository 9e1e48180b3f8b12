"""`pipetrain generate`: text from a trained model, over as many ranks as it was trained on, or others."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from pipetrain.cli.command import Arguments, Command, Parser
from pipetrain.launcher.outcome import Exit, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from pipetrain.config.records import RunConfig
    from pipetrain.loop.generate import Asked
    from pipetrain.observe.folder import RunFolder
    from pipetrain.plan.plan import Plan

_PROMPT = "import "


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"the text to go on from (default: {_PROMPT!r}); may be given again",
    )
    parser.add_argument(
        "--tokens", type=int, default=200, help="how many tokens to make at most (default: %(default)s)"
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
    from pipetrain.cli.run_config import config_of_run
    from pipetrain.group.address import is_rank
    from pipetrain.observe.folder import find_folder

    folder = find_folder(arguments.run)
    config = config_of_run(folder)
    if is_rank():
        _be_a_rank(config, folder, arguments)
    asked = _asked(arguments)
    _check(asked)
    weights = _weights(folder, arguments.step)
    plan = _plan(folder, arguments.ranks)
    if plan.num_ranks == 1:
        return _here(config, plan, weights, asked)
    from pipetrain.launcher.launch import launch
    from pipetrain.launcher.outcome import tell

    outcome = launch(
        "pipetrain.cli",
        ["generate", str(folder.path), *_words(arguments), *_step_of(weights, folder)],
        num_ranks=plan.num_ranks,
        threads_per_rank=config.threads_per_rank,
    )
    return tell(outcome)


def _plan(folder: RunFolder, num_ranks: int | None) -> Plan:
    """That of a replica of the run; on another number of ranks one of its own.

    Raises:
        ValueError: there is none, or the model does not fill so many ranks.
    """
    from pipetrain.plan.plan import make_plan, read_plan, whole_number

    plan = replace(read_plan(folder.plan), num_replicas=1)
    if num_ranks is None or whole_number("--ranks", num_ranks) == plan.num_ranks:
        return plan
    return make_plan(plan.num_layers, num_ranks=num_ranks, edges=plan.edges, communicators=plan.communicators)


def _asked(arguments: Arguments) -> Asked:
    from pipetrain.loop.generate import Asked

    return Asked(
        prompts=tuple(arguments.prompt or [_PROMPT]),
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        system=arguments.system,
        raw=arguments.raw,
    )


def _weights(folder: RunFolder, step: int | None) -> Path:
    """Where the run left its weights: the folder of those at its end, or a whole snapshot.

    Raises:
        ValueError: there are none.
    """
    from pipetrain.snapshot.files import path_of, steps_in
    from pipetrain.snapshot.start import SNAPSHOTS, find
    from pipetrain.snapshot.weights import check_weights, has_weights

    steps = steps_in(folder.path / SNAPSHOTS)
    if step is not None:
        if step not in steps:
            raise ValueError(
                f"--step={step}: {folder.path} has no such snapshot; there are {', '.join(map(str, steps[::-1])) or 'none'}"
            )
        return find(path_of(folder.path / SNAPSHOTS, step), _say)
    if has_weights(folder.weights) or not steps:
        check_weights(folder.weights)
        return folder.weights
    snapshot = find(folder.path, _say)
    _say(f"the run has not ended; generating from {snapshot}")
    return snapshot


def _step_of(weights: Path, folder: RunFolder) -> list[str]:
    """The choice of a snapshot for the ranks: all are to make the same one, while the run may save more."""
    return [] if weights == folder.weights else [f"--step={int(weights.name.removeprefix('step-'))}"]


def _weights_of_rank(folder: RunFolder, step: int | None) -> Path:
    """What the launcher has chosen, and checked.

    Raises:
        ValueError: nobody has, and there are snapshots alone.
    """
    from pipetrain.snapshot.files import path_of, steps_in
    from pipetrain.snapshot.start import SNAPSHOTS
    from pipetrain.snapshot.weights import has_weights

    if step is None and (has_weights(folder.weights) or not steps_in(folder.path / SNAPSHOTS)):
        return _weights(folder, None)
    if step is None:
        raise ValueError(
            f"{folder.path} has snapshots alone, to which more may come: choose one with --step=N on all ranks"
        )
    return path_of(folder.path / SNAPSHOTS, step)


def _say(text: str) -> None:
    print(f"pipetrain: {text}", file=sys.stderr, flush=True)


def _check(asked: Asked) -> None:
    """What can be said before a process starts.

    Raises:
        ValueError: an empty prompt; numbers out of range.
    """
    from pipetrain.runtime.sampling import Sampling

    if not all(asked.prompts):
        raise ValueError("--prompt is empty: the model goes on from a text of at least one character")
    for option, texts in (("--prompt", asked.prompts), ("--system", (asked.system or "",))):
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            raise ValueError(f"{option} has bytes that are no UTF-8: set a UTF-8 locale, or write it in one")
    if asked.num_tokens < 1:
        raise ValueError(f"--tokens={asked.num_tokens}: at least 1 is needed")
    Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)


def _words(arguments: Arguments) -> list[str]:
    """The options again, for the ranks."""
    given = {
        name.replace("_", "-"): value for name, value in vars(arguments).items() if name not in ("run", "ranks", "step")
    }
    flags = [f"--{name}" for name, value in given.items() if value is True]
    lists = [
        (name, value if isinstance(value, list) else [value])
        for name, value in given.items()
        if value is not None and not isinstance(value, bool)
    ]
    return flags + [f"--{name}={value}" for name, values in lists for value in values]


def _here(config: RunConfig, plan: Plan, weights: Path, asked: Asked) -> int:
    from pipetrain.loop.generate import generate

    generate(config, plan, weights, asked, _write)
    return Exit.DONE


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _be_a_rank(config: RunConfig, folder: RunFolder, arguments: Arguments) -> None:
    """One of the ranks of torchrun; ends the process, for past a failure threads may wait for ranks that are gone."""
    from pipetrain.launcher.outcome import announce, end

    rank = int(os.environ["RANK"])
    announce(rank)
    code = end(_outcome(rank, config, folder, arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _outcome(rank: int, config: RunConfig, folder: RunFolder, arguments: Arguments) -> Outcome:
    import torch

    from pipetrain.group.failure import PipelineError
    from pipetrain.group.own_device import set_variables_of_gpus
    from pipetrain.launcher.stop import ending_with_the_launcher, telling_first

    try:
        asked = _asked(arguments)
        _check(asked)
        weights = _weights_of_rank(folder, arguments.step)
        set_variables_of_gpus()
        torch.set_num_threads(config.threads_per_rank)
        with ending_with_the_launcher(), telling_first():
            _here(config, _plan(folder, int(os.environ["WORLD_SIZE"])), weights, asked)
    except ValueError as error:
        return Outcome(rank, Exit.WRONG_INPUT, str(error))
    except PipelineError as error:
        return Outcome(rank, Exit.FAILED, str(error))
    except KeyboardInterrupt:
        return Outcome(rank, Exit.FAILED, "interrupted")
    except Exception as error:
        traceback.print_exc()
        return Outcome(rank, Exit.FAILED, f"rank {rank}: {type(error).__name__}: {error}")
    return Outcome(rank, Exit.DONE)


GENERATE = Command("text from a trained model", _add_arguments, _generate)
