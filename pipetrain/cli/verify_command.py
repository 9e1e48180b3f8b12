"""`pipetrain verify`: whether pipelines on this machine compute what one process computes, and how runs end under faults."""

from __future__ import annotations

import sys

from pipetrain.cli.command import Arguments, Command, Parser, add_json
from pipetrain.launcher.outcome import Exit
from pipetrain.observe.output import STDOUT, write_json


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="two ranks only")
    parser.add_argument(
        "--faults", action="store_true", help="runs with faults on purpose instead: killed ranks and the like"
    )
    add_json(parser)


def _verify(arguments: Arguments) -> int:
    if arguments.faults:
        return _verify_faults(arguments)
    from pipetrain.proof.verify import parity_table, verify

    rows = verify(quick=arguments.quick)
    if arguments.json is not None:
        write_json([row.as_json() for row in rows], arguments.json)
    if arguments.json != STDOUT:
        print(parity_table(rows))
    return Exit.DONE if all(row.is_equal for row in rows) else Exit.DIFFERENT


def _verify_faults(arguments: Arguments) -> int:
    from pipetrain.proof.drill import drill, drill_records, drill_table

    results = drill(quick=arguments.quick, say=lambda text: print(f"pipetrain: {text}", file=sys.stderr, flush=True))
    if arguments.json is not None:
        write_json(drill_records(results), arguments.json)
    if arguments.json != STDOUT:
        print(drill_table(results))
    return Exit.DONE if all(result.problem is None for result in results) else Exit.DIFFERENT


VERIFY = Command("compare every schedule and mode with one process, bit for bit", _add_arguments, _verify)
