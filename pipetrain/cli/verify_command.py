"""`pipetrain verify`: compares pipelines on this machine with one process, and runs with faults with undisturbed ones."""

from __future__ import annotations

from dataclasses import asdict

from pipetrain.cli.main import Arguments, Parser, add_json, present, say
from pipetrain.launcher.outcome import Exit

_LAYERS = (
    "--layers: layers of every kind are tests of pipetrain's repository: type `python tests/zoo/layer_zoo.py` there; "
    "to verify layers of your own: pipetrain verify MODULE:FUNCTION"
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "own",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="verify your own layers, and list those that can be recomputed",
    )
    parser.add_argument(
        "--batch",
        metavar="MODULE:FUNCTION",
        help="function that returns (inputs, targets), if the first function does not",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases: two ranks, fewer modes")
    parser.add_argument("--layers", action="store_true", help="say where the tests of all kinds of layers are")
    parser.add_argument("--faults", action="store_true", help="run with faults on purpose, such as killed ranks")
    add_json(parser)


def run(arguments: Arguments) -> int:
    if arguments.layers:
        raise ValueError(_LAYERS)
    if arguments.own is not None and arguments.faults:
        raise ValueError("MODULE:FUNCTION and --faults are two things to verify: choose one")
    if arguments.batch is not None and arguments.own is None:
        raise ValueError("--batch belongs to MODULE:FUNCTION, the function that makes the layers")
    if arguments.own is not None:
        from pipetrain.verify.own_layers import OwnLayers, own_table, verify_own

        report = verify_own(OwnLayers(arguments.own, arguments.batch), quick=arguments.quick)
        present(arguments, lambda: own_table(report), report.as_json)
        is_right = report.is_right
    elif arguments.faults:
        from pipetrain.verify.drill import drill, drill_table

        results = drill(quick=arguments.quick, say=say)
        present(arguments, lambda: drill_table(results), lambda: [asdict(result) for result in results])
        is_right = all(result.problem is None for result in results)
    else:
        from pipetrain.verify.verify import parity_table, verify

        rows = verify(quick=arguments.quick)
        present(arguments, lambda: parity_table(rows), lambda: [row.as_json() for row in rows])
        is_right = all(row.is_equal for row in rows)
    return Exit.DONE if is_right else Exit.DIFFERENT
