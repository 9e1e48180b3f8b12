"""The address at which the ranks meet: whether it can be reached, and if not, from where it was tried. Needs no torch."""

from __future__ import annotations

import errno
import os
import socket
import time

# Between two attempts: whoever starts a run on many machines starts them within seconds of each other.
_RETRY_SECONDS = 0.5
_ATTEMPT_SECONDS = 5.0


class Unreachable(ConnectionError):
    """The message says which address, from which address of this machine, for how long, and what to look at."""


STORE_VARIABLE = "PIPETRAIN_STORE"  # the file at which the ranks of one machine meet, which nobody else can open


def is_rank() -> bool:
    """Whether somebody (torchrun, a SLURM script) has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def wait_for(host: str, port: int, timeout_seconds: float) -> float:
    """Wait until something listens at the address; returns after how many seconds it did.

    Raises:
        Unreachable: nothing did within `timeout_seconds`, or `host` has no address.
    """
    start = time.monotonic()
    while True:
        left = timeout_seconds - (time.monotonic() - start)
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(left, _ATTEMPT_SECONDS))):
                return time.monotonic() - start
        except OSError as error:
            if time.monotonic() - start + _RETRY_SECONDS >= timeout_seconds:
                raise Unreachable(explain_unreachable(host, port, time.monotonic() - start, error)) from error
        time.sleep(_RETRY_SECONDS)


def check_can_listen(host: str, port: int) -> None:
    """Whether this machine, which the others know as `host`, could listen at the port; it would on all its addresses.

    Raises:
        Unreachable: another process does.
    """
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
            listener.bind(("", port))
    except OSError as error:
        raise Unreachable(
            f"cannot listen at {host}:{port} for the other ranks ({_reason(error)}): another process has this port, perhaps "
            "an older run; end it, or choose another port"
        ) from error


def check_a_port_is_free() -> None:
    """Whether this machine has a port left for ranks to meet at.

    Raises:
        ValueError: all are taken.
    """
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        raise ValueError(
            f"no free port on 127.0.0.1 ({_reason(error)}): the ranks need one to meet, and all of net.ipv4.ip_local_port_range are "
            "taken; `ss -tanp` shows by what"
        ) from error


def explain_unreachable(host: str, port: int, seconds: float, error: OSError) -> str:
    """Why nobody could be reached at the address."""
    if isinstance(error, socket.gaierror):
        return (
            f"{host}:{port}, where the ranks meet: {socket.gethostname()} knows no address of {host} ({error.strerror}); "
            "give an address, or a name that every machine can look up"
        )
    return (
        f"{host}:{port}, where the ranks meet, could not be reached from {_local_address(host, port)} within {seconds:.0f} s "
        f"({_reason(error)}): rank 0's machine did not start, a firewall is in between, or the address is that of "
        "another network"
    )


def _local_address(host: str, port: int) -> str:
    """The address from which this machine would reach `host`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing for a datagram: it only chooses the way
            own: str = probe.getsockname()[0]
    except OSError as error:
        return f"{socket.gethostname()} (which has no way there: {_reason(error)})"
    return f"{own} of {socket.gethostname()}"


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno) if error.errno is not None and error.errno in errno.errorcode else str(error)
