"""Pages that open anywhere: one file each, with its style and the script by which pictures answer to the pointer.

`page` is their frame; `pictures`, `recomputation` and `rank_numbers` are what a page about steps is made of, and `html` is
such a page, of schedules before they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pipetrain.timeline.draw.palette import LOOKS, THEME
from pipetrain.timeline.draw.rank_table import causes, ranks_table, schedules_table
from pipetrain.timeline.draw.svg import CHARACTER, FONT, LEFT, RIGHT, SPARE, held_words, memory_curves, svg
from pipetrain.timeline.draw.table import Table, number
from pipetrain.timeline.shown import Shown

_WIDTH = 1160  # pixels; where there is another width, the script stretches the time axis to it


def page(title: str, *parts: str) -> str:
    """The frame: `parts` are HTML, below each other."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
{chr(10).join(parts)}
<div id="tip"></div><script>{_SCRIPT}</script></body></html>
"""


def html(*shown: Shown, above: Sequence[str] = ()) -> str:
    """The page for one schedule, or for several on one time scale, below what is HTML already."""
    names = [one.title for one in shown]
    return page(
        "; ".join(names),
        *above,
        pictures(shown, names),
        recomputation(shown, names),
        heading("Numbers"),
        framed(schedules_table(shown)),
        rank_numbers(shown, names),
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def framed(table: Table) -> str:
    """A table that scrolls where the window is narrower."""
    return f'<div class="table">{table.as_html()}</div>'


def pictures(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """The steps on one time scale, and below them what the ranks held on the same."""
    return scrolled(picture(shown, names, max(one.step_seconds for one in shown)))


def picture(shown: Sequence[Shown], names: Sequence[str], longest: float) -> str:
    """Part of what is `scrolled`; its width stands for `longest` seconds."""
    curves = [
        heading(f"{name} · {held_words(one)}") + memory_curves(one, width=_WIDTH, longest=longest)
        for one, name in zip(shown, names, strict=True)
    ]
    return svg(*shown, width=_WIDTH, names=names, seconds=longest) + "\n".join(curves)


def scrolled(*drawn: str) -> str:
    """Pictures whose time axis can be stretched, all together."""
    zoom = '<label id="zoom">Stretch the time axis <input type="range" min="0" value="0" step="any"></label>'
    return "\n".join([zoom, '<div class="scroll">', *drawn, "</div>"])


def recomputation(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """Where the recomputation of each step went, in a sentence or three."""
    meanings = [(name, recompute_words(one)) for one, name in zip(shown, names, strict=True)]
    return heading("Where the recomputation went") + _list(meanings)


def recompute_words(one: Shown) -> str:
    """How much of the recomputation was hidden, how much exposed, and on which rank most; seconds summed over ranks."""
    exposed = [rank.recompute_exposed_seconds for rank in one.breakdown]
    hidden = sum(rank.recompute_hidden_seconds for rank in one.breakdown)
    total = hidden + sum(exposed)
    if total <= 0:
        return "Nothing was recomputed."
    words = (
        f"Recomputation took {number(total)} s of all ranks. Hidden: {number(hidden)} s ({hidden / total:.0%}), in which the "
        f"rank would have waited. Exposed: {number(sum(exposed))} s ({sum(exposed) / total:.0%})"
    )
    if sum(exposed) <= 0:
        return f"{words}: no op had to wait for it."
    worst = max(range(len(exposed)), key=exposed.__getitem__)
    return f"{words}, in which the next op had all its inputs and could not run yet; most on {one.rank_name(worst)}, {number(exposed[worst])} s."


def rank_numbers(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """For each step a table with a line per rank, and what its columns mean."""
    tables = [
        heading(f"{name} · seconds per rank") + framed(ranks_table(one.breakdown))
        for one, name in zip(shown, names, strict=True)
    ]
    meanings = {
        "busy": "the rank computed; all columns up to unexplained add up to the step",
        **causes([rank for one in shown for rank in one.breakdown]),
        "R hidden": "recomputation that cost no time: the rank would have waited",
        "R exposed": "recomputation for which the next op had to wait",
        "peak sets": "sets of activations alive at once",
    }
    return "\n".join([*tables, _list(meanings.items())])


def _list(meanings: Iterable[tuple[str, str]]) -> str:
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in meanings)
    return f"<dl>{entries}</dl>"


_STYLE = (
    """
  :root { color-scheme: light dark; font: 14px/1.5 $font; --faint: light-dark(#6e7781, #8d96a0); --line: #8c959f40 }
  body { max-width: 1400px; margin: 24px auto 64px; padding: 0 20px }
  h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 16px; margin: 32px 0 6px } p { margin: 4px 0; max-width: 90ch }
  .scroll { overflow-x: auto } .scroll > h2, .scroll > p { position: sticky; left: 0 }
  svg { display: block } .curve { fill: $fill; fill-opacity: .5; stroke: $fill }
  .op.faded { opacity: .18 } .margin { fill: Canvas }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 6px 0 }
  td, th { padding: 2px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
  th { font-weight: 500; color: var(--faint) } .left { text-align: left; padding-left: 0 }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 14px } dt { color: var(--faint) }
  dd { margin: 0; max-width: 90ch }
  .table { overflow-x: auto } pre { overflow-x: auto }
  #zoom, #choice { display: none; align-items: center; gap: 8px; color: var(--faint) } #zoom input { width: 240px }
  #tip { position: fixed; display: none; padding: 4px 8px; border-radius: 4px; background: #24292f; color: #fff;
         pointer-events: none; white-space: pre }
