"""The address at which the ranks meet: whether it can be reached, and if not, from where it was tried. Needs no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time

# Between two attempts: whoever starts a run on many machines starts them within seconds of each other.
_RETRY_SECONDS = 0.5
_ATTEMPT_SECONDS = 5.0


STORE_VARIABLE = "PIPETRAIN_STORE"  # the file at which the ranks of one machine meet, which nobody else can open
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_ANY_PORT = 9
_LOOPBACKS = ("localhost", "127.0.0.1")


class Unreachable(ConnectionError):
    """The message says which address, from which address of this machine, for how long, and what to look at."""


def is_rank() -> bool:
    """Whether somebody (torchrun, a SLURM script) has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def wait_for(host: str, port: int, timeout_seconds: float) -> float:
    """Wait until something listens at the address; returns after how many seconds it did.

    Raises Unreachable: nothing did within `timeout_seconds`, or `host` has no address.
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


def listener_at(host: str, port: int) -> socket.socket | None:
    """A socket for the other ranks, which know this machine as `host`: nobody reaches it from another network. None where `host` is no IPv4
    address of an interface; a name may lead to another address elsewhere, so whoever listens has to do so at all of them.

    Raises Unreachable: another process listens there.
    """
    found = interface_to(host)
    own = host if found is not None and found[1] == host else ""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        listener.bind((own, port))
    except OSError as error:
        listener.close()
        raise Unreachable(
            f"cannot listen at {host}:{port} for the other ranks ({_reason(error)}): another process has this port, perhaps "
            "an older run; end it, or choose another port"
        ) from error
    if own:
        return listener
    listener.close()
    return None


def interface_to(host: str) -> tuple[str, str] | None:
    """The network interface of this machine by which it reaches `host` over IPv4, and its address there.

    None where there is none, and where the name of a machine leads to the loopback, which no other machine reaches.
    """
    try:
        own = _probed(host)
    except OSError:
        return None
    interface = _interface_of(own)
    if interface is None or (own.startswith("127.") and host not in _LOOPBACKS):
        return None
    return interface, own


def _interface_of(address: str) -> str | None:
    """The interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def check_a_port_is_free() -> None:
    """Checks that this machine has a port left for the ranks.

    Raises ValueError: all are taken.
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
        f"{host}:{port}, where the ranks meet, could not be reached from {_local_address(host)} within {seconds:.0f} s "
        f"({_reason(error)}): rank 0's machine did not start, a firewall is in between, or the address is that of "
        "another network"
    )


def _local_address(host: str) -> str:
    """The address from which this machine would reach `host`."""
    try:
        return f"{_probed(host)} of {socket.gethostname()}"
    except OSError as error:
        return f"{socket.gethostname()} (which has no way there: {_reason(error)})"


def _probed(host: str) -> str:
    """Raises OSError: there is no way to `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing for a datagram: it only chooses the way
        own: str = probe.getsockname()[0]
    return own


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno) if error.errno is not None and error.errno in errno.errorcode else str(error)
