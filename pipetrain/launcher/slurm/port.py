"""A free port for the machines of a job to meet at. `python -m pipetrain.launcher.slurm.port JOB_ID` prints one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

FIRST, COUNT = 20_000, 12_000  # below the ports that Linux gives to outgoing connections


def free_port(job_id: int, attempts: int = 64) -> int:
    """The port that belongs to the job's number, or the next one that is free on this machine.

    Raises:
        OSError: none of them is free.
    """
    for attempt in range(attempts):
        port = FIRST + (job_id + attempt) % COUNT
        if _is_free(port):
            return port
    first = FIRST + job_id % COUNT
    raise OSError(
        f"{socket.gethostname()}: no free port for the machines to meet at ({attempts} from {first} on are taken); "
        "end what holds them (`ss -ltnp` lists it), or give another start: PORT=29500"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the port; 1 where none is free."""
    words = sys.argv[1:] if argv is None else argv
    try:
        print(free_port(int(words[0])))
    except OSError as error:
        print(f"pipetrain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
