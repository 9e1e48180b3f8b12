"""Memory of received messages, used again by later ones: what a queue of receives needs at once, and no more.

Without it the host, which runs ahead, would allocate memory for messages that the device gets to much later. A buffer is free

    [1] on the host, when nobody else holds its memory: its F, R and B have been launched, and what was sent of it has been let go of
    [2] on the device, for a queue whose stream comes after what compute had been given by then

so a receive into it comes after all that have read it, and no wait is added to those that the schedule has. Where these do not
cover it yet, there is one buffer more.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from pipetrain.schedule.op import Lane, Op
from pipetrain.transport.ahead import Moment
from pipetrain.transport.forms import TensorForm
from pipetrain.transport.lanes import Lanes


class Ring:
    """The buffers of one queue: of a stage edge and direction, to which `op` belongs. For the thread that launches."""

    def __init__(self, lanes: Lanes, op: Op, device: torch.device) -> None:
        self._lanes = lanes
        self._op = op
        self._device = device
        self._taken: list[UntypedStorage] = []
        self._free: list[tuple[UntypedStorage, Moment]] = []  # [1] and when it was seen; the first one first
        lanes.watch(self._look)

    def take(self, form: TensorForm) -> Tensor:
        """A buffer for a tensor of this form. The current stream is that of the queue, which owns the memory."""
        if not form.num_bytes:
            return form.empty(self._device)
        memory = self._used_again(form.num_bytes)
        if memory is None:
            memory = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self._taken.append(memory)
        return form.within(memory)

    def _used_again(self, num_bytes: int) -> UntypedStorage | None:
        """The smallest free buffer that is large enough. Where none is, a free one goes: lengths may change from step to step."""
        free = [at for at, (_, moment) in enumerate(self._free) if self._lanes.comes_after(Lane.RECV, self._op, moment)]
        large = [at for at in free if self._free[at][0].nbytes() >= num_bytes]
        if large:
            return self._free.pop(min(large, key=lambda at: self._free[at][0].nbytes()))[0]
        if free:
            del self._free[free[0]]
        return None

    def _look(self, moment: Moment) -> None:
        """Whose memory has been let go of: called before each launch, so `moment` is when its last reader was launched."""
        free = [memory for memory in self._taken if torch._C._storage_Use_Count(memory._cdata) == 1]
        if free:
            self._free += [(memory, moment) for memory in free]
            self._taken = [memory for memory in self._taken if not any(memory is other for other in free)]
