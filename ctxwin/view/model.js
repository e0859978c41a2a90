"use strict";
// From the lines of a trace to steps: one step is a column of the picture.

const EDITS = new Set(["append", "insert", "evict", "forget", "slide", "recall", "look_back", "reorder", "toggle", "undo"]);
const BACK = new Set(["recall", "look_back"]);

class Model {
  constructor(limit, leftOut) {
    this.limit = limit;
    this.leftOut = leftOut;
    this.chunks = new Map();
    this.events = [];
    this.asks = new Map(); // questions
    this.tests = new Map(); // asks that only tested whether a chunk matters
  }

  feed(line) {
    if (line.kind === "chunk") this.chunks.set(line.n, line);
    else if (line.kind === "event") {
      this.events.push(line);
      if (line.op === "ask") this.asks.set(line.n, line);
      for (const n of line.tests || []) {
        if (!this.asks.has(n)) continue;
        this.tests.set(n, this.asks.get(n));
        this.asks.delete(n);
      }
      while (this.events.length > this.limit) this.forget(this.events.shift());
    } else if (line.kind === "note" && this.asks.has(line.of)) {
      const ask = this.asks.get(line.of);
      ask.costs = { ...ask.costs, ...line.costs };
      ask.answers = { ...ask.answers, ...line.answers };
      if (line.truth !== undefined) ask.truth = line.truth;
      if (line.text !== undefined) ask.text = line.text;
      ask.idle = (ask.idle || 0) + (line.idle_tokens || 0);
    }
  }

  forget(event) {
    this.leftOut += 1;
    this.asks.delete(event.n);
    this.tests.delete(event.n);
    if (this.leftOut % this.limit) return;
    const shown = new Set(this.events.flatMap((e) => e.placed.map((p) => p.chunk)));
    for (const n of this.chunks.keys()) if (!shown.has(n)) this.chunks.delete(n);
  }

  // Steps in order of their beginning. `apart`: every edit is a step; else the edits that lead up to an ask are one.
  build(apart) {
    const windows = new Map();
    const steps = [];
    let roots = 0;

    const open = (id, parent, placed, from) => {
      const name = parent ? `${parent.name}.${(parent.forks += 1)}` : letters(roots++);
      const known = parent ? new Set(parent.seen) : new Set(placed.map((p) => p.id));
      const made = { id, name, parent, from, seen: known, last: placed, version: 0, forks: 0, steps: [], open: null };
      windows.set(id, made);
      return made;
    };
    const begin = (w, event, before = w.last) => {
      const step = {
        key: event.n, index: steps.length, window: w, events: [], before, placed: event.placed, ask: null, fresh: new Set(),
        returned: new Set(), met: new Map(), branches: [], adopted: null, closed: false,
      };
      steps.push(step);
      w.steps.push(step);
      w.open = step;
      return step;
    };
    const join = (w, step, event) => {
      step.events.push(event);
      for (const p of event.placed) {
        if (w.seen.has(p.id)) continue;
        w.seen.add(p.id);
        step.fresh.add(p.id);
      }
      for (const p of event.placed) step.met.set(p.id, p);
      if (BACK.has(event.op) || event.op === "adopt") for (const p of event.placed) {
        if (event.op === "adopt" ? !step.fresh.has(p.id) : (event.ids || []).includes(p.id)) step.returned.add(p.id);
      }
      step.placed = event.placed;
      w.last = event.placed;
      w.version = event.version;
    };

    for (const event of this.events) {
      let w = windows.get(event.window);
      const first = !w;
      if (!w) w = open(event.window, windows.get(event.parent) || null, event.op === "watch" ? event.placed : [], null);
      const op = event.op;
      if (op === "fork") {
        const step = w.steps.at(-1) || begin(w, event);
        join(w, step, event);
        step.closed = true;
        step.branches.push(open(event.other, w, event.placed, step));
      } else if (op === "watch") {
        if (event.system_prompt !== undefined) Object.assign(w, { systemPrompt: event.system_prompt, model: event.model });
        if (first ? event.placed.length : !same(w.last, event.placed)) join(w, begin(w, event), event);
      } else if (op === "adopt") {
        const step = begin(w, event);
        join(w, step, event);
        step.adopted = windows.get(event.other) || null;
      } else if (op === "ask" && event.version < w.version) {
        const step = begin(w, event, event.placed); // of an old version: nothing moved
        Object.assign(step, { ask: event, events: [event], closed: true, old: true });
      } else if (op === "ask") {
        const step = usable(w.open) ? w.open : begin(w, event);
        join(w, step, event);
        step.ask = event;
      } else if (op === "close") {
        continue; // every restored window closes; what was done shows
      } else if (op === "disposable") {
        const step = begin(w, event);
        join(w, step, event);
        step.closed = true;
      } else if (EDITS.has(op)) {
        const returns = usable(w.open) && event.placed.some((p) => left(w.open, p.id));
        const step = usable(w.open) && !w.open.adopted && !apart && !returns ? w.open : begin(w, event);
        join(w, step, event);
      } else {
        const step = w.steps.at(-1);
        if (step) step.events.push(event);
        if (step && !step.ask) step.placed = event.placed;
        w.last = event.placed;
        w.version = event.version;
      }
    }
    for (const step of steps) {
      step.test = step.ask !== null && this.tests.has(step.ask.n);
      mark(step);
    }
    return { steps, windows: [...windows.values()].filter((w) => w.steps.length) };
  }

