"""What the host of a virtual machine took of its time for others: whoever measures there looks at it first."""

from __future__ import annotations

from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 7  # its place in the line of all processors: user nice system idle iowait irq softirq steal (proc(5))


class Stolen:
    """Looks at the clocks of all processors."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        """Of their time since the last look, what was not this machine's; 0 where nobody counts it."""
        before, self._before = self._before, _ticks()
        passed = [now - then for now, then in zip(self._before, before)]
        return passed[_STEAL] / sum(passed) if sum(passed) > 0 else 0.0


def _ticks() -> list[int]:
    if not _STAT.exists():
        return [0] * (_STEAL + 1)
    return [int(number) for number in _STAT.read_text().splitlines()[0].split()[1 : _STEAL + 2]]
