"""Whether the ranks of several machines can meet, found out before torchrun starts:

python -m pipetrain.launcher.meet HOST:PORT --timeout=60

On HOST itself (or with --listen, where HOST is a name that others know it by) it looks whether the port is free; elsewhere it
waits until something listens there. It ends with 0, or with one line and exit code 1 (2 where the address is none). Loads no
torch, so it answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipetrain.comm.address import Unreachable, check_can_listen, is_own, parse_address, wait_for
from pipetrain.launcher.outcome import Exit


def check_can_meet(address: str, timeout_seconds: float, *, listen: bool = False) -> None:
    """Check `HOST:PORT` from this machine, which is HOST where `listen` says so.

    Raises:
        ValueError: it is no address.
        Unreachable: nobody answers there within `timeout_seconds`; or it is here, and the port is taken.
    """
    host, port = parse_address(address)
    if listen or is_own(host):
        check_can_listen(host, port)
    else:
        wait_for(host, port, timeout_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipetrain.launcher.meet", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    parser.add_argument(
        "--listen", action="store_true", help="this machine is HOST: only look whether the port is free"
    )
    chosen = parser.parse_args(arguments)
    try:
        check_can_meet(chosen.address, chosen.timeout, listen=chosen.listen)
    except ValueError as error:
        print(f"pipetrain: {error}", file=sys.stderr)
        return Exit.WRONG_INPUT
    except Unreachable as error:
        print(f"pipetrain: {error}", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