  totals() {
    const asks = [...this.asks.values()];
    const sum = (of) => asks.reduce((total, ask) => total + of(ask), 0);
    const costs = {};
    for (const ask of asks) {
      for (const [name, cost] of Object.entries(ask.costs || {})) {
        costs[name] = costs[name] || { tokens: 0, asks: 0 };
        costs[name].tokens += cost;
        costs[name].asks += 1;
      }
    }
    const known = asks.filter((ask) => ask.truth !== undefined);
    const others = {};
    for (const ask of known)
      for (const [name, answer] of Object.entries(ask.answers || {})) others[name] = (others[name] || 0) + (answer.trim() === ask.truth.trim());
    const tested = [...this.tests.values()].reduce((total, ask) => total + ask.usage.computed_tokens, 0);
    return {
      events: this.events.length,
      asks: asks.length,
      prompt_tokens: sum((ask) => ask.usage.prompt_tokens),
      tests: this.tests.size,
      computed_tokens: sum((ask) => ask.usage.computed_tokens + (ask.idle || 0)) + tested,
      idle_tokens: sum((ask) => ask.idle || 0),
      test_tokens: tested,
      vision_encodes: this.events.reduce((total, event) => total + (event.encodes || 0), 0),
      patches: [0, 1, 2].map((i) => this.events.reduce((total, event) => total + (event.patches || [0, 0, 0])[i], 0)),
      known: known.length,
      right: known.filter(right).length,
      right_others: others,
      costs,
    };
  }
}

const usable = (step) => step && !step.closed && !step.ask;
const left = (step, id) => step.before.some((p) => p.id === id) && !step.placed.some((p) => p.id === id);
const right = (ask) => ask.answer.trim() === ask.truth.trim();
const flags = (p) => `${p.id} ${p.conditioned !== false}`;
const same = (a, b) => a.length === b.length && a.every((p, i) => flags(p) === flags(b[i]));

function letters(n) {
  return (n >= 26 ? letters(Math.floor(n / 26) - 1) : "") + String.fromCharCode(65 + (n % 26));
}

// What happened to each chunk in a step: `tiles` in prompt order, and those that `left`.
function mark(step) {
  const before = new Map(step.before.map((p, i) => [p.id, { ...p, at: i }]));
  const placed = new Set(step.placed.map((p) => p.id));
  const lanes = new Map((step.ask ? step.ask.placed : []).map((p) => [p.id, p.lane]));
  const stayed = longestRising(step.placed.filter((p) => before.has(p.id)).map((p) => before.get(p.id).at));
  const still = new Set(stayed.map((at) => step.before[at].id));
  const remembered = new Set(step.ask ? step.ask.ids || [] : []);
  step.tiles = step.placed.map((p) => {
    let mark = "";
    if (!before.has(p.id)) {
      // Neither new nor recalled: an earlier version was restored, and the same edits made again.
      mark = remembered.has(p.id) ? "remembered" : step.returned.has(p.id) ? "back" : step.fresh.has(p.id) ? "new" : "again";
    } else if (!still.has(p.id)) mark = "moved";
    else if ((before.get(p.id).conditioned !== false) !== (p.conditioned !== false)) mark = "toggled";
    return { ...p, lane: lanes.get(p.id), mark };
  });
  const passed = [...step.met.values()].filter((p) => !before.has(p.id) && !placed.has(p.id));
  step.left = [...step.before.filter((p) => !placed.has(p.id)), ...passed.map((p) => ({ ...p, passed: step.returned.has(p.id) ? "back" : "new" }))];
}

// The longest rising subsequence of distinct numbers: what kept its order. O(n^2), n chunks of a window.
function longestRising(values) {
  if (values.every((value, i) => !i || values[i - 1] < value)) return values;
  const best = [];
  for (let i = 0; i < values.length; i++) {
    let from = -1;
    for (let j = 0; j < i; j++) if (values[j] < values[i] && (from < 0 || best[j].length > best[from].length)) from = j;
    best.push({ length: from < 0 ? 1 : best[from].length + 1, from });
  }
  let at = best.reduce((top, b, i) => (top < 0 || b.length > best[top].length ? i : top), -1);
  const out = [];
  for (; at >= 0; at = best[at].from) out.unshift(values[at]);
  return out;
}

// A row for each window: below its parent's, and free from its first step to its last.
function rows(windows) {
  const taken = [];
  const ordered = [...windows].sort((a, b) => a.steps[0].index - b.steps[0].index);
  for (const w of ordered) {
    const begin = w.steps[0].index;
    const end = w.steps.at(-1).index;
    let row = w.parent && w.parent.row !== undefined ? w.parent.row + 1 : 0;
    const clash = ([from, to]) => begin <= to && from <= end;
    while ((taken[row] || []).some(clash)) row += 1;
    (taken[row] = taken[row] || []).push([begin, end]);
    w.row = row;
  }
  return taken.length;
}
