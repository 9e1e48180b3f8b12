"""What each page carries with it: its style, and the script that makes its pictures answer to the pointer."""

from __future__ import annotations

from pipetrain.timeline.draw.palette import LOOKS, THEME
from pipetrain.timeline.draw.svg import CHARACTER, LEFT, RIGHT, SPARE

_FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

STYLE = (
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
""".replace("$font", _FONT).replace("$fill", LOOKS["recompute"].fill)
    + THEME
)

# Shows the op under the pointer and fades all that belongs to other microbatches; stretches the time axis; shows the replica that is
# chosen.
SCRIPT = (
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
