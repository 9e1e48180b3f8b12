"""torchrun's rendezvous of several machines, with a signed state: `--rdzv-backend=pipetrain`.

torch keeps the state as a pickle in a store, to which every client can write. Here a state is unpickled only if it is signed
with the key that the machines share. `python -m pipetrain.launcher.signed` is torchrun, also where no entry point is installed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from pipetrain.comm.address import interface_to
from pipetrain.launcher.nodes import BACKEND, read_key

_SIGNATURE_BYTES = hashlib.sha256().digest_size


def handler() -> Callable[[Any], Any]:
    """What torch asks the entry point `torchrun.handlers` for."""
    return _make


def register() -> None:
    """As the entry point does, if it is installed."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _make)


def _make(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous.api import RendezvousStateError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    key, name = read_key(), parameters.run_id.encode()

    def signature(state: bytes) -> bytes:
        return hmac.digest(key, name + b"\0" + state, "sha256")

    def checked(signed: bytes) -> bytes:
        state = signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signed[:_SIGNATURE_BYTES], signature(state)):
            raise RendezvousStateError(
                "the state of the rendezvous is not signed with the key of this machine: a machine has another key, or a stranger "
                "has written it"
            )
        return state

    class Signed(C10dRendezvousBackend):
        name = BACKEND

        def get_state(self) -> Any:
            found = super().get_state()
            return None if found is None else (checked(found[0]), *found[1:])

        def set_state(self, state: bytes, token: Any = None) -> Any:
            # Without a valid token torch's own would ask for the state through `get_state`, which is checked already.
            if token and not isinstance(token, bytes):
                found = self.get_state()
                return None if found is None else (*found, False)
            found = super().set_state(signature(state) + state, token)
            return None if found is None else (checked(found[0]), *found[1:])

    _, store = create_backend(parameters)
    # By now the name of the rendezvous leads somewhere. Ranks know rank 0's machine by its address there, and listen on that network.
    found = interface_to(parameters.endpoint.rpartition(":")[0] or parameters.endpoint)
    parameters.local_addr = parameters.local_addr or (found and found[1])
    return create_handler(store, Signed(store, parameters.run_id), parameters)


if __name__ == "__main__":
    from torch.distributed import run

    # As the entry point names it: torch refuses a second handler, that of `__main__`.
    from pipetrain.launcher import signed

    signed.register()
    run.main()
