// Draws the page of a run or of a schedule from the JSON in #data. Text goes into the page as text alone, never as HTML.
(() => {
  'use strict';
  const $ = id => document.getElementById(id);
  if (!$('data')) return;
  const LANES = ['compute', 'recompute', 'send', 'recv', 'reduce', 'offload', 'reload'];
  const [COMPUTE, RECOMPUTE, , RECV, REDUCE, ...COPIES] = LANES.keys(), HEIGHTS = [22, 14, 9, 9, 9, 9, 9], LEFT = 92, RIGHT = 12, GAP = 5, HEAD = 40, FOOT = 4;
  const FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";
  const CAUSES = { // of idle time: its colour, and what to try
    fill: ['#dcb64c', 'more microbatches, or more stages per rank'],
    drain: ['#8d7bc3', 'more microbatches, or more stages per rank'],
    reduce: ['#6b7280', 'recompute.segments, for smaller buckets'],
    'wait F': ['#e07a5f', 'transport.prefetch, pipeline.warmup, or faster links'],
    'wait B': ['#c2477f', 'recompute.mode=overlap if it is another, or pipeline.split_backward=true'],
    copy: ['#9a6fb0', 'more recompute.sets, or recompute.offload=auto'],
    imbalance: ['#5f9ea0', 'another pipeline.balance'],
    host: ['#b5838d', 'larger microbatches, or fewer of them'],
    'hand-over': ['#7f9c96', 'an idle machine, larger microbatches, or fewer of them'],
    machine: ['#3d405b', 'an idle machine, or fewer ranks on it'],
    unexplained: ['#a40e26', 'layers that do not wait for the device'],
  };
  const state = { pick: -1, from: 0, to: 1, hover: null, chosen: null };
  let data, recorded = [], panels = [], rows = [], longest = 1, scheduled = false; // `recorded`: a panel per step and replica

  // Words -----------------------------------------------------------------------------------------------------------
  const digits = (value, count = 4) => String(Number(value.toPrecision(count)));
  const share = value => `${(100 * value).toFixed(1)} %`;
  function seconds(value) {
    const [unit, word] = Math.abs(value) >= 1 || value === 0 ? [1, 's'] : Math.abs(value) >= 1e-3 ? [1e-3, 'ms'] : [1e-6, 'µs'];
    return `${digits(value / unit)} ${word}`;
  }
  function bytes(value) {
    let number = value, unit = 'B';
    for (const larger of ['kB', 'MB', 'GB']) if (number >= 1000) { number /= 1000; unit = larger; }
    return `${digits(number, 3)} ${unit}`;
  }
  const amount = (panel, value) => panel.bytes ? bytes(value) : `${digits(value)} set${value === 1 ? '' : 's'}`;
  function element(tag, text, parent, attributes = {}, space = 'http://www.w3.org/1999/xhtml') {
    const made = document.createElementNS(space, tag);
    if (text !== null) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (parent) parent.append(made);
    return made;
  }
  const shape = (tag, parent, attributes) => element(tag, null, parent, attributes, 'http://www.w3.org/2000/svg');
  function empty(id) { $(id).replaceChildren(); return $(id); }
  function key(parent, words, fill, more = '') {
    const made = element('span', null, parent, { class: 'key' });
    element('i', null, made, { class: more }).style.backgroundColor = fill;
    made.append(words);
  }

  // Ops: from the spelling in a schedule to what is drawn and said -----------------------------------------------------
  const SPELLING = /^(\d+)([A-Z_]+?)(\d+)?(?:\.(\d+))?(?:>(\d+))?$/; // 2F0, 2R1.3, 0SEND_F1>3, 2REDUCE_GRAD.0
  function parse(panel) {
    const place = new Map(); // of a stage among those of its rank
    panel.rank_stages.forEach(stages => stages.forEach((stage, number) => place.set(stage, number)));
    panel.parsed = panel.ops.map(([rank, lane, name, start, took]) => {
      const [, stage, kind, microbatch] = SPELLING.exec(name) || [name, '0', name];
      return { panel, rank, lane, name, start, end: start + took, stage: Number(stage), kind, microbatch, place: place.get(Number(stage)) || 0 };
    }).sort((one, other) => one.start - other.start);
    panel.byName = new Map(panel.parsed.map(op => [op.name, op]));
  }
  function tensors({ kind, stage, panel }) {
    const sized = (list, number) => list[number] === undefined ? '' : `, ${bytes(list[number])}`;
    const set = sized(panel.set, stage), input = sized(panel.input, stage), output = sized(panel.input, stage + 1);
    return {
      F: `reads the input of the stage${input}; gives its output${output}`,
      R: `reads the stored input${input}; gives the activation set${set}`,
      B: `reads the activation set${set} and the gradient of the output${output}; frees the set`,
      I: `reads the activation set${set} and the gradient of the output${output}; gives the gradient of the input${input}`,
      W: `reads what I left of the activation set${set}; gives the gradients of the weights; frees the set`,
      SEND_F: `output of the stage${output}`, RECV_F: `input of the stage${input}`, REDUCE_GRAD: 'gradients of the stage',
      SEND_B: `gradient of the input of the stage${input}`, RECV_B: `gradient of the output of the stage${output}`,
    }[kind];
  }
  const wordOf = kind => (data.kinds[kind] || {}).word || kind.toLowerCase().replace('_', ' ');
  function facts(op) {
    const took = ({ start, end }) => `takes ${seconds(end - start)}`, others = panels.filter(panel => panel !== op.panel && panel.byName.has(op.name));
    return [
      ['op', `${op.name}, ${wordOf(op.kind)}`],
      ['where', `${op.panel.ranks[op.rank]}, lane ${LANES[op.lane]}, stage ${op.stage}`],
      ['microbatch', op.microbatch],
      ['time', `${seconds(op.start)} to ${seconds(op.end)}, ${took(op)}`],
      ...others.map(({ name, byName }) => [name, took(byName.get(op.name))]),
      ['layers', data.stages[op.stage]],
      ['tensors', tensors(op)],
    ].filter(([, words]) => words !== undefined);
  }

  // Which panels, which rows -----------------------------------------------------------------------------------------
  function arrange() {
    panels = [...data.fixed, ...recorded.slice(state.pick, state.pick + 1)];
    for (const panel of panels) if (!panel.parsed) parse(panel);
    longest = Math.max(1e-9, ...panels.map(panel => panel.seconds));
    rows = [];
    let y = 0;
    const lanes = $('lanes').checked;
    for (const panel of panels) {
      panel.top = y; y += HEAD;
      const beside = lanes || panel.beside; // R in a row of its own
      panel.ranks.forEach((name, rank) => {
        const own = panel.parsed.filter(op => op.rank === rank);
        const first = own.filter(op => op.lane === COMPUTE || (!beside && op.lane === RECOMPUTE));
        rows.push({ panel, rank, ops: first, y, height: HEIGHTS[COMPUTE], lane: COMPUTE, label: name });
        y += HEIGHTS[COMPUTE] + 1;
        for (const lane of lanes ? [1, 2, 3, 4, ...COPIES] : [...(beside ? [RECOMPUTE] : []), REDUCE, ...COPIES]) {
          const ops = own.filter(op => op.lane === lane);
          if (!ops.length) continue;
          rows.push({ panel, rank, ops, y, height: lanes || lane === RECOMPUTE ? HEIGHTS[lane] : FOOT, lane, label: lanes ? LANES[lane] : '' });
          y += rows[rows.length - 1].height + 1;
        }
        y += GAP;
      });
      panel.bottom = y; y += 24;
    }
    return y;
  }

  // Drawing ----------------------------------------------------------------------------------------------------------
  let paint = {}, width = 800, hatch = null;
  const across = time => LEFT + (time - state.from) / (state.to - state.from) * (width - LEFT - RIGHT);
  const timeAt = x => state.from + (x - LEFT) / (width - LEFT - RIGHT) * (state.to - state.from);
  function begin(canvas, height) {
    const scale = matchMedia('print').matches ? 2 : devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
    width = canvas.clientWidth || 1000;
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) }).style.height = `${height}px`;
    const brush = canvas.getContext('2d');
    brush.scale(scale, scale);
    brush.textBaseline = 'middle';
    for (const name of ['text', 'faint', 'line', 'idle', 'paper', 'accent', 'limit']) paint[name] = style.getPropertyValue(`--${name}`).trim();
    return brush;
  }
  function write(brush, text, x, y, fill, size = 12, { weight = 400, align = 'left' } = {}) {
    Object.assign(brush, { font: `${weight} ${size}px ${FONT}`, fillStyle: fill, textAlign: align });
    brush.fillText(text, x, y, width - 4);
  }
  function clip(brush, top, bottom) {
    brush.save();
    brush.beginPath();
    brush.rect(LEFT, top, width - LEFT - RIGHT, bottom - top);
    brush.clip();
  }
  function hatching(brush) {
    const tile = element('canvas', null, null, { width: 6, height: 6 }), pen = tile.getContext('2d');
    Object.assign(pen, { strokeStyle: '#3d260055', lineWidth: 1.4 });
    for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
    pen.stroke();
    return hatch || (hatch = brush.createPattern(tile, 'repeat'));
  }
  const looksOf = op => data.kinds[op.kind] || { fill: op.lane === RECV ? paint.line : paint.accent, ink: paint.paper };
  function box(brush, op, row) {
    const x = across(op.start), length = Math.max(across(op.end) - x, 0.6), inset = Math.min(0.6, length / 8);
    if (x > width || x + length < LEFT) return;
    brush.globalAlpha = state.hover && op.microbatch !== undefined && state.hover.microbatch !== op.microbatch ? 0.2 : 1;
    brush.fillStyle = looksOf(op).fill;
    brush.fillRect(x + inset, row.y, length - 2 * inset, row.height);
    if (op.place) { // a later stage of its rank is paler
      brush.fillStyle = `rgb(255 255 255 / ${op.place > 1 ? 0.62 : 0.45})`;
      brush.fillRect(x + inset, row.y, length - 2 * inset, row.height);
    }
    brush.globalAlpha = 1;
    if (op === state.chosen) { brush.strokeStyle = paint.text; brush.lineWidth = 2; brush.strokeRect(x, row.y - 1, length, row.height + 2); }
  }
  function label(brush, op, row) {
    const x = across(op.start), length = across(op.end) - x, names = [op.name.replace(/^\d+/, ''), op.kind];
    if (length < 9 || x > width || x + length < LEFT) return;
    if (op.panel.rank_stages[op.rank].length > 1) names.unshift(op.name);
    brush.font = `10.5px ${FONT}`;
    const name = names.find(text => brush.measureText(text).width <= length - 2);
    if (name) write(brush, name, x + length / 2, row.y + row.height / 2 + 0.5, op.place ? '#14181d' : looksOf(op).ink, 10.5, { align: 'center' });
  }
  function axis(brush, y, end) {
    const rough = (state.to - state.from) / 8, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(part => part * unit).find(size => size >= rough);
    for (let mark = Math.ceil(state.from / step) * step; mark <= Math.min(state.to, end) + step * 1e-6; mark += step) {
      Object.assign(brush, { fillStyle: paint.line }).fillRect(across(mark), y - 3, 1, 5);
      write(brush, seconds(Number(mark.toPrecision(9))), Math.min(across(mark), width - 24), y + 9, paint.faint, 11, { align: 'center' });
    }
  }
  function drawSteps(height) {
    const brush = begin($('steps'), height);
    for (const panel of panels) {
      write(brush, panel.name, 0, panel.top + 12, paint.text, 14, { weight: 600 });
      write(brush, panel.facts, 0, panel.top + 29, paint.faint);
      clip(brush, panel.top, panel.bottom + 2);
      const own = rows.filter(row => row.panel === panel);
      for (const row of own) {
        brush.fillStyle = paint.idle;
        brush.fillRect(across(0), row.y, across(panel.seconds) - across(0), row.height);
        for (const op of row.ops) box(brush, op, row);
      }
      brush.fillStyle = hatching(brush);
      for (const [rank, start, end] of panel.exposed) {
        const mine = own.filter(row => row.rank === rank), row = mine.find(one => one.lane === RECOMPUTE) || mine[0];
        brush.fillRect(across(start), row.y, across(end) - across(start), row.height);
      }
      for (const row of own) if (row.height >= HEIGHTS[RECOMPUTE]) for (const op of row.ops) label(brush, op, row);
      brush.restore();
      axis(brush, panel.bottom + 3, panel.seconds);
    }
    for (const { label, lane, y, height } of rows) {
      write(brush, label, lane ? 26 : 0, y + height / 2 + 0.5, lane ? paint.faint : paint.text, lane ? 10 : 12);
    }
  }
  function outline(brush, held, base, up, end) {
    brush.beginPath();
    brush.moveTo(across(0), base);
    let before = 0;
    for (const [time, value] of [...held, [end, 0]]) {
      brush.lineTo(across(time), base - before * up);
      brush.lineTo(across(time), base - value * up);
      before = value;
    }
  }
  function drawMemory() {
    const panel = panels[panels.length - 1], above = panels.length > 1 ? panels[0] : null, tall = panel.ranks.length > 8 ? 40 : 56;
    const plan = above && above.bytes === panel.bytes && above.ranks.length === panel.ranks.length ? above : null;
    const brush = begin($('memory'), panel.ranks.length * tall + 22), measured = rank => panel.bytes && panel.peak[rank] || 0;
    const most = (of, rank) => of ? Math.max(0, ...of.held[rank].map(([, value]) => value)) : 0;
    const peaks = panel.ranks.map((_, rank) => Math.max(most(panel, rank), most(plan, rank), measured(rank)));
    const limits = panel.bytes ? panel.limit.map(Number) : [], limit = Math.max(0, ...limits), highest = Math.max(0, ...peaks);
    const top = (limit && limit < 4 * highest ? limit : highest) || 1, up = (tall - 12) / top;
    panel.ranks.forEach((name, rank) => {
      const base = (rank + 1) * tall - 2;
      write(brush, name, 0, base - tall + 16, paint.text);
      write(brush, measured(rank) ? bytes(measured(rank)) : amount(panel, most(panel, rank)), 0, base - tall + 31, paint.faint, 11);
      clip(brush, base - tall, base + 1);
      Object.assign(brush, { globalAlpha: 0.55, fillStyle: data.kinds.R.fill });
      outline(brush, panel.held[rank], base, up, panel.seconds);
      brush.fill();
      Object.assign(brush, { globalAlpha: 1, strokeStyle: paint.text });
      if (plan) { outline(brush, plan.held[rank], base, up, plan.seconds); brush.stroke(); }
      brush.restore();
      for (const [value, colour] of [[0, paint.line], [measured(rank), paint.accent], [limits[rank] <= top ? limits[rank] : 0, paint.limit]]) {
        brush.fillStyle = colour;
        if (value || colour === paint.line) brush.fillRect(LEFT, base - value * up, width - LEFT - RIGHT, 1.2);
      }
      write(brush, panel.bytes ? bytes(top) : digits(top), LEFT - 4, base - top * up + 4, paint.faint, 9, { align: 'right' });
      write(brush, '0', LEFT - 4, base - 3, paint.faint, 9, { align: 'right' });
    });
    axis(brush, panel.ranks.length * tall + 4, panel.seconds);
    const given = [...new Set(limits)].map(bytes).join(', ');
    $('memory-words').textContent = [
      panel.bytes ? 'Filled: bytes of activation sets and stored inputs, from the order of the ops and the sizes measured.' : 'Filled: activation sets alive.',
      plan ? `Line: the same of "${plan.name}".` : '',
      panel.peak.some((_, rank) => measured(rank)) ? 'Blue: the most that was measured, messages on their way included.' : '',
      limit ? `The device has ${given}${limit <= top ? ' (red)' : ', which is above this scale'}.` : panel.bytes ? 'The device tells no limit: on a CPU, ranks share the memory of the machine.' : '',
    ].join(' ');
  }
  function drawCauses() {
    const panel = panels[panels.length - 1], bars = empty('bars'), list = empty('causes');
    $('bars-of').textContent = panel.name;
    const parts = [{ name: 'busy', fill: '#9fb3c8' }, ...data.causes.map(({ name, words }) => ({ name, words, fill: CAUSES[name][0], tries: CAUSES[name][1] }))];
    panel.ranks.forEach((name, rank) => {
      element('span', name, bars);
      const bar = element('div', null, bars, { class: 'bar' });
      parts.forEach(({ name, fill }, place) => {
        const value = panel.parts[rank][place], piece = element('i', null, bar, { title: `${name}: ${seconds(value)}, ${share(value / panel.seconds)}` });
        piece.style.width = `${100 * value / longest}%`;
        piece.style.backgroundColor = fill;
      });
    });
    parts.forEach(({ name, fill, words, tries }, place) => {
      const total = panel.parts.reduce((sum, of) => sum + of[place], 0) / (panel.seconds * panel.ranks.length);
      if (!(total >= 5e-4)) return; // 0.0 %
      key(list, name, fill);
      element('span', share(total), list);
      element('span', place ? `The rank ${words}. Try ${tries}.` : 'The rank computes.', list);
    });
  }
  function drawCharts() {
    const parent = empty('charts'), { steps, lines } = data.charts, last = steps.length - 1;
    $('over').hidden = steps.length < 2;
    for (const { name, values, percent } of lines) {
      const known = values.filter(value => value !== null), words = value => value === null ? 'no value' : percent ? share(value) : digits(value);
      if (!known.length) continue;
      const low = Math.min(...known), high = Math.max(...known), figure = element('div', null, parent);
      const caption = element('div', null, figure), say = place => { caption.textContent = `${name}: ${words(values[place])} at step ${steps[place]}`; };
      const x = place => 360 * (steps[place] - steps[0]) / (steps[last] - steps[0] || 1), y = value => 145 - 140 * (value - low) / (high - low || 1);
      const svg = shape('svg', figure, { viewBox: '0 0 360 150', preserveAspectRatio: 'none', role: 'img', 'aria-label': `${name} over steps` });
      const pen = (value, place) => value === null ? '' : `${place && values[place - 1] !== null ? 'L' : 'M'}${x(place).toFixed(1)},${y(value).toFixed(1)}h.01`;
      for (const at of [5, 75, 145]) shape('line', svg, { x1: 0, x2: 360, y1: at, y2: at });
      shape('path', svg, { d: values.map(pen).join(''), 'vector-effect': 'non-scaling-stroke' });
      element('div', `${words(low)} to ${words(high)}, steps ${steps[0]} to ${steps[last]}`, figure, { class: 'faint' });
      say(last);
      svg.addEventListener('pointermove', ({ clientX }) => {
        const at = svg.getBoundingClientRect(), distance = place => Math.abs(x(place) - (clientX - at.left) / at.width * 360);
        say(steps.reduce((best, _, place) => distance(place) < distance(best) ? place : best, 0));
      });
      svg.addEventListener('pointerleave', () => say(last));
    }
  }
  function drawLegend() {
    const parent = empty('legend'), there = new Set(panels.flatMap(panel => panel.parsed.map(op => op.kind))), exposed = panels.some(panel => panel.exposed.length);
    for (const [kind, { word, fill }] of Object.entries(data.kinds)) if (there.has(kind)) key(parent, kind === 'R' && exposed ? `${word}, hidden` : word, fill);
    if (exposed) key(parent, `${data.kinds.R.word}, exposed: the next op waits for it`, data.kinds.R.fill, 'hatch');
    if ($('lanes').checked) { key(parent, 'send', 'var(--accent)'); key(parent, 'receive, from when it is posted', 'var(--line)'); }
    key(parent, 'bubble: nothing runs', 'var(--idle)');
  }
  function draw() { scheduled = false; drawSteps(arrange()); drawMemory(); }
  function later() { if (!scheduled) { scheduled = true; requestAnimationFrame(draw); } }

  // What the user does -----------------------------------------------------------------------------------------------
  function look(from, span) { // at so much of the time, from there on
    const shown = Math.min(longest, Math.max(longest / 1e4, span));
    state.from = Math.min(Math.max(0, from), longest - shown);
    state.to = state.from + shown;
    later();
  }
  const whole = () => look(0, longest), pan = part => look(state.from + part * (state.to - state.from), state.to - state.from);
  const zoom = (factor, at = (state.from + state.to) / 2) => look(at - (at - state.from) * factor, (state.to - state.from) * factor);
  const place = event => event.clientX - $('steps').getBoundingClientRect().left;
  function under(event) {
    const x = place(event), y = event.clientY - $('steps').getBoundingClientRect().top;
    const row = rows.find(one => y >= one.y && y <= one.y + one.height), time = timeAt(x), pixel = (state.to - state.from) / (width - LEFT - RIGHT);
    if (!row || x < LEFT || x > width - RIGHT) return null;
    return row.ops.find(op => op.start <= time && time < op.end) || row.ops.find(op => op.start - pixel <= time && time <= op.end + pixel) || null;
  }
  function choose(op) {
    state.chosen = op;
    const list = empty('chosen'), pairs = op && element('dl', null, list), span = state.to - state.from;
    for (const [term, words] of op ? facts(op) : []) { element('dt', term, pairs); element('dd', words, pairs); }
    if (op && (op.end < state.from || op.start > state.to)) look(op.start - span / 2, span);
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
    const filled = rows.filter(row => row.ops.length), now = state.chosen, at = filled.findIndex(row => row.ops.includes(now));
    if (at < 0) return choose(filled[0].ops[0]);
    const { ops } = filled[Math.min(filled.length - 1, Math.max(0, at + dy))], far = op => Math.abs(op.start - now.start);
    return choose(dx ? ops[ops.indexOf(now) + dx] || now : ops.reduce((best, op) => far(op) < far(best) ? op : best));
  }
  function show() {
    const kept = state.chosen && state.chosen.name, [from, to] = [state.from / longest, state.to / longest];
    hover(null);
    arrange();
    look(from * longest, (to - from) * longest); // as much of the step as before
    choose(kept && panels[panels.length - 1].byName.get(kept) || null);
    const options = empty('step');
    recorded.forEach(({ name }, number) => element('option', name.replace(/^Measured, /, ''), options, { value: number }));
    options.value = state.pick;
    $('picker').hidden = !recorded.length;
    for (const part of [drawLegend, drawCauses, drawCharts]) part();
  }
  function pick(number) { if (recorded[number]) { state.pick = number; show(); } }
  function take(text) {
    const first = !panels.length, follows = first || state.pick === recorded.length - 1;
    data = JSON.parse(text);
    recorded = data.steps.flatMap(step => step.panels);
    if (follows || !recorded[state.pick]) state.pick = recorded.length - 1;
    $('drawing').hidden = !data.fixed.length && !recorded.length;
    if ($('drawing').hidden) return;
    arrange();
    if (first) { $('lanes').checked = panels[0].ranks.length <= 4; state.to = longest; }
    show();
  }
  async function follow() { // the run goes on: what is new comes as another page, of which the values and the tables are taken
    const answer = await fetch(location.href, { cache: 'no-store' }).catch(() => null);
    const page = answer && answer.ok && new DOMParser().parseFromString(await answer.text(), 'text/html'), values = page && page.getElementById('data');
    if (!values || values.textContent === $('data').textContent) return;
    $('data').textContent = values.textContent;
    $('tables').replaceWith(page.getElementById('tables'));
    take(values.textContent);
  }

  const canvas = $('steps'), on = (id, kind, listener) => $(id).addEventListener(kind, listener);
  let drag = null;
  on('steps', 'pointerdown', event => { drag = { x: event.clientX, moved: false }; canvas.setPointerCapture(event.pointerId); });
  on('steps', 'pointermove', event => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (!drag || !drag.moved) return hover(under(event), event);
    pan((drag.x - event.clientX) / (width - LEFT - RIGHT));
    drag.x = event.clientX;
    return hover(null);
  });
  on('steps', 'pointerup', event => { if (drag && !drag.moved) choose(under(event)); drag = null; });
  on('steps', 'pointerleave', () => hover(null));
  on('steps', 'dblclick', event => zoom(0.5, timeAt(place(event))));
  canvas.addEventListener('wheel', event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    if (sideways) pan(event.deltaX / width); else zoom(1.002 ** event.deltaY, timeAt(place(event)));
  }, { passive: false });
  const keys = {
    ArrowLeft: event => event.shiftKey ? pan(-0.2) : move(-1, 0), ArrowRight: event => event.shiftKey ? pan(0.2) : move(1, 0),
    ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1), '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), 0: whole,
    Escape: () => choose(null), '[': () => pick(state.pick - 1), ']': () => pick(state.pick + 1),
  };
  document.addEventListener('keydown', event => {
    const listener = keys[event.key], elsewhere = event.key.startsWith('Arrow') && event.target !== canvas; // where arrows scroll
    if (!listener || elsewhere || event.target.tagName === 'SELECT' || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    listener(event);
  });
  on('step', 'change', () => pick(Number($('step').value)));
  on('lanes', 'change', show);
  for (const [id, listener] of [['closer', () => zoom(0.5)], ['farther', () => zoom(2)], ['whole', whole]]) on(id, 'click', listener);
  addEventListener('resize', later);
  for (const query of ['print', '(prefers-color-scheme: dark)']) matchMedia(query).addEventListener('change', () => panels.length && draw());
  take($('data').textContent);
  if (document.body.dataset.live) setInterval(follow, 2000);
})();