""".replace("$font", FONT).replace("$fill", LOOKS["recompute"].fill)
    + THEME
)

# Shows the op under the pointer and fades all that belongs to other microbatches; stretches the time axis; shows the replica that is
# chosen.
_SCRIPT = (
    f"const LEFT = {LEFT}, RIGHT = {RIGHT}, CHARACTER = {CHARACTER}, SPARE = {SPARE};"
    """
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

  // One function per element of the time axis: puts it where a stretch of the axis wants it.
  const at = (x, stretch) => LEFT + (x - LEFT) * stretch, places = [];
  const number = (element, name) => Number(element.getAttribute(name));
  for (const name of document.querySelectorAll('.time .name')) name.remove();
  for (const element of document.querySelectorAll('.time line, .time text')) {
    for (const name of ['x', 'x1', 'x2'].filter(name => element.hasAttribute(name))) {
      const x = number(element, name);
      places.push(stretch => element.setAttribute(name, at(x, stretch)));
    }
  }
  for (const box of document.querySelectorAll('.time rect')) {
    const x = number(box, 'x'), width = number(box, 'width');
    places.push(stretch => { box.setAttribute('x', at(x, stretch)); box.setAttribute('width', width * stretch); });
  }
  for (const curve of document.querySelectorAll('.time polygon')) {
    const points = curve.getAttribute('points').split(' ').map(point => point.split(',').map(Number));
    places.push(stretch => curve.setAttribute('points', points.map(([x, y]) => [at(x, stretch), y]).join(' ')));
  }
  for (const op of ops) {  // named as far as there is room: 2F12, F12 or F
    const text = document.createElementNS('http://www.w3.org/2000/svg', 'text'), long = op.dataset.name;
    const names = [long, long.replace(/^\\d+/, ''), long.replace(/\\d+/g, '')];
    const middle = number(op, 'x') + number(op, 'width') / 2, width = number(op, 'width');
    const looks = { y: number(op, 'y') + number(op, 'height') / 2 + 4.2, fill: op.dataset.ink, 'font-size': 12,
                    'text-anchor': 'middle', 'pointer-events': 'none' };
    for (const [name, value] of Object.entries(looks)) text.setAttribute(name, value);
    op.parentNode.append(text);
    places.push(stretch => {
      text.setAttribute('x', at(middle, stretch));
      text.textContent = names.find(name => CHARACTER * name.length + SPARE <= width * stretch) ?? '';
    });
  }

  const scroll = document.querySelector('.scroll'), zoom = document.querySelector('#zoom input');
  if (scroll && zoom) {
    const pictures = [...scroll.querySelectorAll('svg')], natural = number(pictures[0], 'width') - LEFT - RIGHT;
    const still = scroll.querySelectorAll('.still');
    let stretch = 1;
    const follow = () => { for (const group of still) group.setAttribute('transform', `translate(${scroll.scrollLeft} 0)`); };
    const draw = () => {
      const half = scroll.clientWidth / 2, middle = (scroll.scrollLeft + half - LEFT) / stretch;
      stretch = Math.max(scroll.clientWidth - LEFT - RIGHT, 200) / natural * 2 ** zoom.value;
      for (const place of places) place(stretch);
      for (const picture of pictures) {
        const width = LEFT + natural * stretch + RIGHT;
        picture.setAttribute('width', width);
        picture.setAttribute('viewBox', `0 0 ${width} ${number(picture, 'height')}`);
      }
      scroll.scrollLeft = middle * stretch + LEFT - half;
      follow();
    };
    const narrowest = Math.min(...ops.map(op => number(op, 'width')).filter(width => width > 0));
    zoom.max = Math.min(Math.max(Math.log2(CHARACTER * 4 / narrowest), 0), 6);
    document.getElementById('zoom').style.display = zoom.max > 0.5 ? 'flex' : 'none';
    zoom.addEventListener('input', draw); scroll.addEventListener('scroll', follow); addEventListener('resize', draw);
    draw();
  }

  const choice = document.querySelector('#choice select');
  if (choice) {
    const choose = () => {
      for (const one of document.querySelectorAll('[data-replica]')) one.hidden = one.dataset.replica !== choice.value;
    };
    document.getElementById('choice').style.display = 'flex';
    choice.addEventListener('change', choose);
    choose();
  }
"""
)
