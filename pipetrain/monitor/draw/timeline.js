// Draws the page of a run or of a schedule from the JSON in #data. Text goes into the page as text alone, never as HTML.
(() => {
  'use strict';
  const $ = id => document.getElementById(id);
  if (!$('data')) return;
  const LANES = ['compute', 'recompute', 'send', 'recv', 'reduce'];
  const CAUSE_FILLS = ['#c9b458', '#8d7bc3', '#6b7280', '#5fa8d3', '#43a387', '#d98c8c', '#d1495b'];
  const LEFT = 92, RIGHT = 12, TALL = 22, THIN = 9, GAP = 5, HEAD = 40, STRIP = 54;
  const state = { pick: -1, replica: -1, from: 0, to: 1, hover: null, chosen: null };
  let data, panels = [], rows = [], longest = 1, scheduled = false;

  // Words -----------------------------------------------------------------------------------------------------------
  const digits = (value, count = 4) => String(Number(value.toPrecision(count)));
  function seconds(value) {
    const size = Math.abs(value);
    return size >= 1 || size === 0 ? `${digits(value)} s` : size >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
  }
  function bytes(value) {
    let number = value, unit = 'B';
    for (const larger of ['kB', 'MB', 'GB']) if (number >= 1000) { number /= 1000; unit = larger; }
    return `${digits(number, 3)} ${unit}`;
  }
  const amount = (panel, value) => panel.bytes ? bytes(value) : `${digits(value)} sets`;
  const share = value => `${(100 * value).toFixed(1)} %`;
  function element(tag, text, parent, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== null) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (parent) parent.append(made);
    return made;
  }
  function empty(id) { $(id).replaceChildren(); return $(id); }

  // Ops: from the spelling in a schedule to what is drawn ---------------------------------------------------------------
  function opsOf(panel) {
    const several = new Map(); // stage -> its place among the stages of its rank
    panel.rank_stages.forEach(stages => stages.forEach((stage, place) => several.set(stage, place)));
    return panel.ops.map(([rank, lane, name, start, duration]) => {
      const found = /^(\d+)([A-Z_]+?)(\d+)?(?:\.(\d+))?(?:>(\d+))?$/.exec(name) || [name, '0', '?'];
      const stage = Number(found[1]);
      return { panel, rank, lane, name, start, end: start + duration, stage, kind: found[2], microbatch: found[3], place: several.get(stage) || 0 };
    });
  }
  function tensors(op) {
    const { input, set } = op.panel, kept = op.panel.set.length > 0, of = list => kept && list[op.stage] !== undefined ? `, ${bytes(list[op.stage])}` : '';
    const after = kept && input[op.stage + 1] !== undefined ? `, ${bytes(input[op.stage + 1])}` : '';
    return {
      F: `reads the stage's input${of(input)}; gives its output${after}`,
      R: `reads the stored input${of(input)}; gives the activation set${of(set)}`,
      B: `reads the activation set${of(set)} and the gradient of the output${after}; frees the set`,
      I: `reads the activation set${of(set)} and the gradient of the output${after}; gives the gradient of the input${of(input)}`,
      W: `reads what I left of the activation set${of(set)}; gives the gradients of the weights; frees the set`,
      SEND_F: `output of stage ${op.stage}${after}`, RECV_F: `input of stage ${op.stage}${of(input)}`,
      SEND_B: `gradient of the input of stage ${op.stage}${of(input)}`, RECV_B: `gradient of the output of stage ${op.stage}${after}`,
      REDUCE_GRAD: `gradients of stage ${op.stage}`,
    }[op.kind] || '';
  }
  function facts(op) {
    const word = (data.kinds[op.kind] || {}).word || op.kind.toLowerCase().replace('_', ' ');
    const pairs = [['op', `${op.name}, ${word}`], ['where', `${op.panel.ranks[op.rank]}, lane ${LANES[op.lane]}, stage ${op.stage}`]];
    if (op.microbatch !== undefined) pairs.push(['microbatch', op.microbatch]);
    pairs.push(['time', `${seconds(op.start)} to ${seconds(op.end)}, takes ${seconds(op.end - op.start)}`]);
    for (const other of panels) {
      const same = other !== op.panel && other.byName.get(op.name);
      if (same) pairs.push([`in "${other.name}"`, `takes ${seconds(same.end - same.start)}`]);
    }
    if (data.stages[op.stage]) pairs.push(['layers', data.stages[op.stage]]);
    if (tensors(op)) pairs.push(['tensors', tensors(op)]);
    return pairs;
  }

  // Which panels, which rows --------------------------------------------------------------------------------------------
  function arrange() {
    const step = data.steps[state.pick], own = step ? step.panels[state.replica] || step.panels[step.slowest] : null;
    panels = [...data.fixed, ...(own ? [own] : [])];
    for (const panel of panels) {
      if (!panel.parsed) {
        panel.parsed = opsOf(panel);
        panel.byName = new Map(panel.parsed.map(op => [op.name, op]));
      }
    }
    longest = Math.max(1e-9, ...panels.map(panel => panel.seconds));
    rows = [];
    const lanes = $('lanes').checked;
    let y = 0;
    for (const panel of panels) {
      panel.top = y;
      y += HEAD;
      panel.ranks.forEach((name, rank) => {
        const own = panel.parsed.filter(op => op.rank === rank);
        const beside = lanes || panel.beside;
        const used = LANES.map((_, lane) => own.filter(op => op.lane === lane));
        const first = beside ? used[0] : [...used[0], ...used[1]];
        const below = lanes ? [1, 2, 3, 4] : [...(beside ? [1] : []), 4];
        const group = [[first, TALL, 'compute'], ...below.map(lane => [used[lane], lanes || lane === 1 ? THIN : 4, LANES[lane]])];
        group.forEach(([ops, height, lane], place) => {
          if (place && !ops.length) return;
          ops.sort((one, other) => one.start - other.start);
          rows.push({ panel, rank, ops, y, height, lane, label: place ? (lanes ? lane : '') : name });
          y += height + (lanes ? 2 : 1);
        });
        y += GAP;
      });
      panel.bottom = y;
      y += 24;
    }
    return y;
  }

  // Drawing -------------------------------------------------------------------------------------------------------------
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let paint = {}, width = 800, hatch = null;
  function across(time) { return LEFT + (time - state.from) / (state.to - state.from) * (width - LEFT - RIGHT); }
  function begin(canvas, height) {
    const scale = matchMedia('print').matches ? 2 : devicePixelRatio || 1;
    width = canvas.clientWidth || 1000;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const brush = canvas.getContext('2d');
    brush.scale(scale, scale);
    brush.textBaseline = 'middle';
    paint = Object.fromEntries(['text', 'faint', 'line', 'idle', 'paper', 'accent', 'limit'].map(name => [name, colour(name)]));
    return brush;
  }
  function write(brush, text, x, y, fill, size = 12, weight = 400) {
    brush.font = `${weight} ${size}px ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif`;
    brush.fillStyle = fill;
    brush.fillText(text, x, y);
  }
  function clip(brush, top, bottom) {
    brush.save();
    brush.beginPath();
    brush.rect(LEFT, top, width - LEFT - RIGHT, bottom - top);
    brush.clip();
  }
  function hatching(brush) {
    if (hatch) return hatch;
    const tile = element('canvas', null, null, { width: 6, height: 6 }), pen = tile.getContext('2d');
    pen.strokeStyle = '#3d2600b0';
    pen.lineWidth = 1.6;
    for (const x of [-6, 0, 6]) { pen.beginPath(); pen.moveTo(x, 6); pen.lineTo(x + 6, 0); pen.stroke(); }
    hatch = brush.createPattern(tile, 'repeat');
    return hatch;
  }
  function box(brush, op, row) {
    const x = across(op.start), length = Math.max(across(op.end) - x, 0.6);
    if (x > width || x + length < LEFT) return;
    const looks = data.kinds[op.kind] || { fill: op.lane === 2 ? paint.accent : paint.line, ink: paint.paper };
    const other = state.hover && op.microbatch !== undefined && state.hover.microbatch !== op.microbatch;
    brush.globalAlpha = other ? 0.2 : 1;
    brush.fillStyle = looks.fill;
    const inset = Math.min(0.6, length / 8);
    brush.fillRect(x + inset, row.y, length - 2 * inset, row.height);
    if (op.place) { // a later stage of the same rank: a band of light stripes at its foot, one for each stage before it
      brush.fillStyle = '#ffffffa0';
      for (let one = 0; one < op.place && row.height === TALL; one++) brush.fillRect(x + inset, row.y + row.height - 4 - 4 * one, length - 2 * inset, 2.2);
    }
    if (row.height === TALL && length > 9) {
      brush.font = '11px ui-sans-serif, sans-serif';
      const short = op.name.replace(/^\d+/, ''), several = op.panel.rank_stages[op.rank].length > 1;
      const name = [...(several ? [op.name] : []), short, op.kind].find(text => brush.measureText(text).width <= length - 3);
      if (name) { brush.textAlign = 'center'; brush.fillStyle = looks.ink; brush.fillText(name, x + length / 2, row.y + (op.place ? 9 : row.height / 2 + 0.5)); brush.textAlign = 'left'; }
    }
    brush.globalAlpha = 1;
    if (op === state.chosen) { brush.strokeStyle = paint.text; brush.lineWidth = 2; brush.strokeRect(x, row.y - 1, length, row.height + 2); }
  }
  function axis(brush, y, end) {
    const rough = (state.to - state.from) / 8, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(part => part * unit).find(size => size >= rough);
    brush.textAlign = 'center';
    for (let mark = Math.ceil(state.from / step) * step; mark <= Math.min(state.to, end) + step * 1e-6; mark += step) {
      const x = across(mark);
      brush.fillStyle = paint.line;
      brush.fillRect(x, y - 3, 1, 5);
      write(brush, seconds(Number(mark.toPrecision(9))), Math.min(x, width - 18), y + 9, paint.faint, 11);
    }
    brush.textAlign = 'left';
  }
  function drawSteps(height) {
    const brush = begin($('steps'), height);
    for (const panel of panels) {
      write(brush, panel.name, 0, panel.top + 12, paint.text, 14, 600);
      write(brush, panel.facts, 0, panel.top + 29, paint.faint);
      clip(brush, panel.top, panel.bottom + 2);
      for (const row of rows) {
        if (row.panel !== panel) continue;
        brush.fillStyle = paint.idle;
        brush.fillRect(across(0), row.y, across(panel.seconds) - across(0), row.height);
        for (const op of row.ops) box(brush, op, row);
      }
      brush.fillStyle = hatching(brush);
      for (const [rank, start, end] of panel.exposed) {
        const mine = rows.filter(row => row.panel === panel && row.rank === rank);
        const row = mine.find(one => one.lane === 'recompute') || mine[0];
        brush.fillRect(across(start), row.y, across(end) - across(start), row.height);
      }
      brush.restore();
      axis(brush, panel.bottom + 3, panel.seconds);
    }
    for (const row of rows) {
      const isRank = row.lane === 'compute';
      write(brush, row.label, isRank ? 0 : 30, row.y + row.height / 2 + 0.5, isRank ? paint.text : paint.faint, isRank ? 12 : 9);
    }
  }
  function curve(brush, held, base, up, end) {
    brush.beginPath();
    brush.moveTo(across(0), base);
    let before = 0;
    for (const [time, value] of held) { brush.lineTo(across(time), base - before * up); brush.lineTo(across(time), base - value * up); before = value; }
    brush.lineTo(across(end), base - before * up);
    brush.lineTo(across(end), base);
  }
  function drawMemory() {
    const panel = panels[panels.length - 1], plan = panels.length > 1 ? panels[0] : null, ranks = panel.ranks.length;
    const comparable = plan && plan.bytes === panel.bytes && plan.ranks.length === ranks;
    const brush = begin($('memory'), ranks * STRIP + 22);
    const most = (of, rank) => Math.max(0, ...of.held[rank].map(([, value]) => value));
    const peaks = panel.ranks.map((_, rank) => Math.max(most(panel, rank), comparable ? most(plan, rank) : 0, panel.peak[rank] || 0));
    const limits = panel.bytes ? panel.limit : [], limit = Math.max(0, ...limits.map(Number));
    const highest = Math.max(...peaks), top = (limit && limit < 4 * highest ? limit : highest) * 1.05 || 1, up = (STRIP - 12) / top;
    panel.ranks.forEach((name, rank) => {
      const base = (rank + 1) * STRIP - 2;
      write(brush, name, 0, base - STRIP + 18, paint.text);
      write(brush, amount(panel, peaks[rank]), 0, base - STRIP + 33, paint.faint, 11);
      clip(brush, base - STRIP, base + 1);
      brush.globalAlpha = 0.55;
      brush.fillStyle = data.kinds.R.fill;
      curve(brush, panel.held[rank], base, up, panel.seconds);
      brush.fill();
      brush.globalAlpha = 1;
      const level = (value, stroke, dash) => {
        brush.strokeStyle = stroke; brush.setLineDash(dash); brush.lineWidth = 1.2;
        brush.beginPath(); brush.moveTo(LEFT, base - value * up); brush.lineTo(width - RIGHT, base - value * up); brush.stroke(); brush.setLineDash([]);
      };
      if (comparable) { brush.strokeStyle = paint.text; brush.lineWidth = 1; curve(brush, plan.held[rank], base, up, plan.seconds); brush.stroke(); }
      if (panel.bytes && panel.peak[rank]) level(panel.peak[rank], paint.accent, [4, 3]);
      if (limits[rank] && limits[rank] <= top) level(limits[rank], paint.limit, []);
      brush.restore();
      brush.fillStyle = paint.line;
      brush.fillRect(LEFT, base, width - LEFT - RIGHT, 1);
      brush.textAlign = 'right';
      write(brush, amount(panel, top / 1.05).replace(' sets', ''), LEFT - 4, base - top / 1.05 * up + 4, paint.faint, 9);
      write(brush, '0', LEFT - 4, base - 3, paint.faint, 9);
      brush.textAlign = 'left';
    });
    axis(brush, ranks * STRIP + 4, panel.seconds);
    const words = [panel.bytes ? 'Filled: bytes of activation sets and stored inputs by the order of the ops.' : 'Filled: activation sets alive.'];
    if (comparable) words.push('Line: as predicted.');
    if (panel.bytes && panel.peak.some(Boolean)) words.push('Dashes: the most that was measured, messages included.');
    if (limit) words.push(`The device has ${[...new Set(limits.map(bytes))].join(', ')}${limit <= top ? ' (red)' : ', far above this axis'}.`);
    else if (panel.bytes) words.push('The device sets no limit of its own: on a CPU, ranks share the memory of the machine.');
    empty('memory-words').textContent = words.join(' ');
  }
  function drawCauses() {
    const panel = panels[panels.length - 1], parent = empty('bars'), list = empty('causes');
    $('bars-of').textContent = panel.name;
    const parts = [{ name: 'busy', fill: data.kinds.F.fill }, ...data.causes.map((cause, place) => ({ ...cause, fill: CAUSE_FILLS[place % CAUSE_FILLS.length] }))];
    panel.ranks.forEach((name, rank) => {
      element('span', name, parent);
      const bar = element('div', null, parent, { class: 'bar' });
      parts.forEach((part, place) => {
        const value = panel.parts[rank][place], words = `${part.name}: ${seconds(value)}, ${share(value / panel.seconds)}`;
        const piece = element('i', null, bar, { title: words });
        piece.style.width = `${100 * value / longest}%`;
        piece.style.background = part.fill;
      });
    });
    parts.slice(1).forEach((cause, place) => {
      const total = panel.parts.reduce((sum, of) => sum + of[place + 1], 0);
      if (!(total > 1e-9 * panel.seconds)) return;
      const key = element('span', null, list, { class: 'key' });
      element('i', null, key).style.background = cause.fill;
      key.append(cause.name);
      element('span', share(total / (panel.seconds * panel.ranks.length)), list);
      element('span', `The rank ${cause.words}.${cause.try ? ` Try: ${cause.try}.` : ''}`, list);
    });
  }
  function drawCharts() {
    const parent = empty('charts'), { steps, lines } = data.charts;
    $('over').hidden = steps.length < 2;
    if (steps.length < 2) return;
    for (const { name, values, percent } of lines) {
      const known = values.filter(value => value !== null), words = value => value === null ? 'not a number' : percent ? share(value) : digits(value);
      if (!known.length) continue;
      const low = Math.min(...known, percent ? 0 : Infinity), high = Math.max(...known), span = high - low || 1;
      const figure = element('div', null, parent), caption = element('div', null, figure, { class: 'faint' });
      const say = place => { caption.textContent = `${name}: ${words(values[place])} at step ${steps[place]}`; };
      say(values.length - 1);
      const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
      svg.setAttribute('viewBox', '0 0 360 150');
      svg.setAttribute('preserveAspectRatio', 'none');
      svg.setAttribute('role', 'img');
      svg.setAttribute('aria-label', `${name} over steps ${steps[0]} to ${steps[steps.length - 1]}`);
      const x = place => 4 + 352 * (steps[place] - steps[0]) / (steps[steps.length - 1] - steps[0] || 1), y = value => 140 - 130 * (value - low) / span;
      const path = values.map((value, place) => value === null ? '' : `${place && values[place - 1] !== null ? 'L' : 'M'}${x(place).toFixed(1)},${y(value).toFixed(1)}h.01`).join('');
      const drawn = document.createElementNS(svg.namespaceURI, 'path');
      drawn.setAttribute('d', path);
      drawn.setAttribute('vector-effect', 'non-scaling-stroke');
      svg.append(drawn);
      figure.append(svg);
      element('div', `${words(low)} to ${words(high)}; steps ${steps[0]} to ${steps[steps.length - 1]}`, figure, { class: 'faint' });
      svg.addEventListener('pointermove', move => {
        const at = svg.getBoundingClientRect(), wanted = 4 + (move.clientX - at.left) / at.width * 360;
        say(steps.reduce((best, _, place) => Math.abs(x(place) - wanted) < Math.abs(x(best) - wanted) ? place : best, 0));
      });
      svg.addEventListener('pointerleave', () => say(values.length - 1));
    }
  }
  function draw() {
    scheduled = false;
    drawSteps(arrange());
    drawMemory();
  }
  function later() { if (!scheduled) { scheduled = true; requestAnimationFrame(draw); } }

  // What the user does ----------------------------------------------------------------------------------------------------
  function zoom(factor, at = (state.from + state.to) / 2) {
    const least = longest / 1e4, span = Math.min(longest, Math.max(least, (state.to - state.from) * factor));
    const from = at - (at - state.from) * span / (state.to - state.from);
    state.from = Math.min(Math.max(0, from), longest - span);
    state.to = state.from + span;
    later();
  }
  function pan(share) {
    const span = state.to - state.from;
    state.from = Math.min(Math.max(0, state.from + share * span), longest - span);
    state.to = state.from + span;
    later();
  }
  function whole() { state.from = 0; state.to = longest; later(); }
  function timeAt(x) { return state.from + (x - LEFT) / (width - LEFT - RIGHT) * (state.to - state.from); }
  function under(event) {
    const at = $('steps').getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
    const row = rows.find(one => y >= one.y && y <= one.y + one.height);
    if (!row || x < LEFT || x > width - RIGHT) return null;
    const time = timeAt(x), slack = (state.to - state.from) / (width - LEFT - RIGHT);
    return row.ops.find(op => op.start <= time && time <= op.end) || row.ops.find(op => op.start - slack <= time && time <= op.end + slack) || null;
  }
  function choose(op) {
    state.chosen = op;
    const list = empty('chosen');
    if (op) {
      const pairs = element('dl', null, list);
      for (const [term, words] of facts(op)) { element('dt', term, pairs); element('dd', words, pairs); }
      if (op.end < state.from || op.start > state.to) { const span = state.to - state.from; state.from = Math.max(0, Math.min(longest - span, op.start - span / 2)); state.to = state.from + span; }
    }
    later();
  }
  function hover(op, event) {
    const tip = $('tip');
    tip.style.display = op ? 'block' : 'none';
    if (op) {
      tip.textContent = facts(op).map(([term, words]) => `${term}: ${words}`).join('\n');
      tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 4)}px`;
    }
    if (op !== state.hover) { state.hover = op; later(); }
  }
  function move(dx, dy) {
    const filled = rows.filter(row => row.ops.length), at = filled.findIndex(row => row.ops.includes(state.chosen));
    if (at < 0) return choose(filled[0] ? filled[0].ops[0] : null);
    const row = filled[Math.min(filled.length - 1, Math.max(0, at + dy))], now = state.chosen;
    if (!dy) return choose(row.ops[row.ops.indexOf(now) + dx] || now);
    return choose(row.ops.reduce((best, op) => Math.abs(op.start - now.start) < Math.abs(best.start - now.start) ? op : best));
  }
  function pick(place) {
    if (!data.steps[place]) return;
    state.pick = place;
    state.replica = -1;
    show();
  }
  function show() {
    const kept = state.chosen && state.chosen.name, from = state.from / longest, to = state.to / longest;
    hover(null);
    arrange();
    state.from = from * longest;
    state.to = to * longest;
    choose(kept ? panels[panels.length - 1].byName.get(kept) || null : null);
    fill('step', data.steps.map(one => `step ${one.step}`), state.pick);
    const replicas = data.steps[state.pick] ? data.steps[state.pick].panels : [];
    fill('replica', replicas.map((one, place) => one.replica || `replica ${place}`), state.replica < 0 && replicas.length ? data.steps[state.pick].slowest : state.replica);
    $('picker').hidden = !data.steps.length;
    $('replica').hidden = replicas.length < 2;
    drawCauses();
    drawCharts();
  }
  function fill(id, words, chosen) {
    const options = empty(id);
    words.forEach((word, place) => element('option', word, options, { value: place }));
    options.value = chosen;
  }
  function take(text, first) {
    const newest = first || state.pick === data.steps.length - 1;
    data = JSON.parse(text);
    if (newest || !data.steps[state.pick]) state.pick = data.steps.length - 1;
    if (!data.fixed.length && !data.steps.length) { $('drawing').hidden = true; return; }
    $('drawing').hidden = false;
    if (first || longest === 1e-9) { arrange(); whole(); $('lanes').checked = panels[0].ranks.length <= 4; arrange(); whole(); }
    show();
  }
  async function follow() {
    try {
      const answer = await fetch(location.href, { cache: 'no-store' });
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const text = page.getElementById('data').textContent;
      if (text !== $('data').textContent) {
        $('data').textContent = text;
        $('tables').replaceWith(page.getElementById('tables'));
        take(text, !data.steps.length);
      }
    } catch { /* the command has ended: the page stays as it is */ }
  }

  const canvas = $('steps');
  let drag = null;
  canvas.addEventListener('pointerdown', event => { drag = { x: event.clientX, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener('pointermove', event => {
    if (drag && event.buttons) {
      if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
      if (drag.moved) { pan((drag.x - event.clientX) / (width - LEFT - RIGHT)); drag.x = event.clientX; hover(null); return; }
    }
    hover(under(event), event);
  });
  canvas.addEventListener('pointerup', event => { if (drag && !drag.moved) choose(under(event)); drag = null; });
  canvas.addEventListener('pointerleave', () => hover(null));
  canvas.addEventListener('dblclick', event => zoom(0.5, timeAt(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener('wheel', event => {
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(1.002 ** event.deltaY, timeAt(event.clientX - canvas.getBoundingClientRect().left)); }
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan(event.deltaX / width); }
  }, { passive: false });
  const keys = {
    ArrowLeft: event => event.shiftKey ? pan(-0.2) : move(-1, 0), ArrowRight: event => event.shiftKey ? pan(0.2) : move(1, 0),
    ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1), '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), 0: whole,
    Escape: () => choose(null), '[': () => pick(state.pick - 1), ']': () => pick(state.pick + 1),
  };
  document.addEventListener('keydown', event => {
    if (event.target.tagName === 'SELECT' || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    if (event.key.startsWith('Arrow') && event.target !== canvas) return; // elsewhere they scroll
    event.preventDefault();
    keys[event.key](event);
  });
  $('step').addEventListener('change', () => pick(Number($('step').value)));
  $('replica').addEventListener('change', () => { state.replica = Number($('replica').value); show(); });
  $('lanes').addEventListener('change', later);
  $('closer').addEventListener('click', () => zoom(0.5));
  $('farther').addEventListener('click', () => zoom(2));
  $('whole').addEventListener('click', whole);
  addEventListener('resize', later);
  for (const query of ['print', '(prefers-color-scheme: dark)']) matchMedia(query).addEventListener('change', draw);
  addEventListener('beforeprint', draw);
  take($('data').textContent, true);
  if (document.body.dataset.live) setInterval(follow, 2000);
})();
