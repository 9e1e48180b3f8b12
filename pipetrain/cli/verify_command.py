"""`pipetrain verify`: whether pipelines on this machine compute what one process computes, and how runs end under faults."""

from __future__ import annotations

import sys

from pipetrain.cli.command import Arguments, Command, Parser, add_json
from pipetrain.launcher.outcome import Exit
from pipetrain.observe.output import STDOUT, write_json

_LAYERS = (
    "--layers: layers of every kind are tests of pipetrain's repository: type `python tests/zoo/layer_zoo.py` there; "
    "to verify layers of your own: pipetrain verify MODULE:FUNCTION"
)


def _add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "own", nargs="?", metavar="MODULE:FUNCTION", help="layers of your own instead: which of them can be recomputed"
    )
    parser.add_argument(
        "--batch", metavar="MODULE:FUNCTION", help="what gives (inputs, targets), where the first function does not"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases: two ranks, fewer modes")
    parser.add_argument("--layers", action="store_true", help="says where the tests of layers of every kind are")
    parser.add_argument(
        "--faults", action="store_true", help="runs with faults on purpose instead: killed ranks and the like"
    )
    add_json(parser)


def _verify(arguments: Arguments) -> int:
    if arguments.layers:
        raise ValueError(_LAYERS)
    if arguments.own is not None and arguments.faults:
        raise ValueError("MODULE:FUNCTION and --faults are two things to verify: choose one")
    if arguments.batch is not None and arguments.own is None:
        raise ValueError("--batch belongs to MODULE:FUNCTION, the function that makes the layers")
    if arguments.own is not None:
        return _verify_own(arguments)
    if arguments.faults:
        return _verify_faults(arguments)
    from pipetrain.proof.verify import parity_table, verify

    rows = verify(quick=arguments.quick)
    _tell(arguments, [row.as_json() for row in rows], parity_table(rows))
    return _exit(all(row.is_equal for row in rows))


def _verify_own(arguments: Arguments) -> int:
    from pipetrain.proof.own_layers import OwnLayers, own_table, verify_own

    report = verify_own(OwnLayers(arguments.own, arguments.batch), quick=arguments.quick)
    _tell(arguments, report.as_json(), own_table(report))
    return _exit(report.is_right)


def _verify_faults(arguments: Arguments) -> int:
    from pipetrain.proof.drill import drill, drill_records, drill_table

    results = drill(quick=arguments.quick, say=lambda text: print(f"pipetrain: {text}", file=sys.stderr, flush=True))
    _tell(arguments, drill_records(results), drill_table(results))
    return _exit(all(result.problem is None for result in results))


def _tell(arguments: Arguments, records: object, table: str) -> None:
    """JSON where it is asked for, and the table unless that is on stdout."""
    if arguments.json is not None:
        write_json(records, arguments.json)
    if arguments.json != STDOUT:
        print(table)


def _exit(is_right: bool) -> Exit:
    return Exit.DONE if is_right else Exit.DIFFERENT


VERIFY = Command("compare every schedule and mode with one process, bit for bit", _add_arguments, _verify)
