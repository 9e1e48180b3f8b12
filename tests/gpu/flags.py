"""A flag on a GPU: one small kernel raises it, another spins until it is raised, for some ten seconds at most."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MOST_TURNS = 10_000_000  # of about a microsecond


@triton.jit(do_not_specialize=["value"])
def _raise(flag, value):
    tl.atomic_xchg(flag, value)


@triton.jit(do_not_specialize=["value", "most"])
def _spin(flag, value, stuck, most):
    turns = 0
    seen = tl.atomic_add(flag, 0)
    given_up = tl.atomic_add(stuck, 0)
    while (seen < value) & (given_up == 0) & (turns < most):
        seen = tl.atomic_add(flag, 0)
        given_up = tl.atomic_add(stuck, 0)
        turns += 1
    if seen < value:
        tl.atomic_xchg(stuck, 1)


class SpinningFlag:
    """`spinning.Flag`. `stuck` is 1 from when a wait was given up, and then no other one waits."""

    def __init__(self, stuck: torch.Tensor) -> None:
        self._stuck = stuck
        self._flag = torch.zeros(1, dtype=torch.int32, device=stuck.device)
        torch.cuda.current_stream().synchronize()  # zero before any stream looks

    def raise_to(self, value: int) -> None:
        _raise[(1,)](self._flag, value, num_warps=1)

    def wait_for(self, value: int) -> None:
        _spin[(1,)](self._flag, value, self._stuck, _MOST_TURNS, num_warps=1)


def warm_up(stuck: torch.Tensor) -> None:
    """Both kernels compiled and loaded: to load one may wait for the device."""
    flag = SpinningFlag(stuck)
    flag.raise_to(1)
    flag.wait_for(1)
    torch.cuda.synchronize()
