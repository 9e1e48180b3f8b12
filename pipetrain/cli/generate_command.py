"""`pipetrain generate`: text from a trained model."""

from __future__ import annotations

from pipetrain.cli.command import Arguments, Command, Parser
from pipetrain.launcher.outcome import Exit


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run folder, or `latest` (default)")
    parser.add_argument("--prompt", default="import ", help="the text to go on from (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to draw (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest each time (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (default: 0)")


def _generate(arguments: Arguments) -> int:
    from pipetrain.config.load import read
    from pipetrain.observe.folder import find_folder

    folder = find_folder(arguments.run)
    config = read(folder.config)
    from pipetrain.loop.generate import generate

    text = generate(
        config.model,
        config.data,
        folder.weights,
        arguments.prompt,
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(text)
    return Exit.DONE


GENERATE = Command("text from a trained model", _add_arguments, _generate)
