"""A timeline as one self-contained page: the picture with hover, the memory of each rank below, the numbers."""

from __future__ import annotations

from html import escape

from pipetrain.timeline.draw.palette import THEME
from pipetrain.timeline.draw.rank_table import comparison, ranks_table
from pipetrain.timeline.draw.svg import LEFT, RIGHT, svg
from pipetrain.timeline.memory import Curve, bytes_over_time, sets_over_time
from pipetrain.timeline.shown import Shown

_CURVE_HEIGHT = 46

_STYLE = """
  :root { color-scheme: light dark; font: 14px ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif }
  body { max-width: 1200px; margin: 24px auto; padding: 0 16px }
  svg { width: 100%; height: auto; display: block } pre { overflow-x: auto } h2 { font-size: 16px; margin: 24px 0 4px }
  .op.faded { opacity: .18 } .curve { fill: #f0a830; fill-opacity: .55; stroke: #b87400; stroke-width: 1 }
  #tip { position: fixed; display: none; padding: 4px 8px; border-radius: 4px; background: #24292f; color: #fff;
         pointer-events: none; white-space: pre }
"""

# Shows the op under the pointer and fades all that belongs to other microbatches.
_SCRIPT = """
  const tip = document.getElementById('tip'), ops = [...document.querySelectorAll('.op')];
  for (const op of ops) {
    const words = op.querySelector('title').textContent; op.querySelector('title').remove();
    op.addEventListener('pointerenter', () => {
      tip.textContent = words; tip.style.display = 'block';
      for (const one of ops) one.classList.toggle('faded', one.dataset.microbatch !== op.dataset.microbatch);
    });
    op.addEventListener('pointermove', move => {
      tip.style.left = Math.min(move.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
      tip.style.top = move.clientY + 16 + 'px';
    });
    op.addEventListener('pointerleave', () => {
      tip.style.display = 'none'; for (const one of ops) one.classList.remove('faded');
    });
  }
"""


def html(*shown: Shown, width: int = 1160) -> str:
    """The page for one schedule, or for several on one time scale."""
    longest = max(one.step_seconds for one in shown)
    title = escape("; ".join(one.title for one in shown))
    memory = "\n".join(_memory(one, width, longest) for one in shown)
    numbers = "\n".join(f"<h2>{escape(one.title)}</h2><pre>{ranks_table(one.breakdown)}</pre>" for one in shown)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}{THEME}</style></head><body>
{svg(*shown, width=width)}
{memory}
<h2>Numbers</h2><pre>{escape(comparison(*shown))}</pre>
{numbers}
<div id="tip"></div><script>{_SCRIPT}</script></body></html>
"""


def _memory(one: Shown, width: int, longest: float) -> str:
    """A curve per rank: bytes held where their sizes are known, else sets alive."""
    known = one.peak_bytes() is not None
    curves = [_curve(one, rank, known) for rank in range(one.schedule.num_ranks)]
    highest = max((held for curve in curves for _, held in curve), default=0.0) or 1.0
    scale = (width - LEFT - RIGHT) / longest if longest > 0 else 0.0
    pieces = []
    for rank, curve in enumerate(curves):
        base = (rank + 1) * _CURVE_HEIGHT
        points = _steps(curve, one.timeline.start, scale, base, (_CURVE_HEIGHT - 10) / highest)
        most = max((held for _, held in curve), default=0.0)
        pieces.append(f'<text class="text" x="16" y="{base - 14}">rank {rank}</text>')
        pieces.append(f'<text class="faint" x="16" y="{base}" font-size="11">max {most:.3g}</text>')
        pieces.append(f'<line class="line" x1="{LEFT}" x2="{width - RIGHT}" y1="{base}" y2="{base}"/>')
        pieces.append(f'<polygon class="curve" points="{points}"/>')
    height = one.schedule.num_ranks * _CURVE_HEIGHT + 8
    what = "Bytes of sets and stashed inputs" if known else "Sets alive"
    return (
        f"<h2>{what}: {escape(one.title)}</h2>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13">{"".join(pieces)}</svg>'
    )


def _curve(one: Shown, rank: int, known: bool) -> Curve:
    events = one.timeline.of_rank(rank)
    if known:
        return bytes_over_time(one.schedule, events, one.costs)
    return [(time, float(count)) for time, count in sets_over_time(one.schedule, events)]


def _steps(curve: Curve, start: float, across: float, base: float, up: float) -> str:
    points, level = [(float(LEFT), base)], 0.0
    for time, held in curve:
        x = LEFT + (time - start) * across
        points += [(x, base - level * up), (x, base - held * up)]
        level = held
    points.append((points[-1][0], base))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
