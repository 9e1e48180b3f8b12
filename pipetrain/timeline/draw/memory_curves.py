"""What each rank holds during a step, as curves on the time axis of the picture above them."""

from __future__ import annotations

from pipetrain.timeline.draw.svg import LEFT, RIGHT, margin
from pipetrain.timeline.draw.table import size
from pipetrain.timeline.memory import Curve, bytes_over_time, sets_over_time
from pipetrain.timeline.shown import Shown

_HEIGHT = 46  # of a rank's curve, with the room above it
_ROOM = 10


def held_words(one: Shown) -> str:
    """What the curves count."""
    return "bytes of sets and stashed inputs" if _knows_bytes(one) else "sets of activations alive"


def memory_curves(one: Shown, *, width: int, longest: float) -> str:
    """An SVG with a curve per rank, `longest` seconds wide: bytes where the costs tell their sizes, else sets alive."""
    in_bytes = _knows_bytes(one)
    curves = [_curve(one, rank, in_bytes) for rank in range(one.schedule.num_ranks)]
    peaks = [max((held for _, held in curve), default=0.0) for curve in curves]
    up = (_HEIGHT - _ROOM) / (max(peaks, default=0.0) or 1.0)
    across = (width - LEFT - RIGHT) / longest if longest > 0 else 0.0
    in_time, still = [], [margin(0, len(curves) * _HEIGHT + 1)]
    for rank, (curve, peak) in enumerate(zip(curves, peaks)):
        base = (rank + 1) * _HEIGHT
        points = _outline(curve, one.start, across, base, up)
        most = size(peak) if in_bytes else f"{peak:g}"
        in_time.append(f'<rect class="idle" x="{LEFT}" y="{base}" width="{width - LEFT - RIGHT}" height="1"/>')
        in_time.append(f'<polygon class="curve" points="{points}"/>')
        still.append(f'<text class="text" x="16" y="{base - 14}">{one.rank_name(rank)}</text>')
        still.append(f'<text class="faint" x="16" y="{base}" font-size="11">max {most}</text>')
    height = len(curves) * _HEIGHT + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-size="13"><g class="time">{"".join(in_time)}</g><g class="still">{"".join(still)}</g></svg>'
    )


def _knows_bytes(one: Shown) -> bool:
    return one.peak_bytes() is not None


def _curve(one: Shown, rank: int, in_bytes: bool) -> Curve:
    """Changes at one moment count as one: a set that takes the place of another leaves no gap."""
    events = one.timeline.of_rank(rank)
    if in_bytes:
        return list(dict(bytes_over_time(one.schedule, events, one.costs)).items())
    return list({time: float(count) for time, count in sets_over_time(one.schedule, events)}.items())


def _outline(curve: Curve, start: float, across: float, base: float, up: float) -> str:
    """The points of a polygon: up and down in steps from `base`, and back along it."""
    points, level = [(float(LEFT), base)], 0.0
    for time, held in curve:
        x = LEFT + (time - start) * across
        points += [(x, base - level * up), (x, base - held * up)]
        level = held
    points.append((points[-1][0], base))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
